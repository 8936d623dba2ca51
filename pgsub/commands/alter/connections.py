"""Checks the new connection strings of an altered subscription."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psycopg

from pgsub.apply.verified_publisher import recorded_database
from pgsub.commands.alter.options import AlterOptions
from pgsub.commands.preflight import databases, findings, servers, table_warnings
from pgsub.commands.preflight.findings import Caution
from pgsub.commands.reporter import Reporter
from pgsub.commands.sessions import (
    connect_publisher,
    connect_target,
    target_facts,
    verified_publisher,
    verify_publisher,
)
from pgsub.commands.subscription import definition, password_required
from pgsub.common import conflict_rules
from pgsub.common.connections import conninfo as ci
from pgsub.common.errors import PgsubError, PublisherUnavailable, StateForbids, WrongSystem
from pgsub.common.quoting import named, word
from pgsub.common.subscription import Subscription
from pgsub.publisher import slots
from pgsub.publisher.server_errors import PROMOTE_HINT, standby_lacks_slot
from pgsub.publisher.tables import describe_tables
from pgsub.target.ledger import subscriptions, two_phase_state
from pgsub.target.session import ledger_privileges

_WHERE = """
SELECT s.system_identifier, d.oid, current_user::text, pg_catalog.has_database_privilege(d.oid, 'CREATE')
  FROM pg_catalog.pg_control_system() s, pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database()
"""


@dataclass(slots=True)
class NewConnections:
    """New connection strings: with passwords for this command, and with password files for storage."""

    params: dict[str, dict[str, str]] = field(default_factory=dict, repr=False)
    files: dict[str, Path] = field(default_factory=dict)

    def secret(self, side: str, stored: str) -> str:
        """Return the connection string to use now, ``stored`` if it does not change."""
        return ci.join(self.params[side]) if side in self.params else stored


def new_connections(options: AlterOptions, sub: Subscription) -> NewConnections:
    """Read the new connection strings from the options. Passwords get new files."""
    conns, token = NewConnections(), secrets.token_hex(4)
    if options.connection is not None:
        conns.params["publisher"] = definition.publisher_parameters(options.connection)
    if options.target is not None:
        conns.params["target"] = definition.target_parameters(options.target, options.environment)
    for side, params in conns.params.items():
        if ci.split_password(params)[1] is not None:
            # Not the file in use: workers of the old definition may read it until they have ended.
            conns.files[side] = options.state_dir / "passfiles" / f"{sub.subid}.{token}.{side}"
    return conns


def share_ledger(sub: Subscription, conninfo: str) -> None:
    """Grant the new target's role the use of the ledger if the present role may do so (OWNER TO).

    A role without CREATE on the database could not have made a ledger, so it gets no privileges.

    :param conninfo: the new target. Errors of its connection are left to later steps.
    """
    with (
        contextlib.suppress(PgsubError, psycopg.Error),
        connect_target(sub) as old,
        connect_target(replace(sub, target=conninfo)) as new,
    ):
        (*here, _, _), (*there, role, may_create) = (session.execute(_WHERE).fetchone() or () for session in (old, new))
        if here == there and may_create:
            ledger_privileges.give(old, role)


def check(
    options: AlterOptions,
    session: psycopg.Connection,
    sub: Subscription,
    fields: dict[str, Any],
    conns: NewConnections,
    reporter: Reporter,
) -> None:
    """Check both servers with the new fields. Then alter the slot if ``failover`` changes.

    :param session: a session on the new target.
    :param fields: the changed fields. Fields that depend on the target's role are added.
    """
    if options.target is not None:
        fields |= _new_target(session, sub, reporter)
    if options.target is not None or "on_conflict" in fields:
        servers.check_conflict_rules(session, replace(sub, **fields).on_conflict)
    connection = conns.secret("publisher", sub.connection)
    stored = options.connection is None and password_required.stored(sub, options.state_dir)
    password_required.check(
        session,
        replace(sub, **fields),
        given=options.settings.get("password_required"),
        holds_password=stored or "publisher" in conns.files,
    )
    if options.connection is not None:
        _new_publisher(session, replace(sub, **fields), connection, reporter)
    _warn_of_prepared(options, sub, replace(sub, **fields), connection, reporter)
    if "failover" in fields:
        _alter_slot(session, connection, sub, fields["failover"])


def _warn_of_prepared(
    options: AlterOptions, before: Subscription, after: Subscription, connection: str, reporter: Reporter
) -> None:
    """Warn if the options failover and two_phase come together, before anything is changed."""
    had = before.two_phase != two_phase_state.DISABLED
    prepares = had if options.two_phase is None else options.two_phase
    if not (prepares and after.failover) or (had and before.failover):
        return
    with connect_publisher(after, connection) as source:
        warnings = servers.prepared_at_failover(source)
    findings.report(warnings, reporter, strict=options.strict)


def values_left_out(
    session: psycopg.Connection, sub: Subscription, connection: str, rules: Sequence[str]
) -> list[Caution]:
    """Warn of tables of which updates that win by new rules may leave out values. Nothing is said without a publisher.

    :param connection: the connection string of the publisher.
    """
    known = subscriptions.identity(session, sub.subid).system_identifier is not None
    if not known or not any(conflict_rules.parse(rule).lets_updates_win for rule in rules):
        return []
    names = [(one.schemaname, one.relname) for one in subscriptions.relations(session, sub.subid)]
    try:
        with verified_publisher(session, sub, connection) as source:
            tables = describe_tables(source, names, sub.publications).tables
    except PublisherUnavailable:
        return []
    return list(table_warnings.values_left_out(list(tables.values()), rules))


def _new_target(session: psycopg.Connection, sub: Subscription, reporter: Reporter) -> dict[str, Any]:
    """Check that the new target's ledger has the subscription. It must be the same database."""
    warnings = servers.check_target(session)
    subscriptions.identity(session, sub.subid)
    facts = target_facts(session)
    _check_prepared(session, sub)
    findings.report(warnings, reporter)
    return {"owner": facts["owner"], "unavailable": tuple(w.unavailable for w in warnings if w.unavailable)}


