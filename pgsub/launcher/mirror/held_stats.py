"""Held tables and the size of their kept changes, for the state store."""

from __future__ import annotations

from collections.abc import Sequence

import psycopg

from pgsub.catalog.rows import HeldRow
from pgsub.launcher.mirror.throttled_query import ThrottledQuery
from pgsub.target.ledger.subscriptions import RelationState
from pgsub.target.ledger.tables import held_tables
from pgsub.target.ledger.tables.held_tables import HeldTable


class HeldTableStats:
    """The held tables of one subscription."""

    def __init__(self, session: psycopg.Connection, subid: int) -> None:
        self._session = session
        self._subid = subid
        self._query: ThrottledQuery[list[HeldTable]] = ThrottledQuery(lambda: held_tables.overview(session, subid), [])

    @property
    def releasing(self) -> bool:
        """Whether kept changes were being applied at the last read."""
        return any(one.releasing and one.changes for one in self._query.last)

    def is_next(self, finish_lsn: int) -> bool:
        """Return whether the kept transaction to apply next finishes at this LSN, which the stream has passed."""
        known = any(one.releasing for one in self._query.last)
        return known and finish_lsn in held_tables.next_released(self._session, self._subid)

    def read_again(self) -> None:
        """Read the held tables again at the next call, because they may have changed."""
        self._query.expire()

    def read(self, relations: Sequence[RelationState]) -> list[HeldRow]:
        """Return the held tables, which are read now if it is time."""
        return rows(relations, self._query())


def rows(relations: Sequence[RelationState], found: Sequence[HeldTable]) -> list[HeldRow]:
    """Make the rows of held tables, with the tables' present names."""
    names = {one.srrelid: (one.schemaname, one.relname) for one in relations}
    return [
        HeldRow(one.srrelid, *names[one.srrelid], one.held_at, one.releasing, one.changes, one.bytes)
        for one in found
        if one.srrelid in names
    ]
