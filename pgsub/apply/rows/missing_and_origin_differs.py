"""Conflicts that do not make a change fail: missing rows, and rows that another origin wrote.

They are recorded, or cause a fallback if a rule decides them. Mirrors GetTupleTransactionInfo and the reports of
apply_handle_update_internal and apply_handle_delete_internal (worker.c).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pgsub.apply.conflicts.conflict import Record, RowConflict
from pgsub.apply.conflicts.error_context import Place, locate
from pgsub.apply.rows.owner_pipeline import OwnerPipeline
from pgsub.apply.rows.relation_cache import RelationCache
from pgsub.apply.rows.set_fallback import SetFallback
from pgsub.apply.rows.statements_by_shape import RowStatements
from pgsub.apply.rows.unrouted_rows import UnroutedRows
from pgsub.common.errors import ApplyError
from pgsub.target.sql.pipeline import RowCount

_ORIGIN_DIFFERS = "origin_differs"
#: Number of searches for a row that may have been replaced before it counts as missing.
_SEARCHES = 3
#: Place of the time in a row of :func:`~pgsub.target.sql.row_queries.origin_differs`.
AT = 3


class MissingRows:
    """Rows of one target session that its changes did not find, though another session may have replaced them.

    A statement that waited for another session's DELETE and INSERT of its row finds neither version. The server
    searches again (RelationFindReplTupleByIndex, execReplication.c), and so does the next attempt of the target
    transaction.

    :param looks_again: search for missing rows once more.
    """

    def __init__(self, *, looks_again: bool) -> None:
        self._looks_again = looks_again
        self._places: list[Place] = []  #: rows found missing since the last check
        #: wait for each change; a row has appeared, so the next attempt must be patient
        self._patient = self._doubted = False

    def begin(self) -> None:
        """Begin a target transaction; be patient if a row appeared in its last attempt."""
        self._places, self._patient = [], self._doubted

    def settled(self) -> None:
        """Note that the target transaction is committed or finally given up, so the next one is another."""
        self._doubted = False

    def searches(self, *, resolving: bool) -> int:
        """Return how often to search a change's row, with a wait each time, before its last statement is sent."""
        return _SEARCHES if self._patient or resolving else 0

    def add(self, place: Place) -> None:
        """Add a row that a change did not find. With rules on the table, a count of 0 proves nothing."""
        if self._looks_again and not self._patient and not place.mapped.target.rules:
            self._places.append(place)

    def doubts(self) -> bool:
        """Return whether to execute the target transaction again, patiently, because a row may have been replaced."""
        if not self._looks_again or self._patient:
            return False
        self._doubted = True
        return True

    def forget(self) -> None:
        """Forget the rows, because their changes were undone."""
        self._places = []

    def first_that_came(self, present: Callable[[Sequence[Place]], Sequence[Place]]) -> Place | None:
        """Search for the rows in a new snapshot; return the first that exists, and make the next attempt patient.

        :param present: returns the rows that exist.
        """
        places, self._places = self._places, []
        came = present(places) if places else ()
        # guard: a row that was inserted while its change waited is not reported missing
        if came:
            self._doubted = True
            return came[0]
        return None


def in_doubt(place: Place) -> int | None:
    """Return the count of a deletion whose row a trigger kept, or another session replaced; None if it is certain."""
    return 1 if place.message_type == "DELETE" and place.mapped.target.hides_deletes else None


def locks(place: Place) -> bool:
    """Return whether the row of a change is locked before it is asked who wrote it last, as the server does.

    Only a deletion needs no privilege to lock rows. Without a rule it is made without the lock.
    """
    return place.rule(_ORIGIN_DIFFERS) is not None or place.mapped.target.locks_rows


