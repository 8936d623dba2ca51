"""How much is kept of which held tables, for the state store."""

from __future__ import annotations

import time
from collections.abc import Sequence

import psycopg

from pgsub.catalog.rows import HeldRow
from pgsub.target import holding
from pgsub.target.holding import Held
from pgsub.target.ledger import RelationState

#: Seconds between looks, and how many times the duration of the last one: what is kept of a table is counted each time.
LOOK_SECONDS, LOOK_FACTOR = 1.0, 20


class HeldTables:
    """Of one subscription.

    :param session: the launcher's own target session.
    """

    def __init__(self, session: psycopg.Connection, subid: int) -> None:
        self._session = session
        self._subid = subid
        self._found: list[Held] = []
        self._next = 0.0

    @property
    def releasing(self) -> bool:
        """Whether kept changes are being applied, as of the last look."""
        return any(one.releasing and one.changes for one in self._found)

    def is_next(self, finish_lsn: int) -> bool:
        """Whether it is of a kept transaction that is to be applied now: the stream has passed it long ago."""
        known = any(one.releasing for one in self._found)
        return known and finish_lsn in holding.next_released(self._session, self._subid)

    def read(self, relations: Sequence[RelationState]) -> list[HeldRow]:
        """As of the last look, which may be now."""
        began = time.monotonic()
        if began >= self._next:
            self._found = holding.overview(self._session, self._subid)
            ended = time.monotonic()
            self._next = ended + max(LOOK_SECONDS, LOOK_FACTOR * (ended - began))
        return rows(relations, self._found)


def rows(relations: Sequence[RelationState], found: Sequence[Held]) -> list[HeldRow]:
    """By the names that the tables bear now."""
    names = {one.srrelid: (one.schemaname, one.relname) for one in relations}
    return [
        HeldRow(one.srrelid, *names[one.srrelid], one.held_at, one.releasing, one.changes, one.bytes)
        for one in found
        if one.srrelid in names
    ]
