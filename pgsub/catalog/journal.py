"""The journal of operator actions. It outlives its subscriptions and is bounded."""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Iterator
from typing import Any

from pgsub.catalog.codec import JSON, TEXT, Table, optional
from pgsub.catalog.conflicts import ConflictCatalog
from pgsub.catalog.rows import JournalRow
from pgsub.catalog.times import utc_now
from pgsub.common.errors import PgsubError
from pgsub.common.subscription import Subscription

#: rows kept of pgsub_journal
KEEP = 10_000

_JOURNAL = Table("pgsub_journal", JournalRow)


class JournalCatalog(ConflictCatalog):
    """The part of the state store with the actions of operators."""

    def journal(self, action: str, subid: int | None, subname: str | None, detail: dict[str, Any]) -> int:
        """Record one operator action.

        :param action: the command's name.
        :param detail: what it did; becomes a JSON object, so it holds no secret.
        :return: the row's id.
        """
        sql = "INSERT INTO pgsub_journal (at, subid, subname, action, actor, detail) VALUES (?, ?, ?, ?, ?, ?)"
        values = (utc_now(), subid, optional(TEXT).encode(subname), action, _actor(), JSON.encode(detail))
        with self._database.transaction():
            number = self._database.run(sql, *values)
            # ids rise by one and only the oldest are removed
            self._database.run("DELETE FROM pgsub_journal WHERE id <= ?", number - KEEP)
            return number

    @contextlib.contextmanager
    def journal_attempt(self, action: str, sub: Subscription, detail: dict[str, Any]) -> Iterator[int]:
        """Record an action before it is done, and its failure. A crash leaves a row whose outcome is ``begun``.

        :return: the row's id, for :meth:`journal_done`.
        """
        number = self.journal(action, sub.subid, sub.name, {**detail, "outcome": "begun"})
        try:
            yield number
        except PgsubError as error:
            self.journal_more(number, outcome="failed", error=error.message)
            raise

    def journal_done(self, number: int) -> None:
        """Record that an action was done; nothing happens where its row is no longer kept."""
        self.journal_more(number, outcome="done")

    def journal_more(self, number: int, **more: Any) -> None:
        """Add to what an action's row tells; nothing happens where it is no longer kept."""
        with self._database.transaction():
            for (text,) in self._database.rows("SELECT detail FROM pgsub_journal WHERE id = ?", (number,)):
                detail = JSON.encode({**JSON.decode(text), **more})
                self._database.run("UPDATE pgsub_journal SET detail = ? WHERE id = ?", detail, number)

    def journal_rows(self, subid: int | None = None, limit: int = 100) -> list[JournalRow]:
        """Return the newest operator actions first.

        :param subid: None for all, dropped subscriptions included.
        """
        sql = f"SELECT {_JOURNAL.columns} FROM pgsub_journal WHERE ? IS NULL OR subid = ? ORDER BY id DESC LIMIT ?"
        return [_JOURNAL.decode(values) for values in self._database.rows(sql, (subid, subid, limit))]


def _actor() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
