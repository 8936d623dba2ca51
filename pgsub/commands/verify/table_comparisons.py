"""The comparison of a subscription's tables: their descriptions on both servers, and rows with a known reason."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import psycopg

from pgsub.apply import verified_publisher
from pgsub.catalog import conflicts as history
from pgsub.catalog.store import StateStore
from pgsub.commands.verify.result import EQUAL, NOT_COMPARED, UNEQUAL, EarlierRange, TableVerdict, no_difference
from pgsub.commands.verify.resume import EqualBefore
from pgsub.common.connections.exported_snapshot import ExportedSnapshot
from pgsub.common.errors import PgsubError, SchemaFault
from pgsub.common.query import scalar
from pgsub.common.subscription import Subscription
from pgsub.launcher.mirror.event_log import conflict_of
from pgsub.protocol.lsn import covered
from pgsub.publisher import publication, server_errors
from pgsub.publisher.tables import RemoteTable, describe_tables
from pgsub.reconcile import explained_differences
from pgsub.reconcile.comparison import Comparison, sources
from pgsub.reconcile.equality import Values
from pgsub.reconcile.explained_differences import Explanations
from pgsub.reconcile.expressions import ComparedTable, compared, not_readable
from pgsub.reconcile.key_ranges import EqualRanges, RangeComparison, Ranges, first_column
from pgsub.reconcile.point_attempt import Point
from pgsub.reconcile.reading.recorded_rows import CONFLICT, LOCAL, NEW, OLD, Recorded
from pgsub.reconcile.reading.sessions import Progress
from pgsub.reconcile.reading.side import Side, date_order
from pgsub.reconcile.replaced import REPAIRED
from pgsub.reconcile.rows import EXTRA, LEFT_OUT, left_by
from pgsub.target.catalog.relation import describe
from pgsub.target.catalog.table_names import name_of, names_below
from pgsub.target.ledger.skipped_changes import Covered, covered_by_copies
from pgsub.target.ledger.subscriptions import RelationState
from pgsub.target.session.connect import SessionName, open_session, translate
from pgsub.target.sql import resync_truncate

#: A table, the recorded reasons for its rows, and another subscription that writes to it.
_Described = tuple[ComparedTable, Explanations, str | None]
_EVENTS = """
SELECT id, body FROM pgsub.event WHERE subid = %s AND body ->> 'kind' = 'conflict' AND body ->> 'relname' = ANY (%s)
 ORDER BY id DESC
"""
#: What a conflict says about a difference of its row. A kept skipped change is a reason by itself.
_SAYS = {
    history.KEPT: CONFLICT,
    history.SKIPPED: LEFT_OUT,
    **dict.fromkeys((history.APPLIED, history.REPLAYED, REPAIRED)),
}
#: The reason of a difference if the publication leaves out the change that made it.
UNPUBLISHED = "unpublished"
#: The reason of a row that only the target has, if several subscriptions write to the table.
OTHER = "other_subscription"


def publisher_side(session: psycopg.Connection, sub: Subscription, snapshot: ExportedSnapshot) -> Side:
    """Return the publisher's side of a comparison."""
    publisher = verified_publisher.opener(session, sub)
    return Side("publisher", publisher, snapshot, server_errors.translate, date_order(session))


