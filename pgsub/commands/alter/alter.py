"""``pgsub alter``: ALTER SUBSCRIPTION. Mirrors AlterSubscription and RenameSubscription (subscriptioncmds.c).

A server is contacted only for changes that concern it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import psycopg

from pgsub.catalog.store import StateStore
from pgsub.commands.alter import (
    connections,
    option_checks,
    publications,
    redefinition,
    two_phase,
    upgraded_publisher,
)
from pgsub.commands.alter.hold import hold
from pgsub.commands.alter.options import AlterOptions
from pgsub.commands.preflight import findings, server_limits, servers
from pgsub.commands.preflight.findings import Caution
from pgsub.commands.reporter import Reporter
from pgsub.commands.sessions import check_no_switchover, connect_target, ledger_session, maintenance
from pgsub.commands.subscription import definition_change
from pgsub.common import conflict_rules, server_words
from pgsub.common.errors import LockHeld, PgsubError, SubscriptionExists
from pgsub.common.quoting import literal, word
from pgsub.common.subscription import Subscription, same_service
from pgsub.target.ledger import two_phase_state

_DUPLICATE = "42710"


def alter(options: AlterOptions, *, reporter: Reporter) -> None:
    """Change a subscription, completely or not at all.

    :raises StateForbids: the server would refuse it, too, or the new target does not know the subscription.
    :raises WrongSystem: the new connection leads to another publisher.
    """
    with StateStore.open(options.state_dir, create=False) as store:
        sub = store.subscription(options.name)
        fields = option_checks.resolve(options, sub)
        if options.holds:
            hold(options, store, sub, reporter)
            return
        if "name" in fields and store.find(fields["name"]) is not None:
            raise SubscriptionExists(f'subscription "{fields["name"]}" already exists', sqlstate=_DUPLICATE)
        asks = options.connection is not None or options.target is not None or options.refreshes
        asks = asks or options.publisher_upgraded
        asks = asks or option_checks.asks_two_phase(options, sub)
        asks = asks or bool(conflict_rules.needing_times(fields.get("on_conflict", ())))
        asks = asks or any(conflict_rules.parse(rule).lets_updates_win for rule in fields.get("on_conflict", ()))
        if fields.get("publications", sub.publications) != sub.publications:
            fields |= {"generation": sub.generation + 1, "unrefreshed": options.refreshes}
        _check_rules(options, store, sub, fields, reporter)
        if not asks and not fields.keys() & {"name", "slot_name", "failover", "password_enforced", "password_required"}:
            _check_free_sessions(options, sub, fields, reporter)
            write = partial(redefinition.write, store, sub, fields)
            definition_change.change(store, sub, write, reporter=reporter)
            return
        _alter_with_servers(options, store, sub, fields, reporter)
        if sub.slot_name is not None and fields.get("slot_name", sub.slot_name) != sub.slot_name:
            reporter.notice(
                f'replication slot "{sub.slot_name}" stays on the publisher, and keeps WAL there',
                f"If nothing needs it, run this there:\nSELECT pg_drop_replication_slot({literal(sub.slot_name)});",
            )


def _check_rules(
    options: AlterOptions, store: StateStore, sub: Subscription, fields: Mapping[str, Any], reporter: Reporter
) -> None:
    """Warn of tables that new rules name and that the subscription does not have, and of rules with two_phase."""
    known = {f"{one.schemaname}.{one.relname}" for one in store.relations(sub.subid)}
    rules = fields.get("on_conflict", sub.on_conflict)
    new = [rule for rule in rules if rule not in sub.on_conflict]
    warnings = servers.tables_of_rules(new if known else [], known)
    if options.two_phase is None:
        warnings += servers.times_of_prepared(new, enabled=sub.two_phase != two_phase_state.DISABLED)
    else:
        warnings += servers.times_of_prepared(rules, enabled=options.two_phase)
    findings.report(warnings, reporter, strict=options.strict)


def _check_free_sessions(
    options: AlterOptions,
    sub: Subscription,
    fields: Mapping[str, Any],
    reporter: Reporter,
    session: psycopg.Connection | None = None,
) -> None:
    """Warn if the target has too few free sessions for ``--apply-workers``, or if it cannot be asked.

    :param session: a session on the target, None to open one. A subscription that was never connected is not checked.
    """
    new = replace(sub, **fields)
    if new.apply_workers <= max(sub.apply_workers, 1) or not sub.dboid:
        return
    try:
        with connect_target(new, replica=False) if session is None else contextlib.nullcontext(session) as opened:
            found = list(server_limits.check_apply_workers(opened, new))
    except (PgsubError, psycopg.Error) as error:
        why = error.message if isinstance(error, PgsubError) else server_words.said(error).message
        hint = "What finds no session is tried again, and fewer apply meanwhile."
        found = [Caution("could not check whether the target has room for more sessions", f"{why}.", hint)]
    findings.report(found, reporter, strict=options.strict)


def _alter_with_servers(
    options: AlterOptions, store: StateStore, sub: Subscription, fields: dict[str, Any], reporter: Reporter
) -> None:
    conns = connections.new_connections(options, sub)
    with contextlib.ExitStack() as stack:
        reached = replace(sub, target=conns.secret("target", sub.target))
        connection = conns.secret("publisher", sub.connection)
        if options.target is not None:
            connections.share_ledger(sub, reached.target)
        session = stack.enter_context(ledger_session(store, reached, reporter, options.deadline))
        stack.enter_context(maintenance(session, store, sub))
        if options.refreshes or fields.keys() & {"name", "slot_name"}:
            check_no_switchover(session, store, sub)
        if options.publisher_upgraded:
            upgraded_publisher.adopt(session, store, sub, connection, options.state_dir, reporter)
        _check_free_sessions(options, sub, fields, reporter, session)
        connections.check(options, session, sub, fields, conns, reporter)
        new_rules = [rule for rule in fields.get("on_conflict", ()) if rule not in sub.on_conflict]
        findings.report(
            connections.values_left_out(session, sub, connection, new_rules), reporter, strict=options.strict
        )
        if options.two_phase is not None and option_checks.asks_two_phase(options, sub):
            stack.enter_context(two_phase.exclusive_claim(session, sub, options.state_dir))
            new = replace(sub, **fields)
            fields |= two_phase.alter(session, new, connection, options.two_phase, reporter, strict=options.strict)
        if options.refreshes:
            publications.alter_and_refresh(options, session, store, sub, fields, conns, reporter)
            return
        served = store.server(sub.subid)
        with redefinition.redefined(session, store, sub, fields, conns):
            if not conns.params or same_service(sub, replace(sub, **fields)):
                return
            try:  # afterwards, others may use or remove the old servers
                redefinition.await_old_workers(store, options.state_dir, sub, served)
            except LockHeld:
                reporter.warning(
                    "workers of the old definition may still be running",
                    f"pgsub run did not end them within {redefinition.LET_GO_SECONDS:.0f} seconds.",
                    f"See what runs:\npgsub status {word(sub.name)}",
                )
