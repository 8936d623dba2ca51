"""What the launcher mirrors while workers run: table states, origin progress, workers, copies, the slot.

Mirrors the readers of ``pg_subscription.c`` (relations), ``origin.c`` (progress), ``launcher.c``
(``pg_stat_get_subscription``) and ``backend_progress.c`` (copies). A ``put`` writes only what differs: an idle
launcher causes no write, and :meth:`StateStore.changed` stays quiet for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from pgsub.catalog.codec import Table
from pgsub.catalog.rows import (
    CopyRow,
    HeldRow,
    OriginRow,
    PreparedRow,
    RelationRow,
    ServerRow,
    SkippedRow,
    SlotRow,
    WorkerRow,
)
from pgsub.catalog.subscriptions import SubscriptionCatalog
from pgsub.catalog.times import utc_now

Row = TypeVar("Row")

_RELATION = Table("pg_subscription_rel", RelationRow, "srsubid")
_ORIGIN = Table("pgsub_origin", OriginRow, "subid")
_PREPARED = Table("pgsub_prepared_pending", PreparedRow, "subid")
_HELD = Table("pgsub_held_table", HeldRow, "subid")
_SKIPPED = Table("pgsub_skipped", SkippedRow, "subid")
_WORKER = Table("pgsub_worker", WorkerRow, "subid")
_COPY = Table("pg_stat_progress_copy", CopyRow, "subid")
_SLOT = Table("pgsub_slot", SlotRow, "subid")
_SERVER = Table("pgsub_server", ServerRow, "subid")


class ProgressCatalog(SubscriptionCatalog):
    """The part of the state store that the running engine keeps up to date."""

    def put_relations(self, subid: int, rows: Sequence[RelationRow]) -> None:
        """Make pg_subscription_rel of a subscription hold exactly these rows.

        :raises SubscriptionNotFound: if it is gone, as every method that writes for a subscription.
        """
        self._put(_RELATION, subid, rows)

    def relations(self, subid: int) -> list[RelationRow]:
        """pg_subscription_rel of a subscription, by schema and name."""
        return sorted(self._get(_RELATION, subid), key=lambda row: (row.schemaname, row.relname))

    def put_origin(self, subid: int, remote_lsn: int | None, local_lsn: int | None) -> None:
        """Set the origin's progress.

        :param remote_lsn: end LSN on the publisher up to which everything is durable on the target.
        :param local_lsn: the target's LSN of that commit.
        """
        self._put(_ORIGIN, subid, [OriginRow(remote_lsn, local_lsn)])

    def origin(self, subid: int) -> OriginRow | None:
        """The origin's progress, None before the first :meth:`put_origin`."""
        return _first(self._get(_ORIGIN, subid))

    def put_prepared(self, subid: int, rows: Sequence[PreparedRow]) -> None:
        """Make pgsub_prepared_pending of a subscription hold exactly these rows."""
        self._put(_PREPARED, subid, rows)

    def prepared(self, subid: int) -> list[PreparedRow]:
        """What is prepared on the target and not decided, oldest first."""
        return sorted(self._get(_PREPARED, subid), key=lambda row: (row.prepared_at, row.gid))

    def put_held(self, subid: int, rows: Sequence[HeldRow]) -> None:
        """Make pgsub_held_table of a subscription hold exactly these rows."""
        self._put(_HELD, subid, rows)

    def held(self, subid: int) -> list[HeldRow]:
        """Tables whose changes are kept, by schema and name."""
        return sorted(self._get(_HELD, subid), key=lambda row: (row.schemaname, row.relname))

    def put_skipped(self, subid: int, row: SkippedRow) -> None:
        """Set how much is kept of what was skipped; nothing kept is no row."""
        self._put(_SKIPPED, subid, [row] if row.waiting_changes or row.replayed_changes else [])

    def skipped(self, subid: int) -> SkippedRow | None:
        """How much is kept of what was skipped, None where nothing is."""
        return _first(self._get(_SKIPPED, subid))

    def put_workers(self, subid: int, rows: Sequence[WorkerRow]) -> None:
        """Make pg_stat_subscription show exactly these workers; without any it shows one row of NULLs."""
        self._put(_WORKER, subid, rows)

    def workers(self, subid: int) -> list[WorkerRow]:
        """The workers that run for a subscription."""
        return self._get(_WORKER, subid)

    def put_copy_progress(self, subid: int, rows: Sequence[CopyRow]) -> None:
        """Make pg_stat_progress_copy of a subscription hold exactly these rows."""
        self._put(_COPY, subid, rows)

    def copy_progress(self, subid: int) -> list[CopyRow]:
        """The copies that run for a subscription."""
        return self._get(_COPY, subid)

    def put_slot(self, subid: int, row: SlotRow | None) -> None:
        """Set what is known of the subscription's slot.

        :param row: None if it has no slot.
        """
        self._put(_SLOT, subid, [row] if row else [])

    def slot(self, subid: int) -> SlotRow | None:
        """What was last seen of the subscription's slot."""
        return _first(self._get(_SLOT, subid))

    def put_server(self, subid: int, pid: int, host: str) -> None:
        """Note the launcher that serves a subscription from now on.

        :param pid: of the launcher.
        :param host: where it runs.
        """
        self._put(_SERVER, subid, [ServerRow(pid, host, utc_now())])

    def clear_server(self, subid: int) -> None:
        """Nobody serves the subscription any more; nothing happens if it is gone."""
        with self._database.transaction():
            self._database.run("DELETE FROM pgsub_server WHERE subid = ?", subid)

    def server(self, subid: int) -> ServerRow | None:
        """The launcher that said it serves a subscription; :meth:`Lock.holder` tells whether it still does."""
        return _first(self._get(_SERVER, subid))

    def _get(self, table: Table[Row], subid: int) -> list[Row]:
        return [table.decode(values) for values in self._database.rows(table.select, (subid,))]

    def _put(self, table: Table[Row], subid: int, rows: Sequence[Row]) -> None:
        wanted = [table.encode(row) for row in rows]
        owner = table.owner or "subid"
        with self._database.transaction():
            self.require(subid)
            sql = f'SELECT rowid, {table.columns} FROM "{table.name}" WHERE "{owner}" = ?'
            present = {values[1:]: values[0] for values in self._database.rows(sql, (subid,))}
            gone = [(present[values],) for values in present.keys() - set(wanted)]
            self._database.run_many(f'DELETE FROM "{table.name}" WHERE rowid = ?', gone)
            new = [(subid, *values) for values in wanted if values not in present]
            self._database.run_many(table.insert, new)


def _first(rows: list[Row]) -> Row | None:
    return rows[0] if rows else None
