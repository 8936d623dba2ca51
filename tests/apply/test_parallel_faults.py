"""Transactions applied while they arrive, when something goes wrong in the middle: nothing is lost, nobody hangs."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import SimpleNamespace

import patience
import psycopg
import pytest
from fix_engine import Task
from fix_failpoints import WithoutThreads
from fix_pair import MakePair, Pair
from fix_parallel import OPEN, TABLE, Parallel, Replays, publishing, wait_open
from protocol.encoding import encode, text_tuple

from pgsub.apply.execute.executor import Executor
from pgsub.apply.parallel import worker
from pgsub.apply.parallel.worker import ParallelWorker
from pgsub.apply.rows.relation_cache import RelationCache
from pgsub.apply.rows.table_state_filter import Decision
from pgsub.apply.stream import spool
from pgsub.apply.stream.transactions import RemoteTransaction
from pgsub.apply.worker.start import streams
from pgsub.apply.worker.worker import ApplyPolicy
from pgsub.common.errors import ApplyError, Fenced, SpoolFailed
from pgsub.protocol.frames import Frames
from pgsub.protocol.messages import Column, Insert, Relation

_PREPARED = "SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()"
_REFUSING = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE EXCEPTION 'not now'; END$$;
CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON t DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION refuse();
ALTER TABLE t ENABLE ALWAYS TRIGGER refuse
"""


def test_a_prepare_that_fails_is_reported_and_done_whole_by_the_next_try(parallel: Parallel) -> None:
    p = parallel(sub=_REFUSING, two_phase="p")
    p.apply()
    p.pubdb.execute("BEGIN; INSERT INTO t VALUES (1, 'x'), (2, 'y'); PREPARE TRANSACTION 'x'")
    with pytest.raises(ApplyError, match="not now"):
        p.catch_up()
    assert p.subdb.rows("SELECT gid FROM pgsub.prepared_xact UNION ALL SELECT gid FROM pgsub.prepared_pending") == []
    p.subdb.execute("ALTER TABLE t DISABLE TRIGGER refuse")
    p.apply()
    assert p.subdb.value(_PREPARED) == 1
    p.apply("COMMIT PREPARED 'x'")
    p.same("t")


def test_a_transaction_for_which_there_is_no_thread_waits_in_its_file(
    parallel: Parallel, without_threads: WithoutThreads
) -> None:
    p = parallel()
    with without_threads("parallel_worker") as refused:
        p.apply("INSERT INTO t SELECT g, 'x' FROM generate_series(1, 100) g", "DELETE FROM t WHERE id > 90")
    assert refused
    p.same("t")


