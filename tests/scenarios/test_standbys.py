"""Standbys of the publisher: one that publishes, one that takes its place, and one that becomes the target.

After PostgreSQL's src/test/recovery/t/035_standby_logical_decoding.pl, 040_standby_failover_slots_sync.pl and
src/bin/pg_basebackup/t/040_pg_createsubscriber.pl.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from contextlib import closing, contextmanager

import pytest
from fix_clusters import copied, replayed
from fix_program import one_error, until
from fix_servers import Database

from pgsub.common.errors import PublisherUnavailable
from pgsub.publisher import slots

#: Removes rows that a slot of the standby may need, if nobody tells the primary so.
LOST = ("CREATE TABLE passing ()", "DROP TABLE passing", "VACUUM FULL pg_class", "CREATE TABLE flushed ()")
_names = (f"n{number}" for number in itertools.count(1))


@pytest.fixture(scope="module")
def primary(make_server):
    """A database whose server has standbys; the last test takes the server away."""
    return Database(make_server(autovacuum=False), "app")


@pytest.fixture
def published(primary, subdb, launcher):
    """A table without a key on both sides, so that a row that comes twice shows, and a publication of it.

    :return: the table's name; the subscription, dropped at the end, has it too.
    """
    name = next(_names)
    for database in (primary, subdb):
        database.execute(f"CREATE TABLE {name} (id int, v text)")
    primary.execute(f"CREATE PUBLICATION {name} FOR TABLE {name}")
    written(primary, name, "first")
    launcher.target = subdb.conninfo
    yield name
    launcher("drop", name, "--if-exists", "--yes")
    launcher("drop", name, "--if-exists", "--keep-slot", "--yes")


def written(database, table, word):
    database.execute(f"INSERT INTO {table} SELECT g, '{word}' FROM generate_series(1, 50) g")


def arrived(database, table, *words):
    """Wait until the rows of the words' transactions are there, each once."""
    query = f"SELECT string_agg(DISTINCT v, ' ' ORDER BY v) || ' ' || count(*) FROM {table}"
    database.wait(query, value=f"{' '.join(sorted(words))} {50 * len(words)}")


def create(cli, name, connection, *options):
    words = ["create", name, "--connection", connection, "--target", cli.target, "--publication", name]
    ended = cli(*words, "--timeout", "100s", *options)
    assert ended.returncode == 0, ended.stderr


@contextmanager
def snapshots(primary):
    """The primary logs running transactions again and again: a standby needs that for every new slot."""
    ended = threading.Event()

    def body():
        while not ended.wait(0.2):
            primary.server.query("SELECT pg_log_standby_snapshot()")

    thread = threading.Thread(target=body)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def failure(cli, name, kind, word=""):
    """The error that status shows, once it is one of this class with this word."""

    def shown():
        found = cli.status(name)["last_error"]
        return found if found and found["class"] == kind and word in found["message"] else None

    return until(shown)


@pytest.mark.long
def test_a_copy_of_the_publisher_becomes_the_target_without_copying_a_row(primary, published, launcher, make_server):
    slot = primary.value("SELECT lsn FROM pg_create_logical_replication_slot(%s, 'pgoutput')", published)
    copy = copied(primary.server)
    written(primary, published, "second")
    position = primary.value("SELECT pg_current_wal_insert_lsn()")
    written(primary, published, "third")
    copy.append_conf({"primary_conninfo": primary.server.conninfo("postgres"), "recovery_target_lsn": position})
    copy.append_conf({"recovery_target_inclusive": False, "recovery_target_action": "promote"})
    (copy.data / "recovery.signal").touch()
    (copy.data / "standby.signal").touch()
    make_server(of=copy).start()
    target = Database(copy, "app", there=True)
    target.wait("SELECT NOT pg_is_in_recovery()")
    arrived(target, published, "first", "second")
    launcher.target = target.conninfo
    create(launcher, published, primary.conninfo, "--no-create-slot", "--no-copy-data", "--no-enabled")
    assert primary.value("SELECT %s::pg_lsn < %s::pg_lsn", slot, position)
    ended = launcher("origin-advance", published, position, "--yes")
    assert ended.returncode == 0, ended.stderr
    assert launcher("enable", published).returncode == 0
    written(primary, published, "fourth")
    arrived(target, published, "first", "second", "third", "fourth")
    assert launcher("drop", published, "--yes").returncode == 0


