"""The order of table synchronization: the largest first, small ones in groups that share a slot and worker. No I/O."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from pgsub.tablesync.copy import plan
from pgsub.target.ledger.subscriptions import RelationState

#: Maximum size of a table that is copied together with others. A larger one gets a slot and tasks of its own.
SMALL_BYTES = 8 << 20
#: Limits of a group: apply may have to wait for all of it, and a failure repeats all of it.
GROUP_BYTES = 64 << 20
#: PGSUB_GROUP_TABLES is for tests that need a small table to be copied alone.
GROUP_TABLES = int(os.environ.get("PGSUB_GROUP_TABLES", 100))


def unfinished(rel: RelationState) -> bool:
    """Return whether a table still needs a sync worker."""
    return rel.srsubstate in "idf" or rel.sync_slot is not None or rel.spare_slot is not None


def next_workers(waiting: Sequence[RelationState], free: int, *, alone: Collection[int]) -> list[tuple[int, ...]]:
    """Choose the tables of the next workers: a single table or a group of small ones for each.

    Copied tables are first, because their slots hold WAL back. Those with the same slot are a group. Then the largest
    table is first, so that the last worker does not run alone with it. Small tables are grouped, and spread evenly over
    the workers.

    :param waiting: tables without a worker.
    :param free: number of workers that may start.
    :param alone: tables that failed: they are not grouped, so that they delay no other table.
    """
    first = [rel for rel in waiting if rel.srrelid not in alone]
    to_copy = sorted((rel for rel in first if rel.srsubstate in "id"), key=_size, reverse=True)
    small = [rel for rel in to_copy if _size(rel) <= _small()]
    large = [rel for rel in to_copy if _size(rel) > _small()]
    copied = _by_slot([rel for rel in first if rel.srsubstate not in "id"])
    workers = [*copied, *((rel.srrelid,) for rel in large)][:free]
    groups = max(1, free - len(workers))
    most = min(GROUP_TABLES, -(-len(small) // groups))
    while small and len(workers) < free:
        workers.append(_group(small, most))
    # a table that keeps failing must not take the turn of others
    workers += [(rel.srrelid,) for rel in waiting if rel.srrelid in alone]
    return workers[:free]


def _by_slot(copied: Sequence[RelationState]) -> list[tuple[int, ...]]:
    """Group tables by the slot from which they catch up."""
    slots: dict[str | None, list[int]] = {}
    for rel in copied:
        slots.setdefault(rel.sync_slot, []).append(rel.srrelid)
    return [tuple(relids) for relids in slots.values()]


def _size(rel: RelationState) -> int:
    """Return a table's bytes. Without an estimate it counts as large."""
    return rel.copy_bytes if rel.copy_bytes is not None else _small() + 1


def _small() -> int:
    return min(SMALL_BYTES, plan.CHUNKED_FROM_BYTES)


def _group(small: list[RelationState], most: int) -> tuple[int, ...]:
    """Remove the next group from the list and return it."""
    size = count = 0
    while count < min(most, len(small)) and (not count or size + _size(small[count]) <= GROUP_BYTES):
        size += _size(small[count])
        count += 1
    group = tuple(rel.srrelid for rel in small[:count])
    del small[:count]
    return group
