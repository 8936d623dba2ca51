"""Limits the sessions that ``--apply-workers auto`` takes from the target."""

from __future__ import annotations

from pgsub.apply.rows.worker_sessions import TargetSession
from pgsub.target.session import origins
from pgsub.target.session.free_sessions import free_sessions

#: Sessions of the target that are left to others: the larger of this number and this part of max_connections.
LEFT_TO_OTHERS, PART_OF_OTHERS = 4, 0.1


def further_sessions(own: TargetSession, present: int) -> tuple[int, str]:
    """Return how many more sessions the target has room for, and why not more.

    :param own: the worker's own session, besides which ``present`` others are open.
    """
    connection, subid = own.connection, own.relations.subid
    found = free_sessions(connection, subid)
    if found is None:
        return 0, "The target does not say how many sessions are free."
    free = found.free - max(LEFT_TO_OTHERS, round(PART_OF_OTHERS * found.most))
    if free < 1:
        return 0, f"Only {max(found.free, 0)} sessions are free on the target, which are left to others."
    left = origins.spare(connection, subid) if own.progress.tagged else None
    if left is None:
        return free, ""
    left -= 1 + present
    return min(free, left), "Replication origins of the target are left to others." if left < 1 else ""
