"""Whether a task that synchronizes tables is alive: what counts as a sign of life, and what does not."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from fix_failpoints import At
from fix_pair import MakePair, Pair
from fix_servers import Database

from pgsub.common.errors import WorkerDied
from pgsub.publisher import connect as publisher
from pgsub.tablesync.context import SyncContext
from pgsub.tablesync.coordinator import TableSync
from pgsub.tablesync.task_watch import TaskWatch
from pgsub.target.ledger.worker_takeover import Claim
from pgsub.target.session import connect as target

TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text)"


@pytest.fixture
def watched(pair: MakePair) -> Iterator[tuple[Pair, Claim, psycopg.Connection]]:
    """A pair, the claim of its table's worker, and a session that such a worker may have; every look counts."""
    p = pair(TABLE, state="i")
    claim = p.take_over("t")
    name = f"pgsub {claim.subid} copy:{claim.worker} {claim.epoch}"
    with contextlib.closing(target.connect(p.subdb.conninfo, name)) as session:
        yield p, claim, session


@contextlib.contextmanager
def _running(session: psycopg.Connection, database: Database) -> Iterator[None]:
    """A session runs a statement that waits for no client."""

    def sleep() -> None:
        with contextlib.suppress(psycopg.errors.QueryCanceled):
            session.execute("SELECT pg_sleep(600)")

    pid, thread = session.info.backend_pid, threading.Thread(target=sleep)
    thread.start()
    database.wait("SELECT wait_event = 'PgSleep' FROM pg_stat_activity WHERE pid = %s", pid)
    try:
        yield
    finally:
        database.execute("SELECT pg_cancel_backend(%s)", pid)
        thread.join()


def test_a_task_without_a_sign_of_life_is_given_up(watched: tuple[Pair, Claim, psycopg.Connection]) -> None:
    p, claim, session = watched
    watch = TaskWatch(p.session, [claim], 0.0)
    session.execute("BEGIN")
    watch.look()
    session.execute("SELECT 1")
    watch.look()
    with pytest.raises(WorkerDied, match="gave no sign of life"):
        watch.look()


def test_bytes_that_a_copy_takes_are_a_sign_of_life(watched: tuple[Pair, Claim, psycopg.Connection]) -> None:
    p, claim, session = watched
    watch = TaskWatch(p.session, [claim], 0.0)
    taken = "SELECT bytes_processed FROM pg_stat_progress_copy"
    with contextlib.suppress(psycopg.errors.QueryCanceled), session.cursor() as cursor:
        with cursor.copy("COPY public.t FROM STDIN") as copy:
            for number in range(3):
                before = p.subdb.value(taken) or 0
                copy.write("".join(f"{number * 100_000 + n}\tx\n" for n in range(20_000)))
                p.subdb.wait(f"SELECT bytes_processed > {before} FROM pg_stat_progress_copy")
                p.subdb.wait("SELECT wait_event = 'ClientRead' FROM pg_stat_activity WHERE application_name ~ ' copy:'")
                watch.look()
            with pytest.raises(WorkerDied):
                watch.look()


def test_a_task_that_works_or_has_no_session_yet_is_not_given_up(
    watched: tuple[Pair, Claim, psycopg.Connection],
) -> None:
    p, claim, session = watched
    with _running(session, p.subdb):
        watch = TaskWatch(p.session, [claim], 0.0)
        for _ in range(3):
            watch.look()
    session.close()
    p.until("SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name ~ ' copy:'")
    for _ in range(3):
        watch.look()


def test_a_task_that_waits_for_the_publisher_is_not_given_up(
    watched: tuple[Pair, Claim, psycopg.Connection],
) -> None:
    p, claim, _ = watched
    with contextlib.ExitStack() as stack:
        holder, copies = (
            stack.enter_context(contextlib.closing(publisher.connect(p.pubdb.conninfo, application_name="slot")))
            for _ in range(2)
        )
        holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        watch = TaskWatch(p.session, [claim], 0.0, holder)
        with _running(copies, p.pubdb):
            for _ in range(3):
                watch.look()
        with pytest.raises(WorkerDied):
            watch.look()


def test_a_copy_that_stands_still_ends_its_attempt_and_the_next_one_ends_well(
    pair: MakePair, at: At, tmp_path: Path
) -> None:
    p, go_on = pair(TABLE, pub="INSERT INTO t SELECT g, 'x' FROM generate_series(1, 100) g", state="i"), tmp_path / "on"
    at(f"copy.middle=pause:{go_on}@1")
    with pytest.raises(WorkerDied):
        TableSync(SyncContext(p.sub, "1", p.submit, threading.Event(), patience=0.5), p.relid("t")).run()
    p.sync("t")  # the other one has not gone on
    go_on.touch()
    p.apply()
    p.same("t")


def test_where_the_target_shows_no_activity_nothing_is_judged(watched: tuple[Pair, Claim, psycopg.Connection]) -> None:
    p, claim, session = watched
    session.execute("SET track_activities = off")
    watch = TaskWatch(p.session, [claim], 0.0)
    for _ in range(3):
        watch.look()
