"""A worker's own rows in the ledger: claim, lock, compare-and-set, report."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import psycopg
import pytest

from pgsub.common.errors import Fenced, StreamsMustRestart
from pgsub.target.ledger import worker_takeover
from pgsub.target.ledger.progress import Progress, of_commit
from pgsub.target.ledger.subscriptions import table_states
from pgsub.target.ledger.worker_takeover import APPLY
from pgsub.target.sql.pipeline import StatementFailed

if TYPE_CHECKING:
    from fix_servers import Database

SUBID = 7
Connect = Callable[..., psycopg.Connection]


def _claimed(session: psycopg.Connection) -> Progress:
    progress = Progress(session, worker_takeover.take_over(session, SUBID, APPLY))
    progress.claim()
    return progress


def _step(progress: Progress, old: int, new: int) -> None:
    progress.open(old)
    progress.close(old, new, 1_000_000)


def test_a_claim_is_taken_once(session: psycopg.Connection, connect: Connect) -> None:
    claim = worker_takeover.take_over(session, SUBID, APPLY)
    Progress(session, claim).claim()
    for again in (session, connect()):
        with pytest.raises(Fenced):
            Progress(again, claim).claim()


def test_an_older_epoch_can_do_nothing_any_more(session: psycopg.Connection, connect: Connect) -> None:
    zombie = connect()
    old = _claimed(zombie)
    _step(old, 0, 100)
    fresh = _claimed(session)
    old.open(100)
    zombie.execute("CREATE TABLE public.made (n int)")
    with pytest.raises(StreamsMustRestart):
        old.close(100, 200, None)
    assert zombie.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    assert session.execute("SELECT to_regclass('public.made')").fetchone() == (None,)
    with pytest.raises(Fenced):
        old.report(100)
    with pytest.raises(Fenced):
        old.control()
    _step(fresh, 100, 300)
    assert fresh.control().stop is False


def _joined(session: psycopg.Connection) -> tuple[Progress, dict[int, worker_takeover.Claim]]:
    """The progress of three tables on one stream."""
    claims = worker_takeover.take_over_many(session, SUBID, [11, 12, 13])
    session.execute("INSERT INTO pgsub.progress (subid, worker) SELECT %s, unnest(ARRAY[11, 12, 13])", (SUBID,))
    progress = Progress(session, claims[11])
    progress.claim([claims[12], claims[13]])
    return progress, claims


def _positions(session: psycopg.Connection, column: str = "remote_lsn") -> set[int]:
    query = f"SELECT {column} - '0/0'::pg_lsn FROM pgsub.progress WHERE worker <> 0"
    return {int(at) for (at,) in session.execute(query.encode())}


def test_tables_on_one_stream_move_in_the_same_commit_or_not_at_all(session: psycopg.Connection) -> None:
    progress, _ = _joined(session)
    _step(progress, 0, 100)
    assert _positions(session) == {100}
    times = session.execute("SELECT DISTINCT remote_commit_ts FROM pgsub.progress WHERE worker <> 0").fetchall()
    assert len(times) == 1 and times[0][0] is not None
    progress.report(150)
    assert _positions(session, "reported_lsn") == {150}
    session.execute("UPDATE pgsub.progress SET remote_lsn = '0/50' WHERE worker = 13")
    progress.open(100)
    with pytest.raises(StreamsMustRestart, match="not at one position"):
        progress.close(100, 200, None)
    session.execute("ROLLBACK")
    assert _positions(session) == {100, 0x50}


def test_a_position_of_several_tables_is_reported_only_under_the_claims_of_all(session: psycopg.Connection) -> None:
    progress, _ = _joined(session)
    worker_takeover.take_over(session, SUBID, 13)
    with pytest.raises(Fenced):
        progress.report(100)
    assert _positions(session, "reported_lsn") == {0}
    progress.open(0)
    with pytest.raises(Fenced):
        progress.close(0, 100, None)
    session.execute("ROLLBACK")
    assert _positions(session) == {0}


def test_the_set_needs_the_comparison(session: psycopg.Connection, connect: Connect) -> None:
    progress = _claimed(session)
    _step(progress, 0, 100)
    connect().execute("UPDATE pgsub.progress SET remote_lsn = '0/50'")
    with pytest.raises(StreamsMustRestart, match="not where this worker left it") as caught:
        progress.open(100)
    assert "Expected 0/64, found 0/50" in (caught.value.detail or "")
    with pytest.raises(StreamsMustRestart, match="compare-and-set"):
        progress.close(100, 200, None)
    assert session.execute("SELECT remote_lsn = '0/50' FROM pgsub.progress").fetchall() == [(True,)]


def test_the_time_stays_that_of_the_transaction_whose_end_the_position_is(session: psycopg.Connection) -> None:
    progress = _claimed(session)
    time = "SELECT EXTRACT(epoch FROM remote_commit_ts - '2000-01-01 00:00:00+00')::int FROM pgsub.progress"
    for old, new, seconds, expected in ((0, 100, 1, 1), (100, 100, 2, 1), (100, 200, 3, 3), (200, 200, 4, 3)):
        progress.open(old)
        progress.close(old, new, seconds * 1_000_000)
        assert session.execute(time.encode()).fetchall() == [(expected,)]


_REFUSING = """
CREATE TABLE public.refused (n int);
CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE EXCEPTION 'refused'; END$$;
CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON public.refused DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION public.refuse();
ALTER TABLE public.refused ENABLE ALWAYS TRIGGER refuse
"""


def test_a_step_whose_commit_fails_leaves_a_worker_that_can_go_on(session: psycopg.Connection) -> None:
    progress = _claimed(session)
    session.execute(_REFUSING)
    progress.open(0)
    session.execute("INSERT INTO public.refused VALUES (1)")
    with pytest.raises(StatementFailed, match="refused") as caught:
        progress.close(0, 100, None)
    assert of_commit(caught.value)
    _step(progress, 0, 150)
    progress.report(150)
    assert (progress.remote_lsn, progress.reported_lsn) == (0, 150)
    progress.read()
    assert progress.remote_lsn == 150


def test_a_step_prepares_its_statements_again_when_they_are_gone(session: psycopg.Connection) -> None:
    progress = _claimed(session)
    _step(progress, 0, 100)
    session.execute("DEALLOCATE ALL")
    _step(progress, 100, 200)
    progress.open(200)
    session.execute("DEALLOCATE ALL")
    with pytest.raises(StatementFailed) as caught:
        progress.close(200, 300, None)
    assert caught.value.error.sqlstate == "26000" and not of_commit(caught.value)
    _step(progress, 200, 300)
    progress.read()
    assert progress.remote_lsn == 300


@pytest.mark.parametrize("how", ["VACUUM FULL pgsub.progress", "UPDATE pgsub.progress SET states_version = 5"])
def test_a_row_that_moved_is_found_again(session: psycopg.Connection, connect: Connect, how: str) -> None:
    other = connect()
    for worker in range(1000, 1200):
        other.execute("INSERT INTO pgsub.progress (subid, worker) VALUES (%s, %s)", (SUBID, worker))
    progress = _claimed(session)
    _step(progress, 0, 100)
    other.execute("DELETE FROM pgsub.progress WHERE worker >= 1000")
    other.execute(how.encode())
    _step(progress, 100, 200)
    other.execute(how.encode())
    progress.report(200)
    _step(progress, 200, 300)
    assert other.execute("SELECT worker::int, remote_lsn - '0/0' FROM pgsub.progress").fetchall() == [(0, 300)]


def test_a_report_never_goes_back(session: psycopg.Connection) -> None:
    progress = _claimed(session)
    progress.report(500)
    progress.report(300)
    assert progress.reported_lsn == 500


def test_the_lock_tells_of_a_state_that_was_changed_while_it_waited(
    session: psycopg.Connection, connect: Connect
) -> None:
    progress, other = _claimed(session), connect()
    other.execute("BEGIN")
    other.execute("UPDATE pgsub.progress SET states_version = states_version + 1 WHERE worker = 0")
    other.execute("UPDATE pgsub.subscription_rel SET srsubstate = 's', srsublsn = '0/10'")
    session.execute("BEGIN")
    locking = threading.Thread(target=progress.lock, args=(0,))
    locking.start()
    waiting = "SELECT count(*) > 0 FROM pg_catalog.pg_locks WHERE NOT granted AND pid = %s"
    while other.execute(waiting, (session.info.backend_pid,)).fetchone() == (False,):
        assert locking.is_alive()
    other.execute("COMMIT")
    locking.join()
    assert progress.states_version == 1
    assert {s.srsubstate for s in table_states(session, SUBID).values()} == {"s"}
    session.execute("ROLLBACK")


def _buffers(session: psycopg.Connection, progress: Progress, at: int, steps: int) -> float:
    """Buffers of the progress table and its index touched by a lock and a set, on average."""
    query = (
        "SELECT heap_blks_hit + heap_blks_read + idx_blks_hit + idx_blks_read FROM pg_statio_all_tables"
        " WHERE relid = 'pgsub.progress'::regclass"
    )

    def count() -> int:
        session.execute("SELECT pg_stat_force_next_flush()")
        session.execute("SELECT pg_stat_clear_snapshot()")
        return int(session.execute(query.encode()).fetchone()[0])  # type: ignore[index]

    before = count()
    for number in range(steps):
        _step(progress, at + number, at + number + 1)
    return (count() - before) / steps


@pytest.mark.long
def test_an_old_snapshot_does_not_make_progress_slower(
    session: psycopg.Connection, connect: Connect, subdb: Database
) -> None:
    progress, old = _claimed(session), connect()
    session.execute("ALTER TABLE pgsub.progress SET (autovacuum_enabled = off)")  # what it reads would be counted
    old.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    old.execute("SELECT * FROM pgsub.progress")
    first = _buffers(session, progress, 0, 50)
    for number in range(50, 1500):
        _step(progress, number, number + 1)
    assert _buffers(session, progress, 1500, 50) <= first + 3
    assert old.execute("SELECT remote_lsn = '0/0' FROM pgsub.progress").fetchone() == (True,)
    old.execute("ROLLBACK")


def test_the_events_that_are_left_are_known_without_reading_them(session: psycopg.Connection) -> None:
    progress = _claimed(session)
    assert progress.unmirrored_events() is None
    event = "INSERT INTO pgsub.event (subid, body) SELECT %s, to_jsonb(repeat('x', 500)) FROM generate_series(1, 5000)"
    session.execute(event, (SUBID,))
    with session.transaction():
        found = progress.unmirrored_events()
        read = session.execute(
            "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_xact_user_tables WHERE relid = 'pgsub.event'::regclass"
        ).fetchone()
    assert found is not None and found[1] - found[0] == 4999 and read is not None and read[0] < 10