def test_of_equal_rows_that_several_transactions_delete_as_many_go_as_on_the_publisher(
    parallel: Parallel, replays: Replays, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sessions may choose the same one of them; the server looks again (RelationFindReplTupleSeq)."""
    monkeypatch.setattr(worker, "IDLE_SECONDS", 5)  # nobody gives way: the commit comes first
    monkeypatch.setattr(worker, "LOCK_TIMEOUT", "10s")
    rows = 300  # more than a round trip, so that they are really run
    p = parallel(
        "CREATE TABLE t (v int); ALTER TABLE t REPLICA IDENTITY FULL;"
        f" INSERT INTO t SELECT 1 FROM generate_series(1, {3 * rows})"
    )
    task = p.start()
    some = "DELETE FROM t WHERE ctid IN (SELECT ctid FROM t ORDER BY ctid {} LIMIT " + str(rows) + ")"
    with publishing(p, some.format("ASC")) as first, publishing(p) as second:
        p.pubdb.execute("SELECT pg_logical_emit_message(true, '', '')")
        p.until(_CHANGING, task=task)
        second.execute(some.format("DESC").encode())
        p.pubdb.execute("SELECT pg_logical_emit_message(true, '', '')")
        p.until(_WAITING, task=task)
        first.execute("COMMIT")
        second.execute("COMMIT")
    p.pubdb.execute("INSERT INTO t VALUES (2)")
    p.until("SELECT count(*) = 1 FROM t WHERE v = 2", task=task)
    p.stop(task)
    p.same("t")
    assert not [event for event in p.events() if event["conflict_type"] == "delete_missing"]
    assert any("a row came while its change waited" in reason for reason in replays())


#: A parallel worker has run what it was given: it waits for more.
_CHANGING = OPEN.replace("count(*)", "count(*) = 1") + " AND wait_event = 'ClientRead'"
_WAITING = (
    "SELECT count(*) > 0 FROM pg_stat_activity WHERE application_name LIKE 'pgsub %% apply %%'"
    " AND wait_event_type = 'Lock'"
)


def test_an_open_transaction_gives_way_to_whoever_waits_for_it(parallel: Parallel) -> None:
    """Another client of the target that waits for it may itself keep the subscription waiting: none would ever end."""
    p = parallel("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE u (id int PRIMARY KEY, v text)")
    p.apply("INSERT INTO t VALUES (1, 'x'); INSERT INTO u VALUES (1, 'x')")
    task = p.start()
    with closing(p.subdb.connect()) as local, publishing(p, "UPDATE u SET v = 'held' WHERE id = 1") as first:
        wait_open(p, task)
        local.execute("BEGIN; UPDATE t SET v = 'local' WHERE id = 1")
        p.pubdb.execute("UPDATE t SET v = 'y' WHERE id = 1")
        p.until(_WAITING, task=task)
        local.execute("UPDATE u SET v = 'local' WHERE id = 1; COMMIT")
        p.until("SELECT v = 'y' FROM t", task=task)
        first.execute("COMMIT")
    p.until("SELECT v = 'held' FROM u", task=task)
    p.stop(task)


def test_a_transaction_that_is_applied_waits_for_the_ledger_as_long_as_it_takes(
    parallel: Parallel, replays: Replays, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refresh that empties tables holds apply's row while it waits for their locks."""
    monkeypatch.setattr(worker, "LOCK_TIMEOUT", "100ms")
    p = parallel()
    task = p.start()
    with closing(p.subdb.connect()) as local, publishing(p, "INSERT INTO t VALUES (1, 'x')") as session:
        wait_open(p, task)
        local.execute("BEGIN; SELECT FROM pgsub.progress FOR UPDATE")
        session.execute("COMMIT")
        p.until(_WAITING, task=task)
        local.execute("SELECT pg_sleep(0.5); COMMIT")
    p.until("SELECT count(*) = 1 FROM t", task=task)
    p.stop(task)
    assert not replays()


def test_a_transaction_whose_wait_for_the_ledger_ends_in_a_deadlock_is_replayed(
    parallel: Parallel, replays: Replays
) -> None:
    p = parallel()
    task = p.start()
    with closing(p.subdb.connect()) as local, publishing(p, "INSERT INTO t VALUES (1, 'x')") as session:
        wait_open(p, task)
        local.execute("SET deadlock_timeout = '60s'; BEGIN; SELECT FROM pgsub.progress FOR UPDATE")
        session.execute("COMMIT")
        p.until(_WAITING, task=task)
        local.execute("INSERT INTO t VALUES (1, 'local'); ROLLBACK")
    p.until("SELECT count(*) = 1 FROM t", task=task)
    p.stop(task)
    assert "deadlock" in replays()[0]


#: Two transactions that meet in no row of the publisher, but in rows that a trigger of the target changes. The first
#: attempts wait for each other's locks; the own session then finds the deadlock before the parallel worker does.
_MEETING = """
CREATE TABLE met (id int PRIMARY KEY, n int); INSERT INTO met VALUES (1, 0), (2, 0);
CREATE SEQUENCE tries;
CREATE FUNCTION meet() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM set_config('deadlock_timeout', CASE WHEN NEW.id < 10 THEN '60s' ELSE '10ms' END, true);
    IF NEW.v = 'wait' AND nextval('public.tries') <= 2 THEN
        FOR i IN 1 .. 500 LOOP
            EXIT WHEN EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid = NEW.id AND granted)
                   OR (NEW.id = 11 AND EXISTS (SELECT FROM pg_locks WHERE locktype = 'transactionid' AND NOT granted));
            PERFORM pg_sleep(0.01);
        END LOOP;
    ELSIF NEW.v <> 'wait' THEN
        UPDATE public.met SET n = n + 1 WHERE id = NEW.v::int;
        PERFORM pg_advisory_xact_lock(2) WHERE NEW.id = 10;
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER meet AFTER INSERT ON t FOR EACH ROW EXECUTE FUNCTION meet(); ALTER TABLE t ENABLE ALWAYS TRIGGER meet;
"""


def test_a_parallel_worker_gives_way_in_a_deadlock_although_its_transaction_has_ended(
    parallel: Parallel, replays: Replays
) -> None:
    p = parallel(sub=_MEETING, max_parallel_apply_workers=1)  # the second transaction waits in its file
    with publishing(p, "INSERT INTO t VALUES (1, '2')", "INSERT INTO t VALUES (2, 'wait'), (3, '1')") as session:
        p.pubdb.execute("INSERT INTO t VALUES (10, '1'), (11, 'wait'), (12, '2')")
        session.execute("COMMIT")
    p.apply()
    p.same("t")
    assert p.subdb.rows("SELECT n FROM met ORDER BY id") == [(2,), (2,)]
    assert p.subdb.value("SELECT last_value FROM tries") > 2, "they did not meet"


def test_a_session_that_only_the_worker_lost_does_not_keep_its_locks(parallel: Parallel, replays: Replays) -> None:
    """The server hears nothing of a cut connection until it has something to say itself."""
    p = parallel()
    task = p.start()
    with publishing(p, "INSERT INTO t VALUES (1, 'x')") as session:
        wait_open(p, task)
        [one] = [thread for thread in threading.enumerate() if isinstance(thread, ParallelWorker) and thread.xid]
        assert one.session is not None
        with socket.socket(fileno=os.dup(one.session.connection.fileno())) as kept:
            kept.shutdown(socket.SHUT_RD)
            deadline = time.monotonic() + patience.SECONDS
            while one.reason is None:  # it looks around, and learns that its session is gone
                assert time.monotonic() < deadline
                time.sleep(0.01)
            session.execute("INSERT INTO t VALUES (2, 'x'); COMMIT")
            p.until("SELECT count(*) = 2 FROM t", task=task)
    p.stop(task)
    assert len(replays()) == 1


def test_a_worker_that_was_taken_over_opens_no_further_session(parallel: Parallel) -> None:
    """Its own were ended by the take-over; one that came later would hold locks that nobody looks for."""
    p = parallel()
    with streams(p.spec(p.take_over())) as opened:
        p.take_over()
        with pytest.raises(Fenced):
            opened.open_session()
    p.until("SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'pgsub %% apply %%'", value=0)


def _take_origins(stack: ExitStack, p: Pair) -> None:
    """Use up all that the target has (max_active_replication_origins)."""
    with suppress(psycopg.errors.ConfigurationLimitExceeded):
        for number in itertools.count():
            session = stack.enter_context(closing(p.subdb.connect()))
            session.execute(f"SELECT pg_replication_origin_create('taken{number}')".encode())
            session.execute(f"SELECT pg_replication_origin_session_setup('taken{number}')".encode())


@pytest.mark.long
def test_nothing_is_applied_early_by_a_session_without_an_origin(parallel: Parallel, replays: Replays) -> None:
    """A peer that subscribes to the target with origin = none would get it back."""
    p = parallel()
    task = p.start()
    p.pubdb.wait("SELECT active FROM pg_replication_slots WHERE slot_name = %s", p.sub.slot_name)
    with ExitStack() as stack:
        _take_origins(stack, p)
        for number in itertools.count(1):  # the first ones may be over before anything is applied early
            p.pubdb.execute("INSERT INTO t VALUES (%s, 'x')", number)
            p.until("SELECT count(*) = %s FROM t", number, task=task)
            if replays():
                break
    p.stop(task)
    assert "could not find free replication state slot" in replays()[0]
    assert p.subdb.value("SELECT bool_and(roident > 0) FROM t, pg_xact_commit_timestamp_origin(t.xmin)")


def test_early_work_that_begins_right_after_a_table_became_ready_is_not_in_vain(parallel: Parallel) -> None:
    p = parallel(state="s")
    p.session.execute("UPDATE pgsub.subscription_rel SET srsublsn = '0/1'")
    spec = p.spec(p.take_over())
    with streams(spec) as opened:
        role = ApplyPolicy(opened, spec)
        role.attach(SimpleNamespace(remote_lsn=2, position=2))
        role.boundary(None)
        early = role.filter_for_streaming()
        assert early is not None
        assert early[0] == p.subdb.value("SELECT states_version FROM pgsub.progress WHERE worker = 0")


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_of_a_prepared_transaction_that_is_streamed_again_nothing_stays(
    parallel: Parallel, tmp_path: Path, end: str
) -> None:
    """A new stream does not send the PREPARE again, but its changes where memory is short."""
    p = parallel(f"{TABLE}; CREATE TABLE log (v text)", two_phase="p")
    p.pubdb.execute(
        f"ALTER DATABASE {p.pubdb.name} RESET debug_logical_replication_streaming;"
        f" ALTER DATABASE {p.pubdb.name} SET logical_decoding_work_mem = '64kB'"
    )
    p.apply("INSERT INTO t VALUES (0, 'x')")
    rows = "INSERT INTO {} SELECT repeat('x', 500) FROM generate_series(1, {}) g"
    p.pubdb.execute(f"BEGIN; {rows.format('log', 60)}; PREPARE TRANSACTION 'held'")
    p.apply("INSERT INTO t VALUES (1, 'x')")
    task = p.start(spool_dir=str(tmp_path))
    with publishing(p, rows.format("log", 50)) as session:
        wait_open(p, task)
        assert len(list(tmp_path.glob("*/*.changes"))) == 1
        p.pubdb.execute(f"{end} PREPARED 'held'")
        wait_open(p, task, 0)
        assert not list(tmp_path.glob("*/*.changes"))
        session.execute("COMMIT")
    p.until("SELECT count(*) FROM log", value=110 if end == "COMMIT" else 50, task=task)
    p.stop(task)
    p.same("t", "log")


def test_a_file_that_is_removed_under_a_streamed_transaction_makes_it_come_again_whole(
    parallel: Parallel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "LOCK_TIMEOUT", "60s")
    monkeypatch.setattr(spool, "_RECENT", 30_000)
    p = parallel(f"{TABLE}; CREATE TABLE log (v text)")
    rows = "INSERT INTO log SELECT lpad(g::text, 100, 'x') FROM generate_series({}, {}) g"
    task = p.start(spool_dir=str(tmp_path))
    with closing(p.subdb.connect()) as other, publishing(p, rows.format(0, 0)) as session:
        wait_open(p, task)
        other.execute("BEGIN; LOCK TABLE t")
        session.execute("INSERT INTO t VALUES (1, 'x')")
        p.until("SELECT count(*) FROM pg_locks WHERE NOT granted", value=1, task=task)
        session.execute(rows.format(1, 100).encode())
        _wait_spooled(task, tmp_path, 10_000).unlink()
        session.execute(rows.format(101, 600).encode())
        with suppress(SpoolFailed):
            _wait_spooled(task, tmp_path, 50_000)
        other.execute("COMMIT")
        session.execute("COMMIT")
    with pytest.raises(SpoolFailed, match="was removed or changed"):
        p.stop(task)
    p.apply()
    p.same("t", "log")


def _wait_spooled(task: Task, folder: Path, size: int) -> Path:
    deadline = time.monotonic() + patience.SECONDS
    while not task.done():
        with suppress(FileNotFoundError):  # the worker removes them when it fails
            for file in folder.glob("*/*.changes"):
                if file.stat().st_size > size:
                    return file
        assert time.monotonic() < deadline
    task.result()
    raise AssertionError


def test_rows_after_a_streamed_transaction_go_into_the_columns_that_were_described_meanwhile(pair: MakePair) -> None:
    """Its own description is older than the one that the publisher takes for known."""
    p = pair("CREATE TABLE t (id int PRIMARY KEY, a text, b text)")
    old, new = (Relation(1, "public", "t", "d", (Column(1, "id", 23, -1), Column(0, c, 25, -1))) for c in "ab")
    rows = [encode(Insert(1, text_tuple([b"%d" % number, b"x"]))) for number in (1, 2)]
    batch = [
        RemoteTransaction(1, 10, 11, received=[Frames.around([encode(old), rows[0]]).all()], leaves=(new,)),
        RemoteTransaction(2, 20, 21, received=[Frames.around(rows[1:]).all()]),
    ]
    executor = Executor(p.session, RelationCache(p.session, p.sub, replica=True))
    oid = p.relid("t")
    with p.session.transaction():
        executor.run(batch, lambda *_: Decision(oid))
    assert p.subdb.rows("SELECT * FROM t ORDER BY id") == [(1, "x", None), (2, None, "x")]
