"""Replays skipped changes once: all of a request in one target transaction, or none.

The commit of the data also marks the changes, so a crash leaves both or neither. A conflict that apply would only
report is an error here, after which nothing is changed. Mirrors apply_dispatch (worker.c) for changes that are no
longer in the stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import psycopg

from pgsub.apply.conflicts import conflict
from pgsub.apply.conflicts.conflict import Record, RowConflict
from pgsub.apply.execute.executor import Executor
from pgsub.apply.rows.relation_cache import NEVER, local_name
from pgsub.apply.rows.table_state_filter import Decision
from pgsub.apply.rows.worker_sessions import TargetSession, changing_rows
from pgsub.apply.skip.skipped_reader import SkippedReader
from pgsub.apply.stream.transactions import RemoteTransaction
from pgsub.common import failpoints
from pgsub.common.errors import PgsubError, StateForbids, log_text
from pgsub.common.plural import counted
from pgsub.common.quoting import literal
from pgsub.common.subscription import Subscription
from pgsub.protocol.encoder import encode
from pgsub.protocol.lsn import covered, format_lsn
from pgsub.protocol.messages import Relation
from pgsub.target.ledger import events, skipped_changes
from pgsub.target.ledger.skipped_changes import SkippedChange, SkippedTransaction
from pgsub.target.ledger.subscriptions import table_states

_COPIED = "the table was copied after that, and has it"


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """The skipped changes to replay.

    :ivar event: further fields of the event for the launcher: see
        :meth:`pgsub.catalog.conflicts.ConflictCatalog.conflicts_replayed`.
    """

    finish_lsn: int
    kept: SkippedTransaction
    event: dict[str, Any]


class ReplayFilter:
    """The filter of tables that still accept changes that are made later than by apply.

    :param lsn: position of which the changes are, None for skipped changes.
    """

    def __init__(self, connection: psycopg.Connection, subid: int, lsn: int | None = None) -> None:
        self._states = table_states(connection, subid)
        self._lsn = lsn
        self._covered = skipped_changes.covered_by_copies(connection, subid) if lsn is None else {}
        self.subid = subid
        self.change: SkippedChange | None = None  #: the skipped change to decide about
        self.hint: str | None = None  #: what to do about a change that was refused

    def admits(self, _remote: Relation, oid: int) -> int | str:
        """Return the oid of the subscribed table, or why its changes must no longer be made."""
        state = self._states.get(oid)
        if state is None or oid == NEVER:
            return "the table is not subscribed"
        if state.srsubstate not in "sr":
            return "the table is being synchronized"
        if self._lsn is not None and state.srsublsn is not None and covered(self._lsn, state.srsublsn):
            return _COPIED
        # Its finish LSN does not say that: srsublsn covers what a sync worker skipped behind its copy, too.
        copy = self._covered.get(oid)
        if self.change is not None and copy is not None and copy.has_skip(self.change.id):
            self.hint = self._given_up(self.change, copy.skip)
            return _COPIED
        return oid

    def _given_up(self, change: SkippedChange, last: int) -> str:
        place = f"schemaname = {literal(change.schemaname)} AND relname = {literal(change.relname)} AND id <= {last:d}"
        return (
            "Mark what the copy has on the target; changes of other tables can be replayed with --table:\n"
            "UPDATE pgsub.skipped_change SET replayed_at = now()"
            f" WHERE subid = {self.subid:d} AND {place} AND replayed_at IS NULL;"
        )


def replay(sub: Subscription, request: ReplayRequest) -> list[RowConflict]:
    """Apply the changes in order, in one transaction of a new session, and mark them.

    The session has a replication origin of the subscription if possible, so that peers with ``origin = none`` do not
    receive its changes.

    :return: rows that another origin wrote last; they were changed nevertheless, as by apply.
    :raises ApplyError: a conflict, including a missing row, or a fault: nothing was changed.
    :raises StateForbids: another command was faster, or a table must not be changed.
    """
    # rules were considered when it was skipped; now it is applied or fails
    with changing_rows(sub, "replay", "replay changes on the target") as session:
        reader = SkippedReader(session.connection, request.finish_lsn, request.kept)
        found = _apply(session, sub.subid, request, reader)
        _finish(session, sub, request, reader.transaction)
    return found


def _apply(session: TargetSession, subid: int, request: ReplayRequest, reader: SkippedReader) -> list[RowConflict]:
    """Apply the changes and leave the transaction open."""
    connection, ids = session.connection, request.kept.ids
    connection.execute("BEGIN")
    if skipped_changes.mark_replayed(connection, subid, ids) != len(ids):
        raise StateForbids(
            "another command has replayed it meanwhile", detail="Nothing was changed by this one.", sqlstate="55000"
        )
    failpoints.point("replay.taken")
    tables = ReplayFilter(connection, subid)
    executor = Executor(connection, session.relations, set_based=False)
    return make_changes(session, executor, reader, _read(executor, session, subid, ids), tables)


def make_changes(
    session: TargetSession,
    executor: Executor,
    reader: SkippedReader,
    rows: Iterable[SkippedChange],
    tables: ReplayFilter,
) -> list[RowConflict]:
    """Apply changes row by row, and leave the transaction open.

    :param executor: not set-based.
    :param rows: the changes, for ``reader``.
    :return: rows that another origin wrote last.
    :raises ApplyError: a conflict, including a missing row, or a fault.
    :raises StateForbids: a table must not be changed.
    """

    def should_apply(remote: Relation, oid: int | None, _finish_lsn: int) -> Decision:
        taken = tables.admits(remote, oid or NEVER)
        if isinstance(taken, str):
            raise StateForbids(
                f'cannot make changes of relation "{".".join(local_name(remote))}": {taken}',
                detail="Nothing was changed.",
                hint=tables.hint,
                sqlstate="55000",
            )
        return Decision(taken)

    others: list[RowConflict] = []
    executor.begin(should_apply)
    try:
        with executor.row_by_row():
            for number, (row, relations, change) in enumerate(reader.changes(rows)):
                for relation in relations:
                    session.relations.learn(relation)
                tables.change = row
                executor.change(reader.transaction, encode(change))
                if number % skipped_changes.CHUNK == 0:
                    others += _checked(executor.taken(), tables.subid)
            return others + _checked(executor.finish(), tables.subid)
    except PgsubError:
        executor.abandon()
        raise


def _read(executor: Executor, session: TargetSession, subid: int, ids: list[int]) -> Iterator[SkippedChange]:
    for start in range(0, len(ids), skipped_changes.CHUNK):
        executor.wait()
        yield from skipped_changes.read(session.connection, subid, ids[start : start + skipped_changes.CHUNK])


def _checked(records: list[Record], subid: int) -> list[RowConflict]:
    """Return rows that another origin wrote last.

    :raises ApplyError: a row is missing, which apply would only report.
    """
    for one in records:
        # guard: a replay that misses a row changes nothing
        if isinstance(one, RowConflict) and one.local is None:
            raise conflict.stop_error(subid, one.record(subid), one.place)
    return [one for one in records if isinstance(one, RowConflict)]


def _finish(session: TargetSession, sub: Subscription, request: ReplayRequest, transaction: RemoteTransaction) -> None:
    """Commit together with the event for the launcher."""
    connection, lsn = session.connection, format_lsn(request.finish_lsn)
    count = counted(len(request.kept.ids), "skipped change")
    text = f'subscription "{sub.name}" replayed {count} of the transaction finished at {lsn}'
    replayed = {"kind": "replayed", "finish_lsn": lsn, **request.event}
    events.add(connection, sub.subid, events.log_entry("LOG", log_text(text)), replayed)
    if transaction.commit_ts:  # changes skipped by a copy have none
        session.progress.tag(transaction.finish_lsn, transaction.commit_ts)
    failpoints.point("replay.before_commit")
    connection.execute("COMMIT")
    failpoints.point("replay.committed")