@pytest.mark.long
def test_a_standby_publishes_until_its_slot_conflicts_with_recovery_and_that_is_said(
    primary, published, launcher, make_server, subdb
):
    standby = Database(make_server(standby_of=primary.server), "app", there=True)
    with snapshots(primary):
        create(launcher, published, standby.conninfo)
    written(primary, published, "second")
    replayed(primary, standby)
    assert launcher("wait", published, "--for", "caught-up", "--timeout", "60s").returncode == 0
    arrived(subdb, published, "first", "second")
    standby.server.append_conf({"hot_standby_feedback": False})
    standby.server.reload()
    primary.wait("SELECT xmin IS NULL AND catalog_xmin IS NULL FROM pg_replication_slots WHERE slot_type = 'physical'")
    for statement in LOST:
        primary.execute(statement)
    standby.wait("SELECT invalidation_reason = 'rows_removed' FROM pg_replication_slots", value=True)
    found = failure(launcher, published, "SlotLost")
    assert 'invalidated due to "rows_removed"' in found["detail"]
    assert launcher("status", published, "--check").returncode == 7
    until(lambda: launcher.status(published)["slot"]["conflicting"])
    assert launcher("drop", published, "--yes").returncode == 0
    # as its hint says, from the start; and the promotion of the publisher is nothing that anybody has to notice
    standby.server.append_conf({"hot_standby_feedback": True})
    standby.server.reload()
    subdb.execute(f"TRUNCATE {published}")
    with snapshots(primary):
        create(launcher, published, standby.conninfo)
    standby.server.query("SELECT pg_promote()")
    written(standby, published, "promoted")
    arrived(subdb, published, "first", "second", "promoted")
    assert launcher.status(published)["last_error"] is None


@pytest.mark.long
def test_a_standby_is_compared_with_at_one_point_and_apply_goes_on_until_it_has_one(
    primary, published, launcher, make_server, subdb
):
    standby = Database(make_server(standby_of=primary.server), "app", there=True)
    with snapshots(primary):
        create(launcher, published, standby.conninfo)
    comparing = launcher.start("verify", published)
    query = "SELECT count(*) > 0 FROM pg_stat_activity WHERE query LIKE 'CREATE_REPLICATION_SLOT%verify%'"
    until(lambda: standby.value(query) or comparing.poll() is not None)
    put = subdb.value("SELECT token FROM pgsub.barrier")
    written(primary, published, "second")  # its snapshot waits for what the primary logs now and then
    arrived(subdb, published, "first", "second")
    assert subdb.value("SELECT token FROM pgsub.barrier") == put  # it was moved along, and not given up
    with snapshots(primary):
        assert comparing.wait(100) == 0, comparing.log.read_text()
        subdb.execute(f"DELETE FROM {published} WHERE id = 7 AND v = 'first'")
        written(primary, published, "third")
        ended = launcher("verify", published)
        assert ended.returncode == 6 and f"public.{published}: missing" in ended.stdout, ended.stdout + ended.stderr
    assert launcher("drop", published, "--yes").returncode == 0


@pytest.mark.long
def test_a_standby_that_answers_while_its_primary_is_away_is_waited_for_and_the_slot_is_not_called_lost(
    primary, published, launcher, make_server, subdb
):
    standby = Database(make_server(standby_of=primary.server), "app", there=True)
    replayed(primary, standby)
    hosts = f"host=127.0.0.1,127.0.0.1 port={primary.server.port},{standby.server.port} user=postgres dbname=app"
    create(launcher, published, hosts)
    primary.close()
    primary.server.stop()
    found = failure(launcher, published, "PublisherUnavailable", "standby")
    assert "does not exist on the standby that answers as the publisher" in found["message"]
    until(lambda: launcher.status(published)["slot"] is None)  # and the watch of the slot says nothing else
    assert launcher.status(published)["last_error"]["class"] == "PublisherUnavailable"
    assert launcher("status", published, "--check").returncode == 4
    with closing(standby.connect()) as session, pytest.raises(PublisherUnavailable):
        slots.copy_slot(session, "absent", "of_absent")  # as for a table that leaves a shared slot
    primary.server.start()
    written(primary, published, "second")
    arrived(subdb, published, "first", "second")
    until(lambda: launcher.status(published)["state"] == "running")


