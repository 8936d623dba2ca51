"""Transactions applied while they arrive: ``streaming = parallel``. Mirrors t/015_stream.pl, 022 and 023 of the server,
and what applyparallelworker.c says of deadlocks.
"""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest
from fix_pair import Pair
from fix_parallel import OPEN as _OPEN
from fix_parallel import publishing as _session
from fix_parallel import wait_open as _open

from pgsub.apply.parallel import worker
from pgsub.common.errors import ApplyError
from pgsub.protocol.lsn import parse_lsn


def test_an_unfinished_transaction_is_on_the_target_before_its_commit_and_shows_after_it(
    parallel: Callable[..., Pair], replays: Callable[[], list[str]], reached: Callable[[str], None]
) -> None:
    p = parallel()
    task = p.start()
    with _session(p, "INSERT INTO t SELECT g, 'x' FROM generate_series(1, 200) g") as session:
        _open(p, task)
        assert p.subdb.value("SELECT count(*) FROM t") == 0
        session.execute("COMMIT")
        p.until("SELECT count(*) = 200 FROM t", task=task)
    p.stop(task)
    assert not replays()
    reached("applied while it arrives")


def test_the_targets_log_says_nothing_of_a_transaction_that_ended_well(parallel: Callable[..., Pair]) -> None:
    p = parallel()
    log = p.subdb.server.log
    before = log.stat().st_size
    task = p.start()
    for number in (1, 2):
        with _session(p, f"INSERT INTO t VALUES ({number}, 'x')") as session:
            _open(p, task)
            session.execute("COMMIT")
        p.until(f"SELECT count(*) = {number} FROM t", task=task)
    p.stop(task)
    assert not p.subdb.server.log_contains("WARNING|ERROR|FATAL", before), log.read_text()[before:]


def test_a_transaction_that_is_rolled_back_leaves_nothing_and_its_session_serves_the_next(
    parallel: Callable[..., Pair], replays: Callable[[], list[str]]
) -> None:
    p = parallel()
    task = p.start()
    for end in ("ROLLBACK", "COMMIT", "ROLLBACK", "COMMIT"):
        with _session(p, "INSERT INTO t SELECT count(*) + 1, 'x' FROM t") as session:
            _open(p, task)
            session.execute(end.encode())
        _open(p, task, 0)
    p.until("SELECT count(*) = 2 FROM t", task=task)
    p.stop(task)
    assert not replays()


def test_subtransactions_are_taken_back_one_by_one_and_whole_trees(
    parallel: Callable[..., Pair], replays: Callable[[], list[str]]
) -> None:
    p = parallel("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE gone (id int PRIMARY KEY)")
    task = p.start()
    with _session(p, "INSERT INTO t VALUES (1, 'kept')") as session:
        for statement in (
            *("SAVEPOINT a", "INSERT INTO t VALUES (2, 'a')", "SAVEPOINT b", "INSERT INTO t VALUES (3, 'b')"),
            *("ROLLBACK TO b", "INSERT INTO t VALUES (3, 'b again')", "RELEASE b", "UPDATE t SET v = 'a' WHERE id = 1"),
            *("SAVEPOINT c", "DELETE FROM t", "RELEASE c", "ROLLBACK TO a", "UPDATE t SET v = v || '!' WHERE id = 1"),
            *("SAVEPOINT d", "UPDATE gone SET id = 1", "INSERT INTO t VALUES (4, 'd')", "RELEASE d"),
        ):
            session.execute(statement.encode())
        _open(p, task)
        session.execute("COMMIT")
    p.until("SELECT count(*) = 2 FROM t", task=task)
    p.stop(task)
    p.same("t")
    assert p.subdb.value("SELECT v FROM t WHERE id = 1") == "kept!"
    assert not replays()


def test_a_missing_row_in_a_subtransaction_that_was_taken_back_is_no_conflict(parallel: Callable[..., Pair]) -> None:
    p = parallel(pub="INSERT INTO t SELECT g, 'x' FROM generate_series(1, 4) g")  # none of them on the target
    task = p.start()
    with _session(p, "UPDATE t SET v = 'y' WHERE id = 1") as session:
        for statement in (
            *("SAVEPOINT a", "UPDATE t SET v = 'y' WHERE id = 2", "ROLLBACK TO a", "DELETE FROM t WHERE id = 3"),
            *("SAVEPOINT b", "UPDATE t SET v = 'y' WHERE id = 4", "COMMIT"),
        ):
            session.execute(statement.encode())
    p.until("SELECT count(*) = 3 FROM pgsub.event", task=task)
    finish = {event["finish_lsn"] for event in p.events()}
    assert [event["key"] for event in p.events()] == ["(id)=(1)", "(id)=(3)", "(id)=(4)"]
    assert len(finish) == 1 and 0 < parse_lsn(finish.pop()) < p.progress()[0]
    p.stop(task)


