"""How much is kept of which held tables, for the state store."""

from __future__ import annotations

from collections.abc import Sequence

import psycopg

from pgsub.catalog.rows import HeldRow
from pgsub.launcher.mirror.throttled_query import ThrottledQuery
from pgsub.target.ledger import held_tables
from pgsub.target.ledger.held_tables import HeldTable
from pgsub.target.ledger.subscriptions import RelationState


class HeldTableStats:
    """The statistics of one subscription's held tables.

    :param session: the launcher's own target session.
    """

    def __init__(self, session: psycopg.Connection, subid: int) -> None:
        self._session = session
        self._subid = subid
        self._look: ThrottledQuery[list[HeldTable]] = ThrottledQuery(lambda: held_tables.overview(session, subid), [])

    @property
    def releasing(self) -> bool:
        """Whether kept changes are being applied, as of the last look."""
        return any(one.releasing and one.changes for one in self._look.last)

    def is_next(self, finish_lsn: int) -> bool:
        """Return whether it is of a kept transaction that is to be applied now: the stream has passed it long ago."""
        known = any(one.releasing for one in self._look.last)
        return known and finish_lsn in held_tables.next_released(self._session, self._subid)

    def look_again(self) -> None:
        """Read the held tables anew: they may have changed."""
        self._look.again()

    def read(self, relations: Sequence[RelationState]) -> list[HeldRow]:
        """Return the held tables, as of the last look, which may be now."""
        return rows(relations, self._look())


def rows(relations: Sequence[RelationState], found: Sequence[HeldTable]) -> list[HeldRow]:
    """Return rows by the names that the tables bear now."""
    names = {one.srrelid: (one.schemaname, one.relname) for one in relations}
    return [
        HeldRow(one.srrelid, *names[one.srrelid], one.held_at, one.releasing, one.changes, one.bytes)
        for one in found
        if one.srrelid in names
    ]
