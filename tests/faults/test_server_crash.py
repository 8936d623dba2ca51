"""Crashes of the two servers while tables synchronize and transactions stream."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from fix_faults import Site, until
from fix_servers import Pair

from pgsub.common.errors import PublisherUnavailable
from pgsub.publisher.connect import connect
from pgsub.publisher.identity import identify
from pgsub.publisher.snapshot import SlotSnapshot, use_snapshot

pytestmark = pytest.mark.long

Make = Callable[..., Site]
Reached = Callable[[str], None]

TABLES = ("audit1", "keyed1", "counter1", "audit2", "keyed2", "auditbig")


def test_a_target_that_loses_its_unflushed_tail_gets_it_again(
    own_pair: Callable[..., Pair], site: Make, reached: Reached, tmp_path: Path
) -> None:
    pair = own_pair(target={"wal_writer_delay": "10s", "autovacuum": False})
    case = site(pair.pubdb, pair.subdb)
    writer = case.make_ready("audit1", "keyed1", "counter1")
    release = tmp_path / "release"
    case.disarm("apply.after_target_commit")
    process = case.serve(points={"apply.after_target_commit": f"pause:{release}"})
    case.wait_equal()
    lost = 0
    for _ in range(3):
        writer.resume()
        case.arm("apply.after_target_commit")
        case.wait_fired("apply.after_target_commit")
        committed, reported = case.ledger("remote_lsn"), case.ledger("reported_lsn")
        case.crash(pair.target)
        assert case.ledger("reported_lsn") == reported
        lost += case.ledger("remote_lsn") < committed
        epoch = case.epoch()
        release.touch()
        until(lambda before=epoch: case.epoch() > before, "no new worker")
        release.unlink()
        case.disarm("apply.after_target_commit")
        case.wait_equal()
    assert lost
    reached("unflushed tail lost by the target")
    case.terminate(process)
    case.check()


def test_crashes_of_target_and_publisher_during_synchronization_lose_and_repeat_nothing(
    own_pair: Callable[..., Pair], site: Make
) -> None:
    pair = own_pair(target={"wal_writer_delay": "10s"})
    case = site(pair.pubdb, pair.subdb)
    writer = case.make(*TABLES)
    process = case.create("--follow", "--timeout", "100s", PGSUB_CHUNK_BYTES=str(256 << 10))
    for server, state in ((pair.target, "d"), (pair.publisher, "d"), (pair.target, "[fs]"), (pair.publisher, "[fsr]")):
        query = "SELECT count(*) > 0 FROM pgsub.subscription_rel WHERE srsubstate ~ %s"
        until(case.states, "not registered")
        until(lambda q=query, s=state: case.subdb.value(q, s) or case.all_ready(), f"no table in {state}")
        case.crash(server)
    case.wait_ready()
    writer.some(20)
    for server in (pair.target, pair.publisher):
        case.crash(server)
        writer.some(20)
    case.wait_equal()
    case.terminate(process)
    case.check()


def test_a_publisher_whose_slot_went_back_in_a_crash_repeats_nothing(
    own_pair: Callable[..., Pair], site: Make, reached: Reached
) -> None:
    pair = own_pair()
    case = site(pair.pubdb, pair.subdb)
    writer = case.make_ready("audit1", "keyed1", "counter1")
    process = case.serve()
    query, lost = "SELECT confirmed_flush_lsn FROM pg_replication_slots", 0
    for _ in range(3):
        case.wait_equal()
        before = case.pubdb.value(query)
        writer.resume()
        # on disk the slot's position follows only where a decoded running-xacts record lets it, or a checkpoint
        case.pubdb.wait("SELECT confirmed_flush_lsn > %s::pg_lsn + 5000 FROM pg_replication_slots", before)
        confirmed = case.pubdb.value(query)
        case.crash(pair.publisher)
        lost += case.pubdb.value("SELECT confirmed_flush_lsn < %s FROM pg_replication_slots", confirmed)
        writer.some(20)
    assert lost
    reached("slot position lost by the publisher")
    case.wait_equal()
    case.terminate(process)
    case.check()


def test_a_snapshot_that_got_a_name_again_after_a_crash_is_not_read_for_the_one_before(
    own_pair: Callable[..., Pair],
) -> None:
    pair = own_pair(publisher={"autovacuum": False})

    def crash() -> None:
        pair.pubdb.close()
        pair.publisher.stop("immediate")
        pair.publisher.start()

    def hold(number: int) -> SlotSnapshot:
        return SlotSnapshot.open(pair.pubdb.conninfo, f"s{number}", "sync", verify=identify, temporary=True)

    crash()  # the places of both sessions are found by servers that are as old
    before = hold(0)
    crash()
    before.close()
    for number in range(1, 200):
        with hold(number) as after:
            if after.exported.name == before.exported.name:
                with closing(connect(pair.pubdb.conninfo, application_name="copy")) as reader:
                    with pytest.raises(PublisherUnavailable, match="could not import the slot's snapshot"):
                        use_snapshot(reader, before.exported)
                    reader.execute("ROLLBACK")
                    use_snapshot(reader, after.exported)
                return
    raise AssertionError(f"no snapshot was called {before.exported.name} again")
