"""Slots that the publisher gives up while nobody streams them, and what is said to whoever comes back.

After PostgreSQL's src/test/recovery/t/019_replslot_limit.pl, 044_invalidate_inactive_slots.pl,
006_logical_decoding.pl and 038_save_logical_slots_shutdown.pl.
"""

from __future__ import annotations

import shlex
from contextlib import closing

import psycopg
import pytest
from fix_engine import Subscriber
from fix_program import one_error, until
from fix_servers import Database

from pgsub.common.errors import ReplicationBroken, SlotLost

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def source(make_server):
    return Database(make_server(autovacuum=False, checkpoint_timeout="1h", min_wal_size="32MB"), "app")


@pytest.fixture
def followed(source, subdb):
    """A subscription of a table without a key that has applied a row, and is not running."""
    for database in (source, subdb):
        database.execute("DROP TABLE IF EXISTS t; CREATE TABLE t (id int)")
    source.execute("DROP PUBLICATION IF EXISTS p; CREATE PUBLICATION p FOR TABLE t")
    one = Subscriber(source, subdb).register("t")
    source.execute("INSERT INTO t VALUES (1)")
    assert one.catch_up().outcome == "reached"
    yield one
    one.close()
    source.wait("SELECT NOT active FROM pg_replication_slots WHERE slot_name = %s", one.sub.slot_name)
    source.execute("SELECT pg_drop_replication_slot(%s)", one.sub.slot_name)
    source.server.query("ALTER SYSTEM RESET ALL")
    source.server.reload()


def limited(source, setting, value):
    source.server.query(f"ALTER SYSTEM SET {setting} = '{value}'")
    source.server.reload()


def refused(one):
    """The error that the next worker ends with; nothing was applied before."""
    before = one.subdb.rows("SELECT * FROM t ORDER BY id")
    with pytest.raises(ReplicationBroken) as raised:
        one.catch_up()
    assert one.subdb.rows("SELECT * FROM t ORDER BY id") == before
    assert raised.value.exit_code == 7
    return raised.value


@pytest.mark.parametrize(
    ("setting", "value", "reason"),
    [("max_slot_wal_keep_size", "1MB", "wal_removed"), ("idle_replication_slot_timeout", "1s", "idle_timeout")],
)
def test_a_slot_that_was_invalidated_meanwhile_is_named_with_the_reason(source, followed, setting, value, reason):
    limited(source, setting, value)
    source.execute("INSERT INTO t VALUES (2)")
    query = "SELECT invalidation_reason FROM pg_replication_slots WHERE slot_name = %s"

    def given_up() -> bool:
        source.execute("SELECT pg_logical_emit_message(false, '', ''), pg_switch_wal(); CHECKPOINT")
        return bool(source.value(query, followed.sub.slot_name) == reason)

    until(given_up)
    error = refused(followed)
    assert isinstance(error, SlotLost)
    assert error.message == f'can no longer access replication slot "{followed.sub.slot_name}"'
    assert f'invalidated due to "{reason}"' in error.detail and "pgsub reconcile" in error.hint


def test_a_slot_that_somebody_read_meanwhile_is_not_followed_over_the_gap(source, followed):
    source.execute("INSERT INTO t VALUES (2)")
    source.execute("SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())", followed.sub.slot_name)
    source.execute("INSERT INTO t VALUES (3)")
    error = refused(followed)
    assert "is past the subscription's position" in error.message


def test_a_slot_that_was_made_again_under_its_name_is_not_followed_over_the_gap(source, followed):
    source.execute("INSERT INTO t VALUES (2)")
    source.execute("SELECT pg_drop_replication_slot(%s)", followed.sub.slot_name)
    source.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", followed.sub.slot_name)
    assert "is past the subscription's position" in refused(followed).message


def test_a_publisher_that_restarts_sends_nothing_again_that_was_confirmed(source, followed):
    slot = "SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = %s"
    source.execute("INSERT INTO t VALUES (2)")
    assert followed.catch_up().outcome == "reached"
    confirmed = source.value(slot, followed.sub.slot_name)
    source.close()
    source.server.restart()
    assert source.value(slot, followed.sub.slot_name) == confirmed
    source.execute("INSERT INTO t VALUES (3)")
    assert followed.catch_up().outcome == "reached"
    assert followed.subdb.rows("SELECT * FROM t ORDER BY id") == [(1,), (2,), (3,)]


def test_a_database_that_was_dropped_and_made_again_is_another_one_whatever_its_slot_is_called(source, followed):
    task = followed.start()
    source.wait("SELECT active FROM pg_replication_slots WHERE slot_name = %s", followed.sub.slot_name)
    source.close()
    with pytest.raises(psycopg.errors.ObjectInUse, match="used by an active logical replication slot"):
        source.server.query("DROP DATABASE app")
    followed.stop(task)
    for statement in ("DROP DATABASE app WITH (FORCE)", "CREATE DATABASE app"):  # slots that nobody uses go with it
        source.server.query(statement)
    source.execute("CREATE TABLE t (id int); CREATE PUBLICATION p FOR TABLE t")
    source.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", followed.sub.slot_name)
    source.execute("INSERT INTO t VALUES (2)")
    assert "database is a different one" in refused(followed).message


