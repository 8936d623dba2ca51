"""The barrier: a position in the publisher's WAL at which apply stops until it is told to go on.

NOTES
At the barrier the target has every transaction that finished before its LSN, and no other. A snapshot of the target
then equals the publisher's at that LSN. The command that puts it up may move it forward repeatedly, and releases it.

The barrier is changed as the state of a table is (:mod:`states`): under the lock of apply's row, with a new
``states_version``, which apply compares under that lock before it commits. So once :func:`put` has returned, nothing is
committed that the barrier does not cover. The end of a prepared transaction is an exception: apply reads the version
just before, not under the lock, so one that it had already received may still be committed. A command that needs one
exact point therefore determines it on the publisher after :func:`put`, and moves the barrier there.

Apply waits for a bounded time, then removes the barrier and goes on. If the barrier is still there after a command took
its snapshot, nothing was committed before. A new barrier of the same subscription replaces the old one.
"""

from __future__ import annotations

import uuid
from typing import NamedTuple

import psycopg

from pgsub.common.query import row, scalar
from pgsub.protocol.lsn import format_lsn, lsn_or_none, parse_lsn
from pgsub.target.ledger.tables import states
from pgsub.target.ledger.worker_takeover import Claim
from pgsub.target.session.transactions import lock_timeout


class Barrier(NamedTuple):
    """A barrier as recorded in the ledger.

    :ivar token: identifies the request.
    :ivar lsn: apply stops once it has applied what this position covers.
    :ivar seconds: maximum time that apply waits at the barrier.
    :ivar reached_lsn: last position at which apply stopped for it; None: none yet.
    :ivar stood: seconds that apply had waited by then at earlier positions of the barrier.
    """

    token: str
    lsn: int
    seconds: float
    reached_lsn: int | None
    stood: float

    @property
    def reached(self) -> bool:
        """Whether apply has stopped at it."""
        return self.reached_lsn == self.lsn


def put(connection: psycopg.Connection, subid: int, lsn: int, seconds: float) -> str:
    """Put up a barrier and return its token.

    :raises psycopg.errors.LockNotAvailable: apply held its row for more than a second; try again.
    """
    token = str(uuid.uuid4())
    with states.changing(connection, subid):
        connection.execute(
            "INSERT INTO pgsub.barrier (subid, token, lsn, seconds) VALUES (%s, %s, %s, %s)"
            " ON CONFLICT (subid) DO UPDATE SET token = excluded.token, lsn = excluded.lsn,"
            " seconds = excluded.seconds, reached_lsn = NULL, stood = 0",
            (subid, token, format_lsn(lsn), seconds),
        )
    return token


def move(connection: psycopg.Connection, subid: int, token: str, lsn: int) -> bool:
    """Move a barrier forward and return whether it was still there.

    :raises psycopg.errors.LockNotAvailable: see :func:`put`.
    """
    query = "UPDATE pgsub.barrier SET lsn = greatest(lsn, %s) WHERE subid = %s AND token = %s RETURNING true"
    with states.changing(connection, subid):
        return scalar(connection, query, (format_lsn(lsn), subid, token)) is True


def remove(connection: psycopg.Connection, subid: int, token: str) -> bool:
    """Remove a barrier, so that apply goes on, and return whether it was still there.

    :raises psycopg.errors.LockNotAvailable: see :func:`put`.
    """
    query = "DELETE FROM pgsub.barrier WHERE subid = %s AND token = %s RETURNING true"
    with states.changing(connection, subid):
        return scalar(connection, query, (subid, token)) is True


def take(connection: psycopg.Connection, subid: int, token: str, lsn: int) -> bool:
    """Remove a barrier in the open transaction if apply has stopped at it. Apply goes on when the transaction ends.

    Until then the transaction holds apply's row, so nothing else is committed.

    :return: whether apply had stopped at it.
    :raises psycopg.errors.LockNotAvailable: see :func:`put`.
    """
    lock_timeout(connection)
    connection.execute(
        "UPDATE pgsub.progress SET states_version = states_version + 1 WHERE subid = %s AND worker = 0", (subid,)
    )
    query = (
        "DELETE FROM pgsub.barrier WHERE subid = %s AND token = %s AND lsn = %s AND reached_lsn = lsn RETURNING true"
    )
    return scalar(connection, query, (subid, token, format_lsn(lsn))) is True


def read(connection: psycopg.Connection, subid: int) -> Barrier | None:
    """Read the barrier of a subscription as of this statement; None if there is none."""
    query = "SELECT token::text, lsn::text, seconds, reached_lsn::text, stood FROM pgsub.barrier WHERE subid = %s"
    found = row(connection, query, (subid,))
    if found is None:
        return None
    token, lsn, seconds, reached, stood = found
    return Barrier(token, parse_lsn(lsn), seconds, lsn_or_none(reached), stood)


# Only the worker with the present epoch knows the position of apply.
_MINE = """subid = %s AND token = %s AND EXISTS (SELECT FROM pgsub.control c
    WHERE c.subid = barrier.subid AND c.worker = %s AND c.epoch = %s AND c.token = %s)"""


def stands(connection: psycopg.Connection, claim: Claim, barrier: Barrier, stood: float) -> None:
    """Record that an apply worker has applied what a barrier covers and nothing else.

    Nothing happens if the epoch was raised since.

    :param stood: seconds that apply has waited at earlier positions.
    """
    connection.execute(
        f"UPDATE pgsub.barrier SET reached_lsn = lsn, stood = %s WHERE {_MINE} AND lsn = %s".encode(),
        (stood, *_values(claim, barrier), format_lsn(barrier.lsn)),
    )


def give_up(connection: psycopg.Connection, claim: Claim, barrier: Barrier) -> None:
    """Remove the barrier at which an apply worker has waited for its maximum time.

    Nothing happens if the epoch was raised since.
    """
    connection.execute(f"DELETE FROM pgsub.barrier WHERE {_MINE}".encode(), _values(claim, barrier))


def _values(claim: Claim, barrier: Barrier) -> tuple[object, ...]:
    return claim.subid, barrier.token, claim.worker, claim.epoch, claim.token
