"""A table changes hands in both orders, through a claim, and after a claim was taken back; with writes all the time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fix_engine import Subscriber
from fix_faults import Site, until
from fix_servers import Database

from pgsub.protocol.lsn import parse_lsn
from pgsub.target.ledger import subscriptions
from pgsub.target.ledger.tables import handover, states
from pgsub.target.session import transactions

Make = Callable[[], Site]
Reached = Callable[[str], None]

TABLES = ("audit1", "keyed1", "counter1")


def table_lsns(case: Site, column: str) -> list[int]:
    """A position of all tables, 0 for NULL."""
    return [
        parse_lsn(lsn) for (lsn,) in case.subdb.rows(f"SELECT coalesce({column}, '0/0') FROM pgsub.subscription_rel")
    ]


def sync_lsn(case: Site, relid: int) -> int:
    """Where a sync worker is."""
    return parse_lsn(case.subdb.value("SELECT remote_lsn FROM pgsub.progress WHERE worker = %s", relid))


@pytest.mark.long
def test_apply_that_is_behind_skips_what_the_sync_workers_had(site: Make, reached: Reached, tmp_path: Path) -> None:
    case = site()
    writer = case.make(*TABLES)
    release, later = tmp_path / "release", tmp_path / "later"
    # the first commit is apply's: no table is copied yet, and one of them gets its slot only after it
    points = {"apply.after_target_commit": f"pause:{release}", "sync.before_slot": f"pause:{later}"}
    process = case.create("--follow", points=points)
    case.wait_fired("apply.after_target_commit", "sync.before_slot")
    writer.some(5)
    later.touch()
    until(lambda: case.states() == "sss", lambda: f"tables: {case.states()}\n{case.said()}")
    behind = case.ledger("remote_lsn")
    assert max(table_lsns(case, "srsublsn")) > behind
    writer.some(30)
    assert case.states() == "sss" and case.ledger("remote_lsn") == behind
    reached("hand-over with apply behind")
    release.touch()
    case.wait_ready()
    writer.some(20)
    case.wait_equal()
    case.terminate(process)
    case.check()


@pytest.mark.long
def test_a_sync_worker_that_is_behind_claims_and_apply_takes_a_claim_back_that_nobody_honours(
    site: Make, reached: Reached, tmp_path: Path
) -> None:
    case = site()
    writer = case.make(*TABLES)
    late, claimed = tmp_path / "late", tmp_path / "claimed"
    process = case.create("--follow", points={"sync.after_f": f"pause:{late}", "sync.after_claim": f"pause:{claimed}"})
    case.wait_fired("sync.after_f")
    passed = (
        "SELECT count(*) > 0 FROM pgsub.subscription_rel r JOIN pgsub.progress p ON p.worker = r.srrelid"
        " JOIN pgsub.progress a ON a.worker = 0 WHERE r.srsubstate = 'f' AND a.remote_lsn > p.remote_lsn"
    )
    until(lambda: case.subdb.value(passed), "apply does not pass the sync worker")
    writer.some(100)
    writer.rest()  # so that apply stays where it is: a sync worker that overtakes it needs no claim
    late.touch()
    case.wait_fired("sync.after_claim")
    writer.resume()
    position = max(table_lsns(case, "handover_lsn"))
    assert position > 0
    reached("claim")
    # the sync worker is paused with its claim; apply goes up to it, waits, takes it back, and goes on
    until(lambda: max(table_lsns(case, "handover_lsn")) == 0, "the claim stands")
    until(lambda: case.ledger("remote_lsn") > position, "apply does not go on")
    reached("un-claim")
    writer.some(20)
    claimed.touch()
    case.wait_ready()
    assert max(table_lsns(case, "srsublsn")) > position
    reached("hand-over with the sync worker behind")
    writer.some(20)
    case.wait_equal()
    case.terminate(process)
    case.check()


def test_a_stop_while_apply_waits_at_a_claim_passes_over_nothing(
    pubdb: Database, subdb: Database, subscriber: Callable[..., Subscriber]
) -> None:
    for database in (pubdb, subdb):
        database.execute("CREATE TABLE moving (n int); CREATE TABLE other (n int)")
    pubdb.execute("CREATE PUBLICATION p FOR TABLE moving, other")
    sub = subscriber().register("moving", "other")
    pubdb.execute("INSERT INTO other VALUES (0)")
    sub.catch_up()
    # a sync worker that has applied everything up to its claim is about to hand over
    position = subscriptions.apply_position(sub.session, sub.subid)
    claim = sub.take_over("moving")
    with transactions.durable(sub.session):
        sub.session.execute("UPDATE pgsub.subscription_rel SET srsubstate = 'f' WHERE relname = 'moving'")
    states.slot_position(sub.session, [claim], position)
    assert handover.claim_handover(sub.session, [claim], position) == position

    task = sub.start()
    pubdb.execute("INSERT INTO moving VALUES (1)")
    for n in range(1, 50):
        pubdb.execute("INSERT INTO other VALUES (%s)", n)
    until(lambda: _holds_back(sub, position), "apply does not wait")
    assert sub.stop(task).outcome == "stopped"
    assert subscriptions.apply_position(sub.session, sub.subid) == position
    assert handover.try_syncdone(sub.session, [claim], position).done
    sub.catch_up()
    assert subdb.rows("SELECT n FROM moving") == [(1,)]
    assert [n for (n,) in subdb.rows("SELECT n FROM other ORDER BY n")] == list(range(50))


def _holds_back(sub: Subscriber, position: int) -> bool:
    """Whether apply's session was seen to lock its row and to leave it as it is."""
    query = "SELECT count(*) > 0 FROM pg_stat_activity WHERE application_name LIKE %s AND query = 'ROLLBACK'"
    waits: Any = sub.subdb.value(query, f"pgsub {sub.subid} apply %")
    return bool(waits) and subscriptions.apply_position(sub.session, sub.subid) == position


