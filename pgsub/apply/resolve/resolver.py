"""Changes one by one, their conflicts resolved by rules: wherever apply met one, the changes come here in the end.

What is quick (sets, COPY, changes applied while they arrive) ends at a conflict, and its transactions are replayed row
by row; so the rules hold whatever way was tried first. Rows are tried together inside a savepoint, fewer after one that
failed, until it is alone. Goes beyond the server, whose conflict.c only reports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import psycopg

from pgsub.apply.conflicts import conflict
from pgsub.apply.conflicts.conflict import OtherOrigin, Place
from pgsub.apply.conflicts.record import ConflictRecord
from pgsub.apply.resolve import conflicting_rows
from pgsub.apply.resolve.conflicting_rows import Moved, Obstacles
from pgsub.apply.resolve.policy import Verdict
from pgsub.apply.resolve.rules import Case, Rulings
from pgsub.apply.rows.relation_map import RelationCache
from pgsub.apply.rows.set_fallback import Deviation
from pgsub.apply.rows.writer import RowWriter
from pgsub.apply.stream.transactions import RemoteTransaction
from pgsub.common import conflict_rules as rules
from pgsub.common.errors import TargetUnavailable
from pgsub.protocol.decoder import decode_change
from pgsub.protocol.messages import Delete, Insert, Update
from pgsub.target.catalog.mapping import RelationMap
from pgsub.target.sql.conflict_search import Search
from pgsub.target.sql.pipeline import StatementFailed

#: Rows that are tried together at most.
TOGETHER = 256
#: How often a row is looked at anew where others change rows in its way meanwhile.
TRIES = 10

_UNIQUE = "23505"
_DEALLOCATED = "26000"  #: no fault of a row: psycopg took away what was prepared
#: Failures after which rows are looked at one by one.
RESOLVABLE = (_UNIQUE, _DEALLOCATED)
_OF_ROWS = ("22", "23")  #: data_exception, integrity_constraint_violation
_UNCHANGED = ord("u")

Change = tuple[RemoteTransaction, bytes]


class Changes(Protocol):
    """What makes a change as if there were no rules: :class:`pgsub.apply.execute.dispatch.Dispatch`."""

    def row(self, transaction: RemoteTransaction, payload: bytes) -> None:
        """A message as it came."""

    def target(self, transaction: RemoteTransaction, message_type: str, relid: int) -> RelationMap | None:
        """Where a change goes; None: it is left out."""


class Resolver:
    """Of one executor.

    :param connection: the session; the caller opens and ends transactions.
    :param rows: of that session.
    :param dispatch: applies a change as if there were no rules.
    """

    def __init__(
        self,
        connection: psycopg.Connection,
        rows: RowWriter,
        relations: RelationCache,
        dispatch: Changes,
    ) -> None:
        self._connection = connection
        self._rows = rows
        self._relations = relations
        self._subid = relations.subid
        self._dispatch = dispatch
        self._together = TOGETHER
        self._obstacles = Obstacles(connection)
        self._rulings = Rulings(connection, rows, relations)

    def begin(self) -> None:
        """A target transaction was opened: tables may have other indexes now."""
        self._obstacles.begin()
        self._rulings.begin()

    def run(self, changes: Sequence[Change], between: Callable[[], None]) -> None:
        """Apply row messages in their order.

        :param between: called now and then, where records may be written.
        :raises StatementFailed: no rule says what is to be done; the target transaction is aborted.
        :raises PgsubError: a rule makes it stop.
        """
        at = 0
        while at < len(changes):
            part = changes[at : at + self._together]
            if len(part) == 1:
                met = self._one(*part[0])
                self._together = 1 if met else 2
            elif self.together(part):
                self._together = min(TOGETHER, 2 * len(part))
            else:
                self._together = max(1, len(part) // 4)
                continue
            at += len(part)
            between()

    def together(self, part: Sequence[Change]) -> bool:
        """Apply all of them as if there were no rules, or, where they meet anything, none.

        A row that no table would take may be one that a rule leaves out: alone it is looked at before it is tried.

        :raises StatementFailed: it is nothing that has to do with the rows; the target transaction is aborted.
        """
        try:
            with self._rows.undoing():
                for transaction, payload in part:
                    self._dispatch.row(transaction, payload)
        except StatementFailed as failure:
            state = failure.error.sqlstate or ""
            if state not in RESOLVABLE and state[:2] not in _OF_ROWS:
                raise
            return False
        except Deviation:
            return False
        return True

    def _one(self, transaction: RemoteTransaction, payload: bytes) -> bool:
        """A change by itself; whether it met a conflict."""
        message = decode_change(payload, transaction.in_stream)
        assert isinstance(message, Insert | Update | Delete)
        kind = type(message).__name__.upper()
        relation = self._dispatch.target(transaction, kind, message.relid)
        if relation is None:
            return False
        new = None if isinstance(message, Delete) else message.new
        old = None if isinstance(message, Insert) else message.old
        case = Case(Place(transaction, kind, relation, new, old), message)
        self._rows.sync()
        self._rows.resolving = True
        try:
            self._change(case)
        finally:
            self._rows.resolving = False
        return case.met

    def _change(self, case: Case) -> None:
        place = case.place
        assert place.relation is not None
        if place.message_type != "INSERT" and place.relation.target.origins_of:
            ruled = case.rule(f"{place.message_type.lower()}_origin_differs") is not None
            differs = self._rows.written_by_others(place, lock=ruled)
            if differs is not None and not self._differing(case, differs):
                return
        self._rows.missed = False
        self._settle(case)
        if self._rows.missed:
            self._rows.missed = False
            self._missing(case)

    # rows that somebody else wrote, and rows that are not there

    def _differing(self, case: Case, differs: OtherOrigin) -> bool:
        """Whether the change is to be made."""
        how = self._rulings.rule(case, f"{case.place.message_type.lower()}_origin_differs")
        [differs] = conflict.with_leaves(self._connection, [differs])
        record = differs.record(self._subid)
        verdict = self._rulings.decide(how or rules.APPLY_REMOTE, case, [differs.local])
        self._rulings.note(case, record, how, verdict)
        return verdict is Verdict.APPLY

    def _missing(self, case: Case) -> None:
        place = case.place
        how = self._rulings.rule(case, f"{place.message_type.lower()}_missing")
        missing = conflict.missing_row(place)
        if how is None:
            case.met = True
            self._rows.records.append((self._rows.depth, missing))
            return
        [missing] = conflict.with_leaves(self._connection, [missing])
        record = missing.record(self._subid)
        verdict = self._rulings.decide(how, case, [])
        if verdict is Verdict.APPLY:
            self._insert_missing(case, record, how)
        else:
            self._rulings.note(case, record, how, verdict)

    def _insert_missing(self, case: Case, record: ConflictRecord, how: str) -> None:
        """The row of an update is inserted, where the publisher sent all of it."""
        place = case.place
        assert place.new is not None and place.relation is not None
        kept = [c.name for i, c in enumerate(place.relation.columns) if place.new.kinds[i] == _UNCHANGED]
        if kept:
            error = conflict.stopped(self._subid, record, place)
            error.detail = (
                f"{record.detail}\nThe rule update_missing=apply_remote cannot insert the row, for the publisher left"
                f" out unchanged large values of {', '.join(kept)}."
            )
            error.hint = f"Insert the row on the target: apply goes on by itself. {self._rulings.other_ways()}"
            raise error
        inserting = Case(place._replace(message_type="INSERT", old=None), case.message)
        self._settle(inserting)
        self._rulings.note(case, record, how, Verdict.KEEP if inserting.left else Verdict.APPLY)

    # rows that are in the way

    def _settle(self, case: Case) -> None:
        """Insert, update or delete; what is in the way is dealt with by its rule."""
        place = case.place
        relation = place.relation
        assert relation is not None
        own = relation.target.schema, relation.target.name
        where = None if relation.target.relkind == "p" else own
        looks = place.message_type != "DELETE" and any(kind in _EXISTING for kind, _ in relation.rules)
        failure: StatementFailed | None = None
        for _ in range(TRIES):
            case.pending = None
            found = self._obstacles.search(place, where) if looks and where is not None else None
            if failure is not None and found is not None and not conflicting_rows.indexed(failure, found):
                break
            verdict = self._met(case, found, where or own) if found is not None and found.hits else Verdict.APPLY
            if verdict in (Verdict.KEEP, Verdict.SKIP):
                return
            try:
                with self._rows.undoing():
                    self._make(case, found if verdict is Verdict.APPLY else None, where)
                return
            except Moved:
                continue
            except StatementFailed as error:
                failure = error
                where = _look_next(error, where, asks=looks and verdict is not Verdict.STOP)
        if failure is None:
            raise TargetUnavailable(f'rows of "{place.name()}" are changed by others again and again', sqlstate="40001")
        raise failure

    def _met(self, case: Case, found: Search, where: tuple[str, str]) -> Verdict:
        place = case.place
        kind = "update_exists" if place.message_type == "UPDATE" and not found.moved else "insert_exists"
        if len(found.hits) > 1:
            kind = "multiple_unique_conflicts"
        how = self._rulings.rule(case, kind)
        same = len({hit.ctid for hit in found.hits}) == 1 and all(hit.identical for hit in found.hits)
        if same and place.message_type == "INSERT" and case.rule(rules.IDENTICAL) is not None:
            how, case.flood = f"{rules.IDENTICAL}={case.rule(rules.IDENTICAL)}", None
        if how is None:
            return Verdict.STOP
        verdict = self._rulings.decide(how.rpartition("=")[2], case, found.hits)
        if verdict is Verdict.STOP:
            return verdict
        record = conflicting_rows.recorded(place, kind, found, where)
        record.context = conflict.context(self._subid, place)
        case.pending = self._rulings.resolved(case, record, how, verdict)
        if verdict is not Verdict.APPLY:
            self._rulings.record(case, case.pending)
            case.pending, case.left = None, True
        return verdict

    def _make(self, case: Case, found: Search | None, where: tuple[str, str] | None) -> None:
        """Make room, and the change."""
        place = case.place
        became = found is not None and where is not None and self._obstacles.cleared(place, found, where)
        if became:
            self._rows.changes += 1
        else:
            if place.message_type == "INSERT":
                self._rows.insert_row(place)
            elif place.message_type == "UPDATE":
                self._rows.update(place)
            else:
                self._rows.delete(place)
        self._rows.sync()
        pending, case.pending = case.pending, None
        if pending is not None:
            self._rulings.record(case, pending)


_EXISTING = frozenset({"insert_exists", "update_exists", "multiple_unique_conflicts", rules.IDENTICAL})


def _look_next(failure: StatementFailed, where: tuple[str, str] | None, *, asks: bool) -> tuple[str, str] | None:
    """In which table there is something in the way, after a change failed.

    :param where: the table that was looked at, None of a partitioned one at first.
    :param asks: whether a rule is asked about what is there.
    :raises StatementFailed: no rule is, or it is a row of another table, which a trigger wrote.
    """
    error = failure.error
    if error.sqlstate == _DEALLOCATED:
        return where
    at = error.diag.schema_name or "", error.diag.table_name or ""
    if error.sqlstate not in RESOLVABLE or not asks or (where is not None and at != where):
        raise failure
    return at
