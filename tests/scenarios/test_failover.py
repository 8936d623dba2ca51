"""Servers that are not what they were: a target restored from an older backup, and standbys that were promoted.

Progress commits with the data, so whatever a target has lost, it has lost with its progress. The slot has not: what was
confirmed is not sent again.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess

import pytest
from fix_clusters import copied, replayed
from fix_pair import Pair
from fix_program import until
from fix_servers import Database

from pgsub.apply.worker import feedback
from pgsub.common.errors import TargetUnavailable, WrongSystem
from pgsub.target.ledger import worker_takeover

_GAP = "is past the subscription's position"
_names = (f"f{number}" for number in itertools.count(1))


@pytest.fixture(scope="module")
def primary(make_server):
    """A database on a server that has standbys."""
    return Database(make_server(), "app")


@pytest.fixture
def served(pubdb, primary, launcher):
    """A subscription that a launcher serves, its table without a key, so that a row that comes twice shows.

    :return: the name of both.
    """
    name = next(_names)
    for database in (pubdb, primary):
        database.execute(f"CREATE TABLE {name} (v text)")
    pubdb.execute(f"CREATE PUBLICATION {name} FOR TABLE {name}")
    launcher.target = primary.conninfo
    words = ["create", name, "--connection", pubdb.conninfo, "--target", primary.conninfo, "--publication", name]
    ended = launcher(*words, "--timeout", "100s")
    assert ended.returncode == 0, ended.stderr
    confirmed(pubdb, name, "first")
    yield name
    launcher("drop", name, "--yes")
    launcher("drop", name, "--if-exists", "--keep-target", "--yes")


def confirmed(pubdb, name, word):
    """Write a row, and wait until the publisher knows that it is durable on the target."""
    pubdb.execute(f"INSERT INTO {name} VALUES (%s)", word)
    written = pubdb.value("SELECT pg_current_wal_insert_lsn()")
    query = "SELECT confirmed_flush_lsn >= %s::pg_lsn FROM pg_replication_slots WHERE slot_name = %s"
    pubdb.wait(query, written, name)


def moved(launcher, name, database):
    """The subscription goes on with another server in the place of its target."""
    ended = launcher("alter", name, "--target", database.conninfo)
    assert ended.returncode == 0, ended.stderr


def stopped(launcher, name, kind, message):
    """The error says why it stopped, and monitoring sees it."""

    def shown():
        found = launcher.status(name)["last_error"]
        return found if found and found["class"] == kind else None

    assert message in until(shown)["message"]
    assert launcher("status", name, "--check").returncode == 7


@pytest.mark.long
def test_a_target_restored_from_an_older_backup_is_not_followed_over_the_gap(
    pubdb, primary, served, launcher, make_server
):
    backup = make_server(of=copied(primary.server))
    confirmed(pubdb, served, "second")
    backup.start()
    restored = Database(backup, "app", there=True)
    moved(launcher, served, restored)
    stopped(launcher, served, "ReplicationBroken", _GAP)
    pubdb.execute(f"INSERT INTO {served} VALUES ('third')")
    assert restored.rows(f"SELECT v FROM {served}") == [("first",)]


@pytest.mark.long
def test_a_standby_of_the_target_that_had_everything_is_gone_on_with(pubdb, primary, served, launcher, make_server):
    standby = Database(make_server(standby_of=primary.server), "app", there=True)
    confirmed(pubdb, served, "second")
    replayed(primary, standby)
    standby.server.query("SELECT pg_promote()")
    standby.wait("SELECT NOT pg_is_in_recovery()")
    # the old server still answers: nothing may be applied there any more
    assert launcher("disable", served).returncode == 0
    assert launcher("wait", served, "--for", "disabled", "--timeout", "100s").returncode == 0
    moved(launcher, served, standby)
    assert launcher("enable", served).returncode == 0
    pubdb.execute(f"INSERT INTO {served} VALUES ('third')")
    standby.wait(f"SELECT string_agg(v, ' ' ORDER BY v) FROM {served}", value="first second third")


@pytest.mark.long
def test_a_standby_of_the_publisher_that_was_promoted_without_the_slot_is_not_gone_over_to(
    primary, subdb, launcher, make_server
):
    source = Database(primary.server, "source")
    for database in (source, subdb):
        database.execute("CREATE TABLE promoted (v text)")
    source.execute("CREATE PUBLICATION promoted FOR TABLE promoted")
    places = ["--connection", source.conninfo, "--target", subdb.conninfo, "--publication", "promoted"]
    ended = launcher("create", "promoted", *places, "--timeout", "100s")
    assert ended.returncode == 0, ended.stderr
    standby = Database(make_server(standby_of=primary.server), "source", there=True)
    confirmed(source, "promoted", "first")
    replayed(source, standby)
    standby.server.query("SELECT pg_promote()")
    standby.wait("SELECT NOT pg_is_in_recovery()")
    launcher("alter", "promoted", "--connection", standby.conninfo)
    stopped(launcher, "promoted", "SlotLost", 'replication slot "promoted"')
    assert standby.rows("SELECT slot_name FROM pg_replication_slots WHERE slot_type = 'logical'") == []
    assert launcher("alter", "promoted", "--connection", source.conninfo).returncode == 0
    confirmed(source, "promoted", "second")
    assert subdb.rows("SELECT v FROM promoted ORDER BY 1") == [("first",), ("second",)]
    assert launcher("drop", "promoted", "--yes").returncode == 0
    source.close()


@pytest.mark.long
def test_a_standby_of_the_target_that_lost_commits_is_not_followed_over_the_gap(
    pubdb, primary, served, launcher, make_server
):
    standby = Database(make_server(standby_of=primary.server), "app", there=True)
    replayed(primary, standby)
    standby.close()
    standby.server.stop()
    confirmed(pubdb, served, "second")
    primary.close()
    primary.server.kill9()
    standby.server.start()
    standby.server.query("SELECT pg_promote()")
    standby.wait("SELECT NOT pg_is_in_recovery()")
    moved(launcher, served, standby)
    stopped(launcher, served, "ReplicationBroken", _GAP)
    assert standby.rows(f"SELECT v FROM {served}") == [("first",)]


@pytest.fixture
def followed(make_server, subdb, monkeypatch):
    """A subscription whose publisher has a server of its own, to tables ``t``, not copied yet, and ``u``."""
    monkeypatch.setattr(feedback, "MIRROR_SECONDS", 0.0)
    source = Database(make_server(), "followed")
    for database in (source, subdb):
        database.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE u (id int PRIMARY KEY, v text)")
    source.execute("INSERT INTO t VALUES (1, 'copied'); CREATE PUBLICATION p FOR ALL TABLES")
    p = Pair(source, subdb).subscribe("i", None)
    p.sync("u")
    p.apply("INSERT INTO u VALUES (1, 'first')")
    yield p
    p.close()
    source.close()


def stopped_at(p):
    """The publisher is stopped; what a standby has that has received everything until now."""
    p.pubdb.close()
    p.pubdb.server.stop()
    return p.pubdb.server.data


def promoted(p):
    """A standby that has all that the publisher's files have takes its place, slots and address."""
    (p.pubdb.server.data / "standby.signal").touch()
    p.pubdb.server.start()
    p.pubdb.server.query("SELECT pg_promote()")
    p.pubdb.wait("SELECT NOT pg_is_in_recovery()")