def lost(source, slot):
    """Write WAL until the publisher has given up this slot."""
    limited(source, "max_slot_wal_keep_size", "1MB")
    query = "SELECT wal_status = 'lost' FROM pg_replication_slots WHERE slot_name = %s"

    def gone():
        source.execute("SELECT pg_logical_emit_message(false, '', repeat('x', 100000)), pg_switch_wal(); CHECKPOINT")
        return source.value(query, slot)

    until(gone)
    source.server.query("ALTER SYSTEM RESET max_slot_wal_keep_size")
    source.server.reload()


@pytest.fixture
def program(source, subdb, make_cli):
    """The program between a publisher whose WAL is limited and a target, with the tables a and b published."""
    for database in (source, subdb):
        database.execute("DROP TABLE IF EXISTS a, b; CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (LIKE a)")
        database.execute("ALTER TABLE b ADD PRIMARY KEY (id)")
    source.execute("DROP PUBLICATION IF EXISTS p; CREATE PUBLICATION p FOR TABLE a, b; INSERT INTO b VALUES (1)")
    cli = make_cli(source.conninfo, subdb.conninfo)
    yield cli
    source.server.query("ALTER SYSTEM RESET ALL")
    source.server.reload()
    ended = cli("drop", "s", "--yes")
    assert ended.returncode == 0, ended.stderr
    assert source.value("SELECT count(*) FROM pg_replication_slots") == 0


def shown_error(cli):
    """The error that status shows, once it is that of a slot; monitoring says 7, and so does a bounded run."""
    found = until(lambda: (one := cli.status()["last_error"]) and one["class"] == "SlotLost" and one)
    assert cli("status", "s", "--check").returncode == 7
    return found


def test_a_slot_that_is_lost_while_apply_waits_for_the_target_stops_it_and_nothing_is_skipped(source, subdb, program):
    assert program.create("s").returncode == 0
    running = program.launcher()
    slot = program.status()["subslotname"]
    source.wait("SELECT active FROM pg_replication_slots WHERE slot_name = %s", slot)
    with closing(subdb.connect()) as session:
        session.execute("BEGIN; LOCK TABLE a")
        source.execute("INSERT INTO a VALUES (1)")
        subdb.wait("SELECT count(*) > 0 FROM pg_locks WHERE NOT granted AND relation = 'a'::regclass")
        lost(source, slot)
        source.execute("INSERT INTO a VALUES (2)")
    error = shown_error(program)
    assert slot in error["message"] and program.status()["state"] == "error"
    assert subdb.rows("SELECT id FROM a WHERE id > 1") == []  # behind the gap
    assert program.stop(running) == 0
    one_error(program("run", "s", "--until-caught-up", "--timeout", "2m"), 7, slot)
    steps = program("status", "s", "--runbook").stdout
    assert "pgsub reconcile s" in steps and "pgsub drop" not in steps and "pgsub wait" not in steps


def test_a_slot_of_a_table_that_is_lost_alone_stops_only_that_table_which_the_hint_brings_again(
    source, subdb, program, tmp_path
):
    go_on = tmp_path / "go on"
    source.execute("ALTER PUBLICATION p DROP TABLE b")
    assert program.create("s").returncode == 0
    failpoints = {"PGSUB_FAILPOINTS": f"sync.after_f=pause:{go_on}", "PGSUB_GROUP_TABLES": "1"}
    running = program.launcher(env=failpoints)
    main = program.status()["subslotname"]
    source.execute("ALTER PUBLICATION p ADD TABLE b")
    assert program("refresh", "s", "--no-wait").returncode == 0
    query = "SELECT slot_name FROM pg_replication_slots WHERE slot_name <> %s AND slot_name = %s"
    state = "SELECT sync_slot FROM pgsub.subscription_rel WHERE relname = 'b' AND srsubstate = 'f'"
    own = until(lambda: source.value(query, main, subdb.value(state)))
    source.execute("SELECT pg_drop_replication_slot(%s)", own)  # as an administrator may, or a limit of WAL
    source.execute("INSERT INTO b VALUES (2); INSERT INTO a VALUES (5)")
    subdb.wait("SELECT count(*) = 1 FROM a WHERE id = 5")  # apply is ahead, so the table needs its slot
    assert "does not exist" in shown_error(program)["message"]  # its worker does not know yet
    assert program.status()["state"] == "error"
    go_on.touch()
    error = shown_error(program)
    assert own in error["message"]
    steps = program("status", "s", "--runbook").stdout
    assert "pgsub refresh s --resync public.b --adopt" in steps and "pgsub drop" not in steps
    source.execute("INSERT INTO a VALUES (9)")
    subdb.wait("SELECT count(*) = 1 FROM a WHERE id = 9")  # apply goes on
    assert source.value("SELECT wal_status FROM pg_replication_slots WHERE slot_name = %s", main) != "lost"
    assert program.stop(running) == 0
    hint = one_error(program("run", "s", "--until-caught-up", "--timeout", "2m"), 7).splitlines()[-1]
    assert hint == "pgsub refresh s --resync public.b --adopt"
    ended = program(*shlex.split(hint)[1:], "--yes", "--no-wait")
    assert ended.returncode == 0, ended.stderr
    ended = program("run", "s", "--until-caught-up", "--timeout", "2m")
    assert ended.returncode == 0, ended.stderr
    assert subdb.rows("SELECT id FROM b ORDER BY id") == [(1,), (2,)]
    assert program.status()["last_error"] is None