def test_more_transactions_than_sessions_end_in_the_order_of_their_commits(
    parallel: Callable[..., Pair], replays: Callable[[], list[str]]
) -> None:
    p = parallel("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE log (who text)")
    p.subdb.execute("ALTER TABLE log ADD n serial")
    task = p.start()
    sessions = [p.pubdb.connect() for _ in range(4)]
    for number, session in enumerate(sessions):
        session.execute(f"BEGIN; INSERT INTO t VALUES ({number}, 'x'); INSERT INTO log VALUES ('{number}')".encode())
    _open(p, task, 2)
    p.pubdb.execute("INSERT INTO t VALUES (100, 'meanwhile')")
    for number in (3, 0, 2, 1):
        sessions[number].execute("COMMIT")
        sessions[number].close()
    p.until("SELECT count(*) = 4 FROM log", task=task)
    p.stop(task)
    p.same("t")
    commits = p.subdb.rows("SELECT who FROM log ORDER BY pg_xact_commit_timestamp(xmin), n")
    if p.subdb.value("SHOW track_commit_timestamp") == "on":
        assert commits == [("3",), ("0",), ("2",), ("1",)]
    assert not replays()


def test_an_open_transaction_that_stands_in_the_way_of_an_earlier_commit_gives_way(
    parallel: Callable[..., Pair], replays: Callable[[], list[str]], reached: Callable[[str], None]
) -> None:
    """The publisher lacks the target's unique index, so it does not make the later one wait."""
    p = parallel(sub="CREATE UNIQUE INDEX ON t (v)")
    task = p.start()
    with _session(p, "INSERT INTO t VALUES (1, 'same')") as session:
        _open(p, task)
        p.pubdb.execute("INSERT INTO t VALUES (2, 'same')")
        p.until("SELECT array_agg(id) = '{2}' FROM t", task=task)
        p.pubdb.execute("DELETE FROM t WHERE id = 2")
        session.execute("COMMIT")
    p.until("SELECT array_agg(id) = '{1}' FROM t", task=task)
    p.stop(task)
    assert "waited for it" in replays()[0]
    reached("a parallel worker gave way")


def test_changes_of_an_open_transaction_find_what_was_committed_before_them(
    parallel: Callable[..., Pair], replays: Callable[[], list[str]]
) -> None:
    p = parallel()
    with _session(p, "INSERT INTO t VALUES (1, 'x')") as session:
        for number in range(2, 12):  # a backlog: the row and its change come in one burst
            p.pubdb.execute(f"INSERT INTO t VALUES ({number}, 'committed')")
            session.execute(f"UPDATE t SET v = 'then changed' WHERE id = {number}".encode())
        session.execute("COMMIT")
    p.apply()
    p.same("t")
    assert p.events() == [] and not replays()


def test_two_open_transactions_in_each_others_way_are_applied_in_the_order_of_their_commits(
    parallel: Callable[..., Pair], replays: Callable[[], list[str]]
) -> None:
    p = parallel(sub="CREATE UNIQUE INDEX ON t (v)")
    task = p.start()
    with _session(p, "INSERT INTO t VALUES (1, 'a')") as first, _session(p, "INSERT INTO t VALUES (2, 'b')") as second:
        _open(p, task, 2)
        first.execute("INSERT INTO t VALUES (3, 'b')")
        second.execute("INSERT INTO t VALUES (4, 'a')")
        for session in (first, second):
            session.execute("DELETE FROM t WHERE id > 2")
        second.execute("COMMIT")
        first.execute("UPDATE t SET v = 'c' WHERE id = 1")
        p.pubdb.execute("DELETE FROM t WHERE id = 2")
        p.until("SELECT count(*) = 0 FROM t", task=task)
        first.execute("COMMIT")
    # as the server would, one after the other: 2 with b and 4 with a; 1 with a, 3 with b; and away with what is away
    p.until("SELECT array_agg(v) = '{c}' FROM t", task=task)
    p.stop(task)
    p.same("t")
    assert replays()


def test_a_session_that_is_lost_costs_time_and_nothing_else(
    parallel: Callable[..., Pair], replays: Callable[[], list[str]]
) -> None:
    p = parallel()
    task = p.start()
    with _session(p, "INSERT INTO t VALUES (1, 'x')") as session:
        _open(p, task)
        p.until(_OPEN.replace("count(*)", "count(pg_terminate_backend(pid))"), value=1, task=task)
        session.execute("INSERT INTO t VALUES (2, 'x'); COMMIT")
    p.until("SELECT count(*) = 2 FROM t", task=task)
    with _session(p, "INSERT INTO t VALUES (3, 'x')") as session:
        _open(p, task)
        session.execute("COMMIT")
    p.until("SELECT count(*) = 3 FROM t", task=task)
    p.stop(task)
    assert len(replays()) == 1


def test_a_table_that_comes_to_the_subscription_meanwhile_makes_it_decide_again(
    parallel: Callable[..., Pair], replays: Callable[[], list[str]], reached: Callable[[str], None]
) -> None:
    p = parallel("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE later (id int)", names=[("public", "t")])
    task = p.start()
    with _session(p, "INSERT INTO t VALUES (1, 'x')", "INSERT INTO later VALUES (1)") as session:
        _open(p, task)
        p.add("later")
        session.execute("COMMIT")
    p.until("SELECT count(*) = 1 FROM later", task=task)
    p.stop(task)
    assert "states of tables changed" in replays()[0]
    reached("states_version re-decision")


