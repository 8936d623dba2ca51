"""A publisher whose files were put back from a snapshot of its volume: the same identifier, and the same timeline."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from fix_pair import Pair
from fix_servers import Database
from thorough import thorough

from pgsub.apply import verified_publisher
from pgsub.apply.worker import feedback
from pgsub.common.errors import TargetUnavailable, WrongSystem

_FURTHER = {
    "transactions": "SELECT pg_logical_emit_message(true, '', repeat('x', 1000)) FROM generate_series(1, 3000)",
    "one large record": "SELECT pg_logical_emit_message(false, '', repeat('x', 3000000))",
    "a segment that was not filled": "SELECT pg_switch_wal(); SELECT pg_logical_emit_message(false, '', 'x')",
}


@pytest.fixture
def followed(make_server, subdb, monkeypatch, request):
    """A subscription whose publisher has a server of its own; one row was applied. The parameter is two_phase."""
    monkeypatch.setattr(feedback, "MIRROR_SECONDS", 0.0)
    source = Database(make_server(autovacuum=False, max_prepared_transactions=5), "app")
    for database in (source, subdb):
        database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    source.execute("CREATE PUBLICATION p FOR TABLE t")
    p = Pair(source, subdb, two_phase=getattr(request, "param", "d")).subscribe("r", None)
    p.apply("INSERT INTO t VALUES (1, 'first')")
    yield p
    p.close()
    source.close()


@pytest.fixture
def looks(monkeypatch):
    """What workers find that look for their last transaction in the publisher's WAL."""
    found, has = [], verified_publisher._has_transaction

    def look(*words):
        found.append(has(*words))
        return found[-1]

    monkeypatch.setattr(verified_publisher, "_has_transaction", look)
    return found


def snapshot(p):
    """Copy the files of the publisher, which is stopped for that."""
    stopped(p)
    data = p.pubdb.server.data
    subprocess.run(["cp", "-a", data, data.with_name("snapshot")], check=True)
    p.pubdb.server.start()


def put_back(p):
    """Put the copy in the place of the files."""
    stopped(p)
    data = p.pubdb.server.data
    shutil.rmtree(data)
    data.with_name("snapshot").rename(data)
    p.pubdb.server.start()


def stopped(p):
    p.pubdb.close()
    p.pubdb.server.stop()


@pytest.mark.long
@pytest.mark.parametrize("further", _FURTHER)
def test_its_changes_are_not_followed_over_the_gap(followed, looks, further):
    p = followed
    snapshot(p)
    p.apply(*[f"INSERT INTO t VALUES ({n}, 'lost')" for n in range(100, 150)])
    before = p.progress()
    rows = p.subdb.rows("SELECT * FROM t ORDER BY id")
    put_back(p)
    with pytest.raises(WrongSystem, match="is behind the subscription"):
        p.catch_up()
    p.pubdb.execute("INSERT INTO t VALUES (2, 'passed over if it is followed')")
    p.pubdb.execute(_FURTHER[further])
    p.pubdb.wait("SELECT pg_current_wal_flush_lsn() - '0/0'::pg_lsn > %s", max(before))
    p.pubdb.execute("INSERT INTO t VALUES (3, 'applied if it is followed')")
    for _ in range(2):
        with pytest.raises(WrongSystem, match="does not have the subscription's last transaction"):
            p.catch_up()
    assert looks == [False, False]
    assert (p.progress(), p.subdb.rows("SELECT * FROM t ORDER BY id")) == (before, rows)


@pytest.mark.long
def test_where_nothing_of_the_subscription_is_lost_it_goes_on(followed, looks):
    p = followed
    p.apply("INSERT INTO t VALUES (2, 'second')")
    snapshot(p)
    p.pubdb.execute("INSERT INTO t VALUES (3, 'lost, and never applied')")
    put_back(p)
    p.apply("INSERT INTO t VALUES (4, 'third')")
    p.same("t")
    assert looks == []


@pytest.mark.parametrize("followed", ["p", *thorough(["d"])], indirect=True)
def test_what_ends_before_a_position_that_was_reported_of_the_lost_history_is_applied(followed):
    p = followed
    p.apply("INSERT INTO t VALUES (2, 'second')")
    p.subdb.execute("DELETE FROM pgsub.event")  # as the launcher does
    p.apply()
    snapshot(p)
    more = "SELECT pg_logical_emit_message(false, '', repeat('x', 100000)), pg_switch_wal()"
    for _ in range(3):
        p.pubdb.execute(more)
        p.apply()
    remote, reported = p.progress()
    assert remote < reported
    put_back(p)
    p.pubdb.execute("INSERT INTO t VALUES (3, 'new')")
    p.pubdb.execute("BEGIN; INSERT INTO t VALUES (4, 'prepared'); PREPARE TRANSACTION 'g'")
    p.pubdb.execute("DELETE FROM t WHERE id = 1")
    for _ in range(5):
        p.pubdb.execute(more)
    p.pubdb.wait("SELECT pg_current_wal_flush_lsn() - '0/0'::pg_lsn > %s", reported)
    p.apply("COMMIT PREPARED 'g'", "INSERT INTO t VALUES (5, 'later')")
    p.same("t")


def test_a_publisher_that_crashed_is_gone_on_with(followed, looks, at):
    p = followed
    at("apply.after_target_commit=error")  # its slot has not heard of it, as if it had been forgotten in the crash
    with pytest.raises(TargetUnavailable):
        p.apply("INSERT INTO t VALUES (100, 'x')")
    at("")
    p.pubdb.close()
    p.pubdb.server.kill9()
    p.pubdb.server.start()
    p.apply("INSERT INTO t VALUES (2, 'after the crash')")
    p.same("t")
    assert looks == [True]


def test_a_standby_that_had_everything_is_gone_on_with(followed, looks):
    p = followed
    stopped(p)
    snapshot_of = p.pubdb.server.data  # what a standby has that was ahead of the subscription
    (snapshot_of / "standby.signal").touch()
    p.pubdb.server.start()
    p.pubdb.server.query("SELECT pg_promote()")
    p.pubdb.wait("SELECT NOT pg_is_in_recovery()")
    p.apply("INSERT INTO t VALUES (2, 'on the new timeline')")
    p.pubdb.close()
    p.pubdb.server.kill9()
    p.pubdb.server.start()
    p.apply("INSERT INTO t VALUES (3, 'after a crash of it')")
    p.same("t")
    assert False not in looks
