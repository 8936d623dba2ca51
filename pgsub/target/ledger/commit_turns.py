"""Turns of the sessions that apply at once: each commits only after the one before it (see :mod:`pgsub.apply.writers`).

A turn is an advisory lock that a transaction holds until it ends. The next session waits for it on the target, which
sees who waits for whom and so resolves deadlocks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import psycopg

from pgsub.target.sql.pipeline import Pipeline, StatementFailed, Step
from pgsub.target.sql.statement_builder import Statement

#: Begins a transaction.
BEGIN: Step = (Statement.fixed("BEGIN"), (), None)
_TAKE = Statement.fixed("SELECT pg_catalog.pg_try_advisory_xact_lock($1::bigint)")
_AWAIT = Statement.fixed("SELECT pg_catalog.pg_advisory_xact_lock_shared($1::bigint)")
_CANCEL_HELD_UP = """
WITH turns AS MATERIALIZED (
    SELECT pid, objid, granted FROM pg_catalog.pg_locks
     WHERE locktype = 'advisory' AND objsubid = 1 AND classid::bigint = %s AND pid = ANY(%s::int[])
       AND database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database()))
SELECT pg_catalog.pg_cancel_backend(w.pid) FROM turns w
 WHERE NOT w.granted AND NOT EXISTS (SELECT FROM turns h WHERE h.granted AND h.objid = w.objid)
"""


def awaiting(turn: int) -> Step:
    """Return the statement that waits for the end of a transaction that has taken its turn."""
    return _AWAIT, (turn,), None


class Turns:
    """The turns of one session."""

    def __init__(self, connection: psycopg.Connection, pipeline: Pipeline, subid: int) -> None:
        self._connection = connection
        self._pipeline = pipeline
        self._subid = subid

    def take(self, turn: int, *, begin: bool) -> bool:
        """Take an advisory lock until the transaction ends. The next session waits for it.

        :return: False if another session holds the lock.
        """
        found: list[Sequence[str | None]] = []
        first: tuple[Step, ...] = (BEGIN,) if begin else ()
        self._send(*first, (_TAKE, (turn,), found.append))
        return found[0][0] == "t"

    def wait(self, turn: int) -> None:
        """Wait on the target for the end of a transaction that has taken its turn."""
        self._send(awaiting(turn))

    def _send(self, *steps: Step) -> None:
        try:
            self._pipeline.round_trip(*steps)
        except StatementFailed as failure:
            raise failure.error from None

    def cancel_held_up(self, pids: Collection[int]) -> int:
        """Cancel waits for a turn whose lock a foreign session holds. Not inside a transaction.

        Anyone who may connect to the database can request such a lock while it is held, and then gets it. A wait for
        another session of ``pids`` is not canceled. All locks are read at one moment.

        :param pids: PIDs of all sessions that take turns.
        :return: number of canceled sessions.
        """
        return self._connection.execute(_CANCEL_HELD_UP.encode(), (self._subid, list(pids))).rowcount
