"""Changes of a table's srsubstate: who may make which, under which lock. Mirrors tablesync.c's transitions.

Apply decides about a change under the lock of its progress row, with table states as of a ``states_version``. So
whoever makes apply's decision come out differently updates that row (lock and version in one statement) in the
transaction that changes the state. Lock order everywhere: apply's row, then tables by relid. No state change shares
a transaction with data but ``f``, and each is on disk before anything is built upon it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import psycopg

from pgsub.errors import Fenced
from pgsub.protocol.lsn import format_lsn, parse_lsn
from pgsub.target.ledger import Claim, durable, lock_timeout, lsn_or_none

_REL = "subid = %s AND srrelid = %s"


@contextlib.contextmanager
def deciding(connection: psycopg.Connection, subid: int) -> Iterator[int]:
    """A durable transaction that holds apply's row and has raised its version; gives apply's ``remote_lsn``.

    :raises psycopg.errors.LockNotAvailable: apply held the row for more than a second; try again.
    """
    with durable(connection):
        lock_timeout(connection)
        row = connection.execute(
            "UPDATE pgsub.progress SET states_version = states_version + 1 WHERE subid = %s AND worker = 0"
            " RETURNING remote_lsn::text",
            (subid,),
        ).fetchone()
        if row is None:
            raise Fenced("the subscription was removed from the ledger")
        yield parse_lsn(row[0])


def fence(connection: psycopg.Connection, claim: Claim) -> None:
    """Hold the worker's control row against a take-over for the length of this (short) transaction.

    :raises Fenced: the epoch was raised.
    """
    row = connection.execute(
        "SELECT FROM pgsub.control WHERE subid = %s AND worker = %s AND epoch = %s AND token = %s FOR SHARE",
        (claim.subid, claim.worker, claim.epoch, claim.token),
    ).fetchone()
    if row is None:
        raise Fenced("another worker took over")


def start_copy(connection: psycopg.Connection, claim: Claim, slot: str, mode: str | None) -> int:
    """``i`` or ``d`` → ``d`` with the slot's name as intent: durable before the slot exists.

    :return: the number of this attempt.
    """
    with durable(connection):
        fence(connection, claim)
        row = connection.execute(
            "UPDATE pgsub.subscription_rel SET srsubstate = 'd', sync_slot = %s, attempt = attempt + 1, copy_mode = %s"
            f" WHERE {_REL} AND srsubstate IN ('i', 'd') RETURNING attempt".encode(),
            (slot, mode, claim.subid, claim.worker),
        ).fetchone()
    if row is None:
        raise Fenced("the table's state changed meanwhile")
    return int(row[0])


def slot_position(connection: psycopg.Connection, claim: Claim, position: int) -> None:
    """The sync slot's consistent point is where the sync worker's own progress begins."""
    with durable(connection):
        fence(connection, claim)
        connection.execute(
            "INSERT INTO pgsub.progress AS p (subid, worker, remote_lsn, reported_lsn) VALUES (%s, %s, %s, %s)"
            " ON CONFLICT (subid, worker) DO UPDATE SET remote_lsn = excluded.remote_lsn,"
            " reported_lsn = excluded.reported_lsn, remote_commit_ts = NULL",
            (claim.subid, claim.worker, format_lsn(position), format_lsn(position)),
        )


def finish_copy(connection: psycopg.Connection, claim: Claim, attempt: int) -> bool:
    """``d`` → ``f`` inside the caller's transaction, if every chunk of the attempt is done.

    :return: whether the state was changed.
    """
    fence(connection, claim)
    row = connection.execute(
        f"UPDATE pgsub.subscription_rel SET srsubstate = 'f' WHERE {_REL} AND srsubstate = 'd' AND attempt = %s"
        " AND NOT EXISTS (SELECT FROM pgsub.copy_chunk c WHERE c.subid = subscription_rel.subid"
        " AND c.srrelid = subscription_rel.srrelid AND c.attempt = subscription_rel.attempt AND c.xid IS NULL)"
        " RETURNING true".encode(),
        (claim.subid, claim.worker, attempt),
    ).fetchone()
    return row is not None


@dataclass(frozen=True, slots=True)
class HandOver:
    """Outcome of a hand-over attempt: apply's position, the claim that stands, whether ``s`` was committed."""

    apply_lsn: int
    handover_lsn: int | None
    done: bool


