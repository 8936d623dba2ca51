"""Promises of slots and of the snapshot that one is created with."""

from __future__ import annotations

import contextlib
import threading
import time

import psycopg
import pytest

from pgsub.common.errors import PermissionMissing, PublisherUnavailable, SlotLost, StateForbids, UsageError
from pgsub.publisher.connect import connect
from pgsub.publisher.identity import identify
from pgsub.publisher.slot_names import sync_slot_name, valid_slot_name
from pgsub.publisher.slots import create_slot, drop_slot, free_slots, slot_state
from pgsub.publisher.snapshot import SlotSnapshot, use_snapshot
from pgsub.publisher.stream.walsender import WalSender, start_options


@contextlib.contextmanager
def session(pubdb, replication=True):
    with contextlib.closing(connect(pubdb.conninfo, application_name="x", replication=replication)) as connection:
        yield connection


def stream(connection, name):
    sender = WalSender(connection)
    version = connection.info.server_version
    sender.start(name, 0, start_options(version, ["p"], binary=False, streaming="off", origin="any"))
    return sender


def test_a_new_slot_is_told_completely_by_both_kinds_of_sessions(pubdb):
    with session(pubdb) as connection, session(pubdb, replication=False) as plain:
        point = create_slot(connection, pubdb.name, failover=True, two_phase=True)
        assert point > 0
        for each in (connection, plain):
            state = slot_state(each, pubdb.name)
            assert (state.name, state.plugin, state.database) == (pubdb.name, "pgoutput", pubdb.name)
            assert (state.active, state.active_pid, state.wal_status) == (False, None, "reserved")
            assert state.confirmed_flush_lsn == point and state.restart_lsn <= point <= state.current_lsn
            assert state.retained_bytes == state.current_lsn - state.restart_lsn
            assert state.two_phase and state.failover is (connection.info.server_version >= 170000)
            assert state.invalidation_reason is None


def test_no_slot_is_none(pubdb):
    assert slot_state(pubdb.connection, "no_such_slot") is None


def test_an_active_slot_names_its_walsender(pubdb):
    pubdb.execute("CREATE PUBLICATION p")
    with session(pubdb) as connection:
        create_slot(connection, pubdb.name)
        stream(connection, pubdb.name)
        state = slot_state(pubdb.connection, pubdb.name)
        assert state.active and state.active_pid == connection.info.backend_pid


def test_a_name_that_is_taken_forbids_and_is_left_alone(pubdb):
    with session(pubdb) as connection:
        point = create_slot(connection, pubdb.name)
        with pytest.raises(StateForbids, match="already exists"):
            create_slot(connection, pubdb.name)
        assert slot_state(connection, pubdb.name).confirmed_flush_lsn == point


def test_a_slot_is_created_after_older_write_transactions_have_ended(pubdb):
    pubdb.execute("CREATE TABLE t (n int)")
    writer = pubdb.connect()
    writer.execute("BEGIN")
    writer.execute("INSERT INTO t VALUES (1)")
    with session(pubdb) as connection:
        points = []
        creator = threading.Thread(target=lambda: points.append(create_slot(connection, pubdb.name)))
        creator.start()
        pubdb.wait(
            "SELECT wait_event = 'transactionid' FROM pg_stat_activity WHERE pid = %s", connection.info.backend_pid
        )
        assert not points
        writer.execute("COMMIT")
        creator.join()
        assert points
    writer.close()


@pytest.mark.parametrize("replication", [False, True])
def test_dropping_says_whether_there_was_a_slot(pubdb, replication):
    pubdb.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", pubdb.name)
    with session(pubdb, replication) as connection:
        assert drop_slot(connection, pubdb.name) is True
        assert drop_slot(connection, pubdb.name) is False
        with pytest.raises(SlotLost, match=f'could not drop replication slot "{pubdb.name}" on publisher'):
            drop_slot(connection, pubdb.name, missing_ok=False)


@pytest.mark.parametrize("replication", [False, True])
def test_dropping_waits_for_a_walsender_that_is_about_to_go_but_not_for_ever(pubdb, replication):
    pubdb.execute("CREATE PUBLICATION p")
    with session(pubdb, replication) as connection, session(pubdb) as holder:
        create_slot(holder, pubdb.name)
        stream(holder, pubdb.name)
        for timeout in (0, 0.1):
            with pytest.raises(PublisherUnavailable, match="is active for PID"):
                drop_slot(connection, pubdb.name, timeout=timeout)
        threading.Timer(0.2, holder.close).start()
        assert drop_slot(connection, pubdb.name) is True
    assert slot_state(pubdb.connection, pubdb.name) is None


def test_a_role_without_replication_is_told_the_statement_when_it_drops(pubdb):
    pubdb.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", pubdb.name)
    pubdb.execute(f"CREATE ROLE r_{pubdb.name} LOGIN")
    try:
        conninfo = psycopg.conninfo.make_conninfo(pubdb.conninfo, user=f"r_{pubdb.name}")
        with contextlib.closing(connect(conninfo, application_name="x")) as connection:
            with pytest.raises(PermissionMissing) as raised:
                drop_slot(connection, pubdb.name)
    finally:
        pubdb.execute(f"DROP ROLE r_{pubdb.name}")
    assert "REPLICATION;" in raised.value.hint


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "too short"),
        ("a" * 64, "too long"),
        ("Orders", "invalid character"),
        ("a-b", "invalid character"),
        ("é", "invalid character"),
        ("a\n", "invalid character"),
        ("pg_conflict_detection", "is reserved"),
    ],
)
def test_an_invalid_slot_name_is_refused_with_the_servers_text(name, reason):
    with pytest.raises(UsageError, match=reason) as raised:
        valid_slot_name(name)
    assert raised.value.message.startswith(f'replication slot name "{name}" ')


