"""Replays skipped changes once: all of a request in one target transaction, or none.

The commit of the data also marks the changes, so a crash leaves both or neither. A conflict that apply would only
report is an error here, after which nothing is changed. Mirrors apply_dispatch (worker.c) for changes that are no
longer in the stream.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from pgsub.common.subscription import Subscription
from pgsub.protocol.encoder import encode
from pgsub.protocol.lsn import covered, format_lsn
from pgsub.protocol.messages import Relation
from pgsub.target.ledger import events, skipped_changes
from pgsub.target.ledger.skipped_changes import SkippedTransaction
from pgsub.target.ledger.subscriptions import table_states


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
    """The filter of tables that still accept skipped changes of one transaction."""

    def __init__(self, connection: psycopg.Connection, subid: int, finish_lsn: int) -> None:
        self._states = table_states(connection, subid)
        self._finish_lsn = finish_lsn
        #: true while the present change was skipped by a sync worker, whose table's srsublsn covers it
        self.of_sync = False

    def admits(self, _remote: Relation, oid: int) -> int | str:
        """Return the oid of the subscribed table, or why its changes must no longer be made."""
        state = self._states.get(oid)
        if state is None or oid == NEVER:
            return "the table is not subscribed"
        if state.srsubstate not in "sr":
            return "the table is being synchronized"
        copied = state.srsublsn is not None and covered(self._finish_lsn, state.srsublsn)
        if copied and not self.of_sync:
            return "the table was copied after that, and has it"
        return oid


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
    executor = Executor(connection, session.relations, set_based=False)
    tables = ReplayFilter(connection, subid, request.finish_lsn)

    def should_apply(remote: Relation, oid: int | None, _finish_lsn: int) -> Decision:
        taken = tables.admits(remote, oid or NEVER)
        if isinstance(taken, str):
            raise StateForbids(
                f'cannot replay changes of relation "{".".join(local_name(remote))}": {taken}',
                detail="Nothing was changed.",
                sqlstate="55000",
            )
        return Decision(taken)

    others: list[RowConflict] = []
    executor.begin(should_apply)
    try:
        with executor.row_by_row():
            for number, (row, relations, change) in enumerate(reader.changes(_read(executor, session, subid, ids))):
                for relation in relations:
                    session.relations.learn(relation)
                tables.of_sync = bool(row.body.get("sync"))
                executor.change(reader.transaction, encode(change))
                if number % skipped_changes.CHUNK == 0:
                    others += _checked(executor.taken(), subid)
            return others + _checked(executor.finish(), subid)
    except PgsubError:
        executor.abandon()
        raise


def _read(
    executor: Executor, session: TargetSession, subid: int, ids: list[int]
) -> Iterator[skipped_changes.SkippedChange]:
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
