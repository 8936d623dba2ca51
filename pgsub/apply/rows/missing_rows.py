"""Missing rows of changes: which of them are searched again, since another session may have replaced one meanwhile.

A statement that waited for another session's DELETE and INSERT of its row finds neither. The server searches again
(RelationFindReplTupleByIndex, execReplication.c), and so does the next try of the target transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pgsub.apply.conflicts.error_context import Place

#: How often a row that may have been replaced meanwhile is searched before it counts as missing.
_SEARCHES = 3


class MissingRows:
    """Rows of one target session that its changes did not find.

    :param looks_again: look once more for rows that are missing.
    """

    def __init__(self, *, looks_again: bool) -> None:
        self._looks_again = looks_again
        self._places: list[Place] = []  #: rows that were not there since the last look
        #: each change is waited for; a row was found to have come, so that the next try is to be patient
        self._patient = self._doubted = False

    def begin(self) -> None:
        """Begin a target transaction: patient where a row came in the last try of it."""
        self._places, self._patient = [], self._doubted

    def settled(self) -> None:
        """Note that the target transaction is committed, or given up for good: the next one is a new one."""
        self._doubted = False

    def searches(self, *, resolving: bool) -> int:
        """Return how often a change's row is searched, each time with a wait, before its last statement is sent."""
        return _SEARCHES if self._patient or resolving else 0

    def add(self, place: Place) -> None:
        """Add a row that a change did not find; a rule may make a change of a row that is there count nothing."""
        if self._looks_again and not self._patient and not place.mapped.target.rules:
            self._places.append(place)

    def forget(self) -> None:
        """Forget them: their changes were undone."""
        self._places = []

    def first_that_came(self, present: Callable[[Sequence[Place]], Sequence[Place]]) -> Place | None:
        """Look for the rows by a new snapshot, and return the first that is there; the next try is patient then.

        :param present: returns those of them that are there.
        """
        places, self._places = self._places, []
        came = present(places) if places else ()
        # guard: a row that was inserted while its change waited is not reported missing
        if came:
            self._doubted = True
            return came[0]
        return None
