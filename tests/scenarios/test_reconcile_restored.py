"""A publisher that went back in time (a standby that lagged, a restored backup), and ``pgsub reconcile`` after that."""

from __future__ import annotations

import itertools
import shutil
import subprocess

import pytest
from fix_clusters import copied
from fix_program import one_error, until
from fix_servers import Database

_names = (f"back{number}" for number in itertools.count(1))


@pytest.fixture
def followed(make_server, subdb, launcher):
    """A publisher of its own, and a subscription of a table without a key and of one with, caught up."""
    source = Database(make_server(autovacuum=False), "app")
    name = next(_names)
    for database in (source, subdb):
        database.execute(f"CREATE TABLE {name}_heap (id int, v text); CREATE TABLE {name} (id int PRIMARY KEY, v text)")
    source.execute(f"ALTER TABLE {name}_heap REPLICA IDENTITY FULL")
    source.execute(f"CREATE PUBLICATION {name} FOR TABLE {name}, {name}_heap")
    launcher.target = subdb.conninfo
    written(source, name, "first", 1)
    words = ("create", name, "--connection", source.conninfo, "--target", subdb.conninfo, "--publication", name)
    ended = launcher(*words, "--timeout", "100s")
    assert ended.returncode == 0, ended.stderr
    yield source, name
    launcher("drop", name, "--if-exists", "--yes")
    launcher("drop", name, "--if-exists", "--keep-slot", "--yes")


def written(database, name, word, start):
    """Fifty rows in each table, and the keyed ones before them changed."""
    values = f"SELECT g, '{word}' FROM generate_series({start}, {start + 49}) g"
    database.execute(f"UPDATE {name} SET v = '{word}' WHERE id % 10 = 0; INSERT INTO {name} {values}")
    database.execute(f"INSERT INTO {name}_heap {values}")


def same(source, subdb, name):
    for table in (name, f"{name}_heap"):
        query = f"SELECT id, v FROM {table} ORDER BY 1, 2"
        assert subdb.rows(query) == source.rows(query), table


def caught_up(launcher, name):
    ended = launcher("wait", name, "--for", "caught-up", "--timeout", "100s")
    assert ended.returncode == 0, ended.stderr


@pytest.mark.long
def test_a_standby_that_lagged_takes_the_place_of_the_publisher_and_the_target_becomes_equal_to_it(
    followed, make_server, subdb, launcher
):
    primary, name = followed
    standby = Database(make_server(standby_of=primary.server), "app", there=True)
    standby.wait("SELECT pg_last_wal_replay_lsn() IS NOT NULL")
    standby.close()
    standby.server.stop()
    written(primary, name, "lost", 51)
    caught_up(launcher, name)
    primary.close()
    primary.server.kill9()
    standby.server.append_conf({"primary_conninfo": ""})
    standby.server.start()
    standby.server.query("SELECT pg_promote()")
    written(standby, name, "second", 1001)
    ended = launcher("alter", name, "--connection", standby.conninfo)
    assert ended.returncode == 0 and f"pgsub reconcile {name}" in ended.stderr, ended.stderr
    assert "branched off before the subscription's position" in ended.stderr
    one_error(launcher("reconcile", name), 2, "replacing rows needs --yes")
    ended = launcher("reconcile", name, "--yes")
    assert ended.returncode == 0, ended.stderr
    written(standby, name, "third", 2001)
    caught_up(launcher, name)
    same(standby, subdb, name)
    assert subdb.value(f"SELECT count(*) FROM {name}_heap WHERE v = 'lost'") == 0


