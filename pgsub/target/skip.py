"""``subskiplsn`` in the ledger: which remote transaction is not to be applied, or not all of it.

Mirrors AlterSubscription's SKIP (subscriptioncmds.c) and clear_subscription_skip_lsn (worker.c). It is a flag of
apply's control row: setting it waits for no transaction, however large.
"""

from __future__ import annotations

from dataclasses import dataclass

import psycopg

from pgsub.errors import StateForbids, StreamsMustRestart
from pgsub.protocol.lsn import format_lsn, parse_lsn
from pgsub.target import holding, ledger

WHOLE, CONFLICTING = "whole", "conflicting"
_APPLY = "subid = %s AND worker = 0"


@dataclass(frozen=True, slots=True)
class Skip:
    """What is set.

    :ivar lsn: the finish LSN of the transaction.
    :ivar rows: ``whole``, or ``conflicting``: only the rows that cannot be applied.
    """

    lsn: int
    rows: str = WHOLE


def pending(connection: psycopg.Connection, subid: int) -> Skip | None:
    """What is set and not consumed.

    :raises StateForbids: the ledger does not know the subscription.
    """
    row = connection.execute(
        f"SELECT skip_lsn::text, skip_rows FROM pgsub.control WHERE {_APPLY}".encode(), (subid,)
    ).fetchone()
    if row is None:
        raise ledger.unknown(subid)
    return None if row[0] is None else Skip(parse_lsn(row[0]), row[1])


def check(skip: Skip, remote_lsn: int) -> None:
    """:raises StateForbids: the LSN lies behind what was applied, in the server's words."""
    if skip.lsn < remote_lsn:
        raise StateForbids(
            f"skip WAL location (LSN {format_lsn(skip.lsn)}) must be greater than origin LSN {format_lsn(remote_lsn)}",
            detail="What ends before the origin LSN is applied, or was left out, already.",
            sqlstate="22023",
        )


def set_pending(connection: psycopg.Connection, subid: int, skip: Skip | None) -> None:
    """Set it durably, or clear it with None.

    :raises StateForbids: see :func:`check`.
    """
    with ledger.durable(connection):
        if skip is not None and not holding.keeps(connection, subid, skip.lsn):
            check(skip, ledger.apply_position(connection, subid))
        lsn, rows = (None, None) if skip is None else (format_lsn(skip.lsn), skip.rows)
        connection.execute(
            f"UPDATE pgsub.control SET skip_lsn = %s, skip_rows = %s WHERE {_APPLY}".encode(), (lsn, rows, subid)
        )


def clear(connection: psycopg.Connection, subid: int, skip: Skip) -> None:
    """Inside the transaction that consumes it.

    :raises StreamsMustRestart: an operator has changed it meanwhile: what was decided by it is to be decided anew.
    """
    row = connection.execute(
        "UPDATE pgsub.control SET skip_lsn = NULL, skip_rows = NULL"
        f" WHERE {_APPLY} AND skip_lsn = %s AND skip_rows = %s RETURNING true".encode(),
        (subid, format_lsn(skip.lsn), skip.rows),
    ).fetchone()
    if row is None:
        raise StreamsMustRestart("what is to be skipped was changed meanwhile")
