"""Sessions of the target whose client is gone while they wait for a standby: the server does not notice that."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

import psycopg
import pytest
from fix_servers import Database

from pgsub.launcher.mirror import lock_waits
from pgsub.target.session import advisory_locks

_KEY = (advisory_locks.LAUNCHER, 7)


@pytest.fixture
def unconfirmed(subdb: Database) -> Iterator[Database]:
    """A database whose commits wait for a standby that is not there."""
    subdb.execute("CREATE TABLE t (id int PRIMARY KEY, v int); INSERT INTO t VALUES (1, 0)")
    subdb.server.query("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
    subdb.server.reload()
    yield subdb
    subdb.server.query("ALTER SYSTEM RESET synchronous_standby_names")
    subdb.server.reload()


def _orphan(database: Database) -> int:
    """A launcher's session in a COMMIT that is not confirmed, and whose client has hung up; its PID."""
    session = database.connect(application_name="pgsub 7 launcher 0", options="-c synchronous_commit=on")
    pid = session.info.backend_pid
    assert advisory_locks.take(session, _KEY)

    def commit() -> None:
        with contextlib.suppress(psycopg.Error):
            session.execute("UPDATE t SET v = v + 1")

    thread = threading.Thread(target=commit)
    thread.start()
    database.wait("SELECT wait_event = 'SyncRep' FROM pg_stat_activity WHERE pid = %s", pid)
    with socket.socket(fileno=os.dup(session.fileno())) as line:
        line.shutdown(socket.SHUT_RDWR)
    thread.join()
    session.close()
    return pid


def test_a_lock_of_an_orphan_that_waits_for_a_standby_is_told_as_such_and_its_end_loses_nothing(
    unconfirmed: Database,
) -> None:
    pid = _orphan(unconfirmed)
    with contextlib.closing(unconfirmed.connect(options="-c synchronous_commit=local")) as following:
        assert not advisory_locks.take(following, _KEY, seconds=0.0)
        error = advisory_locks.held(following, _KEY, "held")
        assert error.detail is not None and error.hint is not None
        assert f"PID {pid} " in error.detail and "a synchronous standby of the target to confirm" in error.detail
        writing = threading.Thread(target=lambda: following.execute("UPDATE t SET v = v + 10"))
        writing.start()
        unconfirmed.wait(
            "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s", following.info.backend_pid
        )
        waits = lock_waits.of_session(unconfirmed.connection, following.info.backend_pid)
        assert waits is not None and f"PID {pid} holds" in waits and "waits for a synchronous standby" in waits
        unconfirmed.execute(error.hint.splitlines()[-1])
        writing.join()
        assert advisory_locks.take(following, _KEY)
    assert unconfirmed.rows("SELECT v FROM t") == [(11,)]