class FoundConflicts:
    """The conflicts of one target session, known once its statements have run.

    :ivar records: missing rows and messages, each with the number of savepoints at that time.
    :ivar depth: number of savepoints.
    :ivar resolving: the caller resolves each conflict.
    :ivar missed: if so, whether the row of the last change was missing.
    :ivar missing: rows that changes did not find, and that may have appeared since.
    :ivar unrouted: rows that changes did not find, and that may have no partition.
    """

    def __init__(
        self, pipeline: OwnerPipeline, statements: RowStatements, relations: RelationCache, *, looks_again: bool
    ) -> None:
        self._pipeline, self._subid = pipeline, relations.subid
        self._statements = statements
        self.missing = MissingRows(looks_again=looks_again)
        self.unrouted = UnroutedRows(pipeline, statements, relations)
        self.records: list[tuple[int, Record]] = []
        self.depth = 0
        self.resolving = self.missed = False
        self._unresolved: SetFallback | None = None  #: a conflict for a rule
        self._unseen: Place | None = None  #: a change whose row was not there when it was asked who wrote it
        self._several: Place | None = None  #: a change by a unique key that found several rows

    def begin(self) -> None:
        """Begin a target transaction."""
        self.records, self.depth, self._unresolved, self._several = [], 0, None, None
        self.missing.begin()
        self.unrouted.forget()

    def check_origin(self, place: Place) -> None:
        """Send a query, before a change, for the other origin that wrote the row last (GetTupleTransactionInfo).

        The query locks the row, as the server does (RelationFindReplTupleByIndex). Nobody can then write the row before
        the change does.
        """
        if not self.asks(place):
            return
        depth, lock = self.depth, locks(place)

        def on_row(row: list[str | None]) -> None:
            if row[AT] is not None:
                self.differs(place, RowConflict.of(place, row), depth)

        def on_count(count: int) -> None:
            # guard: a row that another session inserts while its change waits is a conflict
            if lock and not count and not self._is_ruled(place, _ORIGIN_DIFFERS):  # the change may find it
                self._unseen = place

        self._pipeline.send_row(self._statements.written_elsewhere(place, lock=lock), place, on_count, on_row)

    def asks(self, place: Place) -> bool:
        """Return whether it is asked here who wrote the row of a change last."""
        return bool(place.mapped.target.origins_of) and not self.resolving

    def differs(self, place: Place, found: RowConflict, depth: int) -> None:
        """Record that another origin wrote the row of a change last, unless a rule decides.

        :param depth: number of savepoints before the change.
        """
        if not self._is_ruled(place, _ORIGIN_DIFFERS):
            self.records.append((depth, found))

    def if_missing(self, place: Place) -> RowCount:
        """Return a callback for the number of rows that a change found."""
        depth = self.depth
        doubtful = in_doubt(place)

        def on_count(count: int) -> None:
            self.counted(place, count)
            if not count:
                self.unrouted.add(place)
            if not count and self.resolving:
                self.missed = True
            elif not count and not self._is_ruled(place, "missing"):
                self.records.append((depth, RowConflict.of(place)))
                self.missing.add(place)
            # guard: a row that was not deleted, though it was there, is searched again
            elif count == doubtful and not self.resolving and self.missing.doubts():
                self._unresolved = self._unresolved or SetFallback(place.mapped, "a row was not deleted")
            # guard: a row that came while its change waited is a conflict without a rule, too
            elif count and self._unseen is place and self.missing.doubts():
                self._unresolved = self._unresolved or SetFallback(place.mapped, "a row came while its change waited")

        return on_count

    def counted(self, place: Place, count: int) -> None:
        """Note how many rows a change found; :meth:`check` refuses several rows of a unique key."""
        target = place.mapped.target
        keyed = place.mapped.by_identity and not (target.deferrable or target.rules)
        # guard: a change by a unique key that finds several rows stops apply
        if keyed and count > (2 if place.message_type == "DELETE" and target.hides_deletes else 1):
            self._several = self._several or place

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
        if place.rule(what) is None:
            return False
        self._unresolved = self._unresolved or SetFallback(place.mapped, f"{place.message_type.lower()}_{what}")
        return True

    def check(self) -> None:
        """Check the results of the statements that have run.

        :raises SetFallback: a rule must decide a conflict, or a missing row has appeared; the target transaction is not
            aborted.
        :raises ApplyError: a change by a unique key found several rows, or no partition takes its row; in the same way.
        """
        unresolved, self._unresolved = self._unresolved, None
        several, self._several = self._several, None
        if several is not None:
            raise _several_rows(self._subid, several)
        if unresolved is not None:
            raise unresolved
        refused = self.unrouted.first()  # before the search, which finds the rows of a partition that is attached now
        came = self.missing.first_that_came(self._present)
        if came is not None:
            raise SetFallback(came.mapped, "a row that was missing is there")
        # guard: a row whose partition is detached is not missing
        if refused is not None:
            raise refused

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
        self._unresolved = self._several = None
        self.missing.forget()
        self.unrouted.forget()


def _several_rows(subid: int, place: Place) -> ApplyError:
    error = ApplyError(
        f'several rows of "{place.name}" have the key of one change',
        detail="The key is no unique one: its index is damaged, or compares in another way than the column.",
        sqlstate="21000",
    )
    locate(error, subid, place)
    return error
