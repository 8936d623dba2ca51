"""Whatever runs twice, wakes up late or finds the ledger elsewhere commits nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fix_engine import Subscriber
from fix_faults import Child, Site, until
from fix_servers import Database
from thorough import long

from pgsub.apply.worker.loop import WorkerResult
from pgsub.common.errors import Fenced, PgsubError, StreamsMustRestart
from pgsub.protocol.lsn import format_lsn, lsn_or_none
from pgsub.tablesync.copy import plan
from pgsub.target.ledger import subscriptions, worker_takeover

Reached = Callable[[str], None]
APPLY = "pgsub.apply.worker.worker:run"


@pytest.fixture
def log(pubdb: Database, subdb: Database) -> None:
    """An append-only table without a key."""
    for database in (pubdb, subdb):
        database.execute("CREATE TABLE log (n bigint, pad text)")
    pubdb.execute("CREATE PUBLICATION p FOR TABLE log")


def add(database: Database, first: int, last: int) -> None:
    """One transaction a row."""
    database.execute(
        f"DO $$ BEGIN FOR g IN {first}..{last} LOOP INSERT INTO log VALUES (g, repeat('x', 50)); COMMIT;"
        " END LOOP; END $$"
    )


def rows(database: Database) -> list[int]:
    """The log's content."""
    return [n for (n,) in database.rows("SELECT n FROM log ORDER BY n")]


def upto(last: int) -> list[int]:
    """What the log should hold."""
    return list(range(1, last + 1))


def sessions(subdb: Database, role: str, state: str = "%") -> int:
    """Target sessions of a role."""
    return int(
        subdb.value(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE %s AND state LIKE %s"
            " AND datname = current_database()",
            f"pgsub % {role} %",
            state,
        )
    )


@pytest.mark.usefixtures("log")
def test_of_two_attempts_of_one_apply_task_one_is_refused(
    pubdb: Database,
    subdb: Database,
    subscriber: Callable[[], Subscriber],
    child: Callable[..., Child],
    reached: Reached,
) -> None:
    sub = subscriber().register("log")
    spec = sub.spec(sub.take_over())
    pair = [child(APPLY, spec), child(APPLY, spec)]
    add(pubdb, 1, 30)
    until(lambda: rows(subdb) == upto(30), "nothing applied")
    until(lambda: any(c.process.poll() is not None for c in pair), "both attempts go on")
    [refused] = [c for c in pair if c.process.poll() is not None]
    error = refused.outcome()
    assert isinstance(error, Fenced) and error.message == "another attempt of this worker holds the claim"
    reached("duplicate attempt refused")
    add(pubdb, 31, 60)
    until(lambda: rows(subdb) == upto(60), "the first attempt does not go on")
    worker_takeover.ask_to_stop(sub.session, sub.subid)
    [kept] = [c for c in pair if c is not refused]
    result = kept.outcome()
    assert isinstance(result, WorkerResult) and result.outcome == "stopped"
    assert rows(subdb) == upto(60)


class Twice:
    """A job of one item that two processes run at once; its result is that of the first."""

    def __init__(self, pair: Sequence[Child]) -> None:
        self.pair = pair

    def done(self) -> bool:
        return all(one.process.poll() is not None for one in self.pair)

    def result(self, timeout: float | None = None) -> list[Any]:
        return [self.pair[0].outcome()]

    def cancel(self) -> None:
        """It is done."""