def test_a_valid_slot_name_is_returned():
    assert valid_slot_name("orders_2") == "orders_2" and valid_slot_name("a" * 63) == "a" * 63


def test_the_name_of_a_sync_slot_holds_subscription_table_and_system_at_their_longest():
    name = sync_slot_name(2**31 - 1, 2**32 - 1, str(2**64 - 1))
    assert name == "pgsub_2147483647_sync_4294967295_18446744073709551615"
    assert valid_slot_name(name) == name


def test_room_for_slots_and_walsenders_is_counted(pubdb):
    with session(pubdb, replication=False) as plain:
        before = free_slots(plain)
        with session(pubdb) as connection:
            create_slot(connection, pubdb.name)
            after = free_slots(plain)
            assert after.used >= 1 and after.max == before.max
            assert after.free_walsenders <= before.free_walsenders


def test_the_snapshot_is_exactly_what_the_slot_will_not_send(pubdb):
    pubdb.execute("CREATE TABLE t (n int); INSERT INTO t VALUES (1)")
    with SlotSnapshot.open(pubdb.conninfo, pubdb.name, "sync", verify=identify) as snapshot:
        pubdb.execute("INSERT INTO t VALUES (2)")
        assert snapshot.connection.execute("SELECT n FROM public.t").fetchall() == [(1,)]
        assert slot_state(pubdb.connection, pubdb.name).confirmed_flush_lsn == snapshot.consistent_point
    assert slot_state(pubdb.connection, pubdb.name) is not None


def test_any_number_of_sessions_read_the_snapshot_and_keep_it_when_the_holder_goes(pubdb):
    pubdb.execute("CREATE TABLE t (n int); INSERT INTO t VALUES (1)")
    snapshot = SlotSnapshot.open(pubdb.conninfo, pubdb.name, "sync", verify=identify)
    pubdb.execute("INSERT INTO t VALUES (2)")
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(session(pubdb, replication=False)) for _ in range(3)]
        for reader in readers:
            assert snapshot.alive()
            use_snapshot(reader, snapshot.exported)
        snapshot.close()
        assert [reader.execute("SELECT n FROM public.t").fetchall() for reader in readers] == [[(1,)]] * 3


def test_a_snapshot_whose_holder_is_gone_fails_the_attempt_and_is_worth_a_new_one(pubdb):
    snapshot = SlotSnapshot.open(pubdb.conninfo, pubdb.name, "sync", verify=identify)
    pubdb.execute("SELECT pg_terminate_backend(%s, 5000)", snapshot.connection.info.backend_pid)
    assert not snapshot.alive()
    with session(pubdb, replication=False) as reader:
        with pytest.raises(PublisherUnavailable, match="could not import the slot's snapshot"):
            use_snapshot(reader, snapshot.exported)
    snapshot.close()


def test_a_snapshot_of_another_session_that_has_the_name_is_not_read(pubdb):
    with (
        SlotSnapshot.open(pubdb.conninfo, f"{pubdb.name}_a", "sync", verify=identify, temporary=True) as gone,
        SlotSnapshot.open(pubdb.conninfo, f"{pubdb.name}_b", "sync", verify=identify, temporary=True) as there,
        session(pubdb, replication=False) as reader,
    ):
        gone.close()
        pubdb.wait("SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = %s)", gone.exported.pid)
        for other in (gone.exported._replace(name=there.exported.name), there.exported._replace(since="0")):
            with pytest.raises(PublisherUnavailable, match="could not import the slot's snapshot"):
                use_snapshot(reader, other)
            reader.execute("ROLLBACK")
        use_snapshot(reader, there.exported)


def test_an_error_in_the_snapshots_transaction_ends_it(pubdb):
    with SlotSnapshot.open(pubdb.conninfo, pubdb.name, "sync", verify=identify) as snapshot:
        with pytest.raises(Exception, match="no_such_table"):
            snapshot.connection.execute("SELECT * FROM no_such_table")
        assert not snapshot.alive()


def test_the_holder_survives_the_idle_timeouts_of_its_database(pubdb):
    pubdb.execute(f"ALTER DATABASE {pubdb.name} SET idle_in_transaction_session_timeout = '100ms'")
    with SlotSnapshot.open(pubdb.conninfo, pubdb.name, "sync", verify=identify) as snapshot:
        time.sleep(0.4)
        assert snapshot.alive()


def test_a_snapshot_on_a_taken_slot_name_leaves_no_session_behind(pubdb):
    pubdb.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", pubdb.name)
    with pytest.raises(StateForbids, match="already exists"):
        SlotSnapshot.open(pubdb.conninfo, pubdb.name, "lonely_sync", verify=identify)
    pubdb.wait("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'lonely_sync'", value=0)
