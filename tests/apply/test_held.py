"""Held tables: their changes are kept in the commit that passes them, and made when they are released."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Collection

import psycopg
import pytest
from fix_failpoints import At
from fix_pair import MakePair, Pair

from pgsub.apply.execute import held_changes
from pgsub.apply.worker import held_release
from pgsub.common.errors import ApplyError, PgsubError
from pgsub.target.ledger import skip
from pgsub.target.ledger.tables import held_tables, states

TWO = "CREATE TABLE a (id int PRIMARY KEY, v text); CREATE TABLE b (id int PRIMARY KEY, v text)"


def _change(p: Pair, what: Callable[[psycopg.Connection, int, Collection[int]], None], tables: Collection[str]) -> None:
    relids = [p.relid(name) for name in tables]
    while True:
        with contextlib.suppress(psycopg.errors.LockNotAvailable):
            with states.changing(p.session, p.subid):
                what(p.session, p.subid, relids)
            return


def hold(p: Pair, *tables: str) -> None:
    """As the command does."""
    _change(p, held_tables.hold, tables)


def release(p: Pair, *tables: str) -> None:
    """As the command does."""
    _change(p, held_tables.release, tables)


def kept(p: Pair) -> int:
    """Changes that can be seen in the ledger."""
    return sum(one.changes for one in held_tables.overview(p.session, p.subid))


def held(p: Pair) -> int:
    """Tables that are held or being released."""
    return len(held_tables.held(p.session, p.subid))


def fails(p: Pair) -> ApplyError:
    """What stops apply."""
    with pytest.raises(ApplyError) as raised:
        p.catch_up()
    return raised.value


def test_a_held_table_stands_still_while_the_others_go_on_and_has_everything_after_its_release(pair: MakePair) -> None:
    p = pair(TWO)
    p.apply("INSERT INTO a VALUES (1, 'x'), (2, 'y'); INSERT INTO b VALUES (1, 'x')")
    hold(p, "a")
    p.apply(
        "INSERT INTO a VALUES (3, 'z'); INSERT INTO b VALUES (2, 'y')",
        "UPDATE a SET v = 'new' WHERE id = 1; UPDATE a SET id = 9 WHERE id = 2; DELETE FROM b WHERE id = 1",
        "DELETE FROM a WHERE id = 3",
        "INSERT INTO a SELECT i FROM generate_series(100, 400) i; INSERT INTO b SELECT * FROM a WHERE id >= 100",
    )
    p.same("b")
    assert p.subdb.rows("SELECT * FROM a ORDER BY 1") == [(1, "x"), (2, "y")]
    assert kept(p) == 1 + 2 + 1 + 301
    release(p, "a")
    p.catch_up()
    p.same("a", "b")
    assert (kept(p), held(p)) == (0, 0)
    p.apply("INSERT INTO a VALUES (500, 'later')")
    p.same("a")


def test_a_running_worker_holds_and_releases_without_a_restart(pair: MakePair) -> None:
    p = pair(TWO)
    task = p.start()
    hold(p, "a")
    p.pubdb.execute("INSERT INTO a VALUES (1, 'kept'); INSERT INTO b VALUES (1, 'x')")
    p.until("SELECT count(*) FROM b", value=1, task=task)
    assert p.subdb.value("SELECT count(*) FROM a") == 0
    release(p, "a")
    p.until("SELECT v FROM a", value="kept", task=task)
    p.until("SELECT count(*) FROM pgsub.held_table", value=0, task=task)
    p.stop(task)


def test_the_table_that_stops_apply_is_held_and_the_rest_goes_on_until_its_fault_is_mended(pair: MakePair) -> None:
    p = pair(TWO, sub="INSERT INTO a VALUES (1, 'in the way')")
    p.pubdb.execute("INSERT INTO a VALUES (1, 'remote'); INSERT INTO b VALUES (1, 'x')")
    first = fails(p)
    hold(p, "a")
    p.apply("UPDATE a SET v = 'again'", "INSERT INTO b VALUES (2, 'y')")
    p.same("b")
    release(p, "a")
    again = fails(p)
    assert again.conflict == first.conflict == "insert_exists"
    assert (again.finish_lsn, again.xid, again.relation) == (first.finish_lsn, first.xid, first.relation)
    assert kept(p) == 2
    hold(p, "a")
    p.apply("INSERT INTO b VALUES (3, 'on it goes')")
    p.same("b")
    p.subdb.execute("DELETE FROM a")
    release(p, "a")
    p.apply()
    p.same("a", "b")
    assert held(p) == 0


def test_a_held_table_need_not_fit_nor_be_there(pair: MakePair) -> None:
    p = pair(TWO, pub="ALTER TABLE a ADD COLUMN more int; ALTER TABLE b ADD COLUMN more int")
    hold(p, "a", "b")
    p.subdb.execute("ALTER TABLE b RENAME TO elsewhere")
    p.apply("INSERT INTO a VALUES (1, 'x', 1)", "INSERT INTO b SELECT i, 'y', i FROM generate_series(1, 80) i")
    p.subdb.execute("ALTER TABLE elsewhere RENAME TO b; ALTER TABLE a ADD COLUMN more int")
    assert kept(p) == 81
    release(p, "a")
    p.apply()
    p.same("a")
    release(p, "b")
    assert "more" in fails(p).message
    p.subdb.execute("ALTER TABLE b ADD COLUMN more int")
    p.apply()
    p.same("b")


def test_kept_changes_are_read_by_the_description_that_they_came_with(pair: MakePair) -> None:
    p = pair(TWO)
    hold(p, "a")
    p.apply("INSERT INTO a VALUES (1, 'old')")
    p.ddl("ALTER TABLE a ADD COLUMN n int; ALTER TABLE a RENAME TO c")
    p.apply("INSERT INTO c VALUES (2, 'new', 7)", "UPDATE c SET n = 8 WHERE id = 2")
    p.ddl("ALTER TABLE c DROP COLUMN v")
    p.apply("INSERT INTO c VALUES (3, 9)")
    p.subdb.execute("ALTER TABLE c ADD COLUMN v text")
    with states.changing(p.session, p.subid):
        held_tables.release(p.session, p.subid, [p.relid("c")])
    p.apply("INSERT INTO c VALUES (4, 10)")
    assert p.subdb.rows("SELECT id, v, n FROM c ORDER BY 1") == [
        (1, "old", None),
        (2, "new", 8),
        (3, None, 9),
        (4, None, 10),
    ]


def test_truncate_empties_the_tables_that_are_not_held_now_and_the_held_one_at_its_place(pair: MakePair) -> None:
    p = pair(TWO)
    p.apply("INSERT INTO a VALUES (1, 'x'); INSERT INTO b VALUES (1, 'x')")
    hold(p, "a")
    p.apply("INSERT INTO a VALUES (2, 'gone')", "TRUNCATE a, b", "INSERT INTO a VALUES (3, 'after')")
    p.same("b")
    assert p.subdb.value("SELECT count(*) FROM a") == 1
    release(p, "a")
    p.apply()
    p.same("a", "b")


def test_of_a_streamed_transaction_what_was_rolled_back_is_not_kept(pair: MakePair) -> None:
    p = pair(TWO, streaming="parallel")
    p.pubdb.execute(f"ALTER DATABASE {p.pubdb.name} SET debug_logical_replication_streaming = immediate")
    hold(p, "a")
    p.apply(
        "BEGIN; INSERT INTO a SELECT i, 'x' FROM generate_series(1, 70) i; SAVEPOINT s;"
        " INSERT INTO a SELECT i, 'x' FROM generate_series(71, 140) i; ROLLBACK TO s;"
        " INSERT INTO b VALUES (1, 'x'); DELETE FROM a WHERE id > 60; COMMIT"
    )
    p.same("b")
    assert kept(p) == 80
    release(p, "a")
    p.apply("INSERT INTO a VALUES (80, 'later')")
    p.same("a")


def test_a_partitioned_table_is_held_by_its_root_and_kept_changes_obey_the_rules_for_conflicts(pair: MakePair) -> None:
    p = pair(
        "CREATE TABLE a (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);"
        " CREATE TABLE low PARTITION OF a FOR VALUES FROM (0) TO (100);"
        " CREATE TABLE high PARTITION OF a FOR VALUES FROM (100) TO (1000); CREATE TABLE b (id int PRIMARY KEY)",
        pub="CREATE PUBLICATION p FOR TABLE a, b WITH (publish_via_partition_root = true)",
        sub="INSERT INTO a VALUES (5, 'in the way')",
        binary=True,
        on_conflict=("insert_exists=apply_remote",),
    )
    hold(p, "a")
    p.apply(
        "INSERT INTO a SELECT i, 'x' FROM generate_series(1, 200) i; INSERT INTO b VALUES (1)",
        "UPDATE a SET id = 500 WHERE id = 7; DELETE FROM a WHERE id = 150; INSERT INTO low VALUES (0, 'by itself')",
    )
    p.same("b")
    assert kept(p) == 200 + 2 + 1 + 1  # to another partition a row goes as DELETE and INSERT
    release(p, "a")
    p.apply()
    p.same("a")


def test_what_a_prepared_transaction_keeps_is_decided_with_it(pair: MakePair) -> None:
    p = pair(TWO, two_phase="p")
    p.apply()
    hold(p, "a")
    p.apply(
        "BEGIN; INSERT INTO a VALUES (1, 'no'); PREPARE TRANSACTION 'no'",
        "BEGIN; INSERT INTO a VALUES (2, 'yes'); INSERT INTO b VALUES (2, 'yes'); PREPARE TRANSACTION 'yes'",
        "INSERT INTO a VALUES (3, 'plain')",
    )
    assert kept(p) == 1
    release(p, "a")
    p.apply("INSERT INTO a VALUES (4, 'plain')")
    assert p.subdb.rows("SELECT id FROM a ORDER BY 1") == [(3,), (4,)]
    assert held(p) == 1, "what is prepared may still bring kept changes"
    p.apply("ROLLBACK PREPARED 'no'", "COMMIT PREPARED 'yes'", "UPDATE a SET v = 'later' WHERE id = 2")
    p.same("a", "b")
    assert (kept(p), held(p)) == (0, 0)


def test_a_kept_transaction_can_be_skipped_by_its_lsn_and_the_stream_is_not(pair: MakePair) -> None:
    p = pair(TWO, sub="INSERT INTO a VALUES (1, 'in the way')")
    hold(p, "a")
    p.apply(
        "INSERT INTO a VALUES (0, 'before')", "INSERT INTO a VALUES (1, 'x'), (2, 'y')", "INSERT INTO b VALUES (1, 'x')"
    )
    release(p, "a")
    error = fails(p)
    assert error.finish_lsn is not None
    p.session.execute(
        "UPDATE pgsub.control SET skip_lsn = %s, skip_rows = 'whole' WHERE worker = 0 AND subid = %s",
        (error.finish_lsn, p.subid),
    )
    p.apply("INSERT INTO b VALUES (2, 'the stream goes on')", "INSERT INTO a VALUES (3, 'z')")
    p.same("b")
    assert p.subdb.rows("SELECT id FROM a ORDER BY 1") == [(0,), (1,), (3,)]
    assert p.subdb.value("SELECT count(*) FROM pgsub.skipped_change WHERE finish_lsn = %s", error.finish_lsn) == 2
    assert skip.pending(p.session, p.subid) is None


@pytest.mark.long
def test_a_release_that_is_cut_off_anywhere_loses_nothing_and_does_nothing_twice(
    pair: MakePair, monkeypatch: pytest.MonkeyPatch, at: At, reached: Callable[[str], None]
) -> None:
    p = pair("CREATE TABLE a (id int, n int)", pub="ALTER TABLE a REPLICA IDENTITY FULL")
    monkeypatch.setattr(held_release, "STEP_BYTES", 200)
    hold(p, "a")
    p.apply(*(f"INSERT INTO a SELECT {n}, i FROM generate_series(1, 20) i" for n in range(8)))
    release(p, "a")
    for end in ("apply.before_target_commit", "apply.commit_reply_lost", "apply.released"):
        for nth in (1, 2):
            at(f"{end}=error@{nth}")
            with pytest.raises(PgsubError, match="failpoint"):
                p.catch_up()
            reached(end)
            p.pubdb.execute("INSERT INTO a VALUES (100, 0)")
    at("")
    p.apply()
    p.same("a")
    assert (kept(p), held(p)) == (0, 0)


@pytest.mark.long
def test_whatever_is_held_and_released_and_cut_off_when_in_the_end_both_sides_are_equal(
    pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = pair(f"{TWO}; CREATE TABLE c (id int PRIMARY KEY, v text); CREATE TABLE mark (n int)", two_phase="p")
    p.apply()
    dice = random.Random(20261122)
    monkeypatch.setattr(held_release, "STEP_BYTES", 500)
    monkeypatch.setattr(held_changes, "STRETCH_BYTES", 200)  # most transactions are larger than a step
    task, seen = p.start(), 0
    for number in range(42):
        for statement in _work(dice, number):
            p.pubdb.execute(statement)
        if number % 4 == 1:
            (hold if dice.random() < 0.6 else release)(p, *dice.sample("abc", dice.randint(1, 2)))
        if number % 3 == 0:
            p.pubdb.execute(f"INSERT INTO mark VALUES ({number})")
            p.until("SELECT max(n) FROM mark", value=number, task=task)
            seen = max(seen, kept(p))
        elif number % 3 == 1:
            p.take_over()  # its sessions end wherever they are, as with kill -9
            task = p.start()
    p.stop(task)
    release(p, "a", "b", "c")
    p.apply()
    p.same("a", "b", "c")
    assert (kept(p), held(p)) == (0, 0)
    assert seen, "nothing was kept at any time"


def _work(dice: random.Random, number: int) -> list[str]:
    """A transaction of several tables, or one that is prepared and ended after another one."""
    one, other = dice.sample("abc", 2)
    low = dice.randint(0, 60)
    changes = dice.choice(
        [
            f"INSERT INTO {one} SELECT i, '{number}' FROM generate_series({low}, {low + 70}) i ON CONFLICT (id)"
            f" DO UPDATE SET v = '{number}'; UPDATE {other} SET v = 'u{number}' WHERE id % 3 = 0",
            f"DELETE FROM {one} WHERE id BETWEEN {low} AND {low + 30}; INSERT INTO {other} VALUES ({number + 999})",
            f"UPDATE {one} SET id = id + 2000 + 100 * {number} WHERE id BETWEEN {low} AND {low + 5}",
            f"UPDATE {one} SET v = v || '.'",
        ]
    )
    if number % 7 == 3:
        prepared = f"BEGIN; INSERT INTO {one} VALUES (-{number}, 'p'); PREPARE TRANSACTION 'x{number}'"
        return [prepared, changes, f"{dice.choice(['COMMIT', 'ROLLBACK'])} PREPARED 'x{number}'"]
    return [f"TRUNCATE {one}, {other}" if number % 9 == 8 else changes]
