"""``pgsub create``: CREATE SUBSCRIPTION. Mirrors CreateSubscription (subscriptioncmds.c)."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import psycopg

from pgsub.catalog.store import StateStore
from pgsub.commands import definition, preflight, registration
from pgsub.commands.definition import CreateOptions, Definition
from pgsub.commands.preflight import Preflight
from pgsub.commands.reporter import Reporter
from pgsub.commands.serve import Service
from pgsub.errors import SubscriptionExists
from pgsub.publisher import connect as publisher
from pgsub.subscription import Subscription

__all__ = ["CreateOptions", "CreateResult", "create"]


@dataclass(frozen=True, slots=True)
class CreateResult:
    """What was created; ``tables`` are qualified names, ``subid`` None where nothing was."""

    subid: int | None
    tables: tuple[str, ...] = ()


def create(options: CreateOptions, *, reporter: Reporter) -> CreateResult:
    """Check everything, register, create the slot, and synchronize unless told to leave that to ``pgsub run``.

    Nothing stays behind a failure before the registration is complete: no slot, no ledger row, no definition.

    :raises SubscriptionExists: unless ``if_not_exists``.
    :raises PgsubError: see :mod:`pgsub.commands.preflight`; later what ended the first synchronization.
    """
    made = definition.resolve(options)
    with StateStore.open(options.state_dir) as store:
        if any(s.name == options.name for s in store.subscriptions()):
            if not options.if_not_exists:
                raise SubscriptionExists(f'subscription "{options.name}" already exists', sqlstate="42710")
            reporter.notice(f'subscription "{options.name}" already exists, skipping')
            return CreateResult(None)
        with Service(store, options.state_dir, made.sub, reporter) as service:
            with registration.passfiles(made) as written:
                tables = _register(options, made, store, reporter)
                if options.dry_run:
                    return CreateResult(None, tables)
                written.clear()
            if options.wait and made.sub.enabled:
                service.synchronize(
                    follow=options.follow, timeout=options.timeout, master=options.master, conf=options.conf
                )
    return CreateResult(made.sub.subid, tables)


def _register(options: CreateOptions, made: Definition, store: StateStore, reporter: Reporter) -> tuple[str, ...]:
    sub = made.sub
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(contextlib.closing(registration.target_session(sub)))
        warnings = preflight.check_target(session)
        sub = _with_target_facts(sub, session)
        found = Preflight()
        replication = None
        if made.connect:
            replication, found = _check_publisher(stack, session, options, made)
        warnings += found.warnings
        if options.strict:
            preflight.enforce(warnings)
        for warned in warnings:
            reporter.warning(warned.message, warned.detail, warned.hint)
        if not made.connect:
            reporter.warning(
                "subscription was created, but is not connected",
                hint="To initiate replication, you must manually create the replication slot,"
                " enable the subscription, and refresh the subscription.",
            )
        if options.dry_run:
            _show_plan(found, reporter)
        else:
            registration.register(session, replication, made, sub, found.tables, store, reporter)
        return tuple(f"{t.remote.schema}.{t.remote.name}" for t in found.tables)


def _check_publisher(
    stack: contextlib.ExitStack, session: psycopg.Connection, options: CreateOptions, made: Definition
) -> tuple[publisher.Connection, Preflight]:
    sub = made.sub
    source = stack.enter_context(contextlib.closing(publisher.connect(sub.connection, application_name=sub.name)))
    leftover = registration.check_no_leftover(session, sub.name, options.state_dir)
    preflight.check_publisher(source, sub, create_slot=made.create_slot and sub.slot_name != leftover)
    replication = stack.enter_context(
        contextlib.closing(publisher.connect(sub.connection, application_name=sub.name, replication=True))
    )
    return replication, preflight.check_tables(source, session, sub, copy_data=made.copy_data)


def _with_target_facts(sub: Subscription, session: psycopg.Connection) -> Subscription:
    row = session.execute(
        "SELECT current_user::text, oid::bigint FROM pg_catalog.pg_database WHERE datname = current_database()"
    ).fetchone()
    assert row is not None
    return replace(sub, owner=row[0], dboid=row[1])


def _show_plan(found: Preflight, reporter: Reporter) -> None:
    for table in found.tables:
        name = f"{table.remote.schema}.{table.remote.name}"
        reporter.notice(f'table "{name}" ({table.remote.bytes} bytes) would be {table.copy}')
