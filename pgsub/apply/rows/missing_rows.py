"""Finds missing rows that may have been replaced by another session, and makes the next attempt search again.

A statement that waited for another session's DELETE and INSERT of its row finds neither version. The server searches
again (RelationFindReplTupleByIndex, execReplication.c), and so does the next attempt of the target transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pgsub.apply.conflicts.error_context import Place

#: Number of searches for a row that may have been replaced before it counts as missing.
_SEARCHES = 3


class MissingRows:
    """Rows of one target session that its changes did not find.

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
