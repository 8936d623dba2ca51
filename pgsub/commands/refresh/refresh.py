"""``pgsub refresh``: ALTER SUBSCRIPTION … REFRESH PUBLICATION, and repeated copies of tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psycopg

from pgsub.catalog.rows import RelationRow
from pgsub.catalog.store import StateStore
from pgsub.commands.preflight import findings, revoked_privileges
from pgsub.commands.refresh import diff, table_changes
from pgsub.commands.refresh.diff import Plan
from pgsub.commands.reporter import Reporter
from pgsub.commands.serve.synchronize import Service, ServiceOptions, report_adopted
from pgsub.commands.sessions import check_no_switchover, ledger_session, maintenance, verified_publisher
from pgsub.commands.subscription import lost_switchover
from pgsub.commands.subscription.enable_disable import require_enabled
from pgsub.common.errors import UsageError
from pgsub.common.subscription import KEEP, Subscription
from pgsub.launcher.error_handling import sync_name
from pgsub.publisher import connect as publisher
from pgsub.target.ledger import definitions, subscriptions, two_phase_state


@dataclass(frozen=True, slots=True)
class RefreshOptions(ServiceOptions):
    """The options of ``refresh``."""

    name: str
    state_dir: Path
    copy_data: bool = True
    resync: tuple[str, ...] = ()
    adopt: bool = False
    keep_replaced: int = KEEP
    dry_run: bool = False
    strict: bool = False


def refresh(options: RefreshOptions, *, reporter: Reporter, confirm: Callable[[Plan], None]) -> Plan:
    """Add newly published tables, remove tables no longer published, and copy the named tables again.

    :param confirm: called before tables are emptied or adopted. It may raise an exception to refuse.
    :return: what was done, or with ``dry_run`` would be done.
    :raises UsageError: the options exclude each other.
    :raises StateForbids: the subscription is disabled, or would copy a table from a server that lost its switchover.
        See also :mod:`pgsub.commands.refresh.table_changes`.
    """
    if options.adopt and not options.copy_data:
        raise UsageError("--adopt and --no-copy-data are mutually exclusive options")
    with StateStore.open(options.state_dir, create=False) as store:
        sub = store.subscription(options.name)
        require_enabled(sub, "REFRESH PUBLICATION")
        if options.dry_run:
            with ledger_session(store, sub) as session, verified_publisher(session, sub, sub.connection) as source:
                _check_source(session, store, sub, options)
                wanted = _plan(session, source, sub, options)
                kept = [one for one in subscriptions.relations(session, sub.subid) if one not in wanted.drop]
                wanted.found.warnings += revoked_privileges.lacking(source, session, sub, kept, mode="none")
                findings.report(wanted.found.warnings, reporter, strict=options.strict)
                table_changes.report_dry_run(wanted, reporter)
                return wanted
        with Service(store, options.state_dir, sub, reporter, shared=True) as service:
            opened = ledger_session(store, sub, reporter, options.deadline)
            with opened as session, maintenance(session, store, sub):
                check_no_switchover(session, store, sub)
                _check_source(session, store, sub, options)
                with verified_publisher(session, sub, sub.connection) as source:
                    wanted = _plan(session, source, sub, options)
                findings.report(wanted.found.warnings, reporter, strict=options.strict)
                table_changes.warn_of_discarded(wanted, reporter)
                if wanted.again:
                    confirm(wanted)
                if wanted.changes or sub.unrefreshed or definitions.table_set(session, sub.subid) != sub.table_set:
                    table_changes.carry_out(session, wanted, options.deadline)
                    record(session, wanted, store)
            table_changes.report_done(wanted, reporter)
            finish(service, wanted, options)
            if options.adopt and options.wait:
                report_adopted(store, sub, reporter, wanted.unsynchronized)
    return wanted


def _check_source(session: psycopg.Connection, store: StateStore, sub: Subscription, options: RefreshOptions) -> None:
    # guard: an adoption does not overwrite what only the target of a lost switchover has, without " or options.adopt"
    if options.resync or options.adopt:
        lost_switchover.check(session, store, sub)


def _plan(
    session: psycopg.Connection, source: publisher.Connection, sub: Subscription, options: RefreshOptions
) -> Plan:
    if options.copy_data or options.resync:
        two_phase_state.refuse_copy(session, sub.subid)  # checked again when the tables change
    return diff.plan(
        session,
        source,
        sub,
        copy_data=options.copy_data,
        resync=options.resync,
        adopt=options.adopt,
        keep=options.keep_replaced,
    )


def record(session: psycopg.Connection, wanted: Plan, store: StateStore) -> None:
    """Record the result in the state store, so that commands that wait for tables see new ones."""
    sub = wanted.sub
    table_set = max(sub.table_set, definitions.table_set(session, sub.subid))
    store.alter(sub.subid, unrefreshed=False, table_set=table_set)
    if not wanted.changes:
        return
    rows = subscriptions.relations(session, sub.subid)
    with store.batch():
        for rel in (*wanted.drop, *wanted.again):
            store.clear_error(sub.subid, sync_name(rel.srrelid))
        store.put_relations(
            sub.subid, [RelationRow(r.srrelid, r.srsubstate, r.srsublsn, r.schemaname, r.relname) for r in rows]
        )
        tables = {"added": wanted.add, "removed": wanted.drop, "copied again": wanted.again}
        if wanted.adopt:
            tables["compared"] = tables.pop("copied again")
        names = {what: [f"{r.schemaname}.{r.relname}" for r in found] for what, found in tables.items()}
        store.journal("refresh", sub.subid, sub.name, names)


def finish(service: Service, wanted: Plan, options: ServiceOptions) -> None:
    """Synchronize the new tables, follow the launcher that does, or leave them to it."""
    if options.wait and wanted.unsynchronized:
        service.synchronize(options, tables=frozenset(wanted.unsynchronized))
    elif wanted.changes:
        service.leave()