def try_done(connection: psycopg.Connection, claim: Claim, sync_lsn: int) -> HandOver:
    """``f`` → ``s`` if apply has not passed the sync worker, or at the claimed position once that is reached.

    Apply takes a transaction from then on if its finish LSN is not below ``srsublsn``; whatever apply decided before
    under its lock was covered by ``srsublsn`` already.

    :param sync_lsn: everything before is applied by this sync worker, and with a claim nothing beyond it.
    """
    with deciding(connection, claim.subid) as apply_lsn:
        fence(connection, claim)
        handover = _handover(connection, claim)
        if handover is None:
            done, at = apply_lsn <= sync_lsn, sync_lsn
        else:
            done, at = sync_lsn >= handover, handover
        if done:
            connection.execute(
                "UPDATE pgsub.subscription_rel SET srsubstate = 's', srsublsn = %s, handover_lsn = NULL"
                f" WHERE {_REL} AND srsubstate = 'f'".encode(),
                (format_lsn(at), claim.subid, claim.worker),
            )
        else:
            raise psycopg.Rollback()  # no need to make apply look again
    return HandOver(apply_lsn, handover, done)


def claim_handover(connection: psycopg.Connection, claim: Claim, sync_lsn: int) -> int:
    """Fix where the table changes hands: H = max(apply, sync), unless a claim stands.

    :return: H.
    """
    with deciding(connection, claim.subid) as apply_lsn:
        fence(connection, claim)
        handover = _handover(connection, claim)
        if handover is None:
            handover = max(apply_lsn, sync_lsn)
            connection.execute(
                f"UPDATE pgsub.subscription_rel SET handover_lsn = %s WHERE {_REL} AND srsubstate = 'f'".encode(),
                (format_lsn(handover), claim.subid, claim.worker),
            )
    return handover


def unclaim(connection: psycopg.Connection, subid: int, relid: int) -> None:
    """Take a claim back: apply waited long enough, or the sync worker failed. An error in one table stops no other."""
    with deciding(connection, subid):
        connection.execute(
            f"UPDATE pgsub.subscription_rel SET handover_lsn = NULL WHERE {_REL} AND srsubstate = 'f'".encode(),
            (subid, relid),
        )


def _handover(connection: psycopg.Connection, claim: Claim) -> int | None:
    row = connection.execute(
        f"SELECT srsubstate::text, handover_lsn::text FROM pgsub.subscription_rel WHERE {_REL} FOR UPDATE".encode(),
        (claim.subid, claim.worker),
    ).fetchone()
    if row is None or row[0] != "f":
        raise Fenced("the table is not waiting for a hand-over")
    return lsn_or_none(row[1])


def ready(connection: psycopg.Connection, subid: int, position: int) -> None:
    """``s`` → ``r`` for tables whose srsublsn apply has passed; srsublsn stays, and is checked in ``r`` too."""
    with deciding(connection, subid):
        connection.execute(
            "UPDATE pgsub.subscription_rel SET srsubstate = 'r' WHERE subid = %s AND srsubstate = 's'"
            " AND srsublsn <= %s",
            (subid, format_lsn(position)),
        )


def slot_dropped(connection: psycopg.Connection, subid: int, relid: int) -> None:
    """The sync slot is gone: the ledger stops naming it, and forgets the copy's book-keeping."""
    with durable(connection):
        connection.execute(f"UPDATE pgsub.subscription_rel SET sync_slot = NULL WHERE {_REL}".encode(), (subid, relid))
        connection.execute(f"DELETE FROM pgsub.copy_chunk WHERE {_REL}".encode(), (subid, relid))
        connection.execute("DELETE FROM pgsub.progress WHERE subid = %s AND worker = %s", (subid, relid))