@pytest.mark.long
def test_a_subscription_whose_apply_holds_its_row_for_long_still_synchronizes(site: Make, tmp_path: Path) -> None:
    case = site()
    case.make(*TABLES)
    release = tmp_path / "release"
    process = case.create("--follow", points={"apply.batch_open": f"pause:{release}"})
    case.wait_fired("apply.batch_open")
    until(lambda: case.states() and not set(case.states()) & {"i", "d"}, lambda: f"tables: {case.states()}")
    with case.subdb.connect() as session, session.transaction(force_rollback=True):
        locked = session.execute("SELECT FROM pgsub.progress WHERE worker = 0 FOR UPDATE SKIP LOCKED").fetchall()
        assert locked == []  # apply has it
    release.touch()
    case.wait_ready()
    case.wait_equal()
    case.terminate(process)
    case.check()


@pytest.mark.long
def test_a_table_in_error_keeps_none_of_many_others_from_changing_hands(site: Make) -> None:
    case = site()
    names = [f"{kind}{number}" for kind in ("audit", "keyed", "counter") for number in range(1, 6)]
    writer = case.make(*names)
    case.subdb.execute("INSERT INTO keyed3 VALUES (7, 0, 'in the way')")
    process = case.create("--follow")
    others = "SELECT count(*) FROM pgsub.subscription_rel WHERE srsubstate = 'r' AND relname <> 'keyed3'"
    until(
        lambda: "r" in case.states() and case.subdb.value(others) == len(names) - 1,
        lambda: f"tables: {case.states()}\n{case.said()}",
        90,
    )
    query = "SELECT srsubstate::text FROM pgsub.subscription_rel WHERE relname = 'keyed3'"
    assert case.subdb.value(query) in ("i", "d") and case.subdb.value("SELECT count(*) FROM keyed3") == 1
    written = case.subdb.value("SELECT count(*) FROM audit1")
    writer.some(20)
    until(lambda: case.subdb.value("SELECT count(*) FROM audit1") > written, "apply does not go on")
    errors = "SELECT sum(sync_table_error_count) FROM pg_stat_subscription_stats"
    until(lambda: case.sqlite(errors)[0][0] > 0, "the error is not counted")
    case.subdb.execute("DELETE FROM keyed3")
    case.wait_ready()
    writer.some(20)
    case.wait_equal()
    case.terminate(process)
    case.check()


@pytest.mark.long
def test_a_sync_slot_lost_after_the_copy_is_told_with_the_command_that_copies_the_table_again(
    site: Make, tmp_path: Path
) -> None:
    case = site()
    writer = case.make("audit1", "keyed1", "counter1")
    process = case.create("--follow", points={"sync.after_f": f"pause:{tmp_path / 'never'}"})
    case.wait_fired("sync.after_f")
    in_f = "SELECT relname, srrelid::bigint FROM pgsub.subscription_rel WHERE srsubstate = 'f'"
    behind = max(sync_lsn(case, relid) for _, relid in case.subdb.rows(in_f))
    until(lambda: case.ledger("remote_lsn") > behind, "apply does not pass the sync workers")
    process.kill()
    process.wait()
    # of tables that came to f a moment ago apply may be still behind: those need no slot any more
    copied = case.subdb.rows(
        "SELECT r.relname, r.srrelid::bigint FROM pgsub.subscription_rel r"
        " JOIN pgsub.progress p ON p.worker = r.srrelid"
        " JOIN pgsub.progress a ON a.worker = 0 WHERE r.srsubstate = 'f' AND a.remote_lsn > p.remote_lsn"
    )
    assert copied
    slots = "SELECT count(pg_drop_replication_slot(slot_name)) FROM pg_replication_slots WHERE slot_name ~ '_sync_'"
    case.pubdb.wait("SELECT count(*) = 0 FROM pg_replication_slots WHERE slot_name ~ '_sync_' AND active")
    assert case.pubdb.value(f"{slots} AND database = current_database()") > 0
    process = case.serve()
    for name, _ in copied:
        command = f"pgsub refresh {case.name} --resync public.{name}"
        until(lambda text=command: text in case.output.read_text(), command)
        case.end(case.start("refresh", case.name, "--resync", f"public.{name}", "--yes", "--no-wait"))
    case.wait_ready()
    writer.some(20)
    case.wait_equal()
    case.terminate(process)
    case.check()