def timeline(p):
    """The one that the ledger has."""
    return p.subdb.value("SELECT timeline FROM pgsub.subscription WHERE subid = %s", p.subid)


@pytest.mark.long
@pytest.mark.parametrize("first", ["apply", "sync"])
def test_a_standby_that_lagged_is_not_gone_over_to_whoever_of_the_workers_comes_first(followed, at, first):
    p = followed
    at("sync.after_f=error")
    with pytest.raises(TargetUnavailable):
        p.sync("t")
    p.apply("INSERT INTO u VALUES (2, 'apply is beyond the slot of t')")
    data = stopped_at(p)
    copy = data.with_name("lagging")
    subprocess.run(["cp", "-a", data, copy], check=True)
    p.pubdb.server.start()
    p.apply(*[f"INSERT INTO u VALUES ({n}, 'the standby lacks this')" for n in range(100, 300)])
    stopped_at(p)
    shutil.rmtree(data)
    copy.rename(data)
    promoted(p)
    p.pubdb.execute("INSERT INTO u VALUES (3, 'only there'), (4, 'and this')")
    p.pubdb.execute("SELECT pg_switch_wal()")  # past where apply is
    p.pubdb.execute("INSERT INTO t VALUES (3, 'only there')")
    workers = [lambda: p.sync("t"), p.catch_up]
    for work in workers if first == "sync" else reversed(workers):
        with pytest.raises(WrongSystem, match="branched off before") as refused:
            work()
        assert refused.value.diverged and refused.value.exit_code == 7
    assert timeline(p) == 1 and p.state("t") == "f"


@pytest.mark.long
def test_a_table_that_was_caught_up_with_where_a_standby_lags_keeps_apply_from_going_over_to_it(followed, at):
    p = followed
    at("sync.after_f=error")
    data = stopped_at(p)
    copy = data.with_name("lagging")
    subprocess.run(["cp", "-a", data, copy], check=True)
    p.pubdb.server.start()
    p.pubdb.execute("INSERT INTO t VALUES (2, 'copied, and the standby lacks it')")
    with pytest.raises(TargetUnavailable):
        p.sync("t")
    stopped_at(p)
    shutil.rmtree(data)
    copy.rename(data)
    promoted(p)
    p.pubdb.execute("SELECT pg_switch_wal()")
    with pytest.raises(WrongSystem, match="branched off before"):
        p.catch_up()


@pytest.mark.parametrize("first", ["sync", "apply"])
def test_a_standby_that_had_everything_is_gone_over_to_whoever_of_the_workers_comes_first(followed, first):
    p = followed
    stopped_at(p)
    promoted(p)
    p.pubdb.execute("INSERT INTO t VALUES (2, 'after'); INSERT INTO u VALUES (2, 'after')")
    if first == "apply":
        p.apply()
        p.same("u")
    # a worker whose session with the old server has outlived it
    before = p.take_over()
    p.sync("t")
    assert timeline(p) == 2
    assert bool(worker_takeover.taken_over(p.session, [before])) == (first == "sync")
    p.apply("INSERT INTO t VALUES (3, 'streamed'); INSERT INTO u VALUES (3, 'streamed')")
    p.same("t", "u")
