"""``pgsub origin-advance``: pg_replication_origin_advance of the server's runbook, with a preview of what is lost.

The ledger is changed first, under a new epoch, then the native origin and the state store. Only the ledger matters, so
after a crash the position is the old or the new one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from pgsub.apply.preview.slot_reader import Change, Ended, SlotReader
from pgsub.apply.rows.relation_cache import local_name
from pgsub.apply.stream.transactions import Kind, RemoteTransaction
from pgsub.catalog.conflicts import SKIPPED
from pgsub.catalog.store import StateStore
from pgsub.commands.alter.two_phase import exclusive_claim
from pgsub.commands.reporter import Reporter
from pgsub.commands.sessions import ledger_session
from pgsub.commands.skip.preview import transaction
from pgsub.commands.skip.transaction_search import read_from
from pgsub.commands.subscription.enable_disable import require_disabled
from pgsub.common import failpoints
from pgsub.common.errors import StateForbids
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.launcher.error_handling import APPLY
from pgsub.protocol.lsn import covered, format_lsn
from pgsub.protocol.messages import Delete, Insert, Relation, Truncate, Update
from pgsub.target.ledger import subscriptions, two_phase_state
from pgsub.target.ledger.maintenance.origin_advance import Position, advance, position
from pgsub.target.ledger.tables import subscription_tables
from pgsub.target.ledger.worker_takeover import Claim
from pgsub.target.session import origins

OPERATIONS = ("insert", "update", "delete", "truncate")


@dataclass(slots=True)
class SkippedRange:
    """The transactions between the present position and the wanted one.

    :ivar bytes: size of what the publisher would send for them.
    :ivar tables: number of changes that would not be applied, by table and operation.
    :ivar first: the first transaction that would not be applied. ``last`` is the last one.
    :ivar following: the first transaction that would still be applied, None if there is none yet.
    :ivar synchronizing: tables whose sync workers apply their part of the range.
    """

    name: str
    old: Position
    to: int
    transactions: int = 0
    prepared: int = 0
    bytes: int = 0
    tables: dict[tuple[str, str], dict[str, int]] = field(default_factory=dict)
    first: RemoteTransaction | None = None
    last: RemoteTransaction | None = None
    following: RemoteTransaction | None = None
    synchronizing: tuple[tuple[str, str], ...] = ()

    @property
    def changes(self) -> int:
        """The total number of changes."""
        return sum(sum(table.values()) for table in self.tables.values())

    @property
    def inside(self) -> RemoteTransaction | None:
        """The transaction that contains the new position. It is still applied completely."""
        following = self.following
        return following if following is not None and following.begin_lsn < self.to else None


def origin_advance(
    folder: Path,
    name: str,
    lsn: int,
    *,
    preview: bool = False,
    reporter: Reporter,
    confirm: Callable[[SkippedRange], None],
) -> SkippedRange:
    """Advance the position past transactions that must never be applied. With ``preview``, change nothing.

    :param confirm: called before anything is changed. It may raise an exception to refuse.
    :raises StateForbids: the subscription is enabled; the position is backwards, beyond the publisher's WAL, or past
        the end of a prepared transaction.
    """
    with StateStore.open(folder, create=False) as store:
        sub = store.subscription(name)
        if not preview:
            require_disabled(sub, "cannot advance the replication origin of an enabled subscription")
        with ledger_session(store, sub, reporter) as session:
            found = survey(session, sub, lsn)
            _explain(found, reporter)
            if preview:
                return found
            if found.to == found.old.furthest:
                _complete(store, sub, found)
                return found
            confirm(found)
            with (
                subscription_tables.maintenance(session, sub.subid, sub.name),
                exclusive_claim(session, sub, folder, "advance the replication origin") as claim,
            ):
                _advance(session, store, sub, found, claim)
        reporter.notice(f"apply continues from {format_lsn(found.to)} once the subscription is enabled")
    return found


def _advance(
    session: psycopg.Connection, store: StateStore, sub: Subscription, found: SkippedRange, claim: Claim
) -> None:
    """Advance the positions. The journal records them first, so a crash leaves an entry."""
    old, counts = found.old, {"transactions": found.transactions, "changes": found.changes}
    positions = {"from": old.furthest, "remote_lsn": old.remote_lsn, "to": found.to}
    entry = {**{name: format_lsn(lsn) for name, lsn in positions.items()}, **counts}
    with store.journal_attempt("origin-advance", sub, entry) as attempt:
        failpoints.point("advance.before_ledger")
        advance(session, claim, found.old, found.to)
    failpoints.point("advance.after_ledger")
    origins.advance(session, sub.subid, found.to)
    failpoints.point("advance.after_origin")
    with store.batch():
        _record(store, sub, found)
        store.journal_done(attempt)


def survey(session: psycopg.Connection, sub: Subscription, to: int) -> SkippedRange:
    """Read the transactions that would not be applied.

    :raises StateForbids: see :func:`origin_advance`.
    """
    found = SkippedRange(sub.name, position(session, sub.subid), to)
    if to < found.old.furthest:
        raise StateForbids(
            f"the replication origin cannot be moved backwards to {format_lsn(to)}",
            detail=f"The subscription is at {format_lsn(found.old.furthest)};"
            " what came before is applied, and the publisher does not send it again.",
            sqlstate="22023",
        )
    found.synchronizing = tuple(
        (r.schemaname, r.relname) for r in subscriptions.relations(session, sub.subid) if r.srsubstate in "idf"
    )
    if to > found.old.furthest:
        prepared = {one.xid: one.gid for one in two_phase_state.pending(session, sub.subid)}
        with read_from(session, sub, found.old.remote_lsn) as reading:
            if to > reading.flush_lsn:
                raise StateForbids(
                    f"the replication origin cannot be moved beyond the publisher's WAL to {format_lsn(to)}",
                    detail=f"The publisher's WAL ends at {format_lsn(reading.flush_lsn)}.",
                    sqlstate="22023",
                )
            _read(reading, found, prepared)
    return found


def _read(reading: SlotReader, found: SkippedRange, prepared: dict[int, str]) -> None:
    names: dict[int, tuple[str, str]] = {}
    for step in reading.steps():
        match step:
            case RemoteTransaction():
                if not covered(step.finish_lsn, found.to):
                    found.following = step
                    return
                _count(step, found, prepared)
            case Change():
                _change(step, found, names)
            case Ended():
                found.bytes += step.transaction.size


def _count(header: RemoteTransaction, found: SkippedRange, prepared: dict[int, str]) -> None:
    if header.kind in (Kind.COMMIT_PREPARED, Kind.ROLLBACK_PREPARED):
        if header.xid in prepared:
            raise StateForbids(
                f"the replication origin cannot be moved over the {header.kind.value} of a transaction that is prepared"
                " on the target",
                detail=f'"{prepared[header.xid]}" would stay prepared for ever, and hold its locks;'
                f" the publisher ended it at {format_lsn(header.finish_lsn)}.",
                hint=f"Let apply get there, or advance to {format_lsn(header.finish_lsn)} first and let it apply that.",
                sqlstate="55000",
            )
        return
    if header.xid in prepared:
        return  # sent again, because the copy of the slot has an older state
    found.transactions += 1
    found.prepared += header.kind is Kind.PREPARE
    found.first, found.last = found.first or header, header


def _change(change: Change, found: SkippedRange, names: dict[int, tuple[str, str]]) -> None:
    message = change.message
    relids: Sequence[int] = ()
    if isinstance(message, Relation):
        names[message.relid] = local_name(message)
    elif isinstance(message, Truncate):
        relids = message.relids
    elif isinstance(message, Insert | Update | Delete):
        relids = (message.relid,)
    for relid in relids:
        table = found.tables.setdefault(names.get(relid, ("", str(relid))), dict.fromkeys(OPERATIONS, 0))
        table[type(message).__name__.lower()] += 1


def _explain(found: SkippedRange, reporter: Reporter) -> None:
    """Report common mistakes. The LSN of the server's runbook is the finish LSN plus one."""
    to, inside, last = format_lsn(found.to), found.inside, found.last
    if found.to == found.old.furthest:
        reporter.notice(f"the subscription is at {to} already")
    elif inside is not None:
        beyond = format_lsn(inside.finish_lsn + 1)
        reporter.warning(
            f"{to} lies inside transaction {inside.xid}, which will still be applied, whole",
            detail=f"It begins at {format_lsn(inside.begin_lsn)} and finishes at {format_lsn(inside.finish_lsn)};"
            " what finishes at a position or behind it is applied.",
            hint="To leave it out too, give its finish LSN plus one:\n"
            f"pgsub origin-advance {word(found.name)} {beyond}",
        )
    if found.prepared:
        reporter.warning(
            f"{found.prepared} of the transactions that are left out were prepared",
            detail="Where one is committed behind the new position, its COMMIT PREPARED finds nothing to commit.",
        )
    if inside is None and last is not None and found.to == last.finish_lsn + 1:
        reporter.notice(f"{to} is the finish LSN of transaction {last.xid} plus one: it is the last that is left out")


