"""Rows that the launcher mirrors while workers run: table states, origin, workers, copies, the slot, counters, errors.

Mirrors the readers of ``pg_subscription.c`` (relations), ``origin.c`` (progress), ``launcher.c``
(``pg_stat_get_subscription``), ``backend_progress.c`` (copies) and ``pgstat_subscription.c`` (counters). A ``put``
writes only differences, so an idle launcher writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, TypeVar

from pgsub.catalog.codec import Table
from pgsub.catalog.rows import (
    CopyRow,
    ErrorRow,
    HeldRow,
    OriginRow,
    PreparedRow,
    RelationRow,
    SequenceRow,
    ServerRow,
    SkippedRow,
    SlotRow,
    StatsRow,
    TaskRow,
    WorkerRow,
)
from pgsub.catalog.subscriptions import SubscriptionCatalog
from pgsub.catalog.times import utc_now
from pgsub.common.errors import InternalError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Row = TypeVar("Row", bound="DataclassInstance")

_RELATION = Table("pg_subscription_rel", RelationRow, "srsubid")
_SEQUENCE = Table("pgsub_sequence", SequenceRow, "subid")
_ORIGIN = Table("pgsub_origin", OriginRow, "subid")
_PREPARED = Table("pgsub_prepared_pending", PreparedRow, "subid")
_HELD = Table("pgsub_held_table", HeldRow, "subid")
_SKIPPED = Table("pgsub_skipped", SkippedRow, "subid")
_WORKER = Table("pgsub_worker", WorkerRow, "subid")
_COPY = Table("pg_stat_progress_copy", CopyRow, "subid")
_SLOT = Table("pgsub_slot", SlotRow, "subid")
_SERVER = Table("pgsub_server", ServerRow, "subid")
_TASK = Table("pgsub_task", TaskRow, "subid")
_STATS = Table("pgsub_stats", StatsRow, "subid")
_ERROR = Table("pgsub_error", ErrorRow, "subid")
_COUNTERS = [column for column in _STATS.kinds if column != "stats_reset"]


def _rows(table: Table[Row], *order: str) -> Callable[[ViewsCatalog, int], list[Row]]:
    """Make the method that reads the rows of a subscription."""

    def read(self: ViewsCatalog, subid: int) -> list[Row]:
        found = [table.decode(values) for values in self._database.rows(table.select, (subid,))]
        return sorted(found, key=attrgetter(*order)) if order else found

    return read


def _put(table: Table[Row]) -> Callable[[ViewsCatalog, int, Sequence[Row]], None]:
    """Make the method that replaces the rows of a subscription in a table.

    Like every method that writes for a subscription, it raises SubscriptionNotFound if that was dropped.
    """

    def put(self: ViewsCatalog, subid: int, rows: Sequence[Row]) -> None:
        wanted = [table.encode(row) for row in rows]
        with self._database.transaction():
            self.require(subid)
            sql = f'SELECT rowid, {table.columns} FROM "{table.name}" WHERE "{table.owner}" = ?'
            present = {values[1:]: values[0] for values in self._database.rows(sql, (subid,))}
            gone = [(present[values],) for values in present.keys() - set(wanted)]
            self._database.run_many(f'DELETE FROM "{table.name}" WHERE rowid = ?', gone)
            new = [(subid, *values) for values in wanted if values not in present]
            self._database.run_many(table.insert, new)

    return put


def _one(table: Table[Row]) -> Callable[[ViewsCatalog, int], Row | None]:
    """Make the method that reads the only row of a subscription, None if there is none."""
    read = _rows(table)
    return lambda self, subid: next(iter(read(self, subid)), None)


def _put_one(table: Table[Row]) -> Callable[[ViewsCatalog, int, Row | None], None]:
    """Make the method that sets the only row of a subscription, None for no row."""
    put = _put(table)
    return lambda self, subid, row: put(self, subid, [] if row is None else [row])


class ViewsCatalog(SubscriptionCatalog):
    """The part of the state store that a running launcher updates."""

    put_relations = _put(_RELATION)
    relations = _rows(_RELATION, "schemaname", "relname")
    put_sequences = _put(_SEQUENCE)
    sequences = _rows(_SEQUENCE, "schemaname", "relname")
    put_prepared = _put(_PREPARED)
    prepared = _rows(_PREPARED, "prepared_at", "gid")
    put_held = _put(_HELD)
    held = _rows(_HELD, "schemaname", "relname")
    put_workers = _put(_WORKER)  #: without rows, pg_stat_subscription shows one row of NULLs
    workers = _rows(_WORKER)
    put_copy_progress = _put(_COPY)
    copy_progress = _rows(_COPY)

    origin = _one(_ORIGIN)
    _put_origin = _put_one(_ORIGIN)
    skipped = _one(_SKIPPED)  #: the amount of rows in pgsub.skipped_change, None if it is empty
    _put_skipped = _put_one(_SKIPPED)
    slot = _one(_SLOT)  #: the slot as last seen, None if the subscription has no slot
    put_slot = _put_one(_SLOT)
    task = _one(_TASK)  #: the task of the apply worker, None if nothing serves the subscription
    put_task = _put_one(_TASK)
    server = _one(_SERVER)  #: the launcher that serves it; :meth:`Lock.holder` tells whether it is alive
    _put_server = _put_one(_SERVER)

    def put_origin(
        self, subid: int, remote_lsn: int | None, local_lsn: int | None, reported_lsn: int | None = None
    ) -> None:
        """Set the origin's progress.

        :param remote_lsn: end LSN on the publisher up to which everything is durable on the target.
        :param local_lsn: the target's LSN of that commit.
        :param reported_lsn: the position in feedback, including WAL without transactions.
        """
        self._put_origin(subid, OriginRow(remote_lsn, local_lsn, reported_lsn))

    def put_skipped(self, subid: int, row: SkippedRow) -> None:
        """Set the amount of rows in pgsub.skipped_change. No rows are stored for an empty one."""
        self._put_skipped(subid, row if row.waiting_changes or row.replayed_changes else None)

    def put_server(self, subid: int, pid: int, host: str) -> None:
        """Set the launcher that now serves a subscription. Workers of the previous one are no longer shown."""
        with self._database.transaction():
            self._put_server(subid, ServerRow(pid, host, utc_now()))
            self.put_workers(subid, [])
            self.put_task(subid, None)

    def clear_server(self, subid: int) -> None:
        """Record that no launcher serves the subscription. Does nothing if it was dropped."""
        with self._database.transaction():
            self._database.run("DELETE FROM pgsub_server WHERE subid = ?", subid)
            self._database.run("DELETE FROM pgsub_task WHERE subid = ?", subid)

    def add_stats(self, subid: int, **increments: int) -> None:
        """Add to counters of pg_stat_subscription_stats.

        :param increments: names of counters in :class:`~pgsub.catalog.rows.StatsRow`.
        :raises SubscriptionNotFound: the subscription was dropped, as in every method that writes for one.
        """
        if not increments.keys() <= set(_COUNTERS):
            raise InternalError(f"no such counters: {sorted(increments.keys() - set(_COUNTERS))}")
        with self._database.transaction():
            self.require(subid)
            for counter, step in increments.items():
                sql = f'UPDATE pgsub_stats SET "{counter}" = "{counter}" + ? WHERE subid = ?'
                self._database.run(sql, step, subid)

    def stats(self, subid: int) -> StatsRow:
        """Return the counters of a subscription."""
        found = self._database.rows(_STATS.select, (subid,))
        return _STATS.decode(found[0]) if found else StatsRow()

    def reset_stats(self, subid: int | None) -> None:
        """Reset the counters (``pg_stat_reset_subscription_stats``).

        :param subid: None for all subscriptions.
        """
        zeros = ", ".join(f'"{counter}" = 0' for counter in _COUNTERS)
        sql = f"UPDATE pgsub_stats SET {zeros}, stats_reset = ? WHERE ? IS NULL OR subid = ?"
        with self._database.transaction():
            if subid is not None:
                self.require(subid)
            self._database.run(sql, utc_now(), subid, subid)

    def record_error(self, subid: int, row: ErrorRow) -> ErrorRow:
        """Record the error that ended a worker. The same message at the same finish LSN counts as a further attempt.

        :param row: the store sets ``attempts``, ``first_at``, ``restarts``, ``stuck_since``, and ``at`` if None.
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
        """Remove the error of a worker that has recovered. Does nothing if there is none.

        :param worker: see :class:`~pgsub.catalog.rows.ErrorRow`, None for all of the subscription.
        """
        with self._database.transaction():
            sql = "DELETE FROM pgsub_error WHERE subid = ? AND (? IS NULL OR worker = ?)"
            self._database.run(sql, subid, worker, worker)

    def errors(self, subid: int) -> list[ErrorRow]:
        """Return the last error of each worker, newest first."""
        found = self._database.rows(f"{_ERROR.select} ORDER BY at DESC, rowid DESC", (subid,))
        return [_ERROR.decode(values) for values in found]
