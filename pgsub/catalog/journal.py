"""The journal of operator actions. It outlives its subscriptions, and its size is limited."""

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

#: Maximum number of rows of pgsub_journal.
KEEP = 10_000

_JOURNAL = Table("pgsub_journal", JournalRow)


class JournalCatalog(ConflictCatalog):
    """The part of the state store with the actions of operators."""

    def journal(self, action: str, subid: int | None, subname: str | None, detail: dict[str, Any]) -> int:
        """Record an operator action.

        :param action: the command's name.
        :param detail: what it did. This becomes a JSON object, and must not contain secrets.
        :return: the row's ID.
        """
        sql = "INSERT INTO pgsub_journal (at, subid, subname, action, actor, detail) VALUES (?, ?, ?, ?, ?, ?)"
        values = (utc_now(), subid, optional(TEXT).encode(subname), action, _actor(), JSON.encode(detail))
        with self._database.transaction():
            number = self._database.run(sql, *values)
            # IDs increase by one, and only the oldest rows are removed.
            self._database.run("DELETE FROM pgsub_journal WHERE id <= ?", number - KEEP)
            return number

    @contextlib.contextmanager
    def journal_attempt(self, action: str, sub: Subscription, detail: dict[str, Any]) -> Iterator[int]:
        """Record an action before it is done, and its failure. After a crash the outcome stays ``begun``.

        :return: the row's ID for :meth:`journal_done`.
        """
        number = self.journal(action, sub.subid, sub.name, {**detail, "outcome": "begun"})
        try:
            yield number
        except PgsubError as error:
            self.journal_more(number, outcome="failed", error=error.message)
            raise

    def journal_done(self, number: int) -> None:
        """Record that an action was done. Does nothing if its row no longer exists."""
        self.journal_more(number, outcome="done")

    def journal_more(self, number: int, **more: Any) -> None:
        """Add to the detail of an action's row. Does nothing if it no longer exists."""
        with self._database.transaction():
            for (text,) in self._database.rows("SELECT detail FROM pgsub_journal WHERE id = ?", (number,)):
                detail = JSON.encode({**JSON.decode(text), **more})
                self._database.run("UPDATE pgsub_journal SET detail = ? WHERE id = ?", detail, number)

    def journal_rows(self, subid: int | None = None, limit: int = 100) -> list[JournalRow]:
        """Return the newest operator actions first.

        :param subid: None for all, including dropped subscriptions.
        """
        sql = f"SELECT {_JOURNAL.columns} FROM pgsub_journal WHERE ? IS NULL OR subid = ? ORDER BY id DESC LIMIT ?"
        return [_JOURNAL.decode(values) for values in self._database.rows(sql, (subid, subid, limit))]


def _actor() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
