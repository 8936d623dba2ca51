"""A synchronous standby of the target takes its place; test_failover.py has those that are none."""

from __future__ import annotations

from dataclasses import replace

import patience
import pytest
from fix_engine import Subscriber
from fix_servers import Database

from pgsub.launcher.mirror import lock_waits


@pytest.fixture
def target(make_server):
    return Database(make_server(autovacuum=False, track_commit_timestamp=True), "app")


@pytest.fixture
def followed(pubdb, target):
    """A subscription of a table without a key that has applied a row."""
    for database in (pubdb, target):
        database.execute("DROP TABLE IF EXISTS t; CREATE TABLE t (id int)")
    pubdb.execute("CREATE PUBLICATION p FOR TABLE t")
    one = Subscriber(pubdb, target).register("t")
    pubdb.execute("INSERT INTO t VALUES (1)")
    assert one.catch_up().outcome == "reached"
    yield one
    one.close()


def promoted(one, standby):
    """The target dies, and the subscription goes over to its standby."""
    one.subdb.close()
    one.subdb.server.kill9()
    standby.server.query("SELECT pg_promote()")
    one.subdb, one.sub = standby, replace(one.sub, target=standby.conninfo)
    one.renew()


@pytest.mark.long
def test_a_synchronous_standby_has_all_that_was_reported_however_the_target_dies(followed, make_server, pubdb, target):
    standby = Database(make_server(standby_of=target.server), "app", there=True)
    target.server.query("ALTER SYSTEM SET synchronous_standby_names = '*'")
    target.server.reload()
    target.wait("SELECT count(*) = 1 FROM pg_stat_replication WHERE sync_state = 'sync'")
    task = followed.start()
    for number in range(2, 40):
        pubdb.execute("INSERT INTO t VALUES (%s)", number)
    target.wait("SELECT count(*) > 20 FROM t")
    standby.close()
    target.close()
    target.server.kill9()
    assert task.ends_within(patience.SECONDS)
    promoted(followed, standby)
    assert followed.catch_up().outcome == "reached"
    assert standby.rows("SELECT * FROM t ORDER BY id") == [(n,) for n in range(1, 40)]


def test_a_standby_that_does_not_answer_is_named_as_what_is_waited_for_and_apply_goes_on_after_it(
    followed, pubdb, target
):
    task = followed.start()
    pubdb.execute("INSERT INTO t VALUES (2)")
    target.wait("SELECT count(*) = 2 FROM t")
    target.server.query("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
    target.server.reload()
    try:
        pubdb.execute("INSERT INTO t VALUES (3)")
        target.wait("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'")
        found = lock_waits.locks(followed.session, followed.subid)
        assert found == {
            "apply": "a synchronous standby of the target to confirm a commit (synchronous_standby_names = 'nobody')"
        }
    finally:
        target.server.query("ALTER SYSTEM RESET synchronous_standby_names")
        target.server.reload()
    followed.stop(task)
    assert followed.catch_up().outcome == "reached"
    assert target.rows("SELECT * FROM t ORDER BY id") == [(1,), (2,), (3,)]