def _complete(store: StateStore, sub: Subscription, found: SkippedRange) -> None:
    """Record the result of an earlier command that was killed before it did."""
    to = format_lsn(found.to)
    for row in store.journal_rows(sub.subid):
        if (row.action, row.detail.get("outcome"), row.detail.get("to")) == ("origin-advance", "begun", to):
            with store.batch():
                _record(store, sub, found)
                store.journal_done(row.id)


def _record(store: StateStore, sub: Subscription, found: SkippedRange) -> None:
    """Copy the ledger's state to the state store. The ledger's event informs the launcher."""
    with store.batch():
        store.put_origin(sub.subid, found.to, None)
        for error in store.errors(sub.subid):
            if error.worker == APPLY and error.finish_lsn and covered(error.finish_lsn, found.to):
                store.clear_error(sub.subid, APPLY)
        store.conflicts_passed(sub.subid, APPLY, found.to, SKIPPED)


def document(found: SkippedRange) -> dict[str, Any]:
    """Return the survey as JSON."""
    inside = found.inside
    return {
        "subscription": found.name,
        "from": format_lsn(found.old.furthest),
        "to": format_lsn(found.to),
        "transactions": found.transactions,
        "prepared": found.prepared,
        "changes": found.changes,
        "bytes": found.bytes,
        "wal_bytes": found.to - found.old.furthest,
        "tables": [{"schemaname": s, "relname": n, **counts} for (s, n), counts in sorted(found.tables.items())],
        "first": transaction(found.first) if found.first else None,
        "last": transaction(found.last) if found.last else None,
        "inside": transaction(inside) if inside else None,
        "synchronizing": [f"{schema}.{name}" for schema, name in found.synchronizing],
    }
