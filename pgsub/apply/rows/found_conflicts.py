"""Conflicts that do not make a change fail: missing rows, and rows that another origin wrote.

They are recorded, or cause a fallback if a rule decides them. Mirrors GetTupleTransactionInfo and the reports of
apply_handle_update_internal and apply_handle_delete_internal (worker.c).
"""

from __future__ import annotations

from collections.abc import Sequence

from pgsub.apply.conflicts.conflict import Record, RowConflict
from pgsub.apply.conflicts.error_context import Place
from pgsub.apply.rows.missing_rows import MissingRows
from pgsub.apply.rows.owner_pipeline import OwnerPipeline
from pgsub.apply.rows.set_fallback import SetFallback
from pgsub.apply.rows.statements import RowStatements
from pgsub.target.sql.pipeline import RowCount


class FoundConflicts:
    """The conflicts of one target session, known once its statements have run.

    :ivar records: missing rows and messages, each with the number of savepoints at that time.
    :ivar depth: number of savepoints.
    :ivar resolving: the caller resolves each conflict.
    :ivar missed: if so, whether the row of the last change was missing.
    :ivar missing: rows that changes did not find, and that may have appeared since.
    """

    def __init__(self, pipeline: OwnerPipeline, statements: RowStatements, *, looks_again: bool) -> None:
        self._pipeline = pipeline
        self._statements = statements
        self.missing = MissingRows(looks_again=looks_again)
        self.records: list[tuple[int, Record]] = []
        self.depth = 0
        self.resolving = self.missed = False
        self._unresolved: SetFallback | None = None  #: a conflict for a rule

    def begin(self) -> None:
        """Begin a target transaction."""
        self.records, self.depth, self._unresolved = [], 0, None
        self.missing.begin()

    def check_origin(self, place: Place) -> None:
        """Send a query, before a change, for the other origin that wrote the row last (GetTupleTransactionInfo)."""
        if not place.mapped.target.origins_of or self.resolving:
            return
        depth = self.depth

        def on_row(row: list[str | None]) -> None:
            if not self._is_ruled(place, "origin_differs"):
                self.records.append((depth, RowConflict.of(place, row)))

        self._pipeline.send_row(self._statements.written_elsewhere(place, lock=False), place, None, on_row)

    def if_missing(self, place: Place) -> RowCount:
        """Return a callback for the number of rows that a change found."""
        depth = self.depth

        def on_count(count: int) -> None:
            if not count and self.resolving:
                self.missed = True
            elif not count and not self._is_ruled(place, "missing"):
                self.records.append((depth, RowConflict.of(place)))
                self.missing.add(place)

        return on_count

    def _present(self, places: Sequence[Place]) -> Sequence[Place]:
        """Return the changes whose row exists in a new snapshot."""
        there: list[Place] = []
        for place in places:
            self._pipeline.send_row(self._statements.present(place), place, self._if_there(place, there))
        self._pipeline.become(None)
        self._pipeline.sync()
        return there

    @staticmethod
    def _if_there(place: Place, there: list[Place]) -> RowCount:
        def on_count(count: int) -> None:
            if count:
                there.append(place)

        return on_count

    def _is_ruled(self, place: Place, what: str) -> bool:
        """Return whether a rule decides a conflict (missing or origin_differs)."""
        relation, kind = place.mapped, f"{place.message_type.lower()}_{what}"
        if relation.rule(kind) is None:
            return False
        self._unresolved = self._unresolved or SetFallback(relation, kind)
        return True

    def check(self) -> None:
        """Check the results of the statements that have run.

        :raises SetFallback: a rule must decide a conflict, or a missing row has appeared; the target transaction is not
            aborted.
        """
        unresolved, self._unresolved = self._unresolved, None
        if unresolved is not None:
            raise unresolved
        came = self.missing.first_that_came(self._present)
        if came is not None:
            raise SetFallback(came.mapped, "a row that was missing is there")

    def record(self, record: Record) -> None:
        """Add a record; it is dropped if an open savepoint is rolled back."""
        self.records.append((self.depth, record))

    def taken(self) -> list[Record]:
        """Return the records so far, and clear them."""
        records, self.records = self.records, []
        return [record for _, record in records]

    def drop_behind(self, depth: int) -> None:
        """Drop the records that were added after a savepoint that was rolled back."""
        self.records = [one for one in self.records if one[0] <= depth]

    def undo(self, count: int) -> None:
        """Drop all but the first ``count`` records, and forget the other conflicts."""
        del self.records[count:]
        self._unresolved = None
        self.missing.forget()