@pytest.mark.long
@pytest.mark.usefixtures("log")
@pytest.mark.parametrize("chunk_bytes", [1 << 30, 64 << 10], ids=["atomic", "chunked"])
def test_what_one_attempt_of_a_copy_task_does_the_other_finds_done(
    pubdb: Database,
    subdb: Database,
    subscriber: Callable[[], Subscriber],
    child: Callable[..., Child],
    reached: Reached,
    monkeypatch: pytest.MonkeyPatch,
    chunk_bytes: int,
) -> None:
    monkeypatch.setattr(plan, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(plan, "CHUNKED_FROM_BYTES", chunk_bytes)
    pubdb.execute("INSERT INTO log SELECT g, repeat('x', 50) FROM generate_series(1, 3000) g")
    sub = subscriber().register("log", state="i")
    jobs: list[Twice] = []

    def submit(name: str, function: Callable[[Any], Any], items: Sequence[Any]) -> Twice:
        task = f"{function.__module__}:{function.__name__}"
        jobs.append(Twice([child(task, items[0]) for _ in range(2)]))
        return jobs[-1]

    with monkeypatch.context() as patch:  # apply, later, has one attempt
        patch.setattr(sub, "submit", submit)
        sub.sync("log")
    attempts = [one.outcome() for job in jobs for one in job.pair]
    assert all(attempt.error is None for attempt in attempts)
    assert sum(attempt.rows for attempt in attempts) == 3000
    if chunk_bytes > 1 << 20:
        assert sorted(attempt.rows for attempt in attempts) == [0, 3000]
    reached("duplicate copy chunk found done")
    assert rows(subdb) == upto(3000)
    add(pubdb, 3001, 3010)
    sub.catch_up()
    assert rows(subdb) == upto(3010)


@pytest.mark.usefixtures("log")
@pytest.mark.parametrize("point", ["apply.before_target_commit", *long(["apply.after_target_commit"])])
def test_a_zombie_that_wakes_up_after_a_take_over_commits_and_reports_nothing(
    pubdb: Database,
    subdb: Database,
    subscriber: Callable[..., Subscriber],
    child: Callable[..., Child],
    reached: Reached,
    tmp_path: Path,
    point: str,
) -> None:
    sub = subscriber().register("log")
    add(pubdb, 1, 5)
    sub.catch_up()
    zombie = child(APPLY, sub.spec(sub.take_over()), {point: "stop"})
    add(pubdb, 6, 20)
    until(lambda: _stopped(zombie.process.pid), "the worker did not stop")
    # as wal_sender_timeout does with the walsender of a process that is stopped
    pubdb.execute(
        "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = %s", sub.sub.slot_name
    )
    open_transaction = point == "apply.before_target_commit"
    assert sessions(subdb, "apply", "idle in transaction" if open_transaction else "idle") == 1
    claim = sub.take_over()
    assert sessions(subdb, "apply") == 0
    reached("zombie evicted")
    before = sub.session.execute("SELECT remote_lsn::text, reported_lsn::text FROM pgsub.progress").fetchone()
    if open_transaction:
        assert rows(subdb) == upto(5)
        os.kill(zombie.process.pid, signal.SIGCONT)
        assert isinstance(zombie.outcome(), PgsubError)
        assert rows(subdb) == upto(5)
        after = sub.session.execute("SELECT remote_lsn::text, reported_lsn::text FROM pgsub.progress").fetchone()
        assert after == before
    successor = child(APPLY, sub.spec(claim))
    add(pubdb, 21, 30)
    until(lambda: rows(subdb) == upto(30), "the successor does not apply")
    if not open_transaction:
        os.kill(zombie.process.pid, signal.SIGCONT)
        assert isinstance(zombie.outcome(), PgsubError)
        add(pubdb, 31, 40)
        until(lambda: rows(subdb) == upto(40), "the successor was disturbed")
    worker_takeover.ask_to_stop(sub.session, sub.subid)
    assert successor.outcome().outcome == "stopped"
    assert rows(subdb) == rows(pubdb)


def _stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.long
@pytest.mark.usefixtures("log")
def test_a_batch_whose_epoch_was_raised_meanwhile_is_rolled_back(
    pubdb: Database,
    subdb: Database,
    subscriber: Callable[[], Subscriber],
    child: Callable[..., Child],
    reached: Reached,
    tmp_path: Path,
) -> None:
    sub = subscriber().register("log")
    release = tmp_path / "release"
    late = child(APPLY, sub.spec(sub.take_over()), {"apply.batch_open": f"pause:{release}"})
    add(pubdb, 1, 10)
    until(lambda: (tmp_path / "apply.batch_open").exists(), "no batch")
    # another launcher, between the raise of the epoch and the eviction of older sessions
    subdb.execute("UPDATE pgsub.control SET epoch = epoch + 1 WHERE worker = 0")
    release.touch()
    error = late.outcome()
    assert isinstance(error, StreamsMustRestart)
    assert error.message == "compare-and-set of the progress row failed"
    assert rows(subdb) == []
    reached("compare-and-set failed")
    sub.catch_up()
    assert rows(subdb) == upto(10)


@pytest.mark.long
def test_a_ledger_that_moved_restarts_the_streams_without_a_word(site: Callable[[], Site], reached: Reached) -> None:
    case = site()
    writer = case.make_ready("audit1", "counter1")
    process = case.serve()
    case.wait_equal()
    epoch = case.epoch()
    # nothing is written for the subscription meanwhile, so nothing lies between the two positions
    case.pubdb.execute("CREATE TABLE elsewhere ()")
    position = case.pubdb.value("SELECT pg_current_wal_flush_lsn()")
    case.subdb.execute("UPDATE pgsub.progress SET remote_lsn = %s WHERE worker = 0", position)
    writer.resume()
    until(lambda: case.epoch() == epoch + 1, "the streams were not restarted")
    reached("compare-and-set failed")
    writer.some(20)
    case.wait_equal()
    case.terminate(process)
    case.check()
    assert "ERROR" not in case.said()


@pytest.mark.usefixtures("log")
def test_an_end_position_in_the_middle_of_a_backlog_is_reached_exactly(
    pubdb: Database, subdb: Database, subscriber: Callable[[], Subscriber]
) -> None:
    sub = subscriber().register("log")
    add(pubdb, 1, 1300)
    position = lsn_or_none(pubdb.value("SELECT pg_current_wal_insert_lsn()"))
    assert position is not None
    add(pubdb, 1301, 4000)
    result = sub.start(until_lsn=position).result()[0]
    assert result.outcome == "reached" and result.remote_lsn <= position, format_lsn(result.remote_lsn)
    assert rows(subdb) == upto(1300)
    sub.catch_up()
    assert rows(subdb) == upto(4000)


@pytest.mark.long
@pytest.mark.usefixtures("log")
def test_take_overs_in_quick_succession_lose_and_repeat_nothing(
    pubdb: Database, subdb: Database, subscriber: Callable[[], Subscriber], child: Callable[..., Child]
) -> None:
    sub = subscriber().register("log")
    writing = threading.Thread(target=lambda: [add(pubdb, 50 * i + 1, 50 * i + 50) for i in range(40)])
    writing.start()
    for _ in range(4):
        child(APPLY, sub.spec(sub.take_over()))
        before = subscriptions.apply_position(sub.session, sub.subid)
        with contextlib.suppress(AssertionError):  # one that still waits for the slot is taken over as well
            until(lambda past=before: subscriptions.apply_position(sub.session, sub.subid) > past, "no progress", 3)
    writing.join()
    sub.catch_up()
    assert rows(subdb) == upto(2000)
