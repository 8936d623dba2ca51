"""Sessions of a command: on the target that has the subscription's ledger, and on its publisher."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import psycopg

from pgsub.apply.verified_publisher import recorded_database, telling, verify
from pgsub.catalog.store import StateStore
from pgsub.commands.reporter import Reporter
from pgsub.commands.target_wait import TargetWait
from pgsub.common.errors import LockHeld, PublisherUnavailable
from pgsub.common.subscription import Subscription
from pgsub.publisher import connect as publisher
from pgsub.publisher import database
from pgsub.publisher.database import Database
from pgsub.switchover import journal
from pgsub.target.ledger import definitions, subscriptions
from pgsub.target.ledger.schema import installation
from pgsub.target.ledger.tables import subscription_tables
from pgsub.target.session import connect as target
from pgsub.target.session import ledger_guard, ledger_privileges
from pgsub.target.session.connect import SessionName, is_superuser, must_use_password

MUST_PROVIDE = "Non-superusers must provide a password in the connection string."
#: Fields that launchers write, or commands that change one field without waiting for each other.
_APART = ("enabled", "disable_on_error", "skip_lsn", "skips", "unavailable", "two_phase", "recorded", "table_set")


def connect_target(sub: Subscription, **options: Any) -> contextlib.closing[psycopg.Connection]:
    """Open a session on the target with the launcher's name, which reads no untrusted ledger. The block closes it.

    :param options: see :func:`pgsub.target.session.connect.connect`.
    :raises TargetReplaced: another database now has the name.
    """
    session = target.open_session(sub, SessionName(sub.subid, "launcher", 0), **options)
    # guard: no command reads a ledger that comes behind its check
    ledger_guard.guard(session)
    return contextlib.closing(session)


@contextlib.contextmanager
def ledger_session(
    store: StateStore, sub: Subscription, reporter: Reporter | None = None, deadline: float | None = None
) -> Iterator[psycopg.Connection]:
    """Open a session on the target and upgrade its ledger if necessary. Errors of psycopg become pgsub's own.

    A ledger is never created, because a target without one is not this subscription's.

    :param store: must have the newest definition.
    :param reporter: told what a statement waits for. With ``deadline`` it is passed to :class:`TargetWait`.
    """
    with connect_target(sub) as session, TargetWait(session, sub, reporter, deadline):
        try:
            if session.execute("SELECT pg_catalog.to_regnamespace('pgsub') IS NULL").fetchone() == (True,):
                raise subscriptions.unknown(sub.subid)
            ledger_privileges.check(session)
            ledger_privileges.give(session)
            installation.check(session)
            installation.install(session)
            definitions.check_newest(session, sub, partial(store.subscription_by_id, sub.subid))
            subscriptions.identity(session, sub.subid)
            yield session
        except psycopg.Error as error:
            doing = "change the subscription on the target"
            raise target.translate(error, doing, user=session.info.user) from None


@contextlib.contextmanager
def maintenance(session: psycopg.Connection, store: StateStore, sub: Subscription) -> Iterator[None]:
    """Lock the subscription against other commands that change it.

    :param sub: the subscription as read before.
    :raises LockHeld: another command is changing it, or has changed it since it was read.
    """
    with subscription_tables.maintenance(session, sub.subid, sub.name):
        check_unchanged(store, sub)
        yield


def check_no_switchover(session: psycopg.Connection, store: StateStore, sub: Subscription) -> None:
    """Check that no running switchover needs a subscription unchanged.

    :param session: a session on the subscription's target.
    :raises StateForbids: one does.
    """
    ended = sub.way_back_of is not None and store.way_there(sub) is None
    # guard: a way back that is disabled later does not count as part of a switchover, without " or ended"
    journal.check_not_needed(session, sub, enabled=sub.enabled or ended)


def check_unchanged(store: StateStore, sub: Subscription) -> None:
    """Refuse an outdated definition, because using it would undo another command's change.

    Mirrors "tuple concurrently updated" (CatalogTupleUpdate).

    :raises LockHeld: another command has changed the subscription since it was read.
    :raises SubscriptionNotFound: the subscription was dropped.
    """
    store.require(sub.subid)
    now = store.subscription_by_id(sub.subid)
    if now is None or replace(now, **{name: getattr(sub, name) for name in _APART}) != sub:
        raise LockHeld(
            f'subscription "{sub.name}" was concurrently changed by another command',
            detail="This command changed nothing.",
            hint="Try again.",
        )


def connect_publisher(
    sub: Subscription,
    conninfo: str | None = None,
    *,
    expected: Database | None = None,
    replication: bool = False,
    must_use_password: bool = False,
) -> contextlib.closing[publisher.Connection]:
    """Open a connection to the publisher. The block closes it.

    :param conninfo: a connection string, None for the stored one.
    :param expected: raise WrongSystem if another database answers.
    """
    return contextlib.closing(
        database.open_session(
            sub.connection if conninfo is None else conninfo,
            expected,
            application_name=sub.name,
            replication=replication,
            must_use_password=must_use_password,
        )
    )


@contextlib.contextmanager
def verified_publisher(session: psycopg.Connection, sub: Subscription, conninfo: str) -> Iterator[publisher.Connection]:
    """Open a connection to the subscription's publisher after its verification. Another would remove every table.

    :param conninfo: its connection string, including the password if there is no password file yet.
    :raises WrongSystem: the server is another system, database or history.
    """
    verify_publisher(session, sub, conninfo)
    must, expected = must_use_password(session, sub), recorded_database(session, sub.subid)
    with connect_publisher(sub, conninfo, expected=expected, must_use_password=must) as source:
        yield source


def verify_publisher(session: psycopg.Connection, sub: Subscription, conninfo: str) -> None:
    """Check that a connection string leads to the subscription's publisher.

    :raises WrongSystem: see :func:`verified_publisher`.
    """
    try:
        opened = connect_publisher(sub, conninfo, replication=True, must_use_password=must_use_password(session, sub))
    except PublisherUnavailable as error:
        if "no password supplied" in error.message and sub.password_required and not is_superuser(session):
            error.detail = f"{MUST_PROVIDE} {error.detail or ''}".strip()
        raise
    with opened as replication, telling(sub):
        verify(session, replication, sub.subid)


def target_facts(session: psycopg.Connection) -> dict[str, Any]:
    """Return the fields of the definition that depend on the target: the session's role and the database's OID."""
    row = session.execute(
        "SELECT current_user::text, oid::bigint FROM pg_catalog.pg_database WHERE datname = current_database()"
    ).fetchone()
    assert row is not None
    return {"owner": row[0], "dboid": row[1]}
