"""Large transactions are executed in blocks, and a block that cannot be a set is undone alone."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from fix_pair import MakePair, Pair

from pgsub.apply.rows import change_block
from pgsub.apply.worker import start

TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text)"
Made = Callable[..., Pair]


@pytest.fixture
def undone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Pieces of a hundred rows; what is said of those that were undone."""
    monkeypatch.setattr(change_block, "BLOCK_ROWS", 100)
    caplog.set_level(logging.DEBUG, "pgsub.apply")
    return lambda: [one.getMessage() for one in caplog.records if "block is replayed" in one.getMessage()]


def _missing(p: Pair) -> list[str]:
    return [event["key"] for event in p.events()]


def test_where_a_row_is_missing_only_its_block_is_replayed(pair: MakePair, undone: Callable[[], list[str]]) -> None:
    p = pair(TABLE)
    p.apply("INSERT INTO t SELECT g, 'x' FROM generate_series(1, 1000) g")
    p.subdb.execute("DELETE FROM t WHERE id = 550")
    p.apply("UPDATE t SET v = 'y'")
    assert len(undone()) == start.SET_BASED and _missing(p) == ["(id)=(550)"]
    p.pubdb.execute("DELETE FROM t WHERE id = 550")
    p.apply()
    p.same("t")


def test_of_a_transaction_that_is_applied_while_it_arrives_too(
    parallel: Made, replays: Callable[[], list[str]], undone: Callable[[], list[str]]
) -> None:
    p = parallel()
    p.apply("INSERT INTO t SELECT g, 'x' FROM generate_series(1, 1000) g")
    p.subdb.execute("DELETE FROM t WHERE id = 550")
    p.apply("UPDATE t SET v = 'y'")
    assert bool(undone()) is start.SET_BASED and _missing(p) == ["(id)=(550)"]
    assert not [text for text in replays() if "from its file" in text]
    p.pubdb.execute("DELETE FROM t WHERE id = 550")
    p.apply()
    p.same("t")


def test_a_row_in_the_way_stops_apply_whatever_block_it_is_in(pair: MakePair, undone: Callable[[], list[str]]) -> None:
    p = pair(TABLE)
    p.subdb.execute("INSERT INTO t VALUES (550, 'mine')")
    p.pubdb.execute("INSERT INTO t VALUES (0, 'before')")
    p.pubdb.execute("INSERT INTO t SELECT g, 'x' FROM generate_series(1, 1000) g")
    with pytest.raises(Exception, match="conflict=insert_exists") as caught:
        p.catch_up()
    assert "(550, x)" in str(caught.value.detail)  # type: ignore[attr-defined]
    assert bool(undone()) is start.SET_BASED
    assert p.subdb.rows("SELECT * FROM t ORDER BY id") == [
        (0, "before"),
        (550, "mine"),
    ]
    p.subdb.execute("DELETE FROM t WHERE id = 550")
    p.apply()
    p.same("t")


def test_values_that_change_places_over_blocks_are_no_conflict(pair: MakePair, undone: Callable[[], list[str]]) -> None:
    p = pair("CREATE TABLE t (id int PRIMARY KEY, v int UNIQUE)")
    p.apply("INSERT INTO t SELECT g, g FROM generate_series(1, 300) g")
    p.apply("UPDATE t SET v = -v; UPDATE t SET v = 301 + v")  # what comes of it is another order of the same values
    p.same("t")
    assert p.events() == []


def test_a_row_that_is_missing_before_the_first_full_block_is_recorded(
    pair: MakePair, undone: Callable[[], list[str]]
) -> None:
    p = pair(f"{TABLE}; {TABLE.replace(' t ', ' u ')}")
    p.apply(*(f"INSERT INTO {t} SELECT g, 'x' FROM generate_series(1, {n}) g" for t, n in (("t", 60), ("u", 300))))
    p.subdb.execute("DELETE FROM t WHERE id = 30")
    p.apply("UPDATE t SET v = 'y'; UPDATE u SET v = 'y'")
    assert _missing(p) == ["(id)=(30)"]
    p.same("u")