def _check_prepared(session: psycopg.Connection, sub: Subscription) -> None:
    """Check that the new role may finish transactions that the old role prepared."""
    others = sorted({one.owner for one in two_phase_state.prepared(session, sub.subid) if not one.ours})
    if others:
        raise StateForbids(
            "the new target's role cannot finish the subscription's prepared transactions",
            detail=f"They were prepared by role {', '.join(others)}; only that role or a superuser may commit them.",
            hint="Let them be committed or rolled back on the publisher, and let the subscription catch up.",
            sqlstate="42501",
        )


def _new_publisher(session: psycopg.Connection, sub: Subscription, connection: str, reporter: Reporter) -> None:
    """Check that the connection leads to the same publisher, or to a standby that replaced it."""
    if subscriptions.identity(session, sub.subid).system_identifier is None:
        return  # like the server, do not connect a subscription that was never connected
    try:
        verify_publisher(session, sub, connection)
    except WrongSystem as error:
        # guard: a connection is not changed to a server with another history
        if error.elsewhere or not error.diverged:
            raise
        reporter.warning(error.message, error.detail, error.hint)  # it can only continue at the new address
    except PublisherUnavailable as error:
        if not error.standby:
            raise
        reporter.warning(error.message, error.detail, error.hint)  # it is waited for
    if sub.slot_name is None:
        return
    with connect_publisher(sub, connection) as source:
        databases.check_other_database(source, session)
        state, standby = slots.slot_state(source, sub.slot_name), slots.in_recovery(source)
    copied = state is not None and state.synced and state.in_recovery
    if state is None and standby:
        lacks = standby_lacks_slot(sub.slot_name)
        reporter.warning(lacks.message, lacks.detail, named(lacks.hint, sub.name))
    elif copied:
        reporter.warning(
            f'replication slot "{sub.slot_name}" is still synchronized from the primary',
            "The new publisher is a standby that has not been promoted.",
            PROMOTE_HINT,
        )
    elif state is None or state.wal_status == "lost":
        reporter.warning(
            f'replication slot "{sub.slot_name}" {"does not exist" if state is None else "is lost"} on the publisher',
            "Workers will end with an error.",
            f"To make another one, and compare every table:\npgsub reconcile {word(sub.name)}",
        )


def _alter_slot(session: psycopg.Connection, connection: str, sub: Subscription, failover: bool) -> None:
    assert sub.slot_name is not None
    expected = recorded_database(session, sub.subid)
    with connect_publisher(sub, connection, expected=expected, replication=True) as replication:
        if replication.info.server_version < slots.FAILOVER_VERSION:
            detail = "Failover slots require PostgreSQL 17 or newer."
            raise StateForbids("the publisher does not support failover slots", detail=detail, sqlstate="0A000")
        slots.alter_slot(replication, sub.slot_name, failover=failover)