@pytest.mark.long
@pytest.mark.parametrize(("point", "states"), [("sync.before_slot", "id"), ("sync.before_slot_drop", "sr")])
def test_no_slot_of_a_table_is_made_or_taken_for_dropped_on_a_standby_that_answers_for_its_primary(
    primary, subdb, make_server, make_cli, tmp_path, point, states
):
    for database in (primary, subdb):
        database.execute("DROP TABLE IF EXISTS a, b")
    primary.execute("DROP PUBLICATION IF EXISTS p")
    for database in (primary, subdb):
        database.execute("CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY)")
    primary.execute("INSERT INTO b VALUES (1); CREATE PUBLICATION p FOR TABLE a")
    standby = Database(make_server(standby_of=primary.server), "app", there=True)
    ports = f"{primary.server.port},{standby.server.port}"
    cli = make_cli(f"host=127.0.0.1,127.0.0.1 port={ports} user=postgres dbname=app", subdb.conninfo)
    go_on = tmp_path / "go on"
    assert cli.create("s").returncode == 0
    running = cli.launcher(env={"PGSUB_FAILPOINTS": f"{point}=pause:{go_on}"})
    primary.execute("ALTER PUBLICATION p ADD TABLE b")
    assert cli("refresh", "s", "--no-wait").returncode == 0
    paused = f"SELECT count(*) FROM pgsub.subscription_rel WHERE relname = 'b' AND srsubstate::text ~ '[{states}]'"
    subdb.wait(f"{paused} AND sync_slot IS NOT NULL", value=1)
    replayed(primary, standby)
    primary.close()
    primary.server.stop()
    go_on.touch()
    said = "SELECT count(*) FROM pgsub_error WHERE worker LIKE 'table %' AND message LIKE '%on the standby%'"
    until(lambda: cli.sql(said) == [(1,)])
    assert standby.value("SELECT count(*) FROM pg_replication_slots WHERE slot_type = 'logical'") == 0
    primary.server.start()
    subdb.wait("SELECT count(*) FROM b", value=1)
    primary.wait("SELECT count(*) FROM pg_replication_slots WHERE slot_type = 'logical'", value=1)
    assert cli.stop(running) == 0
    assert cli("drop", "s", "--yes").returncode == 0


@pytest.mark.long
def test_a_message_marks_a_position_that_can_be_waited_for(primary, published, launcher, subdb):
    create(launcher, published, primary.conninfo)
    written(primary, published, "second")
    mark = primary.value("SELECT pg_logical_emit_message(false, 'mark', '', true)::text")
    ended = launcher("wait", published, "--for", f"lsn={mark}", "--timeout", "60s")
    assert ended.returncode == 0, ended.stderr
    arrived(subdb, published, "first", "second")


@pytest.mark.long
def test_a_standby_that_is_away_and_without_which_the_publisher_sends_nothing_is_told_with_its_slot(
    primary, published, launcher, subdb
):
    create(launcher, published, primary.conninfo, "--failover")
    primary.execute("SELECT pg_create_physical_replication_slot('away')")
    primary.server.append_conf({"synchronized_standby_slots": ' "away" '})
    primary.server.reload()
    try:
        written(primary, published, "second")
        waits = until(lambda: launcher.status(published)["waits"])
        away = 'slot "away" of synchronized_standby_slots is inactive'
        assert waits["for"] == f"a standby of the publisher to receive the changes ({away})"
        ended = launcher("wait", published, "--for", "caught-up", "--timeout", "1s")
        assert (ended.returncode, f"It waits for {waits['for']}." in ended.stderr) == (8, True), ended.stderr
        assert launcher("status", published, "--check", "--max-lag", "100ms").returncode == 8
        arrived(subdb, published, "first")
    finally:
        primary.server.append_conf({"synchronized_standby_slots": ""})
        primary.server.reload()
        primary.execute("SELECT pg_drop_replication_slot('away')")
    arrived(subdb, published, "first", "second")
    until(lambda: launcher.status(published)["waits"] is None)


