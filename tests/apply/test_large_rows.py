"""Rows as large as a row can be: what is recorded of them is bounded, and none stops apply for good."""

from __future__ import annotations

import json

import pytest
from apply.test_skip import fails, letters, logged, skips
from fix_pair import MakePair, Pair
from thorough import only_thorough, thorough

from pgsub.apply.commit import skipped_writer
from pgsub.apply.conflicts import conflict_text
from pgsub.apply.skip.skipped_reader import SkippedReader
from pgsub.common.errors import StateForbids
from pgsub.protocol.lsn import parse_lsn
from pgsub.target.ledger.skipped_changes import SkippedChange, SkippedTransaction
from pgsub.target.ledger.tables import held_tables, states

MB = 1 << 20


def _hold(p: Pair, *, released: bool = False) -> None:
    with states.changing(p.session, p.subid):
        (held_tables.release if released else held_tables.hold)(p.session, p.subid, [p.relid("t")])


def _apply(p: Pair, *statements: str) -> None:
    """Rows of hundreds of megabytes take their time."""
    for statement in statements:
        p.pubdb.execute(statement)
    [result] = p.start(until_lsn=p.published()).result(600)
    assert result.outcome == "reached"


@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
@pytest.mark.parametrize("size", [MB, *thorough([270 * MB])])
def test_the_record_of_a_missing_row_keeps_the_beginning_of_its_values(pair: MakePair, binary: bool, size: int) -> None:
    """Found by all of its columns, which no index bounds; a jsonb cannot hold 256 MB."""
    p = pair(
        "CREATE TABLE t (id int, v text, w bytea); ALTER TABLE t ALTER v SET STORAGE EXTERNAL;"
        "ALTER TABLE t REPLICA IDENTITY FULL",
        pub=f"INSERT INTO t SELECT 1, repeat('x', {size}), repeat('y', {min(size, MB)})::bytea",
        binary=binary,
    )
    _apply(p, "UPDATE t SET id = 2", "DELETE FROM t", "INSERT INTO t VALUES (3)")
    assert p.subdb.rows("SELECT id FROM t") == [(3,)]
    update, delete = p.events()
    assert (update["conflict_type"], delete["conflict_type"]) == ("update_missing", "delete_missing")
    assert len(json.dumps([update, delete])) < 20 * conflict_text.KEPT
    assert delete["key"].startswith("(id, v, w)=(2, xxx")


def test_what_is_skipped_of_a_row_too_large_to_be_kept_is_its_size(
    pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skipped_writer, "KEEPABLE", 1000)
    p = pair("CREATE TABLE t (id int PRIMARY KEY, v text)", sub="INSERT INTO t VALUES (1, 'mine')")
    error = fails(p, "INSERT INTO t VALUES (1, repeat('x', 5000))")
    skips(p, error.finish_lsn)
    p.apply("INSERT INTO t VALUES (2, 'next')")
    assert p.subdb.rows("SELECT id, v FROM t ORDER BY id") == [(1, "mine"), (2, "next")]
    [(_, body)] = letters(p)
    assert body["new"] == {"id": "1", "v": {"bytes": "5000"}}
    assert any("1 value was too large to be kept" in text for text in logged(p))
    kept = SkippedTransaction(1, [1], {("public", "t", "INSERT"): 1}, 0, None)
    revival = SkippedReader(p.session, parse_lsn(error.finish_lsn or ""), kept)
    with pytest.raises(StateForbids, match='the value of column "v" was too large to be kept'):
        list(revival.changes([SkippedChange(1, 1, "public", "t", body)]))


@only_thorough
def test_a_transaction_with_a_row_of_270_mb_can_be_skipped(pair: MakePair) -> None:
    p = pair("CREATE TABLE t (id int PRIMARY KEY, v text)", sub="INSERT INTO t VALUES (1, 'mine')")
    skips(p, fails(p, f"INSERT INTO t VALUES (1, repeat('x', {270 * MB}))").finish_lsn)
    _apply(p, "INSERT INTO t VALUES (2, 'next')")
    assert p.subdb.rows("SELECT id, v FROM t ORDER BY id") == [(1, "mine"), (2, "next")]


@only_thorough
def test_a_kept_change_of_540_mb_is_released(pair: MakePair) -> None:
    """In text form a bytea of so many bytes cannot be sent."""
    p = pair("CREATE TABLE t (id int PRIMARY KEY, v text)")
    _hold(p)
    _apply(p, f"INSERT INTO t VALUES (1, repeat('x', {540 * MB}))", "INSERT INTO t VALUES (2, 'after')")
    _hold(p, released=True)
    _apply(p)
    assert p.subdb.rows("SELECT id, length(v) FROM t ORDER BY 1") == [(1, 540 * MB), (2, 5)]
