"""``pgsub reconcile``: replaces a lost slot, and compares tables instead of copying them.

NOTES

A killed command can be repeated. One commit moves apply's position and all tables. Until then the ledger says that a
slot is being made (:mod:`pgsub.target.ledger.maintenance.reconciliation`): apply does not start, and the next command
drops and remakes what this one made. After that commit the launcher has everything that it needs. A command that fails
before it has dropped or made a slot leaves the subscription as it was.

Prepared transactions on the target are rolled back, because the publisher no longer sends their ends. Those that it
committed arrive by comparison. The creation of a slot waits for those on the publisher, so none is on both sides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psycopg

from pgsub.catalog.store import StateStore
from pgsub.commands.preflight import findings, server_limits, tables
from pgsub.commands.reconcile import new_slot
from pgsub.commands.reconcile.diagnosis import Diagnosis, diagnose
from pgsub.commands.refresh import diff, refresh, table_changes
from pgsub.commands.refresh.diff import Plan
from pgsub.commands.reporter import Reporter
from pgsub.commands.serve.synchronize import Service, ServiceOptions, report_adopted
from pgsub.commands.sessions import check_no_switchover, connect_publisher, ledger_session, maintenance
from pgsub.commands.subscription import definition_change, lost_switchover
from pgsub.common import failpoints
from pgsub.common.errors import StateForbids, StateStoreError
from pgsub.common.plural import counted
from pgsub.common.quoting import word
from pgsub.common.subscription import KEEP, Subscription
from pgsub.launcher.error_handling import APPLY
from pgsub.protocol.lsn import format_lsn
from pgsub.publisher import slots
from pgsub.target.ledger import skip, two_phase_state, worker_takeover
from pgsub.target.ledger.maintenance import reconciliation
from pgsub.target.ledger.prepared_xacts import Prepared
from pgsub.target.session import origins
from pgsub.target.session.connect import must_use_password

_ACTION = "reconcile"  #: action in the journal


@dataclass(frozen=True, slots=True)
class ReconcileOptions(ServiceOptions):
    """The options of ``reconcile``.

    :ivar slot_name: the name of the new slot, None for the subscription's.
    :ivar force: make a slot even if nothing is wrong.
    """

    name: str
    state_dir: Path
    slot_name: str | None = None
    force: bool = False
    keep_replaced: int = KEEP
    dry_run: bool = False
    strict: bool = False


@dataclass(slots=True)
class Reconciliation:
    """The outcome of the command, or of a dry run.

    :ivar plan: the changes of tables.
    :ivar prepared: transactions on the target that are rolled back.
    :ivar skips: transactions of the lost stream that should have been skipped.
    :ivar lsn: the position from which apply continues, None before it is known.
    """

    diagnosis: Diagnosis
    plan: Plan
    prepared: Sequence[Prepared]
    skips: tuple[int, ...]
    dry_run: bool
    lsn: int | None = None

    def document(self) -> dict[str, Any]:
        """Return the outcome as JSON."""
        known, position = self.diagnosis, self.diagnosis.position
        names = [{"schemaname": one.schemaname, "relname": one.relname} for one in self.plan.again]
        return {
            "dry_run": self.dry_run,
            "subscription": self.plan.sub.name,
            "reason": known.reason,
            "slot_name": known.slot_name,
            "from": format_lsn(position.furthest),
            "to": None if self.lsn is None else format_lsn(self.lsn),
            "compared": names,
            "added": [{"schemaname": one.schemaname, "relname": one.relname} for one in self.plan.add],
            "removed": [{"schemaname": one.schemaname, "relname": one.relname} for one in self.plan.drop],
            "rolled_back": [one.gid for one in self.prepared],
            "skips_cleared": [format_lsn(lsn) for lsn in self.skips],
            "held_changes_removed": [{"table": name, "changes": changes} for name, changes in self.plan.discarded],
            "warnings": self.plan.found.document()["warnings"],
        }


def reconcile(
    options: ReconcileOptions, *, reporter: Reporter, confirm: Callable[[Reconciliation], None]
) -> Reconciliation:
    """Give a subscription a new slot, and compare its tables with the publisher's.

    :param confirm: called before anything is changed. It may raise an exception to refuse.
    :raises StateForbids: nothing is wrong, or there is an obstacle. Nothing was changed.
    :raises WrongSystem: the server is another publisher.
    :raises PgsubError: see :mod:`pgsub.commands.refresh.table_changes`, or the synchronization ended with an error.
    """
    with StateStore.open(options.state_dir, create=False) as store:
        sub = store.subscription(options.name)
        if options.dry_run:
            with ledger_session(store, sub) as session:
                lost_switchover.check(session, store, sub)
                check_no_switchover(session, store, sub)
                found = _survey(session, sub, options)
            _explain(found, options, reporter)
            table_changes.report_dry_run(found.plan, reporter)
            return found
        with Service(store, options.state_dir, sub, reporter, shared=True) as service:
            opened = ledger_session(store, sub, reporter, options.deadline)
            with opened as session, maintenance(session, store, sub):
                lost_switchover.check(session, store, sub)
                check_no_switchover(session, store, sub)
                begun = _begun(store, sub)
                found = _survey(session, sub, options, force=begun is not None)
                if begun is not None and found.diagnosis.fits:
                    _complete(session, store, found, begun, reporter)
                else:
                    _explain(found, options, reporter)
                    confirm(found)
                    _carry_out(session, store, found, options, reporter)
            _finish(service, store, found, options, reporter)
    return found


def _finish(
    service: Service, store: StateStore, found: Reconciliation, options: ReconcileOptions, reporter: Reporter
) -> None:
    sub = found.plan.sub
    if not sub.enabled:
        reporter.notice(
            f'subscription "{sub.name}" is disabled: its tables are compared once it is enabled',
            f"pgsub enable {word(sub.name)}",
        )
        return
    service.redefined(sub)
    refresh.finish(service, found.plan, options)
    if options.wait:
        report_adopted(store, sub, reporter, found.plan.unsynchronized)


def _begun(store: StateStore, sub: Subscription) -> int | None:
    """Return the journal ID of an earlier command that was killed before it recorded its end, None if there is none."""
    for row in store.journal_rows(sub.subid):
        if row.action == _ACTION:
            return row.id if row.detail.get("outcome") == "begun" else None
    return None


def _complete(
    session: psycopg.Connection, store: StateStore, found: Reconciliation, begun: int, reporter: Reporter
) -> None:
    """Record the result of an earlier command."""
    found.lsn = found.diagnosis.position.furthest
    _record(session, store, found, begun)
    reporter.notice(f'subscription "{found.plan.sub.name}" has its slot already: an earlier command was interrupted')


def _survey(
    session: psycopg.Connection, sub: Subscription, options: ReconcileOptions, *, force: bool = False
) -> Reconciliation:
    """Diagnose the subscription, and check that every table can be compared."""
    must = must_use_password(session, sub)
    with connect_publisher(sub, replication=True, must_use_password=must) as replication:
        diagnosis = diagnose(session, replication, sub, options.slot_name, force=force or options.force)
    with connect_publisher(sub, expected=diagnosis.publisher.database, must_use_password=must) as source:
        for one in tables.missing_publications(source, sub.publications):
            raise StateForbids(one.message, detail=one.detail, hint="Create it again on the publisher.")
        plan = diff.plan(session, source, sub, copy_data=True, adopt=True, everything=True, keep=options.keep_replaced)
        if slots.slot_state(source, diagnosis.slot_name) is None:
            server_limits.check_new_slot(source, diagnosis.slot_name)
    prepared = two_phase_state.prepared(session, sub.subid)
    two_phase_state.check_finishable(prepared)
    skipped = skip.pending(session, sub.subid)
    return Reconciliation(diagnosis, plan, prepared, () if skipped is None else skipped.lsns, options.dry_run)


def _explain(found: Reconciliation, options: ReconcileOptions, reporter: Reporter) -> None:
    """Report the problem and what the new slot loses, besides rows that only the target has."""
    name, diagnosis = found.plan.sub.name, found.diagnosis
    what = "gets another slot" if diagnosis.fits else "cannot continue from its slot"
    reporter.notice(f'subscription "{name}" {what}: {diagnosis.reason}')
    findings.report(found.plan.found.warnings, reporter, strict=options.strict)
    table_changes.warn_of_discarded(found.plan, reporter)
    if found.prepared:
        reporter.warning(
            f"{counted(len(found.prepared), 'prepared transaction')} on the target will be rolled back",
            "The publisher does not send how they ended. The comparison brings what it committed.",
        )
    if found.skips:
        reporter.warning(
            f"{counted(len(found.skips), 'transaction')} that should be skipped will no longer be sent",
            "The comparison brings what the publisher has of them.",
        )


def _carry_out(
    session: psycopg.Connection,
    store: StateStore,
    found: Reconciliation,
    options: ReconcileOptions,
    reporter: Reporter,
) -> None:
    sub, diagnosis = found.plan.sub, found.diagnosis
    detail = {name: value for name, value in found.document().items() if name not in ("dry_run", "warnings", "to")}
    with store.journal_attempt(_ACTION, sub, detail) as attempt:
        failpoints.point("reconcile.journalled")
        # guard: the ledger records a new slot before the old one is touched
        reconciliation.begin(session, sub.subid, diagnosis.slot_name)
        failpoints.point("reconcile.begun")
        # End apply workers of the old slot.
        worker_takeover.take_over(session, sub.subid, worker_takeover.APPLY)
        failpoints.point("reconcile.fenced")
        found.prepared = two_phase_state.prepared(session, sub.subid)
        two_phase_state.roll_back(session, found.prepared)
        failpoints.point("reconcile.rolled_back")
        rolled_back = bool(found.prepared)
        who, found.lsn = new_slot.make(
            session, store, sub, diagnosis, options.deadline, reporter, rolled_back=rolled_back
        )
        moves = partial(reconciliation.move, session, publisher=who, slot_name=diagnosis.slot_name, position=found.lsn)
        table_changes.carry_out(session, found.plan, options.deadline, moves)
    failpoints.point("reconcile.moved")
    origins.advance(session, sub.subid, found.lsn)
    _record(session, store, found, attempt)
    table_changes.report_done(found.plan, reporter)
    reporter.notice(f'subscription "{sub.name}" continues from {format_lsn(found.lsn)} of slot "{diagnosis.slot_name}"')


def _record(session: psycopg.Connection, store: StateStore, found: Reconciliation, attempt: int) -> None:
    """Record the result in the state store. After a killed command the launcher does most of this."""
    sub, subid, lsn = found.plan.sub, found.plan.sub.subid, found.lsn or 0
    skipped, rules = skip.pending(session, subid), skip.pending_rules(session, subid)
    fields: dict[str, Any] = {
        "skip_lsn": skipped.lsn if skipped is not None else 0,
        "skips": skip.shown(skipped, rules),
        "two_phase": two_phase_state.state(session, subid),
    }
    with store.batch():
        store.alter(subid, **fields)
        store.clear_error(subid, APPLY)
        store.put_origin(subid, lsn, None, lsn)
        store.put_prepared(subid, [])
        store.put_slot(subid, None)
        refresh.record(session, found.plan, store)
        store.journal_done(attempt)
    with contextlib.suppress(psycopg.Error, StateStoreError):  # the launcher does this, too
        definition_change.record(session, store, subid)
    found.plan = replace(found.plan, sub=store.subscription(sub.name))