def test_nothing_is_applied_early_while_a_table_is_not_ready(
    parallel: Callable[..., Pair], replays: Callable[[], list[str]]
) -> None:
    p = parallel("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE u (id int)", names=[("public", "t")])
    p.session.execute("UPDATE pgsub.subscription_rel SET srsubstate = 'd'")
    p.session.execute("UPDATE pgsub.progress SET states_version = states_version + 1")
    p.add("u")
    task = p.start()
    with _session(p, "INSERT INTO u VALUES (1)") as session:
        p.pubdb.execute("INSERT INTO u VALUES (2)")
        p.until("SELECT count(*) = 1 FROM u", task=task)
        assert p.subdb.value(_OPEN) == 0
        session.execute("COMMIT")
    p.until("SELECT count(*) = 2 FROM u", task=task)
    p.stop(task)
    assert not replays()


def test_a_fault_in_a_transaction_that_was_applied_early_is_named_with_its_finish_lsn(
    parallel: Callable[..., Pair],
) -> None:
    p = parallel(sub="INSERT INTO t VALUES (7, 'here already')")
    p.pubdb.execute("INSERT INTO t VALUES (1, 'before')")
    p.pubdb.execute("BEGIN; INSERT INTO t VALUES (2, 'x'); INSERT INTO t VALUES (7, 'x'); COMMIT")
    with pytest.raises(ApplyError) as caught:
        p.catch_up()
    assert caught.value.conflict == "insert_exists" and caught.value.relation == "public.t"
    assert caught.value.finish_lsn is not None and parse_lsn(caught.value.finish_lsn) > 0
    assert p.subdb.rows("SELECT id FROM t ORDER BY id") == [(1,), (7,)]
    p.subdb.execute("DELETE FROM t WHERE id = 7")
    p.apply()
    p.same("t")


def test_what_a_streamed_transaction_says_of_relations_holds_for_those_after_it(parallel: Callable[..., Pair]) -> None:
    p = parallel()
    task = p.start()
    with _session(p, "INSERT INTO t VALUES (1, 'x')") as session:
        _open(p, task)
        session.execute("COMMIT")
    p.pubdb.execute(f"ALTER DATABASE {p.pubdb.name} RESET ALL")
    p.pubdb.execute("INSERT INTO t VALUES (2, 'y')")
    p.until("SELECT count(*) = 2 FROM t", task=task)
    p.stop(task)


def test_a_worker_that_stops_leaves_no_open_transaction_behind(parallel: Callable[..., Pair]) -> None:
    p = parallel()
    task = p.start()
    with _session(p, "INSERT INTO t VALUES (1, 'x')") as session:
        _open(p, task)
        assert p.stop(task).outcome == "stopped"
        p.until("SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'pgsub %% apply %%'", value=0)
        session.execute("COMMIT")
    p.apply()
    p.same("t")


def test_a_truncate_that_is_not_committed_yet_keeps_nobody_waiting_for_long(
    parallel: Callable[..., Pair], replays: Callable[[], list[str]]
) -> None:
    p = parallel("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE u (id int)")
    p.apply("INSERT INTO t VALUES (1, 'x')")
    task = p.start()
    with _session(p, "INSERT INTO u VALUES (1)", "SAVEPOINT a", "TRUNCATE t") as session:
        _open(p, task)
        session.execute("ROLLBACK TO a")
        p.pubdb.execute("INSERT INTO t VALUES (2, 'y')")
        p.until("SELECT count(*) = 2 FROM t", task=task)
        session.execute("COMMIT")
    p.until("SELECT count(*) = 1 FROM u", task=task)
    p.stop(task)


def test_a_change_that_waits_for_a_prepared_transaction_waits_for_its_own_end_instead(
    parallel: Callable[..., Pair], replays: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the publisher refused after it was written to WAL is sent before it is taken back."""
    monkeypatch.setattr(worker, "LOCK_TIMEOUT", "100ms")
    p = parallel(two_phase="p")
    task = p.start()
    p.pubdb.wait("SELECT two_phase AND active FROM pg_replication_slots WHERE slot_name = %s", p.sub.slot_name)
    p.pubdb.execute("BEGIN; INSERT INTO t VALUES (1, 'prepared'); PREPARE TRANSACTION 'held'")
    with _session(p, "SET lock_timeout = '10ms'", "INSERT INTO t VALUES (2, 'x')", "SAVEPOINT a") as session:
        with pytest.raises(psycopg.errors.LockNotAvailable):
            session.execute("INSERT INTO t VALUES (1, 'refused')")
        session.execute("ROLLBACK TO a")
        session.execute("COMMIT")
    p.until("SELECT array_agg(id) = '{2}' FROM t", task=task)
    p.pubdb.execute("COMMIT PREPARED 'held'")
    p.until("SELECT count(*) = 2 FROM t", task=task)
    p.stop(task)
    p.same("t")
    assert len(replays()) == 1 and "lock timeout" in replays()[0]
