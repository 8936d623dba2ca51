"""``pgsub conflicts list`` and ``show``: the recorded conflicts, from the state store only.

The server only logs conflicts (``replication/logical/conflict.c``).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pgsub.catalog.conflicts import SKIPPED
from pgsub.catalog.rows import ConflictRow
from pgsub.catalog.store import StateStore
from pgsub.catalog.times import ago
from pgsub.common.errors import StateForbids, SubscriptionNotFound, UsageError
from pgsub.common.quoting import word
from pgsub.protocol.lsn import covered, format_lsn, parse_lsn

#: The server's types except update_deleted, which needs dead rows that only the server can see.
TYPES = (
    *("insert_exists", "update_origin_differs", "update_exists", "update_missing"),
    *("delete_origin_differs", "delete_missing", "multiple_unique_conflicts"),
)
#: The value of a column that was not sent or not read.
ABSENT = object()


@dataclass(frozen=True)
class Compared:
    """A column in both versions. A version that does not contain it has :data:`ABSENT`."""

    column: str
    remote: object
    local: object

    @property
    def differs(self) -> bool:
        """Whether both values are known and differ."""
        return ABSENT not in (self.remote, self.local) and self.remote != self.local


@dataclass(frozen=True)
class Conflicts:
    """The conflicts that were found.

    :ivar more: whether there are more than the limit.
    :ivar dropped: number of conflicts removed from the history because of its size limit.
    """

    name: str
    rows: list[ConflictRow]
    more: bool
    dropped: int


def conflicts(
    folder: Path,
    name: str,
    *,
    conflict_type: str | None = None,
    table: str | None = None,
    since: float | None = None,
    limit: int = 100,
) -> Conflicts:
    """Return the conflicts of a subscription, even a dropped one, newest first.

    :param table: schema.table.
    :param since: only conflicts detected within this many seconds.
    :raises SubscriptionNotFound: no subscription has this name, nor has a conflict.
    :raises UsageError: the type does not exist.
    """
    if conflict_type is not None:
        check_type(conflict_type)
    with StateStore.open(folder, create=False) as store, store.snapshot():
        subid = _subid(store, name)
        begin = None if since is None else ago(since)
        rows = store.conflicts(subid, limit + 1, conflict_type=conflict_type, table=table, since=begin)
        return Conflicts(name, rows[:limit], len(rows) > limit, store.conflicts_dropped(subid))


def check_type(conflict_type: str) -> None:
    """Check that a conflict type exists.

    :raises UsageError: the type does not exist.
    """
    if conflict_type not in TYPES:
        raise UsageError(
            f'"{conflict_type}" is not a conflict type that pgsub can detect', hint=f"Choose one of {', '.join(TYPES)}."
        )


def conflict(folder: Path, name: str, conflict_id: int) -> tuple[ConflictRow, bool]:
    """Return a conflict of a subscription, and whether its change is kept, as far as the state store knows.

    :raises StateForbids: there is no such conflict, or no longer.
    """
    with StateStore.open(folder, create=False) as store, store.snapshot():
        row = require_conflict(store, name, conflict_id)
        return row, _kept(store, row)


def _kept(store: StateStore, row: ConflictRow) -> bool:
    """Return whether the change is kept. It is not after origin-advance, after a prune, or if the row was missing or
    identical.
    """
    if row.action != SKIPPED or row.identical or (row.skipped_ref is None and row.worker is None):
        return False
    journal, lsn = store.journal_rows(row.subid), row.finish_lsn or 0
    for prune in (one.detail for one in journal if one.action == "prune"):
        if not prune["replayed"] and (prune["before"] is None or (row.last_at or "") < prune["before"]):
            return False
    advances = (one.detail for one in journal if one.action == "origin-advance" and row.skipped_ref is None)
    done = ((parse_lsn(one["from"]), parse_lsn(one["to"])) for one in advances if one.get("outcome") == "done")
    return not any(start <= lsn and covered(lsn, end) for start, end in done)


def require_conflict(store: StateStore, name: str, conflict_id: int) -> ConflictRow:
    """Return a conflict like :func:`conflict`, from an open state store."""
    subid, row = _subid(store, name), store.conflict(conflict_id)
    if row is None or row.subid != subid:
        raise StateForbids(
            f'subscription "{name}" has no conflict {conflict_id}',
            hint=f"See which it has.\npgsub conflicts list {word(name)}",
        )
    return row


def _subid(store: StateStore, name: str) -> int:
    try:
        return store.subscription(name).subid
    except SubscriptionNotFound:
        subid = store.conflicts_of(name)
        if subid is None:
            raise
        return subid


def compare(row: ConflictRow, local: dict[str, Any]) -> list[Compared]:
    """Compare both versions column by column: sent columns first, then those that only the target has.

    :param local: one of ``local_conflicts``.
    """
    sent, present = row.remote_tuple or row.replica_identity or {}, local.get("row") or {}
    return [Compared(name, sent.get(name, ABSENT), present.get(name, ABSENT)) for name in {**sent, **present}]


def document(row: ConflictRow) -> dict[str, Any]:
    """Return a conflict as JSON. ``differs`` lists the columns that differ in a local row."""
    found = asdict(row)
    for internal in ("subid", "event", "local_tuple", "origin", "skipped_ref"):
        del found[internal]
    found["finish_lsn"] = None if row.finish_lsn is None else format_lsn(row.finish_lsn)
    found["local_conflicts"] = [
        {**local, "differs": [one.column for one in compare(row, local) if one.differs]}
        for local in row.local_conflicts or ()
    ]
    return {"id": row.id, **found}