@pytest.mark.long
def test_apply_does_not_go_on_from_half_a_slot_of_a_publisher_that_was_restored(followed, make_server, subdb, launcher):
    source, name = followed
    backup = copied(source.server)
    source.execute("SELECT pg_logical_emit_message(false, '', repeat('x', 3000000))")
    written(source, name, "lost", 51)
    caught_up(launcher, name)
    position = source.value("SELECT pg_current_wal_lsn()")
    source.close()
    source.server.stop()
    make_server(of=backup).start()
    restored = Database(backup, "app", there=True)
    assert launcher("alter", name, "--connection", restored.conninfo).returncode == 0
    ended = launcher("reconcile", name, "--yes", env={"PGSUB_FAILPOINTS": "reconcile.created=kill"})
    assert ended.returncode < 0
    before = subdb.rows(f"SELECT v, count(*) FROM {name}_heap GROUP BY 1")
    written(restored, name, "second", 1001)  # before the old position: the slot has it, and apply would not take it
    restored.execute("SELECT pg_logical_emit_message(false, '', repeat('x', 5000000))")
    until(lambda: restored.value("SELECT pg_current_wal_flush_lsn() > %s::pg_lsn", position))
    written(restored, name, "third", 2001)
    until(lambda: "is being reconciled" in ((launcher.status(name)["last_error"] or {}).get("message") or ""))
    assert subdb.rows(f"SELECT v, count(*) FROM {name}_heap GROUP BY 1") == before
    ended = launcher("reconcile", name, "--yes")
    assert ended.returncode == 0, ended.stderr
    caught_up(launcher, name)
    same(restored, subdb, name)


@pytest.mark.long
@pytest.mark.parametrize("further", [False, True], ids=["behind", "beyond the old position"])
def test_a_publisher_restored_from_a_backup_goes_on_from_a_new_slot(followed, make_server, subdb, launcher, further):
    source, name = followed
    backup = copied(source.server)
    if not further:
        source.execute("SELECT pg_logical_emit_message(false, '', repeat('x', 3000000))")
    written(source, name, "lost", 51)
    caught_up(launcher, name)
    position = source.value("SELECT pg_current_wal_lsn()")
    source.close()
    source.server.stop()
    make_server(of=backup).start()
    restored = Database(backup, "app", there=True)
    written(restored, name, "second", 1001)
    if further:  # of the same timeline: only the missing slot shows that it is not the server that it was
        restored.execute("SELECT pg_logical_emit_message(false, '', repeat('x', 3000000))")
        until(lambda: restored.value("SELECT pg_current_wal_flush_lsn() > %s::pg_lsn", position))
    ended = launcher("alter", name, "--connection", restored.conninfo)
    assert ended.returncode == 0 and f"pgsub reconcile {name}" in ended.stderr, ended.stderr
    assert ("the publisher is behind the subscription" in ended.stderr) != further
    ended = launcher("reconcile", name, "--yes")
    assert ended.returncode == 0, ended.stderr
    written(restored, name, "third", 2001)
    caught_up(launcher, name)
    same(restored, subdb, name)


@pytest.mark.long
def test_a_publisher_whose_files_were_put_back_goes_on_from_a_new_slot(followed, subdb, launcher):
    source, name = followed
    data = source.server.data
    source.close()
    source.server.stop()
    subprocess.run(["cp", "-a", data, data.with_name("snapshot")], check=True)
    source.server.start()
    written(source, name, "lost", 51)
    caught_up(launcher, name)
    position = source.value("SELECT pg_current_wal_lsn()")
    assert launcher("disable", name).returncode == 0
    assert launcher("wait", name, "--for", "disabled", "--timeout", "100s").returncode == 0
    source.close()
    source.server.stop()
    shutil.rmtree(data)
    data.with_name("snapshot").rename(data)
    source.server.start()
    before = subdb.rows(f"SELECT v, count(*) FROM {name}_heap GROUP BY 1")
    written(source, name, "second", 1001)
    source.execute("SELECT pg_logical_emit_message(false, '', repeat('x', 3000000))")
    until(lambda: source.value("SELECT pg_current_wal_flush_lsn() > %s::pg_lsn", position))
    written(source, name, "third", 2001)
    assert launcher("enable", name).returncode == 0
    until(lambda: "last transaction" in ((launcher.status(name)["last_error"] or {}).get("message") or ""))
    assert launcher("status", name, "--check").returncode == 7
    assert f"pgsub reconcile {name}" in launcher("status", name, "--runbook").stdout
    assert subdb.rows(f"SELECT v, count(*) FROM {name}_heap GROUP BY 1") == before
    ended = launcher("reconcile", name, "--yes")
    assert ended.returncode == 0 and "does not have the subscription's last transaction" in ended.stderr, ended.stderr
    written(source, name, "fourth", 3001)
    caught_up(launcher, name)
    same(source, subdb, name)
