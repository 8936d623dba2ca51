"""Promises of the checks at every connect: another system, a lost slot, or a step back in time never pass."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
from embedded import Server
from fix_servers import needs_wal_level_logical

from pgsub.common.errors import PublisherUnavailable, ReplicationBroken, SlotLost, StateForbids, WrongSystem
from pgsub.protocol.lsn import format_lsn, parse_lsn
from pgsub.publisher.connect import connect
from pgsub.publisher.current_wal_lsn import committed_position
from pgsub.publisher.identity import (
    PublisherIdentity,
    TimelineSwitch,
    check_identity,
    check_slot,
    check_upgraded,
    identify,
    parse_history,
    timeline_history,
    verify_publisher,
)
from pgsub.publisher.prerequisites import check_wal_level
from pgsub.publisher.slots import SlotState, create_slot, slot_state

KNOWN = PublisherIdentity("7000000000000000001", "app", 16384, 2, 180006, 0x3000000)
HISTORY = [TimelineSwitch(1, 0x1000000, "no recovery target specified"), TimelineSwitch(2, 0x2800000, "")]
SLOT = SlotState("s", "pgoutput", "app", False, None, 90, 100, "reserved", None, False, False, None, 10, 200)


@contextlib.contextmanager
def walsender(conninfo):
    with contextlib.closing(connect(conninfo, application_name="x", replication=True)) as connection:
        yield connection


def actual(**changes):
    return dataclasses.replace(KNOWN, **changes)


def test_a_publisher_says_who_it_is(pubdb):
    with walsender(pubdb.conninfo) as connection:
        identity = identify(connection)
        assert timeline_history(connection, 1) == []
    assert identity.system_identifier == str(pubdb.value("SELECT system_identifier FROM pg_control_system()"))
    assert identity.dbname == pubdb.name
    assert identity.database_oid == pubdb.value("SELECT oid FROM pg_database WHERE datname = current_database()")
    assert identity.timeline == 1 and identity.server_version // 10000 == pubdb.server.version
    assert 0 < identity.flush_lsn <= parse_lsn(pubdb.value("SELECT pg_current_wal_flush_lsn()"))


def test_the_same_publisher_passes_every_check(pubdb):
    with walsender(pubdb.conninfo) as connection:
        create_slot(connection, pubdb.name)
        identity = identify(connection)
        state = slot_state(connection, pubdb.name)
        assert verify_publisher(connection, identity, remote_lsn=identity.flush_lsn).timeline == identity.timeline
        check_slot(state, state.confirmed_flush_lsn, pubdb.name, pubdb.name, in_recovery=identity.in_recovery)


def test_a_database_that_was_only_renamed_passes():
    check_identity(KNOWN, actual(dbname="renamed"), remote_lsn=0x3000000)


@pytest.mark.parametrize(
    ("changes", "history", "words"),
    [
        ({"system_identifier": "7000000000000000002"}, (), ("a different database system", "7000000000000000002")),
        ({"database_oid": 5, "dbname": "other"}, (), ("database is a different one", "other")),
        ({"flush_lsn": 0x2FFFFFF}, (), ("is behind the subscription", "0/2FFFFFF")),
        ({"timeline": 1}, (), ("does not continue", "timeline 1")),
        ({"timeline": 3}, HISTORY[:1], ("does not continue", "timeline 3")),
        ({"timeline": 3}, HISTORY, ("branched off before", "0/2800000")),
    ],
)
def test_a_publisher_that_is_not_the_one_recorded_is_diagnosed(changes, history, words):
    with pytest.raises(WrongSystem) as raised:
        check_identity(KNOWN, actual(**changes), remote_lsn=0x3000000, history=history)
    error = raised.value
    assert words[0] in error.message and words[1] in error.detail and error.hint
    assert error.exit_code == 7


def test_a_promoted_standby_that_had_everything_passes():
    check_identity(KNOWN, actual(timeline=3), remote_lsn=0x2800000, history=HISTORY)


def test_a_real_promotion_is_followed_by_its_history_and_one_that_lagged_is_refused():
    with Server(fast=True) as server:
        with walsender(server.conninfo()) as connection:
            before = identify(connection)
        server.stop()
        (server.data / "standby.signal").touch()
        server.start()
        server.query("SELECT pg_promote()")
        server.query("CHECKPOINT")
        with walsender(server.conninfo()) as connection:
            now = verify_publisher(connection, before, remote_lsn=before.flush_lsn)
            (switch,) = timeline_history(connection, now.timeline)
            assert (before.timeline, now.timeline, switch.timeline) == (1, 2, 1)
            assert switch.switch_lsn >= before.flush_lsn
            with pytest.raises(WrongSystem, match="branched off before") as raised:
                verify_publisher(connection, before, remote_lsn=switch.switch_lsn + 1)
            assert format_lsn(switch.switch_lsn) in raised.value.detail


def test_a_history_file_is_read_with_comments_and_without_reasons():
    content = "# comment\n\n1\t0/3000000\tno recovery target specified\n\n2\t1/A0\n"
    expected = [TimelineSwitch(1, 0x3000000, "no recovery target specified"), TimelineSwitch(2, 0x1000000A0, "")]
    assert parse_history(content) == parse_history(content.encode()) == expected


@pytest.mark.parametrize("line", ["x\t0/1", "1", "1\tnowhere\treason"])
def test_a_history_file_of_another_form_is_refused(line):
    with pytest.raises(ReplicationBroken, match="timeline history"):
        parse_history(line)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"wal_status": "lost"}, SlotLost, "wal_removed"),
        ({"invalidation_reason": "idle_timeout"}, SlotLost, 'due to "idle_timeout"'),
        ({"plugin": None, "database": None}, ReplicationBroken, "physical slot"),
        ({"plugin": "test_decoding"}, ReplicationBroken, "test_decoding"),
        ({"database": "other"}, ReplicationBroken, '"other"'),
        ({"confirmed_flush_lsn": 101}, ReplicationBroken, "0/65"),
    ],
)
def test_a_slot_that_cannot_continue_is_diagnosed(changes, kind, words):
    with pytest.raises(kind) as raised:
        check_slot(dataclasses.replace(SLOT, **changes), 100, "s", "app", in_recovery=False)
    assert words in raised.value.detail and raised.value.exit_code == 7


def test_the_gap_left_by_a_restored_target_is_told_with_both_positions():
    with pytest.raises(ReplicationBroken, match="past the subscription's position") as raised:
        check_slot(dataclasses.replace(SLOT, confirmed_flush_lsn=0x200), 0x100, "s", "app", in_recovery=False)
    assert "0/200" in raised.value.detail and "0/100" in raised.value.detail and "backup" in raised.value.hint


def test_a_slot_that_a_standby_only_copies_is_waited_for_and_not_lost():
    copied = dataclasses.replace(SLOT, synced=True, in_recovery=True)
    with pytest.raises(PublisherUnavailable, match='slot "s" is still synchronized from the primary') as raised:
        check_slot(copied, 100, "s", "app", in_recovery=True)
    assert "Promote the standby" in raised.value.hint and raised.value.exit_code == 4
    lost = dataclasses.replace(copied, wal_status="lost")
    with pytest.raises(PublisherUnavailable):  # it is made again while the primary has it
        check_slot(lost, 100, "s", "app", in_recovery=True)
    check_slot(dataclasses.replace(copied, in_recovery=False), 100, "s", "app", in_recovery=False)  # promoted


def test_a_cluster_that_pg_upgrade_made_goes_on_from_the_slot_that_came_along():
    who = actual(system_identifier="7000000000000000002", timeline=1)
    assert check_upgraded(who, SLOT, KNOWN.database_oid, 99, "s") == SLOT.confirmed_flush_lsn


@pytest.mark.parametrize(
    ("slot", "done", "oid", "kind", "words"),
    [
        (None, 0, KNOWN.database_oid, SlotLost, "does not exist"),
        (dataclasses.replace(SLOT, wal_status="lost"), 0, KNOWN.database_oid, SlotLost, "can no longer access"),
        (SLOT, 0, KNOWN.database_oid + 1, WrongSystem, "not an upgrade of the publisher"),
        (SLOT, 101, KNOWN.database_oid, WrongSystem, "not an upgrade of the publisher"),
    ],
)
def test_a_cluster_that_cannot_be_the_publisher_upgraded_is_refused(slot, done, oid, kind, words):
    who = actual(system_identifier="7000000000000000002", timeline=1)
    with pytest.raises(kind, match=words) as raised:
        check_upgraded(who, slot, oid, done, "s")
    assert raised.value.hint


def test_a_standby_that_lacks_the_slot_does_not_show_that_it_is_lost():
    with pytest.raises(PublisherUnavailable, match='"s" does not exist on the standby') as raised:
        check_slot(None, 0, "s", "app", in_recovery=True)
    assert raised.value.standby and raised.value.exit_code == 4
    assert "target_session_attrs=primary" in raised.value.hint and "may be on its primary" in raised.value.detail


def test_a_standby_that_lags_is_waited_for_and_no_publisher_that_went_back_in_time():
    lags = actual(flush_lsn=0x2000000)
    with pytest.raises(WrongSystem, match="the publisher is behind"):
        check_identity(KNOWN, lags, remote_lsn=0x3000000)
    with pytest.raises(PublisherUnavailable, match="a standby that lacks changes") as raised:
        check_identity(KNOWN, dataclasses.replace(lags, in_recovery=True), remote_lsn=0x3000000)
    assert raised.value.standby and "0/2000000" in raised.value.detail and "0/3000000" in raised.value.detail


def test_a_missing_slot_of_a_primary_is_never_anything_but_lost():
    with pytest.raises(SlotLost, match='replication slot "s" does not exist') as raised:
        check_slot(None, 0, "s", "app", in_recovery=False)
    assert raised.value.hint.endswith("\npgsub reconcile NAME")


def test_a_slot_that_lags_behind_what_was_reported_passes():
    check_slot(SLOT, 100, "s", "app", in_recovery=False)
    check_slot(SLOT, 10_000, "s", "app", in_recovery=False)


@needs_wal_level_logical()
def test_a_publisher_without_logical_wal_says_what_to_set_before_and_at_the_slot():
    with Server(fast=True, settings={"wal_level": "replica"}) as server, walsender(server.conninfo()) as connection:
        for attempt in (check_wal_level, lambda each: create_slot(each, "s")):
            with pytest.raises(StateForbids) as raised:
                attempt(connection)
            assert raised.value.hint.splitlines()[-1] == "ALTER SYSTEM SET wal_level = logical;"


@pytest.mark.long
def test_a_commit_that_is_flushed_later_counts_to_where_the_publisher_is(pubdb):
    """synchronous_commit = off: what is flushed lags, and whoever waits for it waits for that commit, too."""
    pubdb.execute("CREATE TABLE late (id int); SET synchronous_commit = off")
    for number in range(20):
        pubdb.execute("INSERT INTO late VALUES (%s)", number)
        end = parse_lsn(pubdb.value("SELECT pg_current_wal_insert_lsn()"))
        # of the next page nothing but its header is there
        assert committed_position(pubdb.connection) >= end - 40
    with pubdb.connect() as other:
        other.execute("BEGIN; INSERT INTO late VALUES (0)")  # may be flushed when it ends
        before = parse_lsn(pubdb.value("SELECT pg_current_wal_flush_lsn()"))
        assert committed_position(pubdb.connection) >= before
