"""``pgsub alter``: ALTER SUBSCRIPTION. Mirrors AlterSubscription and RenameSubscription (subscriptioncmds.c).

A server is contacted only for changes that concern it. The definition is one write of the state store, which a launcher
notices at once. Tables are changed only after the workers of the old definition have ended, because those would copy
new tables by the old publications.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psycopg

from pgsub.catalog.locks import lock_held, subscription_lock
from pgsub.catalog.rows import ServerRow
from pgsub.catalog.store import StateStore
from pgsub.catalog.subscriptions import options as stored_options
from pgsub.commands.alter import apply_workers, connections, option_checks, upgraded_publisher
from pgsub.commands.alter import two_phase as alter_two_phase
from pgsub.commands.alter.connections import NewConnections
from pgsub.commands.alter.hold import hold
from pgsub.commands.alter.options import AlterOptions
from pgsub.commands.preflight import findings, servers
from pgsub.commands.refresh import diff, table_changes
from pgsub.commands.refresh.refresh import finish, record
from pgsub.commands.reporter import Reporter
from pgsub.commands.serve.synchronize import Service
from pgsub.commands.sessions import check_unchanged, ledger_session, maintenance, verified_publisher
from pgsub.commands.status.wait import WaitOptions, wait
from pgsub.commands.subscription import definition, definition_change, passfiles
from pgsub.common import conflict_rules, failpoints
from pgsub.common.connections import conninfo as ci
from pgsub.common.errors import LockHeld, PgsubError, SubscriptionExists, TimeoutExpired
from pgsub.common.quoting import literal, word
from pgsub.common.subscription import Subscription, same_service
from pgsub.protocol.lsn import format_lsn
from pgsub.publisher import connect as publisher
from pgsub.publisher import slots
from pgsub.switchover import journal
from pgsub.target.ledger import definitions, subscriptions, two_phase

_DUPLICATE = "42710"
#: Fields that the journal does not show.
_NOT_SHOWN = ("connection", "target", "generation", "unrefreshed")
#: Seconds within which a launcher must end the workers of the old definition.
LET_GO_SECONDS = 45.0
#: Seconds after which even a launcher that is starting its workers has noticed a change.
NOTICE_SECONDS = 1.0
#: Seconds within which apply must pass the creation of a new publication.
CONFIRM_SECONDS = 30.0


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
            apply_workers.check_free_sessions(sub, fields, reporter, strict=options.strict)
            write = partial(_store, store, sub, fields)
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
        warnings += servers.times_of_prepared(new, enabled=sub.two_phase != two_phase.DISABLED)
    else:
        warnings += servers.times_of_prepared(rules, enabled=options.two_phase)
    findings.report(warnings, reporter, strict=options.strict)


def _store(store: StateStore, sub: Subscription, fields: Mapping[str, Any]) -> None:
    shown = {name: value for name, value in fields.items() if name not in _NOT_SHOWN}
    shown |= dict.fromkeys(fields.keys() & {"connection", "target"}, "changed")
    with store.batch():
        check_unchanged(store, sub)
        store.alter(sub.subid, **fields)
        if fields.get("slot_name", "") is None:
            store.put_slot(sub.subid, None)
        if fields.get("sequences") is False:
            store.put_sequences(sub.subid, [])
        store.journal("alter", sub.subid, fields.get("name", sub.name), shown)


def _alter_with_servers(
    options: AlterOptions, store: StateStore, sub: Subscription, fields: dict[str, Any], reporter: Reporter
) -> None:
    conns = connections.new_connections(options, sub)
    with contextlib.ExitStack() as stack:
        reached = replace(sub, target=conns.secret("target", sub.target))
        connection = conns.secret("publisher", sub.connection)
        if options.target is not None:
            connections.share_ledger(sub, reached.target)
        session = stack.enter_context(ledger_session(reached, reporter, options.deadline))
        stack.enter_context(maintenance(session, store, sub))
        if options.refreshes or fields.keys() & {"name", "slot_name"}:
            journal.check_not_needed(session, sub.subid, sub.name, enabled=sub.enabled)
        if options.publisher_upgraded:
            upgraded_publisher.adopt(session, store, sub, connection, options.state_dir, reporter)
        apply_workers.check_free_sessions(sub, fields, reporter, strict=options.strict, session=session)
        connections.check(options, session, sub, fields, conns, reporter)
        new_rules = [rule for rule in fields.get("on_conflict", ()) if rule not in sub.on_conflict]
        findings.report(
            connections.values_left_out(session, sub, connection, new_rules), reporter, strict=options.strict
        )
        if options.two_phase is not None and option_checks.asks_two_phase(options, sub):
            stack.enter_context(alter_two_phase.exclusive_claim(session, sub, options.state_dir))
            new = replace(sub, **fields)
            fields |= alter_two_phase.alter(
                session, new, connection, options.two_phase, reporter, strict=options.strict
            )
        if options.refreshes:
            _alter_and_refresh(options, session, store, sub, fields, conns, reporter)
            return
        served = store.server(sub.subid)
        with _redefined(session, store, sub, fields, conns):
            if not conns.params or same_service(sub, replace(sub, **fields)):
                return
            try:  # afterwards, others may use or remove the old servers
                _await_old_workers(store, options.state_dir, sub, served)
            except LockHeld:
                reporter.warning(
                    "workers of the old definition may still be running",
                    f"pgsub run did not end them within {LET_GO_SECONDS:.0f} seconds.",
                    f"See what runs:\npgsub status {word(sub.name)}",
                )


def _alter_and_refresh(
    options: AlterOptions,
    session: psycopg.Connection,
    store: StateStore,
    sub: Subscription,
    fields: dict[str, Any],
    conns: NewConnections,
    reporter: Reporter,
) -> None:
    """Write the definition, wait for the end of the old workers, and change the tables."""
    new, copies = replace(sub, **fields), options.copy_data is not False
    with Service(store, options.state_dir, sub, reporter, shared=True) as service:
        if copies:
            two_phase.refuse_copy(session, sub.subid, two_phase.ALTER)
        with verified_publisher(session, new, conns.secret("publisher", sub.connection)) as source:
            wanted = diff.plan(session, source, new, copy_data=copies, named=options.named)
            unconfirmed = _unconfirmed(source, sub, new)
        findings.report(wanted.found.warnings, reporter, strict=options.strict)
        if unconfirmed:
            _pass_creation(service, sub, options, unconfirmed, reporter)
        served = store.server(sub.subid)
        with _redefined(session, store, sub, fields, conns):
            wanted = replace(wanted, sub=store.subscription(fields.get("name", sub.name)))
            if not service.alone and not same_service(sub, wanted.sub):
                _await_old_workers(store, options.state_dir, sub, served)
            try:
                table_changes.carry_out(session, wanted, options.deadline)
            except (psycopg.Error, KeyboardInterrupt):
                reporter.warning(
                    "the publications are changed, but perhaps not the tables",
                    "It is not known whether the target has committed the change.",
                    f"Refresh the subscription:\npgsub refresh {word(wanted.sub.name)}",
                )
                raise
        record(session, wanted, store)
        table_changes.report_done(wanted, reporter)
        service.redefined(wanted.sub)
        session.close()
        finish(service, wanted, options)


def _unconfirmed(source: publisher.Connection, before: Subscription, after: Subscription) -> int:
    """Return the position that apply must pass before new publications are used, 0 if there is none.

    Before 18, the publisher raises an error when it decodes a change from before a publication was created. The error
    is permanent if the slot has not been confirmed past that change.
    """
    added = set(after.publications) - set(before.publications)
    if source.info.server_version >= 180000 or not added or before.slot_name is None:
        return 0
    state = slots.slot_state(source, before.slot_name)
    return state.current_lsn if state and (state.confirmed_flush_lsn or 0) < state.current_lsn else 0


def _pass_creation(
    service: Service, sub: Subscription, options: AlterOptions, position: int, reporter: Reporter
) -> None:
    """Wait until a launcher has passed the position. Its workers confirm their positions when they end."""
    with contextlib.suppress(TimeoutExpired):
        if not service.alone:
            wait(WaitOptions(sub.name, options.state_dir, "lsn", lsn=position, timeout=CONFIRM_SECONDS))
            return
    reporter.warning(
        "the publisher may refuse a publication that is newer than changes still to be applied",
        f"Apply is not known to be past {format_lsn(position)}, and before version 18 such a publication does not exist"
        " for the publisher at older changes.",
        f"If workers end with that error, take the publication away, catch up, and add it again:\n"
        f"pgsub run {word(sub.name)} --until-caught-up",
    )


@contextlib.contextmanager
def _redefined(
    session: psycopg.Connection, store: StateStore, sub: Subscription, fields: dict[str, Any], conns: NewConnections
) -> Iterator[None]:
    """Write the definition, first to the ledger. Undo this if a later step is refused."""
    present = sub
    try:
        for side, params in conns.params.items():
            if side in conns.files:
                ci.store_password(params, conns.files[side])
            name = "connection" if side == "publisher" else "target"
            fields[name] = definition.public(params, conns.files.get(side, Path()))
        _follow(session, sub, replace(sub, **fields))
        failpoints.point("alter.after_ledger")
        _store(store, sub, fields)
        present = replace(sub, **fields)
        with contextlib.suppress(psycopg.Error):  # the launcher does this, too
            definitions.record(session, sub.subid, stored_options(present))
        failpoints.point("alter.after_definition")
        yield
    except PgsubError:  # other errors may come after a change, so the new definition stays
        with contextlib.suppress(PgsubError, psycopg.Error):  # the user must see the original error
            if present is not sub:
                store.alter(sub.subid, **{name: getattr(sub, name) for name in fields})
                present = sub
                definitions.record(session, sub.subid, stored_options(sub))
            _follow(session, replace(sub, **fields), sub)
        raise
    finally:
        passfiles.remove(store.path.parent, sub.subid, present.connection, present.target)


def _follow(session: psycopg.Connection, before: Subscription, after: Subscription) -> None:
    if (before.name, before.slot_name) != (after.name, after.slot_name):
        subscriptions.redefine(session, after.subid, after.name, after.slot_name)


def _await_old_workers(store: StateStore, folder: Path, sub: Subscription, before: ServerRow | None) -> None:
    """Wait until the launcher has ended the workers of the old definition, or nobody serves the subscription.

    :param before: the server's row from before the change. The launcher rewrites it when it restarts the workers.
    """
    lock = subscription_lock(folder, sub.subid)
    began = time.monotonic()
    while lock.holder() is not None:
        now, waited = store.server(sub.subid), time.monotonic() - began
        if now != before and (before is not None or waited > NOTICE_SECONDS):
            return
        if now is None and waited > NOTICE_SECONDS:
            return
        if waited > LET_GO_SECONDS:
            raise lock_held(lock, f'subscription "{sub.name}"')
        time.sleep(0.05)
