"""Users of the target without any privilege of the ledger cannot hold up workers by the names of their sessions.

Advisory locks that they hold are waited for a moment only.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg import sql

from pgsub.common.errors import LockHeld
from pgsub.launcher import runner
from pgsub.launcher.mirror import lock_waits
from pgsub.launcher.runner import Runner
from pgsub.target.ledger import worker_takeover
from pgsub.target.ledger.schema import installation
from pgsub.target.ledger.tables import subscription_tables
from pgsub.target.session import advisory_locks, ledger_privileges, origins

if TYPE_CHECKING:
    from fix_pair import MakePair
    from fix_servers import Database

_STRANGER = f"stranger_{os.getpid()}"
_KEYS = [(0x7067737562,), (0x70677375626F,)]  #: of the ledger's schema, and of origins


@pytest.fixture
def stranger(subdb: Database) -> Iterator[str]:
    """A role that may connect, and no more."""
    subdb.execute(f"CREATE ROLE {_STRANGER} LOGIN")
    yield _STRANGER
    subdb.execute(f"DROP OWNED BY {_STRANGER}; DROP ROLE {_STRANGER}")


@pytest.mark.parametrize("name", ["apply x 1", "apply 99999999999999999999", "apply 0", "sync:1 99999999999999999999"])
def test_a_session_that_only_bears_a_workers_name_is_no_worker(pair: MakePair, stranger: str, name: str) -> None:
    p = pair("CREATE TABLE t (id int PRIMARY KEY)")
    with contextlib.closing(p.subdb.connect(stranger, application_name=f"pgsub {p.subid} {name}")) as session:
        worker_takeover.take_over_many(p.session, p.subid, [worker_takeover.APPLY, 1])
        worker_takeover.evict(p.session, p.subid)
        assert session.execute("SELECT 1").fetchone() == (1,)


def test_a_strangers_session_is_no_sign_of_life_and_waits_for_nothing(pair: MakePair, stranger: str) -> None:
    p = pair("CREATE TABLE t (id int PRIMARY KEY); GRANT INSERT ON t TO PUBLIC")
    claim = worker_takeover.take_over(p.session, p.subid, worker_takeover.APPLY)
    name = f"pgsub {p.subid} apply {claim.epoch}"
    with contextlib.closing(p.subdb.connect(stranger, application_name=name)) as session:
        assert worker_takeover.sign(p.session, claim).sessions == 0
        with contextlib.closing(p.subdb.connect()) as holder:
            holder.execute("BEGIN; LOCK TABLE t")
            blocked = threading.Thread(target=lambda: session.execute("INSERT INTO t VALUES (1)"))
            blocked.start()
            p.until(
                "SELECT count(*) = 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND usename = %s", stranger
            )
            assert lock_waits.locks(p.session, p.subid) == {}
            holder.execute("ROLLBACK")
            blocked.join()
    with contextlib.closing(p.subdb.connect(application_name=name)):
        assert worker_takeover.sign(p.session, claim).sessions == 1


@pytest.mark.parametrize("name", ["apply 0", "sync:1 0"])
def test_a_role_that_may_not_end_a_strangers_session_need_not(
    pair: MakePair, subdb: Database, stranger: str, name: str
) -> None:
    p = pair("CREATE TABLE t (id int PRIMARY KEY)")
    plain = sql.Identifier(f"plain_{os.getpid()}")
    subdb.connection.execute(sql.SQL("CREATE ROLE {}").format(plain))
    try:
        subdb.connection.execute(
            sql.SQL(
                "GRANT USAGE ON SCHEMA pgsub TO {0}; GRANT SELECT, INSERT, UPDATE ON ALL TABLES IN SCHEMA pgsub TO {0}"
            ).format(plain)
        )
        with contextlib.closing(subdb.connect(stranger, application_name=f"pgsub {p.subid} {name}")):
            p.session.execute(sql.SQL("SET ROLE {}").format(plain))
            worker_takeover.take_over_many(p.session, p.subid, [worker_takeover.APPLY, 1])
            worker_takeover.evict(p.session, p.subid)
    finally:
        p.session.execute("RESET ROLE")
        subdb.connection.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(plain))


def _launches(session: psycopg.Connection, subid: int) -> None:
    Runner._lock(SimpleNamespace(sub=SimpleNamespace(subid=subid, name="s"), _stop_event=threading.Event()), session)  # type: ignore[arg-type]


def _changes(session: psycopg.Connection, subid: int) -> None:
    with subscription_tables.maintenance(session, subid, "s"):
        pass


def _installs(session: psycopg.Connection, subid: int) -> None:
    session.execute("DROP SCHEMA IF EXISTS pgsub CASCADE")
    installation.install(session)


def _grants(session: psycopg.Connection, subid: int) -> None:
    ledger_privileges.give(session, _STRANGER)


@pytest.mark.parametrize("work", [_launches, _changes, _installs, _grants])
def test_an_advisory_lock_that_a_stranger_holds_is_waited_for_in_vain_and_its_holder_named(
    pair: MakePair,
    subdb: Database,
    stranger: str,
    monkeypatch: pytest.MonkeyPatch,
    work: Callable[[psycopg.Connection, int], None],
) -> None:
    p = pair("CREATE TABLE t (id int PRIMARY KEY)")
    for name in (advisory_locks, "PATIENCE_SECONDS"), (runner, "_LOCK_SECONDS"):
        monkeypatch.setattr(*name, 0.2)
    with contextlib.closing(subdb.connect(stranger, application_name="curious")) as session:
        for keys in _KEYS, [(0x70677375, p.subid), (0x7067736D, p.subid)]:
            for key in keys:
                session.execute(f"SELECT pg_advisory_lock({', '.join(['%s'] * len(key))})", key)
        with pytest.raises(LockHeld) as caught:
            work(p.session, p.subid)
        pid = session.info.backend_pid
        what = f'PID {pid} of the target, user "{stranger}", application_name "curious", holds the advisory lock.'
        assert caught.value.detail == what
        p.session.execute((caught.value.hint or "").splitlines()[-1])
        subdb.wait("SELECT count(*) FROM pg_stat_activity WHERE pid = %s", pid, value=0)
    work(p.session, p.subid)


@pytest.mark.parametrize("work", [_launches, _changes, _grants])
def test_a_prepared_transaction_of_a_stranger_that_holds_an_advisory_lock_is_named(
    pair: MakePair,
    subdb: Database,
    stranger: str,
    monkeypatch: pytest.MonkeyPatch,
    work: Callable[[psycopg.Connection, int], None],
) -> None:
    p = pair("CREATE TABLE t (id int PRIMARY KEY)")
    for name in (advisory_locks, "PATIENCE_SECONDS"), (runner, "_LOCK_SECONDS"):
        monkeypatch.setattr(*name, 0.2)
    gid = f"it's {p.subid}"
    with contextlib.closing(subdb.connect(stranger)) as session:
        session.execute("BEGIN")
        for key in [_KEYS[0], (0x70677375, p.subid), (0x7067736D, p.subid)]:
            session.execute(f"SELECT pg_advisory_xact_lock({', '.join(['%s'] * len(key))})", key)
        session.execute("SELECT txid_current()")
        session.execute(sql.SQL("PREPARE TRANSACTION {}").format(gid))
    with pytest.raises(LockHeld) as caught:
        work(p.session, p.subid)
    said = f'Prepared transaction "{gid}" of role "{stranger}" on the target holds the advisory lock.'
    statement = (caught.value.hint or "").splitlines()[-1]
    p.session.execute(statement)
    assert caught.value.detail == said
    work(p.session, p.subid)


def test_an_advisory_lock_that_a_stranger_holds_keeps_no_session_from_its_origin(
    pair: MakePair, subdb: Database, stranger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = pair("CREATE TABLE t (id int PRIMARY KEY)")
    monkeypatch.setattr(advisory_locks, "PATIENCE_SECONDS", 0.2)
    with contextlib.closing(subdb.connect(stranger)) as session:
        session.execute("SELECT pg_advisory_lock(%s)", _KEYS[1])
        assert origins.attach(p.session, p.sub) is not None
