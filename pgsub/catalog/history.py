"""What happened: counters, errors, and the journal of operator actions.

Mirrors ``utils/activity/pgstat_subscription.c`` (counters). The journal outlives its subscriptions and is bounded.
"""

from __future__ import annotations

import os
import pwd
from dataclasses import replace
from typing import Any

from pgsub.catalog.codec import JSON, TEXT, Table, optional
from pgsub.catalog.conflicts import ConflictCatalog
from pgsub.catalog.rows import ErrorRow, JournalRow, StatsRow
from pgsub.catalog.times import utc_now
from pgsub.common.errors import InternalError

#: rows kept of pgsub_journal
KEEP = 10_000

_STATS = Table("pgsub_stats", StatsRow, "subid")
_ERROR = Table("pgsub_error", ErrorRow, "subid")
_JOURNAL = Table("pgsub_journal", JournalRow)
_COUNTERS = [column for column in _STATS.kinds if column != "stats_reset"]


class HistoryCatalog(ConflictCatalog):
    """The part of the state store that remembers."""

    def add_stats(self, subid: int, **increments: int) -> None:
        """Add to counters of pg_stat_subscription_stats.

        :param increments: names of counters in :class:`~pgsub.catalog.rows.StatsRow`.
        :raises SubscriptionNotFound: if it is gone, as every method that writes for a subscription.
        """
        if not increments.keys() <= set(_COUNTERS):
            raise InternalError(f"no such counters: {sorted(increments.keys() - set(_COUNTERS))}")
        with self._database.transaction():
            self.require(subid)
            for counter, step in increments.items():
                sql = f'UPDATE pgsub_stats SET "{counter}" = "{counter}" + ? WHERE subid = ?'
                self._database.run(sql, step, subid)

    def stats(self, subid: int) -> StatsRow:
        """The counters of a subscription."""
        found = self._database.rows(_STATS.select, (subid,))
        return _STATS.decode(found[0]) if found else StatsRow()

    def reset_stats(self, subid: int | None) -> None:
        """``pg_stat_reset_subscription_stats``.

        :param subid: None for all subscriptions.
        """
        zeros = ", ".join(f'"{counter}" = 0' for counter in _COUNTERS)
        sql = f"UPDATE pgsub_stats SET {zeros}, stats_reset = ? WHERE ? IS NULL OR subid = ?"
        with self._database.transaction():
            if subid is not None:
                self.require(subid)
            self._database.run(sql, utc_now(), subid, subid)

    def record_error(self, subid: int, row: ErrorRow) -> ErrorRow:
        """Record the error that ended a worker; the same message at the same finish LSN counts as a further attempt.

        :param row: ``at``, ``attempts``, ``first_at``, ``restarts`` and ``stuck_since`` are the store's.
        :return: the row as stored.
        """
        at = row.at or utc_now()
        with self._database.transaction():
            self.require(subid)
            known = next((error for error in self.errors(subid) if error.worker == row.worker), None)
            stored = replace(row, at=at, attempts=1, first_at=at, restarts=0, stuck_since=at)
            if known and (known.message, known.finish_lsn) == (row.message, row.finish_lsn):
                stored = replace(stored, attempts=known.attempts + 1, first_at=known.first_at)
            if known and row.position is not None and known.position == row.position:
                stored = replace(stored, restarts=known.restarts + 1, stuck_since=known.stuck_since)
            self._database.run(_ERROR.insert, subid, *_ERROR.encode(stored))
        return stored

    def clear_error(self, subid: int, worker: str | None = None) -> None:
        """Forget the error of a worker that got further; nothing happens if it has none.

        :param worker: as in :class:`~pgsub.catalog.rows.ErrorRow`; None for all of the subscription.
        """
        with self._database.transaction():
            sql = "DELETE FROM pgsub_error WHERE subid = ? AND (? IS NULL OR worker = ?)"
            self._database.run(sql, subid, worker, worker)

    def last_error(self, subid: int) -> ErrorRow | None:
        """The newest error that was not cleared."""
        return next(iter(self.errors(subid)), None)

    def errors(self, subid: int) -> list[ErrorRow]:
        """The last error of each worker, newest first."""
        found = self._database.rows(f"{_ERROR.select} ORDER BY at DESC, rowid DESC", (subid,))
        return [_ERROR.decode(values) for values in found]

    def journal(self, action: str, subid: int | None, subname: str | None, detail: dict[str, Any]) -> int:
        """Record one operator action.

        :param action: the command's name.
        :param detail: what it did; becomes a JSON object, so it holds no secret.
        :return: the row's id.
        """
        values = {"at": utc_now(), "subid": subid, "subname": optional(TEXT).encode(subname)}
        values |= {"action": action, "actor": _actor(), "detail": JSON.encode(detail)}
        with self._database.transaction():
            return self._append("pgsub_journal", values)

    def amend_journal(self, number: int, **more: Any) -> None:
        """Add to the detail of an action, of which a row was written before it was done.

        :param number: as :meth:`journal` returned it; nothing happens where the row is no longer kept.
        """
        with self._database.transaction():
            for (text,) in self._database.rows("SELECT detail FROM pgsub_journal WHERE id = ?", (number,)):
                detail = JSON.encode({**JSON.decode(text), **more})
                self._database.run("UPDATE pgsub_journal SET detail = ? WHERE id = ?", detail, number)

    def journal_rows(self, subid: int | None = None, limit: int = 100) -> list[JournalRow]:
        """The newest operator actions first.

        :param subid: None for all, dropped subscriptions included.
        :param limit: rows.
        """
        return self._newest(_JOURNAL, subid, limit)

    def _append(self, table: str, values: dict[str, Any]) -> int:
        columns = [column for column in values if column != "id"]
        names, marks = ", ".join(columns), ", ".join("?" * len(columns))
        sql = f"INSERT INTO {table} ({names}) VALUES ({marks})"
        new = self._database.run(sql, *(values[column] for column in columns))
        # ids rise by one and only the oldest are removed
        self._database.run(f"DELETE FROM {table} WHERE id <= ?", new - KEEP)
        return new

    def _newest(self, table: Table[Any], subid: int | None, limit: int) -> list[Any]:
        sql = f'SELECT {table.columns} FROM "{table.name}" WHERE ? IS NULL OR subid = ? ORDER BY id DESC LIMIT ?'
        return [table.decode(values) for values in self._database.rows(sql, (subid, subid, limit))]


def _actor() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
