"""The barrier: apply comes to a stop at one position of the publisher's WAL, and goes on when it is told to.

NOTES
At the barrier the target has every transaction that finished before its LSN, and no other: a snapshot of the target is
then the publisher's of that LSN. Who raises it, moves it forward as often as he likes, and releases it.

It is changed as the state of a table is (:mod:`states`): under the lock of apply's row and with a new
``states_version``, which is what apply compares under that lock before it commits. So nothing that the barrier does not
cover is committed once :func:`put` has returned. What ends a prepared transaction is not decided under the lock: apply
reads the version just before, so that what it had received by then may still be committed. Whoever wants one point
therefore takes it on the publisher after :func:`put`, and moves the barrier there.

Apply stands for a bounded time: then it takes the barrier away, and goes on. Who finds it still there after he has
taken what he wanted knows that nothing was committed before. Another one of the same subscription takes its place.
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
    """A barrier as the ledger has it.

    :ivar token: names the request.
    :ivar lsn: apply applies what it covers.
    :ivar seconds: for which apply stands there at most.
    :ivar reached_lsn: the position at which apply has stood last, None before it has.
    :ivar stood: seconds for which it had stood at earlier ones by then.
    """

    token: str
    lsn: int
    seconds: float
    reached_lsn: int | None
    stood: float

    @property
    def reached(self) -> bool:
        """Whether apply stands there."""
        return self.reached_lsn == self.lsn


def put(connection: psycopg.Connection, subid: int, lsn: int, seconds: float) -> str:
    """Raise a barrier.

    :return: its token.
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
    """Move a barrier forward.

    :return: whether it was still there.
    :raises psycopg.errors.LockNotAvailable: as of :func:`put`.
    """
    query = "UPDATE pgsub.barrier SET lsn = greatest(lsn, %s) WHERE subid = %s AND token = %s RETURNING true"
    with states.changing(connection, subid):
        return scalar(connection, query, (format_lsn(lsn), subid, token)) is True


def remove(connection: psycopg.Connection, subid: int, token: str) -> bool:
    """Release apply.

    :return: whether the barrier was still there.
    :raises psycopg.errors.LockNotAvailable: as of :func:`put`.
    """
    query = "DELETE FROM pgsub.barrier WHERE subid = %s AND token = %s RETURNING true"
    with states.changing(connection, subid):
        return scalar(connection, query, (subid, token)) is True


def take(connection: psycopg.Connection, subid: int, token: str, lsn: int) -> bool:
    """Take a barrier away in the open transaction, if apply stands there; it goes on when the transaction ends.

    Until then the transaction holds apply's row: nothing is committed that its writer does not see.

    :return: whether apply stood there.
    :raises psycopg.errors.LockNotAvailable: as of :func:`put`.
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
    """Read the barrier of a subscription, as of this statement; None where there is none."""
    query = "SELECT token::text, lsn::text, seconds, reached_lsn::text, stood FROM pgsub.barrier WHERE subid = %s"
    found = row(connection, query, (subid,))
    if found is None:
        return None
    token, lsn, seconds, reached, stood = found
    return Barrier(token, parse_lsn(lsn), seconds, lsn_or_none(reached), stood)


# Only the worker of the present epoch knows where apply is.
_MINE = """subid = %s AND token = %s AND EXISTS (SELECT FROM pgsub.control c
    WHERE c.subid = barrier.subid AND c.worker = %s AND c.epoch = %s AND c.token = %s)"""


def stands(connection: psycopg.Connection, claim: Claim, barrier: Barrier, stood: float) -> None:
    """Say for an apply worker that it has applied what a barrier covers, and nothing else.

    Nothing happens if the epoch was raised since.

    :param stood: seconds that it has stood before.
    """
    connection.execute(
        f"UPDATE pgsub.barrier SET reached_lsn = lsn, stood = %s WHERE {_MINE} AND lsn = %s".encode(),
        (stood, *_values(claim, barrier), format_lsn(barrier.lsn)),
    )


def give_up(connection: psycopg.Connection, claim: Claim, barrier: Barrier) -> None:
    """Take the barrier away for an apply worker that has stood there for its time.

    Nothing happens if the epoch was raised since.
    """
    connection.execute(f"DELETE FROM pgsub.barrier WHERE {_MINE}".encode(), _values(claim, barrier))


def _values(claim: Claim, barrier: Barrier) -> tuple[object, ...]:
    return claim.subid, barrier.token, claim.worker, claim.epoch, claim.token