class TableComparisons:
    """The comparisons of one subscription's tables at a point. Parameters: see :func:`~.verify.compare_at`."""

    def __init__(self, session: psycopg.Connection, sub: Subscription, point: Point, store: StateStore) -> None:
        self._sub = sub
        self._store = store
        self._lsn = point.lsn
        order = date_order(session)

        def target() -> psycopg.Connection:
            return open_session(sub, SessionName(sub.subid, "launcher", 0), views=False)

        self.sides = (
            publisher_side(session, sub, point.publisher),
            Side("target", target, point.target, translate, order),
        )
        self._in_utf8 = self._encoding(self.sides[0]) != self._encoding(self.sides[1])
        # operations that are not published, so that the target lacks their effect, by table
        with contextlib.closing(self.sides[0].connect()) as connection:
            self._unpublished = publication.unpublished_operations(connection, sub.publications)

    def _encoding(self, side: Side) -> str:
        with contextlib.closing(side.connect()) as connection, side.translating("read the encoding"):
            return str(scalar(connection, "SHOW server_encoding"))

    def _expected(self, state: RelationState, written_by: str | None) -> dict[str, str]:
        """Return the kinds of differences that are no fault in this table, with the reason.

        :param written_by: another subscription that writes to it.
        """
        found = dict.fromkeys(left_by(self._unpublished.get((state.schemaname, state.relname), ())), UNPUBLISHED)
        # guard: rows that another subscription may have written are neither reported nor replaced
        if written_by is not None:
            found.setdefault(EXTRA, OTHER)
        return found

    def verdict(
        self, comparison: Comparison, state: RelationState, progress: Progress, before: EqualBefore | None
    ) -> TableVerdict:
        """Compare one table, or return why it is not compared.

        :param before: contains what need not be compared. What is found equal is added.
        """
        verdict = TableVerdict(state.schemaname, state.relname, NOT_COMPARED, self._lsn)
        if state.srsubstate != "r":
            verdict.reason = f"it is still being synchronized (state {state.srsubstate})"
        else:
            try:
                self._compare(verdict, comparison, state, progress, before)
            except PgsubError as error:
                verdict.error = error
        if verdict.error is not None:
            verdict.error = no_difference(verdict.error)
            verdict.outcome, verdict.reason = NOT_COMPARED, verdict.error.message
        return verdict

    def _compare(
        self,
        verdict: TableVerdict,
        comparison: Comparison,
        state: RelationState,
        progress: Progress,
        before: EqualBefore | None,
    ) -> None:
        table, explained, verdict.written_by = self._described(comparison, state)
        expected = self._expected(state, verdict.written_by)
        both = sources(table, in_utf8=self._in_utf8)

        def explain(key: int, kind: str, row: Values | None) -> str | None:
            return _reason(explained.reason(key, row), kind, expected)

        if before is None:
            result = comparison.compare(table, both, explain, progress)
        else:
            known = before.of(state, table, self._lsn)
            if known.lsn is not None:
                verdict.outcome, verdict.lsn = EQUAL, known.lsn
                return
            result = RangeComparison(comparison, table, both, known.ranges, explain).run(progress)
            verdict.earlier = [_earlier(table, known.ranges, one) for one in known.ranges.earlier()]
            if result.error is None and not known.ranges.bounds and not sum(result.differences.counts.values()):
                before.keep_table((state.schemaname, state.relname), self._lsn)
        verdict.result, verdict.error = result, result.error
        verdict.outcome = UNEQUAL if result.differences.unexplained else EQUAL

    def _described(self, comparison: Comparison, state: RelationState) -> _Described:
        """Describe a table on both servers."""
        publisher, target = self.sides
        remote = comparison.on(publisher, partial(self._remote, state))
        return comparison.on(target, partial(self._local, state, remote))

    def _remote(self, state: RelationState, connection: psycopg.Connection) -> RemoteTable:
        name = (state.schemaname, state.relname)
        with self.sides[0].seeing(connection, "describe a table"):
            found = describe_tables(connection, [name], self._sub.publications)
        if name in found.faults:
            raise found.faults[name]
        return found.tables[name]

    def _local(self, state: RelationState, remote: RemoteTable, connection: psycopg.Connection) -> _Described:
        known_as = (state.schemaname, state.relname)
        with self.sides[1].seeing(connection, "describe a table"):
            name = name_of(connection, state.srrelid) or known_as
            local = describe(connection, *name)
            if local is None:
                raise SchemaFault(f'table "{".".join(name)}" does not exist on the target')
            table = compared(remote, local)
            if (reason := not_readable(table)) is not None:
                raise SchemaFault(f'table "{table.name}" cannot be compared: {reason}')
            absent = [c.name for c in remote.columns if c.name not in {d.name for d in table.columns}]
            if absent:
                raise SchemaFault(f'table "{table.name}" lacks published columns: {", ".join(absent)}')
            names = list(dict.fromkeys([known_as, name, *names_below(connection, local.oid)]))
            subid, in_utf8 = self._sub.subid, self._in_utf8
            copy = covered_by_copies(connection, subid).get(local.oid, Covered())
            conflicts = self._conflicts(connection, names, copy)
            updated = "update" not in self._unpublished.get(known_as, ())
            explained = explained_differences.explained(
                connection, subid, table, conflicts, names=names, in_utf8=in_utf8, updated=updated, covered=copy
            )
            members = resync_truncate.members(connection, [local.oid])
            other = resync_truncate.other_writer(connection, subid, members)
        return table, explained, None if other is None else other[0]

    def _conflicts(
        self, session: psycopg.Connection, names: Sequence[tuple[str, str]], copy: Covered
    ) -> Iterator[Recorded]:
        """Yield rows of conflicts, the last first, for :mod:`pgsub.reconcile.explained_differences`.

        :param session: a session on the target in a transaction that sees the snapshot. Events that the launcher has
            not moved there are read first, then the recorded ones.
        :param copy: what the copy of the table has.
        """
        subid = self._sub.subid
        events = session.execute(_EVENTS, (subid, [name for _, name in names])).fetchall()
        unheard = [conflict_of(self._sub, event, body) for event, body in events]
        recorded = [row for name in names for row in self._store.conflicts(subid, table=".".join(name))]
        recorded.sort(key=lambda row: row.id, reverse=True)
        for row in itertools.chain(unheard, recorded):
            # guard: what was left out before the copy of a table explains no difference
            if copy.has_event(row.event):
                continue
            of_it = (row.schemaname, row.relname) in names
            # The store may have conflicts of changes after the point.
            later = row.finish_lsn is not None and not covered(row.finish_lsn, self._lsn)
            # A row that already had the publisher's values is no difference.
            local = row.local_conflicts or ()
            same = bool(local) and all(one.get("identical") for one in local)
            if of_it and row.action in _SAYS and not later and not same:
                rows = (NEW, row.remote_tuple), (OLD, row.replica_identity), (LOCAL, row.local_tuple)
                lsn, at = row.finish_lsn or 0, row.remote_commit_ts if row.action == REPAIRED else None
                yield from (Recorded(_SAYS[row.action], of, one, lsn, at) for of, one in rows if one)


def _earlier(table: ComparedTable, ranges: Ranges, one: EqualRanges) -> EarlierRange:
    return EarlierRange(first_column(table), *ranges.between(one.first, one.until), one.lsn, one.rows)


def _reason(known: str | None, kind: str, expected: Mapping[str, str]) -> str | None:
    """Return the known reason of a difference.

    :param known: the recorded reason for the row.
    :param expected: reasons by kind of difference.
    """
    if known not in (None, LEFT_OUT):
        return known
    # A left-out change does not explain a row that only the target has.
    return expected.get(kind, None if kind == EXTRA else known)