@pytest.mark.long
def test_a_standby_that_stands_still_and_without_which_the_publisher_sends_nothing_is_told_with_its_slot(
    primary, published, launcher, make_server, subdb
):
    create(launcher, published, primary.conninfo, "--failover")
    there = set(primary.rows("SELECT slot_name::text FROM pg_replication_slots"))
    standby = make_server(standby_of=primary.server)
    [(slot,)] = set(primary.rows("SELECT slot_name::text FROM pg_replication_slots")) - there
    primary.server.append_conf({"synchronized_standby_slots": slot, "wal_sender_timeout": 0})
    primary.server.reload()
    receiver = Database(standby, "app", there=True).value("SELECT pid FROM pg_stat_wal_receiver")
    os.kill(receiver, signal.SIGSTOP)  # as one whose disk does
    try:
        written(primary, published, "second")
        waits = until(lambda: launcher.status(published)["waits"])
        assert f'slot "{slot}" of synchronized_standby_slots is of a standby that does not answer' in waits["for"]
        assert launcher("status", published, "--check", "--max-lag", "100ms").returncode == 8
        arrived(subdb, published, "first")
    finally:
        os.kill(receiver, signal.SIGCONT)
    arrived(subdb, published, "first", "second")
    until(lambda: launcher.status(published)["waits"] is None)
    primary.server.append_conf({"synchronized_standby_slots": "", "wal_sender_timeout": "60s"})
    primary.server.reload()


@pytest.mark.long
def test_a_standby_that_takes_the_place_of_the_publisher_has_all_that_was_applied(
    primary, published, launcher, make_server, subdb
):
    standby = Database(make_server(standby_of=primary.server, sync_replication_slots=True), "app", there=True)
    [(slot,)] = standby.rows("SHOW primary_slot_name")
    primary.server.append_conf({"synchronized_standby_slots": slot})
    primary.server.reload()
    create(launcher, published, primary.conninfo, "--failover")
    written(primary, published, "second")
    arrived(subdb, published, "first", "second")
    standby.wait("SELECT synced AND NOT temporary FROM pg_replication_slots WHERE slot_name = %s", published)
    # what the standby does not have yet is not sent, or the target would have what a new publisher has not
    standby.close()
    standby.server.stop()
    written(primary, published, "third")
    assert launcher("wait", published, "--for", "caught-up", "--timeout", "2s").returncode == 8
    arrived(subdb, published, "first", "second")
    standby.server.start()
    arrived(subdb, published, "first", "second", "third")
    # the connection may be turned round before the standby is promoted: it is waited for, and nothing is lost
    ended = launcher("alter", published, "--connection", standby.conninfo)
    assert (ended.returncode, "still synchronized from the primary" in ended.stderr) == (0, True), ended.stderr
    found = failure(launcher, published, "PublisherUnavailable")
    assert found["message"] == f'replication slot "{published}" is still synchronized from the primary'
    written(primary, published, "fourth")
    replayed(primary, standby)
    primary.close()
    primary.server.kill9()
    standby.server.query("SELECT pg_promote()")
    written(standby, published, "fifth")
    arrived(subdb, published, "first", "second", "third", "fourth", "fifth")
    until(lambda: launcher.status(published)["state"] == "running")
    # who comes back after that has another history, and is not taken for the publisher
    primary.server.append_conf({"synchronized_standby_slots": ""})
    primary.server.start()
    one_error(
        launcher("alter", published, "--connection", primary.conninfo), 7, "timeline does not continue", "promoted last"
    )
