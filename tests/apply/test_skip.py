"""What apply does of a skip: whole or only the rows that conflict, in every kind of transaction, never by halves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import patience
import pytest
from fix_pair import MakePair, Pair
from fix_transaction_kinds import KINDS

from pgsub.apply.skip.replay import ReplayRequest, replay
from pgsub.common.errors import ApplyError, PgsubError, StateForbids
from pgsub.protocol.decoder import decode_change
from pgsub.protocol.lsn import format_lsn, parse_lsn
from pgsub.protocol.messages import Commit
from pgsub.target.ledger import skip, skipped_changes
from pgsub.target.ledger.skip import CONFLICTING, WHOLE, Skip
from pgsub.target.ledger.tables import states, subscription_tables

_LETTERS = "SELECT relname, body FROM pgsub.skipped_change ORDER BY id"


@pytest.fixture
def make(pair_of_kind: Callable[..., Pair]) -> Callable[..., Pair]:
    """Short for it."""
    return pair_of_kind


def fails(p: Pair, *statements: str) -> ApplyError:
    """Apply these, each in a transaction of its own; one of them stops apply."""
    with pytest.raises(ApplyError) as met:
        p.apply(*statements)
    assert met.value.finish_lsn is not None
    return met.value


def transaction(kind: str, *statements: str) -> str:
    end = "PREPARE TRANSACTION 'x'" if "prepared" in kind else "COMMIT"
    return "; ".join(["BEGIN", *statements, end])


def skips(p: Pair, lsn: str | int | None, rows: str = WHOLE) -> None:
    wanted = None if lsn is None else Skip(parse_lsn(lsn) if isinstance(lsn, str) else lsn, rows)
    skip.set_pending(p.session, p.subid, wanted)


def finish_lsn(p: Pair, statement: str) -> int:
    """Run a transaction on the publisher; where its Commit message says that it finished."""
    p.pubdb.execute(statement)
    query = "SELECT data FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL, 'proto_version', '1',"
    query += " 'publication_names', 'p') WHERE get_byte(data, 0) = ascii('C')"
    commits = [decode_change(bytes(data), False) for (data,) in p.pubdb.rows(query, p.sub.slot_name)]
    return max(message.commit_lsn for message in commits if isinstance(message, Commit))


def letters(p: Pair) -> list[tuple[str, dict[str, Any]]]:
    return [(name, body) for name, body in p.subdb.rows(_LETTERS)]


def logged(p: Pair) -> list[str]:
    return [f"{body['level']}: {body['text']}" for body in p.events() if body["kind"] == "log"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_transaction_is_left_out_and_kept_by_the_commit_that_passes_it(make, kind):
    p = make(kind)
    p.subdb.execute("INSERT INTO t VALUES (1, 1, 'mine')")
    error = fails(
        p,
        transaction(
            kind,
            "INSERT INTO t VALUES (2, 2, 'x'), (1, 10, 'theirs')",
            "UPDATE t SET v = NULL WHERE id = 2",
            "SAVEPOINT s",
            "INSERT INTO t VALUES (3, 3, 'undone')",
            "ROLLBACK TO s",
            "DELETE FROM t WHERE id = 2",
        ),
    )
    skips(p, error.finish_lsn)
    assert letters(p) == []
    p.apply("INSERT INTO t VALUES (5, 5, 'next')")
    if "prepared" in kind:
        assert letters(p) == []  # what is prepared may still be rolled back, and then nothing was lost
        p.apply("COMMIT PREPARED 'x'")
    assert p.subdb.rows("SELECT id, v FROM t ORDER BY id") == [(1, "mine"), (5, "next")]
    kept = letters(p)
    assert [(name, body["operation"]) for name, body in kept] == [
        ("t", "INSERT"),
        ("t", "INSERT"),
        ("t", "UPDATE"),
        ("t", "DELETE"),
    ]
    assert kept[1][1]["new"] == {"id": "1", "u": "10", "v": "theirs"} and kept[2][1]["new"]["v"] is None
    assert kept[3][1]["old"]["id"] == "2"
    row = "SELECT DISTINCT finish_lsn = %s::pg_lsn, xid FROM pgsub.skipped_change"
    assert p.subdb.rows(row, error.finish_lsn) == [(True, error.xid)]
    assert skip.pending(p.session, p.subid) is None
    assert [text.split("\n")[0] for text in logged(p)] == [
        f"LOG: logical replication starts skipping transaction at LSN {error.finish_lsn}",
        f"LOG: logical replication completed skipping transaction at LSN {error.finish_lsn}",
    ]


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_only_the_rows_that_conflict_are_left_out_and_what_depends_on_them(make, kind):
    p = make(kind)
    p.subdb.execute("INSERT INTO t VALUES (1, 1, 'mine'), (4, 4, 'same')")
    error = fails(
        p,
        transaction(
            kind,
            "INSERT INTO t SELECT g, g, 'bulk' FROM generate_series(100, 900) g",
            "INSERT INTO t VALUES (2, 2, 'two')",
            "INSERT INTO t VALUES (1, 10, 'theirs')",  # its primary key
            "UPDATE t SET v = 'newer' WHERE id = 1",  # of a row that is not the publisher's
            "UPDATE t SET id = 11 WHERE id = 1",
            "UPDATE t SET v = 'newest' WHERE id = 11",
            "INSERT INTO t VALUES (3, 1, 'three')",  # its other key
            "INSERT INTO t VALUES (4, 4, 'same')",  # is there already
            "UPDATE t SET v = 'same no more' WHERE id = 4",
            "UPDATE t SET u = 4000 WHERE id = 900",
            "DELETE FROM t WHERE id = 100",
        ),
    )
    skips(p, error.finish_lsn, CONFLICTING)
    p.apply(*(["COMMIT PREPARED 'x'"] if "prepared" in kind else []))
    assert p.subdb.rows("SELECT id, u, v FROM t WHERE id < 100 ORDER BY id") == [
        (1, 1, "mine"),
        (2, 2, "two"),
        (4, 4, "same no more"),
    ]
    assert p.subdb.value("SELECT count(*) FROM t WHERE v = 'bulk'") == 800
    assert p.subdb.value("SELECT u FROM t WHERE id = 900") == 4000
    kept = [body for _, body in letters(p)]
    assert [body["operation"] for body in kept] == ["INSERT", "UPDATE", "UPDATE", "UPDATE", "INSERT"]
    assert [body.get("conflict") for body in kept] == ["insert_exists", None, None, None, "insert_exists"]
    assert skip.pending(p.session, p.subid) is None


@pytest.mark.parametrize("key", ["numeric", "money"])  # which has no hash
def test_what_depends_on_a_skipped_row_is_found_by_a_key_that_the_target_takes_for_the_same(
    pair: MakePair, key: str
) -> None:
    p = pair(f"CREATE TABLE n (k {key} PRIMARY KEY, v text)")
    p.subdb.execute("INSERT INTO n VALUES (1, 'mine')")
    error = fails(
        p,
        "BEGIN; INSERT INTO n VALUES (1.00, 'theirs'); UPDATE n SET k = 1.0; "
        "UPDATE n SET v = 'newer'; INSERT INTO n VALUES (2, 'two'); COMMIT",
    )
    skips(p, error.finish_lsn, CONFLICTING)
    p.apply()
    assert p.subdb.rows("SELECT k::numeric::int, v FROM n ORDER BY k") == [(1, "mine"), (2, "two")]
    assert [body["operation"] for _, body in letters(p)] == ["INSERT", "UPDATE", "UPDATE"]


@pytest.mark.parametrize(
    "altered",
    [
        "ALTER TABLE n ADD COLUMN more int",
        "CREATE TABLE rebuilt (LIKE n INCLUDING ALL); INSERT INTO rebuilt SELECT * FROM n WHERE k <> 2;"
        " ALTER PUBLICATION p ADD TABLE rebuilt; ALTER TABLE n RENAME TO old; ALTER TABLE rebuilt RENAME TO n",
    ],
)
def test_what_depends_on_a_skipped_row_is_found_behind_a_change_of_its_table_on_the_publisher(
    pair: MakePair, altered: str
) -> None:
    tables = "CREATE TABLE n (k int PRIMARY KEY, v text)"
    p = pair(tables, pub="CREATE PUBLICATION p FOR TABLE n", sub="ALTER TABLE n ADD COLUMN more int")
    p.subdb.execute("INSERT INTO n VALUES (1, 'mine')")
    changes = "INSERT INTO n VALUES (1, 'theirs'), (2, 'two')"
    error = fails(p, f"BEGIN; {changes}; {altered}; UPDATE n SET v = 'newer' WHERE k = 1; COMMIT")
    skips(p, error.finish_lsn, CONFLICTING)
    p.apply("INSERT INTO n VALUES (3, 'three')")
    assert p.subdb.rows("SELECT k, v FROM n ORDER BY k") == [(1, "mine"), (2, "two"), (3, "three")]


@pytest.mark.parametrize("kind", KINDS)
def test_an_lsn_that_does_not_match_is_cleared_by_the_next_transaction_with_changes_and_loses_nothing(make, kind):
    p = make(kind, ddl="CREATE TABLE t (id int PRIMARY KEY)")
    wrong = p.published() + 10_000_000
    skips(p, wrong)
    p.apply("SELECT pg_logical_emit_message(true, '', 'no change')")
    assert skip.pending(p.session, p.subid) == Skip(wrong)
    p.apply(transaction(kind, "INSERT INTO t VALUES (1)"))
    assert skip.pending(p.session, p.subid) is None
    p.apply("INSERT INTO t VALUES (2)", *(["COMMIT PREPARED 'x'"] if "prepared" in kind else []))
    p.same("t")
    assert skip.pending(p.session, p.subid) is None and letters(p) == []
    [said] = logged(p)
    assert said.startswith(f'WARNING: skip-LSN of subscription "{p.sub.name}" cleared\nDETAIL:  Remote transaction')


def test_a_skip_that_is_taken_back_is_none(make):
    p = make()
    p.subdb.execute("INSERT INTO t VALUES (1, 1, 'mine')")
    error = fails(p, "INSERT INTO t VALUES (1, 2, 'theirs')")
    skips(p, error.finish_lsn)
    skips(p, None)
    assert fails(p).finish_lsn == error.finish_lsn
    assert letters(p) == []


def test_a_prepared_transaction_that_is_rolled_back_leaves_no_trace_of_its_skip(make):
    p = make("prepared")
    p.subdb.execute("INSERT INTO t VALUES (1, 1, 'mine')")
    error = fails(p, transaction("prepared", "INSERT INTO t VALUES (1, 2, 'theirs')"))
    skips(p, error.finish_lsn)
    p.apply("ROLLBACK PREPARED 'x'")
    assert letters(p) == [] and p.subdb.rows("SELECT v FROM t") == [("mine",)]


def test_a_table_that_the_target_lacks_can_be_skipped(make):
    p = make(ddl="CREATE TABLE t (id int PRIMARY KEY)")
    p.pubdb.execute("CREATE TABLE extra (id int PRIMARY KEY)")
    error = fails(p, "BEGIN; INSERT INTO extra VALUES (1); INSERT INTO t VALUES (1); COMMIT")
    skips(p, error.finish_lsn, CONFLICTING)
    p.apply("INSERT INTO t VALUES (2)")
    assert p.subdb.rows("SELECT id FROM t ORDER BY id") == [(1,), (2,)]
    assert [name for name, _ in letters(p)] == ["extra"]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["plain", "prepared"])
def test_a_crash_during_a_skip_leaves_the_old_state_or_the_new_one(make, at, kind, reached):
    p = make(kind)
    points = ("apply.skipped", "apply.before_target_commit", "apply.after_target_commit")
    for number, (point, rows) in enumerate((point, rows) for point in points for rows in (WHOLE, CONFLICTING)):
        there, new, lost = 10 * number, 10 * number + 1, 2 if rows == WHOLE else 1
        p.subdb.execute(f"DELETE FROM pgsub.skipped_change; INSERT INTO t VALUES ({there}, {there}, 'mine')")
        rows_of_it = f"INSERT INTO t VALUES ({there}, {there + 2}, 'theirs'), ({new}, {new}, 'two')"
        error = fails(p, transaction(kind, rows_of_it))
        skips(p, error.finish_lsn, rows)
        at(f"{point}=error")
        with pytest.raises(PgsubError, match="failpoint"):
            p.apply()
        reached(point)
        at("")
        done = point == "apply.after_target_commit"
        assert (skip.pending(p.session, p.subid) is None) is done
        assert len(letters(p)) == (lost if done and kind == "plain" else 0)
        p.apply(*(["COMMIT PREPARED 'x'"] if kind == "prepared" else []))
        assert len(letters(p)) == lost
        assert p.subdb.rows("SELECT id, v FROM t WHERE id >= %s ORDER BY id", there) == [
            (there, "mine"),
            *([(new, "two")] if rows == CONFLICTING else []),
        ]
        assert skip.pending(p.session, p.subid) is None


def test_a_sync_worker_obeys_a_skip_and_leaves_it_to_apply_to_clear_it(pair, at):
    p = pair("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE u (id int PRIMARY KEY)", state="i")
    p.subdb.execute("INSERT INTO t VALUES (9, 'mine')")
    at("sync.after_f=error")
    with pytest.raises(PgsubError, match="failpoint"):
        p.sync("t")
    assert p.state("t") == "f"
    at("")
    p.apply(
        "INSERT INTO t VALUES (8, 'before')",
        "BEGIN; INSERT INTO u VALUES (1); INSERT INTO t VALUES (9, 'theirs'); COMMIT",
    )
    with pytest.raises(ApplyError) as met:
        p.sync("t")
    error = met.value
    assert error.finish_lsn is not None
    set_by_hand = "UPDATE pgsub.control SET skip_lsn = %s::pg_lsn, skip_rows = 'whole' WHERE worker = 0"
    p.subdb.execute(set_by_hand, error.finish_lsn)
    p.sync("t")
    assert p.state("t") == "s"
    assert p.subdb.rows("SELECT * FROM t ORDER BY id") == [(8, "before"), (9, "mine")]
    assert [(name, body["new"]["v"]) for name, body in letters(p)] == [("t", "theirs")]
    assert skip.pending(p.session, p.subid) == Skip(parse_lsn(error.finish_lsn))


def test_what_was_skipped_before_its_table_was_copied_again_is_not_replayed_over_the_copy(pair, at):
    p = pair("CREATE TABLE t (id int PRIMARY KEY, v text)", state="i", on_conflict=("insert_exists=skip",))

    def replays() -> None:
        [(lsn,)] = p.subdb.rows("SELECT finish_lsn - '0/0'::pg_lsn FROM pgsub.skipped_change WHERE replayed_at IS NULL")
        kept = skipped_changes.of_transaction(p.session, p.subid, int(lsn))
        replay(p.sub, ReplayRequest(int(lsn), kept, {}))

    at("sync.after_f=error")
    with pytest.raises(PgsubError, match="failpoint"):
        p.sync("t")
    at("")
    p.subdb.execute("INSERT INTO t VALUES (9, 'mine')")
    p.apply("INSERT INTO t VALUES (9, 'theirs')")
    p.sync("t")
    with pytest.raises(ApplyError):  # what the sync worker skipped behind its copy may be replayed
        replays()
    p.apply("DELETE FROM t")
    with states.changing(p.session, p.subid):
        subscription_tables.change(p.session, p.subid, subscription_tables.Change(again=[p.relid("t")]))
    p.subdb.execute("TRUNCATE t")
    with pytest.raises(StateForbids, match="is being synchronized"):
        replays()
    p.sync("t")
    with pytest.raises(StateForbids, match="was copied after that, and has it") as refused:
        replays()
    assert p.subdb.rows("SELECT * FROM t") == []
    p.subdb.execute((refused.value.hint or "").splitlines()[-1])
    p.subdb.execute("INSERT INTO t VALUES (10, 'mine')")
    p.apply("INSERT INTO t VALUES (10, 'theirs')")
    p.subdb.execute("DELETE FROM t")
    replays()  # skipped after the copy
    p.same("t")


def test_each_of_several_lsns_waits_for_its_transaction_and_those_between_are_applied(make):
    p = make(ddl="CREATE TABLE t (id int PRIMARY KEY)")
    lsns = [finish_lsn(p, f"INSERT INTO t VALUES ({number})") for number in range(6)]
    wanted = skip.of([lsns[4], lsns[1], lsns[2]])
    skip.set_pending(p.session, p.subid, wanted)
    p.catch_up()
    assert p.subdb.rows("SELECT id FROM t ORDER BY id") == [(0,), (3,), (5,)]
    assert [body["new"]["id"] for _, body in letters(p)] == ["1", "2", "4"]
    assert skip.pending(p.session, p.subid) is None
    assert [body["finish_lsn"] for body in p.events() if body["kind"] == "skipped"] == [
        format_lsn(lsn) for lsn in (lsns[1], lsns[2], lsns[4])
    ]
    assert not any(text.startswith("WARNING") for text in logged(p))


def test_one_of_several_lsns_that_is_missed_is_cleared_with_a_warning_and_the_others_stay(make):
    p = make(ddl="CREATE TABLE t (id int PRIMARY KEY)")
    lsns = [finish_lsn(p, f"INSERT INTO t VALUES ({number})") for number in range(4)]
    wrong, far = lsns[1] - 1, lsns[3] + 10_000_000
    skip.set_pending(p.session, p.subid, skip.of([wrong, lsns[2], far]))
    p.catch_up()
    assert p.subdb.rows("SELECT id FROM t ORDER BY id") == [(0,), (1,), (3,)]
    [warning] = [text for text in logged(p) if text.startswith("WARNING")]
    assert f"did not match skip-LSN {format_lsn(wrong)}." in warning
    left = skip.pending(p.session, p.subid)
    assert left is not None and left.lsns == (far,)  # still waits, other than one that was set alone
    p.apply("INSERT INTO t VALUES (7)")
    assert skip.pending(p.session, p.subid) == left


def test_the_end_of_a_prepared_transaction_clears_a_skip_as_on_the_server(make):
    p = make("prepared", ddl="CREATE TABLE t (id int PRIMARY KEY)")
    p.apply("BEGIN; INSERT INTO t VALUES (1); PREPARE TRANSACTION 'x'")
    wrong = p.published() + 10_000_000
    skips(p, wrong)
    p.apply("COMMIT PREPARED 'x'")
    assert skip.pending(p.session, p.subid) is None
    [said] = logged(p)
    assert f"did not match skip-LSN {format_lsn(wrong)}." in said
    p.same("t")


@pytest.mark.long
@pytest.mark.parametrize("rows", [WHOLE, CONFLICTING])
def test_a_worker_killed_at_any_step_of_a_skip_has_skipped_once_or_not_at_all(make, child, rows):
    p = make()
    sessions = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE %s"
    for number, point in enumerate(("apply.skipped", "apply.before_target_commit", "apply.commit_reply_lost")):
        there, new = 10 * number, 10 * number + 1
        p.subdb.execute(f"INSERT INTO t VALUES ({there}, {there}, 'mine')")
        error = fails(p, f"INSERT INTO t VALUES ({there}, {there + 2}, 'theirs'), ({new}, {new}, 'two')")
        skips(p, error.finish_lsn, rows)
        before = len(letters(p))
        task = child("pgsub.apply.worker.worker:run", p.spec(p.take_over(), until_lsn=p.published()), {point: "kill"})
        assert task.process.wait(patience.SECONDS) == -9
        p.subdb.wait(sessions, f"pgsub {p.subid} apply %", value=0)
        done = point == "apply.commit_reply_lost"
        assert (skip.pending(p.session, p.subid) is None) is done
        assert len(letters(p)) - before == (0 if not done else 2 if rows == WHOLE else 1)
        p.apply()
        assert len(letters(p)) - before == (2 if rows == WHOLE else 1) and skip.pending(p.session, p.subid) is None
        kept = p.subdb.rows("SELECT id, v FROM t WHERE id >= %s ORDER BY id", there)
        assert kept == [(there, "mine"), *([(new, "two")] if rows == CONFLICTING else [])]


def test_rules_hold_behind_a_skip_of_rows_in_the_same_batch(make):
    p = make("plain", on_conflict=("insert_exists=keep_local",))
    p.subdb.execute("INSERT INTO t VALUES (1, 1, 'mine'), (3, 3, 'mine'); ALTER TABLE t ADD CHECK (u < 100)")
    p.pubdb.execute("INSERT INTO t VALUES (1, 10, 'theirs')")  # which makes apply go row by row
    waiting = Skip(finish_lsn(p, "INSERT INTO t VALUES (2, 200, 'refused')"), CONFLICTING, waits=True)
    skip.set_pending(p.session, p.subid, waiting)
    p.apply("INSERT INTO t VALUES (3, 30, 'theirs')")
    assert p.subdb.rows("SELECT id, v FROM t ORDER BY id") == [(1, "mine"), (3, "mine")]
    assert [body["new"]["id"] for _, body in letters(p)] == ["2"]
