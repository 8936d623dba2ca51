"""Applies changes row by row and resolves their conflicts by rules.

Sets, COPY and changes applied while they are received stop at a conflict. Their transactions are then replayed here, so
the rules hold for all of them. Rows are tried together inside a savepoint, fewer after a failure, until the conflicting
row is alone. The server's conflict.c only reports conflicts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pgsub.apply.conflicts import conflict
from pgsub.apply.conflicts.conflict import RowConflict
from pgsub.apply.conflicts.conflict_record import ConflictRecord
from pgsub.apply.conflicts.error_context import Place, context
from pgsub.apply.resolve.conflicting_rows import ConflictingRows, RowChanged
from pgsub.apply.resolve.decision_record import Records, SingleChange
from pgsub.apply.resolve.winner import Action, decide
from pgsub.apply.rows.missing_and_origin_differs import locks
from pgsub.apply.rows.set_fallback import SetFallback
from pgsub.apply.rows.table_state_filter import TableStateFilter
from pgsub.apply.rows.writer import TRIES, RowWriter, changed_again
from pgsub.apply.stream.transactions import RemoteTransaction
from pgsub.common import conflict_rules as rules
from pgsub.common import failpoints
from pgsub.common.conflict_rules import Rule
from pgsub.protocol.decoder import decode_change
from pgsub.protocol.messages import Delete, Insert, Update
from pgsub.protocol.reader import filled
from pgsub.target.sql.conflict_search import ConflictingRow, Search
from pgsub.target.sql.pipeline import StatementFailed
from pgsub.target.sql.prepared_statements import DEALLOCATED

#: Maximum number of rows that are tried together.
TOGETHER = 256

_UNIQUE = "23505"
#: Failures after which rows are tried one by one.
RESOLVABLE = (_UNIQUE, DEALLOCATED)
_OF_ROWS = ("22", "23")  #: data_exception, integrity_constraint_violation

Change = tuple[RemoteTransaction, bytes]


class AttemptSize:
    """The number of rows to try together inside a savepoint: fewer after a failure, more after a success."""

    def __init__(self) -> None:
        self.rows = TOGETHER

    def succeeded(self, rows: int) -> None:
        """Note that ``rows`` rows were applied."""
        self.rows = min(TOGETHER, 2 * rows)

    def failed(self, rows: int) -> None:
        """Note that one of ``rows`` rows failed."""
        self.rows = max(1, rows // 4)


class Resolver:
    """The application of changes with conflict resolution.

    :param rows: the session's writer; the caller opens and ends transactions.
    :param changes: decides to which table changes go.
    :param apply: applies a message without rules.
    """

    def __init__(
        self, rows: RowWriter, changes: TableStateFilter, apply: Callable[[RemoteTransaction, bytes], None]
    ) -> None:
        self._connection = rows.connection
        self._rows = rows
        self._relations = rows.relations
        self._subid = rows.relations.subid
        self._filter = changes
        self._apply_unruled = apply
        self._size = AttemptSize()
        self._conflicting_rows = ConflictingRows(rows)
        self._records = Records(rows)

    def begin(self) -> None:
        """Begin a target transaction, and forget the tables, whose indexes may have changed."""
        self._conflicting_rows.begin()

    def run(self, changes: Sequence[Change], between: Callable[[], None]) -> None:
        """Apply row messages in order.

        :param between: called regularly at points where records may be written.
        :raises StatementFailed: no rule decides; the target transaction is aborted.
        :raises PgsubError: a rule stops apply.
        """
        at = 0
        while at < len(changes):
            part = changes[at : at + self._size.rows]
            if len(part) == 1:
                conflicted = self._one(*part[0])
                self._size.rows = 1 if conflicted else 2
            elif self.together(part):
                self._size.succeeded(len(part))
            else:
                self._size.failed(len(part))
                continue
            at += len(part)
            between()

    def together(self, part: Sequence[Change]) -> bool:
        """Apply all messages without rules, or none after the first conflict; return whether they were applied.

        A row that no table accepts may be one that a rule skips: when it is alone, its conflicts are searched first.

        :raises StatementFailed: an error that is not about rows; the target transaction is aborted.
        """
        try:
            with self._rows.undoing():
                for transaction, payload in part:
                    self._apply_unruled(transaction, payload)
        except StatementFailed as failure:
            state = failure.error.sqlstate or ""
            if state not in RESOLVABLE and state[:2] not in _OF_ROWS:
                raise
            return False
        except SetFallback:
            return False
        return True

    def _one(self, transaction: RemoteTransaction, payload: bytes) -> bool:
        """Apply a single change; return whether it had a conflict."""
        message = decode_change(payload, transaction.in_stream)
        assert isinstance(message, Insert | Update | Delete)
        kind = type(message).__name__.upper()
        relation = self._filter.target(transaction, kind, message.relid)
        if relation is None:
            return False
        if isinstance(message, Update):
            # guard: the winner of a conflict brings unchanged large values if the publisher sends them
            message = filled(message)
        new = None if isinstance(message, Delete) else message.new
        old = None if isinstance(message, Insert) else message.old
        change = SingleChange(Place(transaction, kind, relation, new, old), message)
        self._rows.sync()
        self._rows.conflicts.resolving = True
        try:
            self._apply(change)
        finally:
            self._rows.conflicts.resolving = False
        return change.conflicted

    def _apply(self, change: SingleChange) -> None:
        place = change.place
        if place.message_type != "INSERT" and change.relation.target.origins_of:
            lock = locks(place)
            differs, locked = self._rows.written_by_others(place, lock=lock)
            if differs is not None and not self._differing(change, differs):
                return
            if lock and not locked:  # nobody was asked about a row that appears from now on
                # guard: a row whose partition is detached is not missing
                self._rows.conflicts.unrouted.add(place)
                self._rows.sync()
                self._missing(change)
                return
        self._rows.conflicts.missed = False
        self._settle(change)
        if self._rows.conflicts.missed:
            self._missing(change)

    # rows that another origin wrote, and missing rows

    def _decide(self, change: SingleChange, rule: Rule | None, local: Sequence[ConflictingRow]) -> Action:
        return decide(self._connection, self._subid, rule, change.place.transaction.commit_ts, local)

    def _differing(self, change: SingleChange, differs: RowConflict) -> bool:
        """Decide whether to apply a change to a row that another origin wrote."""
        rule = self._relations.rule(change.relation, f"{change.place.message_type.lower()}_origin_differs")
        [differs] = conflict.with_partitions(self._connection, [differs])
        action = self._decide(change, rule, [differs.local] if differs.local is not None else [])
        record, place = differs.record(self._subid), change.place
        self._records.note(change, record, rule, action)
        kept = [] if place.new is None else place.columns(sent=False)
        if kept and action is Action.APPLY:
            record.detail += (
                f"\nThe publisher left out unchanged large values: {', '.join(kept)} stay as they were here."
            )
        return action is Action.APPLY

    def _missing(self, change: SingleChange) -> None:
        rule = self._relations.rule(change.relation, f"{change.place.message_type.lower()}_missing")
        missing = RowConflict.of(change.place)
        if rule is None:
            change.conflicted = True
            self._rows.conflicts.record(missing)
            return
        [missing] = conflict.with_partitions(self._connection, [missing])
        record = missing.record(self._subid)
        action = self._decide(change, rule, [])
        if action is Action.APPLY:
            self._insert_missing(change, record, rule)
        else:
            self._records.note(change, record, rule, action)

    def _insert_missing(self, change: SingleChange, record: ConflictRecord, rule: Rule) -> None:
        """Insert the row of an update if the publisher sent all of it."""
        place = change.place
        kept = place.columns(sent=False)
        if kept:
            error = conflict.stop_error(self._subid, record, place)
            error.detail = (
                f"{record.detail}\nThe rule update_missing=apply_remote cannot insert the row, because the publisher"
                f" left out unchanged large values of {', '.join(kept)}."
            )
            error.hint = conflict.hint("Insert the row on the target", self._relations.subname)
            raise error
        inserting = SingleChange(place._replace(message_type="INSERT", old=None), change.message)
        self._settle(inserting)
        self._records.note(change, record, rule, Action.KEEP if inserting.left else Action.APPLY)

    # existing rows in conflict

    def _settle(self, change: SingleChange) -> None:
        """Insert, update or delete; resolve conflicts with existing rows by their rule."""
        place, relation = change.place, change.relation
        own = relation.target.schema, relation.target.name
        where = None if relation.target.relkind == "p" else own
        searches = place.message_type != "DELETE" and not _EXISTING.isdisjoint(kind for kind, _ in relation.rules)
        failure: StatementFailed | None = None
        for _ in range(TRIES):
            change.pending = None
            found = self._conflicting_rows.search(place, where) if searches and where is not None else None
            if failure is not None and found is not None and _is_fault(failure, found):
                break
            action = self._existing(change, found, where or own)
            if action in (Action.KEEP, Action.SKIP):
                return
            try:
                if found is not None and found.hits:
                    failpoints.point("apply.conflict_decided")
                with self._rows.undoing():
                    self._make(change, found if action is Action.APPLY else None, where)
                return
            except RowChanged:
                # guard: rows that others change again and again stop no subscription
                failure = None  # it was about an earlier version of the rows
                continue
            except StatementFailed as error:
                failure = error
                where = _next_search(error, where, asks=searches and action is not Action.STOP)
        raise failure or changed_again(place)

    def _existing(self, change: SingleChange, found: Search | None, where: tuple[str, str]) -> Action:
        """Decide about existing rows in conflict; record the decision now, or once the change is made."""
        if found is None or not found.hits:
            return Action.APPLY
        place = change.place
        kind = "update_exists" if place.message_type == "UPDATE" and not found.moved else "insert_exists"
        if len(found.hits) > 1:
            kind = "multiple_unique_conflicts"
        rule = self._relations.rule(change.relation, kind)
        same = len({hit.ctid for hit in found.hits}) == 1 and all(hit.identical for hit in found.hits)
        if same and place.message_type == "INSERT":
            rule = self._relations.rule(change.relation, rules.IDENTICAL) or rule
        if rule is None:
            return Action.STOP
        action = self._decide(change, rule, found.hits)
        if action is Action.STOP:
            return action
        record = conflict.new_record(place, kind, *where)
        conflict.add_rows_in_the_way(record, place, found.hits, found)
        record.context = context(self._subid, place)
        change.pending = self._records.resolved(change, record, rule, action)
        if action is not Action.APPLY:
            self._records.add(change, change.pending)
            change.pending, change.left = None, True
        return action

    def _make(self, change: SingleChange, found: Search | None, where: tuple[str, str] | None) -> None:
        """Remove the conflicting rows, and make the change."""
        place = change.place
        became = found is not None and where is not None and self._conflicting_rows.cleared(place, found, where)
        if became:
            self._rows.changes += 1
        else:
            rows = self._rows
            write = {"INSERT": rows.insert_row, "UPDATE": rows.update, "DELETE": rows.delete}[place.message_type]
            write(place)
        self._rows.sync()
        pending, change.pending = change.pending, None
        if pending is not None:
            self._records.add(change, pending)


_EXISTING = frozenset({"insert_exists", "update_exists", "multiple_unique_conflicts", rules.IDENTICAL})


def _is_fault(failure: StatementFailed, found: Search) -> bool:
    """Return whether the index that refused a row is not one that the server checks for conflicts."""
    return failure.error.sqlstate == _UNIQUE and failure.error.diag.constraint_name not in found.indexes


def _next_search(failure: StatementFailed, where: tuple[str, str] | None, *, asks: bool) -> tuple[str, str] | None:
    """Find the table to search for conflicting rows after a change failed.

    :param where: the table that was searched, None for a partitioned table at first.
    :param asks: a rule may decide about existing rows.
    :raises StatementFailed: no rule may decide, or the row is in another table, which a trigger wrote.
    """
    error = failure.error
    if error.sqlstate == DEALLOCATED:
        return where
    at = error.diag.schema_name or "", error.diag.table_name or ""
    if error.sqlstate not in RESOLVABLE or not asks or (where is not None and at != where):
        raise failure
    return at
