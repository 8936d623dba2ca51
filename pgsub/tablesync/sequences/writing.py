"""The update of a sequence's value on the target. Mirrors copy_sequence (sequencesync.c).

NOTES
A value that was given out on the target is never given out again, unless the caller allows it. For this the value is
read again and written under a lock that nextval() of other sessions waits for. Only ALTER SEQUENCE takes such a lock,
so it sets CACHE to its present value. A session that is not the owner has no such lock. Between its read and its write
others may draw values; if they draw more than the position was behind, those are given out again. The lock, the read
and the write are one transaction: if the session is killed, the value is unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import psycopg
from psycopg import sql

from pgsub.common import failpoints
from pgsub.tablesync.sequences import reading
from pgsub.tablesync.sequences.comparison import Wanted, acts_as_owner
from pgsub.tablesync.sequences.definition import Position, identifier
from pgsub.target.session import roles

#: Maximum wait for sessions that drew a value in an open transaction. New sessions wait behind this one meanwhile.
LOCK_TIMEOUT = "1s"
_SET_TOGETHER = """
SELECT pg_catalog.setval(u.o::oid::regclass, u.v, u.c)
  FROM ROWS FROM (pg_catalog.unnest(%s::bigint[]), pg_catalog.unnest(%s::bigint[]), pg_catalog.unnest(%s::boolean[]))
       AS u (o, v, c)
"""


def bring_up(
    session: psycopg.Connection[Any], wanted: Wanted, *, run_as_owner: bool, allow_backward: bool, lock_timeout: str
) -> tuple[Position, bool]:
    """Set the target's value to the publisher's if it is behind, or, with ``allow_backward``, if it differs.

    :param session: on the target, in autocommit mode.
    :return: the position that was found, and whether it was changed.
    :raises psycopg.errors.LockNotAvailable: a transaction that drew values stays open; nothing was changed.
    """
    local = wanted.local
    owned = local.access == "own" or acts_as_owner(local, run_as_owner)
    with session.transaction():
        with roles.acting(session, local.owner if acts_as_owner(local, run_as_owner) else None):
            before = reading.positions(session, [local.key])[local.key]
            if not moves(before, wanted, allow_backward=allow_backward):
                return before, False
            if owned:
                _lock(session, wanted, lock_timeout)
                before = reading.positions(session, [local.key])[local.key]
                if not moves(before, wanted, allow_backward=allow_backward):
                    return before, False
            failpoints.point("sequence.before_setval")
            session.execute(
                "SELECT pg_catalog.setval(%s::oid::regclass, %s::bigint, %s)",
                (local.oid, wanted.position.last_value, wanted.position.is_called),
            )
            failpoints.point("sequence.before_commit")
    return before, True


def set_together(session: psycopg.Connection[Any], behind: Iterable[Wanted], *, run_as_owner: bool) -> None:
    """Set the target's values to the publisher's, in the open transaction, without locking the sequences.

    :param behind: sequences from which nobody draws values now.
    """
    by_owner: dict[str | None, list[Wanted]] = {}
    for one in behind:
        by_owner.setdefault(one.local.owner if acts_as_owner(one.local, run_as_owner) else None, []).append(one)
    for owner, some in by_owner.items():
        positions = [(one.local.oid, one.position.last_value, one.position.is_called) for one in some]
        with roles.acting(session, owner):
            session.execute(_SET_TOGETHER, tuple(map(list, zip(*positions, strict=True))))


def moves(before: Position, wanted: Wanted, *, allow_backward: bool) -> bool:
    """Return whether the target's value must be set. It never moves backward unless that is allowed.

    A sequence that was set back meanwhile is not set to a publisher's value that was read before.
    """
    # guard: a sequence that was set back is not set to a value read before
    if went_back(before, wanted) and not allow_backward:
        return False
    ahead = before.ahead_of(wanted.position, wanted.definition.increment)
    return ahead < 0 or (allow_backward and ahead > 0)


def went_back(now: Position, wanted: Wanted) -> bool:
    """Return whether the target's value was set back after it was first read."""
    return wanted.seen is not None and now.ahead_of(wanted.seen, wanted.definition.increment) < 0


def _lock(session: psycopg.Connection[Any], wanted: Wanted, timeout: str) -> None:
    local = wanted.local
    session.execute(sql.SQL("SET LOCAL lock_timeout = {}").format(sql.Literal(timeout)))
    session.execute(sql.SQL("ALTER SEQUENCE {} CACHE {}").format(identifier(local.key), sql.Literal(local.cache)))
