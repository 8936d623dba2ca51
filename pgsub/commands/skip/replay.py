"""``pgsub conflicts replay``: applies skipped changes that were kept in pgsub.skipped_change.

The operator names a recorded conflict or a transaction. :mod:`pgsub.apply.skip.replay` applies the changes and marks
them in one transaction of the target. The journal gets an entry before that, and the state store is updated afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psycopg

from pgsub.apply.conflicts.conflict import RowConflict
from pgsub.apply.conflicts.conflict_text import KEPT
from pgsub.apply.preview.finding import Outcome
from pgsub.apply.rows.relation_cache import RelationCache
from pgsub.apply.skip.replay import ReplayFilter, ReplayRequest, replay
from pgsub.apply.skip.skipped_reader import SkippedReader
from pgsub.catalog.conflicts import KEPT as KEPT_LOCAL
from pgsub.catalog.conflicts import REPLAYED, SKIPPED, STOPPED
from pgsub.catalog.rows import ConflictRow
from pgsub.catalog.store import StateStore
from pgsub.commands.reporter import Reporter
from pgsub.commands.sessions import check_no_switchover, ledger_session
from pgsub.commands.skip.preview import Preview, row, simulate
from pgsub.commands.skip.transaction_search import COMPARED
from pgsub.commands.status.conflicts import require_conflict
from pgsub.common import failpoints
from pgsub.common.errors import ApplyError, StateForbids
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.protocol.lsn import format_lsn
from pgsub.target.ledger import skipped_changes
from pgsub.target.ledger.skipped_changes import SkippedTransaction
from pgsub.target.ledger.tables import subscription_tables
from pgsub.target.session import connect as target


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """The options of ``conflicts replay``: the number of a conflict, or a transaction and perhaps its table."""

    name: str
    state_dir: Path
    number: int | None = None
    lsn: int = 0
    table: str | None = None
    dry_run: bool = False

    @property
    def words(self) -> str:
        """The choice as command-line arguments."""
        if self.number is not None:
            return str(self.number)
        return f"--lsn {format_lsn(self.lsn)}" + (f" --table {word(self.table)}" if self.table else "")


@dataclass(slots=True)
class Replay:
    """The changes that are or were replayed.

    :ivar preview: the effect of a dry run. It counts changes that would make the replay fail in ``refused``.
    """

    name: str
    request: ReplayRequest
    dry_run: bool
    preview: Preview = field(default_factory=Preview)
    refused: int = 0

    @property
    def kept(self) -> SkippedTransaction:
        """The kept changes."""
        return self.request.kept


def conflicts_replay(options: ReplayOptions, *, reporter: Reporter, confirm: Callable[[Replay], None]) -> Replay:
    """Apply what was left out, or with ``dry_run`` find out the effect.

    :param confirm: called before anything is changed. It may raise an exception to refuse.
    :raises StateForbids: no change is kept, it was already replayed, or its table has changed.
    :raises ApplyError: there is a conflict. Nothing was changed.
    """
    with StateStore.open(options.state_dir, create=False) as store:
        sub = store.subscription(options.name)
        conflict = None if options.number is None else require_conflict(store, options.name, options.number)
        with ledger_session(store, sub, reporter) as session:
            found = Replay(sub.name, _request(session, store, sub, options, conflict), options.dry_run)
            if options.dry_run:
                _look(session, sub, found)
                return found
            confirm(found)
            with subscription_tables.maintenance(session, sub.subid, sub.name):
                check_no_switchover(session, store, sub)
                for other in _replay(store, sub, found, options):
                    body = other.body(sub.subid)
                    reporter.warning(str(body["message"]), detail=str(body["detail"]))
    return found


def _request(
    session: psycopg.Connection,
    store: StateStore,
    sub: Subscription,
    options: ReplayOptions,
    conflict: ConflictRow | None,
) -> ReplayRequest:
    if conflict is None:
        kept = skipped_changes.of_transaction(session, sub.subid, options.lsn, table=options.table)
        request = ReplayRequest(options.lsn, kept, {"table": options.table}) if kept is not None else None
    else:
        request = _of_conflict(session, sub, conflict)
    if request is None:
        raise _nothing(options)
    if not request.kept.ids:
        _record(store, sub, request)  # an earlier replay may have been killed before this
        raise StateForbids(
            f"the changes were already replayed at {request.kept.last_replayed_at}",
            detail="What was left out is applied once.",
            sqlstate="55000",
        )
    return request


def _nothing(options: ReplayOptions) -> StateForbids:
    where = "table pgsub.skipped_change of the target"
    if options.number is not None:
        return StateForbids(
            f"nothing is kept of conflict {options.number}",
            detail=f"Its change is not in {where}; of what origin-advance leaves out, and of changes that are skipped"
            " because their row is missing, only the record is kept.",
            hint=f"See its record.\npgsub conflicts show {word(options.name)} {options.number}",
        )
    of = f' on table "{options.table}"' if options.table else ""
    return StateForbids(
        f"nothing is kept of a transaction finished at {format_lsn(options.lsn)}{of}",
        detail=f"Changes that were left out are in {where}, with the finish LSN of their transaction.",
        hint=f"See what was skipped.\npgsub conflicts list {word(options.name)}",
    )


_BECAME = {STOPPED: "still stops apply", KEPT_LOCAL: "was resolved by a rule that keeps what is on the target"}


def _of_conflict(session: psycopg.Connection, sub: Subscription, conflict: ConflictRow) -> ReplayRequest | None:
    """Find the kept change of a conflict by its record, or by its values if a whole transaction was skipped.

    :raises StateForbids: the change was not skipped, or several kept changes have its values.
    """
    if conflict.action not in (SKIPPED, REPLAYED):
        stopped = conflict.action == STOPPED
        raise StateForbids(
            f"conflict {conflict.id} was not skipped: it {_BECAME.get(conflict.action, 'was applied')}",
            detail="Only what was left out can be replayed.",
            hint=f"See what can be done.\npgsub status {word(sub.name)} --runbook" if stopped else None,
            sqlstate="55000",
        )
    lsn = conflict.finish_lsn
    if lsn is None or (conflict.skipped_ref is None and conflict.worker is None):
        return None
    if conflict.skipped_ref is not None:
        ids = skipped_changes.by_ref(session, sub.subid, lsn, conflict.skipped_ref)
    else:
        ids = _by_content(session, sub.subid, lsn, conflict)
    if len(ids) > 1:
        raise StateForbids(
            f"any of {len(ids)} changes that are kept may be that of conflict {conflict.id}",
            detail="The whole transaction was skipped, and they have the same values.",
            hint="Replay all that is kept of the transaction:\n"
            f"pgsub conflicts replay {word(sub.name)} --lsn {format_lsn(lsn)}",
        )
    kept = skipped_changes.of_transaction(session, sub.subid, lsn, ids=ids) if ids else None
    return None if kept is None else ReplayRequest(lsn, kept, {"conflict": conflict.id})


def _by_content(session: psycopg.Connection, subid: int, lsn: int, conflict: ConflictRow) -> list[int]:
    operation = "DELETE" if conflict.remote_tuple is None else "UPDATE" if conflict.replica_identity else "INSERT"
    values: dict[str, Any] = conflict.remote_tuple or conflict.replica_identity or {}
    whole = {name: value for name, value in values.items() if value is None or len(value) <= KEPT}
    table = (conflict.schemaname or "", conflict.relname or "")
    return skipped_changes.by_content(session, subid, lsn, table, operation, whole)


def _look(session: psycopg.Connection, sub: Subscription, found: Replay) -> None:
    request, ids = found.request, found.kept.ids
    tables, revival = ReplayFilter(session, sub.subid), SkippedReader(session, request.finish_lsn, request.kept)
    cache = RelationCache(session, replace(sub, on_conflict=()), replica=target.is_replica(session))
    with simulate(session, sub, cache, tables.admits) as comparison:
        for row, relations, change in revival.changes(skipped_changes.read(session, sub.subid, ids)):
            if found.preview.changes >= COMPARED:
                found.preview.not_compared += 1
                continue
            tables.change = row
            for relation in relations:
                comparison.learn(relation)
            for finding in comparison.take(change):
                found.preview.add(finding)
                applied = finding.outcome in (Outcome.WOULD_APPLY, Outcome.IDENTICAL)
                found.refused += not applied or finding.conflict is not None


def _replay(store: StateStore, sub: Subscription, found: Replay, options: ReplayOptions) -> list[RowConflict]:
    """Replay the changes. The journal gets an entry first, which remains after a crash."""
    request = found.request
    detail = {"finish_lsn": format_lsn(request.finish_lsn), "changes": len(request.kept.ids), **request.event}
    with store.journal_attempt("conflicts replay", sub, detail) as attempt:
        failpoints.point("replay.journalled")
        try:
            others = replay(sub, request)
        except ApplyError as error:
            if error.conflict is not None or error.hint is None:
                error.hint = _hint(options, found)
            raise
    with store.batch():
        _record(store, sub, request)
        store.journal_done(attempt)
    return others


def _record(store: StateStore, sub: Subscription, request: ReplayRequest) -> None:
    event = request.event
    store.conflicts_replayed(sub.subid, request.finish_lsn, event.get("conflict"), event.get("table"))


def _hint(options: ReplayOptions, found: Replay) -> str:
    text = "Nothing was changed. Correct the row on the target and replay again"
    ids = found.kept.ids
    if len(ids) == 1:
        text += ", or give the change up for good there:\n"
        text += f"UPDATE pgsub.skipped_change SET replayed_at = now() WHERE id = {ids[0]:d};"
    else:
        text += ". To see the outcome of each change:\n"
        text += f"pgsub conflicts replay {word(options.name)} {options.words} --dry-run"
    return text


def document(found: Replay) -> dict[str, Any]:
    """Return a replay as JSON."""
    shown: dict[str, Any] = {
        "subscription": found.name,
        "dry_run": found.dry_run,
        "finish_lsn": format_lsn(found.request.finish_lsn),
        "xid": found.kept.xid,
        "changes": len(found.kept.ids),
        "replayed_before": found.kept.replayed,
        "tables": [
            {"schemaname": schema, "relname": name, "operation": operation, "changes": count}
            for (schema, name, operation), count in found.kept.totals.items()
        ],
    }
    if found.dry_run:
        seen = found.preview
        shown |= {
            "refused": found.refused,
            "not_compared": seen.not_compared,
            "rows": [row(one) for one in seen.findings],
            "rows_omitted": seen.omitted,
        }
    return shown
