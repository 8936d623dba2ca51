"""The record of conflicts, which the server only logs (``replication/logical/conflict.c``).

There is one row per conflict. A conflict that stops apply keeps its row, however often it is retried, until apply gets
past it. The record outlives its subscription. Its size is limited, and removed rows are counted.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from pgsub.catalog.codec import TEXT, Table
from pgsub.catalog.rows import ConflictRow
from pgsub.catalog.times import utc_now
from pgsub.catalog.views import ViewsCatalog
from pgsub.protocol.lsn import covered, format_lsn

#: Maximum number of rows for each subscription, and for all dropped ones together.
KEEP = max(1, int(os.environ.get("PGSUB_CONFLICT_HISTORY") or 10_000))
STOPPED, APPLIED, SKIPPED, KEPT, REPLAYED = "stopped", "applied", "skipped", "kept", "replayed"

_CONFLICT = Table("pgsub_conflict", ConflictRow)
#: Columns that identify a repeated stop of a worker by the same change. Its diagnosis may differ.
_SAME_CHANGE = ("finish_lsn", "schemaname", "relname", "key")
#: Columns that identify a stop which a rule decides. One change may have several conflicts.
_SAME_CONFLICT = (*_SAME_CHANGE, "conflict_type")
_EXCESS = (
    "DELETE FROM pgsub_conflict WHERE id IN (SELECT id FROM pgsub_conflict"
    " WHERE {} AND action <> 'stopped' ORDER BY id DESC LIMIT -1 OFFSET ?)"
)
_OF_DROPPED = "subid NOT IN (SELECT oid FROM pg_subscription)"


class Added(NamedTuple):
    """The outcome of recording a row: its ID, and whether it is new."""

    id: int
    new: bool


class ConflictCatalog(ViewsCatalog):
    """The part of the state store with the record of conflicts."""

    def add_conflict(self, row: ConflictRow) -> int:
        """Record a conflict. A repeated stop raises ``attempts`` and replaces texts and rows by the newer ones.

        :param row: ``id``, ``attempts`` and times are set by the store, unless it is imported with a time.
        :return: its ID. IDs increase.
        """
        return self.add_conflicts([row])[0].id

    def add_conflicts(self, rows: Sequence[ConflictRow]) -> list[Added]:
        """Record several conflicts like :meth:`add_conflict`. An already recorded event of the ledger is not changed.

        :return: the outcome for each, in order.
        """
        with self._database.transaction():
            added = [self._add(row) for row in rows]
            for subid in {row.subid for row in rows}:
                self._bound(subid)
        return added

    def conflicts(
        self,
        subid: int | None = None,
        limit: int | None = None,
        *,
        conflict_type: str | None = None,
        table: str | None = None,
        since: str | None = None,
        action: str | None = None,
    ) -> list[ConflictRow]:
        """Return conflicts, newest first. A condition that is None is not applied.

        :param subid: may belong to a dropped subscription.
        :param limit: maximum number of rows, None for all.
        :param table: schema.name.
        :param since: minimum time of the last occurrence, as text of :mod:`pgsub.catalog.times`.
        """
        conditions = {
            "subid = ?": subid,
            "conflict_type = ?": conflict_type,
            "schemaname || '.' || relname = ?": table,
            "last_at >= ?": since,
            "action = ?": action,
        }
        chosen = {text: value for text, value in conditions.items() if value is not None}
        return self._select(" AND ".join(["1", *chosen]), *chosen.values(), limit=-1 if limit is None else limit)

    def _select(self, where: str, *parameters: object, limit: int = 1) -> list[ConflictRow]:
        sql = f"SELECT {_CONFLICT.columns} FROM pgsub_conflict WHERE {where} ORDER BY id DESC LIMIT ?"
        return [_CONFLICT.decode(values) for values in self._database.rows(sql, (*parameters, limit))]

    def conflict(self, conflict_id: int) -> ConflictRow | None:
        """Return one conflict, None if there is none, or no longer."""
        found = self._select("id = ?", conflict_id) if 0 < conflict_id < 2**63 else []
        return found[0] if found else None

    def conflicts_of(self, subname: str) -> int | None:
        """Return the ID of the newest subscription of this name with a conflict. It may be dropped."""
        sql = "SELECT subid FROM pgsub_conflict WHERE subname = ? ORDER BY id DESC LIMIT 1"
        found = self._database.rows(sql, (TEXT.encode(subname),))
        return found[0][0] if found else None

    def conflicts_passed(self, subid: int, worker: str, position: int, action: str = APPLIED) -> int:
        """Record the outcome of the conflicts that a worker has got past.

        :param worker: see :class:`~pgsub.catalog.rows.ErrorRow`.
        :param position: the worker's position, which covers these conflicts.
        :return: their number.
        """
        with self._database.transaction():
            own = [row for row in self.conflicts(subid, action=STOPPED) if row.worker == worker]
            passed = [row.id for row in own if row.finish_lsn is None or covered(row.finish_lsn, position)]
            self._set_action(passed, action)
        return len(passed)

    def _set_action(self, ids: Sequence[int], action: str) -> None:
        self._database.run_many("UPDATE pgsub_conflict SET action = ? WHERE id = ?", [(action, one) for one in ids])

    def conflicts_skipped(self, subid: int, finish_lsn: int) -> None:
        """Record that a transaction which had stopped a worker was skipped, even if that is known late."""
        with self._database.transaction():
            sql = (
                "UPDATE pgsub_conflict SET action = ? WHERE subid = ? AND finish_lsn = ? AND worker IS NOT NULL"
                " AND replayed_at IS NULL"
            )
            self._database.run(sql, SKIPPED, subid, format_lsn(finish_lsn))

    def conflicts_left_out(self, subid: int, start: int, position: int) -> None:
        """Record that apply's position was moved past stopping conflicts, even if that is known late."""
        with self._database.transaction():
            found = [row for row in self.conflicts(subid) if row.action in (STOPPED, APPLIED)]
            lsns = {row.id: row.finish_lsn for row in found if row.worker is not None and row.event is None}
            left = [one for one, lsn in lsns.items() if lsn is not None and start <= lsn and covered(lsn, position)]
            self._set_action(left, SKIPPED)

    def conflicts_replayed(
        self, subid: int, finish_lsn: int, conflict_id: int | None = None, table: str | None = None
    ) -> None:
        """Record that skipped changes of a transaction were applied later. A repetition does nothing.

        :param conflict_id: only the change of this conflict, None for all kept changes of the transaction.
        :param table: only changes of this schema.name.
        """
        with self._database.transaction():
            sql = (
                "UPDATE pgsub_conflict SET action = ?, replayed_at = ? WHERE subid = ? AND finish_lsn = ?"
                " AND action = 'skipped' AND NOT identical AND (skipped_ref IS NOT NULL OR worker IS NOT NULL)"
                " AND (? IS NULL OR id = ?) AND (? IS NULL OR schemaname || '.' || relname = ?)"
            )
            place = (subid, format_lsn(finish_lsn))
            self._database.run(sql, REPLAYED, utc_now(), *place, conflict_id, conflict_id, table, table)

    def conflicts_dropped(self, subid: int) -> int:
        """Return the number of a subscription's rows that were removed because of the limit."""
        found = self._database.rows("SELECT dropped FROM pgsub_conflict_dropped WHERE subid = ?", (subid,))
        return int(found[0][0]) if found else 0

    def _add(self, row: ConflictRow) -> Added:
        known = self._recorded(row)
        if known is not None and row.event is not None:
            return Added(known.id, new=False)  # the ledger's row had not been removed yet
        at = row.at or utc_now()
        # a skipped conflict that would otherwise have stopped a worker
        stops = row.action == SKIPPED and (row.skipped_ref is not None or row.identical)
        stop = None if row.event is None else self._stop(row, _SAME_CHANGE if stops else _SAME_CONFLICT)
        if known is not None:
            row = replace(row, id=known.id, at=known.at, last_at=at, attempts=known.attempts + 1)
        elif stop is not None:  # the stopping conflict recurs, and a skip or a rule decides it
            same = {"id": stop.id, "attempts": stop.attempts, "worker": stop.worker}
            row = replace(row, at=stop.at, last_at=at, **same)  # type: ignore[arg-type]
        else:
            row = replace(row, id=0, at=at, last_at=at)
        *values, number = _CONFLICT.encode(row)
        return Added(self._database.run(_CONFLICT.insert, *values, number or None), new=number == 0)

    def _recorded(self, row: ConflictRow) -> ConflictRow | None:
        """Return the row of the same event, or of the same stop.

        The event's number is not sufficient, because a target that lost its last commits assigns numbers again.
        """
        if row.event is None:
            return self._stop(row, (*_SAME_CHANGE, "worker"))
        return self._same("event = ?", row, _SAME_CONFLICT, row.event)

    def _stop(self, row: ConflictRow, columns: Sequence[str]) -> ConflictRow | None:
        """Return the stop that is equal in these columns."""
        # The index finds few rows, although a transaction may have a million conflicts of one row.
        return self._same("event IS NULL AND action = 'stopped'", row, columns)

    def _same(self, where: str, row: ConflictRow, columns: Sequence[str], *params: object) -> ConflictRow | None:
        values = dict(zip(_CONFLICT.kinds, _CONFLICT.encode(row), strict=True))
        same = "".join(f' AND "{column}" IS ?' for column in columns)
        params = (row.subid, *params, *(values[column] for column in columns))
        return next(iter(self._select(f"subid = ? AND {where}{same}", *params)), None)

    def _bound(self, subid: int) -> None:
        self._database.run(_EXCESS.format("subid = ?"), subid, KEEP)
        dropped = int(self._database.rows("SELECT changes()")[0][0])
        if dropped:
            sql = (
                "INSERT INTO pgsub_conflict_dropped VALUES (?, ?)"
                " ON CONFLICT (subid) DO UPDATE SET dropped = dropped + excluded.dropped"
            )
            self._database.run(sql, subid, dropped)
        self._database.run(_EXCESS.format(_OF_DROPPED), KEEP)
