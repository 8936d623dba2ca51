"""One deterministic test for each rule that carries the promise; ``make sabotage`` removes the rules one by one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable

import patience
import psycopg
import pytest
from fix_engine import Subscriber
from fix_servers import Database, Pair

from pgsub.apply.worker import worker
from pgsub.common.errors import Fenced, StreamsMustRestart
from pgsub.protocol.lsn import covered, format_lsn, parse_lsn
from pgsub.target.ledger import subscriptions
from pgsub.target.ledger.tables import handover, states

Make = Callable[..., Subscriber]


@pytest.fixture
def log(pubdb: Database, subdb: Database) -> None:
    """An append-only table without a key: a repeated or lost transaction shows as a row too many or too few."""
    for database in (pubdb, subdb):
        database.execute("CREATE TABLE log (n int)")
    pubdb.execute("CREATE PUBLICATION p FOR TABLE log")


def rows(database: Database) -> list[int]:
    """The log's content."""
    return [n for (n,) in database.rows("SELECT n FROM log ORDER BY n")]


def wait_for(condition: Callable[[], bool]) -> None:
    """Poll until it holds."""
    deadline = time.monotonic() + patience.SECONDS
    while not condition():
        assert time.monotonic() < deadline, "condition not met"
        time.sleep(0.01)


def test_a_position_does_not_cover_a_transaction_that_finishes_at_it() -> None:
    assert covered(99, 100)
    assert not covered(100, 100)


@pytest.mark.usefixtures("log")
def test_a_table_state_that_changes_while_apply_waits_for_its_lock_decides_the_change(
    pubdb: Database, subdb: Database, subscriber: Make
) -> None:
    sub = subscriber().register("log", state="f")
    task = sub.start()
    pubdb.execute("INSERT INTO log VALUES (0)")  # skipped: apply has read state f, and goes past it
    wait_for(lambda: subscriptions.apply_position(sub.session, sub.subid) > 0)
    with subdb.connect() as holder, states.changing(holder, sub.subid) as apply_lsn:
        pubdb.execute("INSERT INTO log VALUES (1)")
        subdb.wait("SELECT count(*) = 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
                   " AND application_name LIKE 'pgsub % apply %'")  # fmt: skip
        holder.execute(
            "UPDATE pgsub.subscription_rel SET srsubstate = 's', srsublsn = %s::pg_lsn WHERE subid = %s",
            (format_lsn(apply_lsn), sub.subid),
        )
    pubdb.execute("INSERT INTO log VALUES (2)")
    subdb.wait("SELECT count(*) FROM log WHERE n = 2", value=1)
    assert rows(subdb) == [1, 2]
    sub.stop(task)


@pytest.mark.usefixtures("log")
def test_apply_restarts_its_streams_where_the_ledger_moved_without_it(
    pubdb: Database, subdb: Database, subscriber: Make
) -> None:
    sub = subscriber().register("log")
    task = sub.start()
    pubdb.execute("INSERT INTO log VALUES (1)")
    subdb.wait("SELECT count(*) FROM log", value=1)
    # what a target does that crashes and loses its unflushed tail: row and progress go back together
    subdb.execute("BEGIN; DELETE FROM log; UPDATE pgsub.progress SET remote_lsn = '0/0', reported_lsn = '0/0'; COMMIT")
    pubdb.execute("INSERT INTO log VALUES (2)")
    with pytest.raises(StreamsMustRestart):
        task.result()
    assert rows(subdb) == []


@pytest.mark.usefixtures("log")
def test_a_second_run_of_a_task_is_rejected(pubdb: Database, subdb: Database, subscriber: Make) -> None:
    sub = subscriber().register("log")
    spec = sub.spec(sub.take_over())
    first = sub.submit("first", worker.run, [spec])
    pubdb.execute("INSERT INTO log VALUES (1)")
    subdb.wait("SELECT count(*) FROM log", value=1)
    with pytest.raises(Fenced):
        worker.run(spec)
    sub.stop(first)
    assert rows(subdb) == [1]


@pytest.mark.usefixtures("log")
def test_a_zombie_with_an_open_transaction_cannot_commit_after_a_take_over(
    pubdb: Database, subdb: Database, subscriber: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    sub = subscriber().register("log")
    pubdb.execute("INSERT INTO log VALUES (1)")
    claim = sub.take_over()
    code = textwrap.dedent(
        f"""
        from pgsub.apply.worker import worker
        from pgsub.apply.worker.start import WorkerSpec
        from pgsub.common.subscription import Subscription
        from pgsub.target.ledger.worker_takeover import Claim
        sub = {sub.sub!r}
        worker.run(WorkerSpec(sub, {claim!r}, sub.slot_name, sub.name))
        """
    )
    environment = {**os.environ, "PGSUB_FAILPOINTS": "apply.before_target_commit=stop"}
    zombie = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.DEVNULL)
    try:
        subdb.wait(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'pgsub % apply %' AND state ="
            " 'idle in transaction'",
            value=1,
        )
        wait_for(lambda: _state_of(zombie.pid) == "T")
        newer = sub.take_over()
        assert newer.epoch > claim.epoch
        assert subdb.value("SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'pgsub % apply %'") == 0
        os.kill(zombie.pid, signal.SIGCONT)
        assert zombie.wait(patience.SECONDS) != 0
        assert rows(subdb) == []
    finally:
        zombie.kill()
        zombie.wait()
    sub.catch_up()
    assert rows(subdb) == [1]


