"""What an interrupted ``verify`` had found equal: one row per table, removed with the subscription."""

from __future__ import annotations

from collections.abc import Sequence

from pgsub.catalog.codec import Table
from pgsub.catalog.journal import JournalCatalog
from pgsub.catalog.rows import VerifiedRow

_VERIFIED = Table("pgsub_verified", VerifiedRow, "subid")
_OF_TABLE = "DELETE FROM pgsub_verified WHERE subid = ? AND schemaname = ? AND relname = ?"


class VerifiedCatalog(JournalCatalog):
    """The part of the state store with results of ``verify``."""

    def verified(self, subid: int) -> list[VerifiedRow]:
        """Return what is known about a subscription's tables."""
        return [_VERIFIED.decode(values) for values in self._database.rows(_VERIFIED.select, (subid,))]

    def put_verified(self, subid: int, rows: Sequence[VerifiedRow]) -> None:
        """Set what is known about some tables.

        :raises SubscriptionNotFound: the subscription was dropped.
        """
        with self._database.transaction():
            self.require(subid)
            self._database.run_many(_VERIFIED.insert, [(subid, *_VERIFIED.encode(row)) for row in rows])

    def forget_verified(self, subid: int, names: Sequence[tuple[str, str]]) -> None:
        """Forget what is known about some tables.

        :param names: schema and name of each.
        """
        with self._database.transaction():
            self._database.run_many(_OF_TABLE, [(subid, *name) for name in names])