def _state_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0]


@pytest.mark.usefixtures("log")
def test_a_position_is_in_the_ledger_before_the_publisher_gets_it(
    pubdb: Database, subdb: Database, subscriber: Make
) -> None:
    sub = subscriber().register("log")
    task = sub.start()
    for n in range(20):
        pubdb.execute("INSERT INTO log VALUES (%s)", n)
        confirmed = pubdb.value(
            "SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = %s", sub.sub.slot_name
        )
        reported = subdb.value("SELECT reported_lsn FROM pgsub.progress WHERE worker = 0")
        assert parse_lsn(confirmed) <= parse_lsn(reported)
    subdb.wait("SELECT count(*) FROM log", value=20)
    result = sub.stop(task)
    confirmed = pubdb.value(
        "SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = %s", sub.sub.slot_name
    )
    reported = parse_lsn(subdb.value("SELECT reported_lsn FROM pgsub.progress WHERE worker = 0"))
    assert parse_lsn(confirmed) <= reported
    assert reported >= result.remote_lsn


def test_a_committed_s_survives_a_crash_of_the_target_with_asynchronous_commit(own_pair: Callable[..., Pair]) -> None:
    pair = own_pair(target={"wal_writer_delay": "10s", "synchronous_commit": "off"})
    for database in (pair.pubdb, pair.subdb):
        database.execute("CREATE TABLE log (n int)")
    pair.pubdb.execute("CREATE PUBLICATION p FOR TABLE log")
    sub = Subscriber(pair.pubdb, pair.subdb).register("log", state="f")
    claim = sub.take_over("log")
    states.slot_position(sub.session, [claim], 1)
    sub.session.execute("SET synchronous_commit = off")
    assert handover.try_syncdone(sub.session, [claim], parse_lsn("0/1")).done
    pair.target.stop("immediate")
    pair.target.start()
    with pair.subdb.connect() as session:
        row = session.execute("SELECT srsubstate::text FROM pgsub.subscription_rel").fetchone()
    assert row == ("s",)


@pytest.mark.usefixtures("log")
def test_apply_waits_at_a_claimed_table_and_withdraws_the_claim_after_a_while(
    pubdb: Database, subdb: Database, subscriber: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "CLAIM_PATIENCE", 0.5)
    sub = subscriber().register("log", state="f")
    claim = sub.take_over("log")
    states.slot_position(sub.session, [claim], 0)
    claimed = handover.claim_handover(sub.session, [claim], parse_lsn(pubdb.value("SELECT pg_current_wal_lsn()")))
    with subdb.connect() as holder:
        task = None
        with holder.transaction():
            holder.execute("SELECT FROM pgsub.subscription_rel WHERE subid = %s FOR UPDATE", (sub.subid,))
            task = sub.start()
            pubdb.execute("INSERT INTO log VALUES (1)")
            time.sleep(0.3)  # apply must not go past the claim however long it is given
            assert subscriptions.apply_position(sub.session, sub.subid) <= claimed
    wait_for(lambda: subscriptions.relations(sub.session, sub.subid)[0].handover_lsn is None)
    wait_for(lambda: subscriptions.apply_position(sub.session, sub.subid) > claimed)
    sub.stop(task)


@pytest.mark.usefixtures("log")
def test_a_table_is_not_handed_over_behind_apply(pubdb: Database, subdb: Database, subscriber: Make) -> None:
    sub = subscriber().register("log", state="f")
    claim = sub.take_over("log")
    states.slot_position(sub.session, [claim], 1)
    pubdb.execute("INSERT INTO log VALUES (1)")
    sub.catch_up()  # apply leaves the change to the sync worker, which has not seen it
    outcome = handover.try_syncdone(sub.session, [claim], 1)
    assert not outcome.done
    assert sub.state("log") == "f"


@pytest.mark.usefixtures("log")
def test_no_change_is_lost_or_applied_twice_while_a_table_synchronizes_under_writes(
    pubdb: Database, subdb: Database, subscriber: Make
) -> None:
    sub = subscriber().register("log", state="i")
    apply = sub.start()
    stop = threading.Event()
    written = [0]

    def write() -> None:
        with psycopg.connect(pubdb.conninfo, autocommit=True) as connection:
            while not stop.is_set():
                connection.execute("INSERT INTO log VALUES (%s)", (written[0],))
                written[0] += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        wait_for(lambda: written[0] > 50)
        sub.sync("log")
        wait_for(lambda: sub.state("log") == "r")
    finally:
        stop.set()
        writer.join()
    subdb.wait("SELECT count(*) >= %s FROM log", written[0])
    sub.stop(apply)
    assert rows(subdb) == list(range(written[0]))
