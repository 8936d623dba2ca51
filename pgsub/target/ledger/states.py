"""Changes of a table's srsubstate: who may make which, under which lock. Mirrors tablesync.c's transitions.

Apply decides about a change under the lock of its progress row, with table states as of a ``states_version``. So
whoever makes apply's decision come out differently updates that row (lock and version in one statement) in the
transaction that changes the state. Lock order everywhere: apply's row, then tables by relid. No state change shares
a transaction with data but ``f``, and each is on disk before anything is built upon it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import psycopg

from pgsub.common.errors import Fenced
from pgsub.protocol.lsn import format_lsn, lsn_or_none, parse_lsn
from pgsub.target.ledger import workers
from pgsub.target.ledger.workers import Claim
from pgsub.target.session.transactions import durable, lock_timeout

_REL = "subid = %s AND srrelid = %s"


@contextlib.contextmanager
def changing(connection: psycopg.Connection, subid: int) -> Iterator[int]:
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


def lock_tables(connection: psycopg.Connection, subid: int, relids: Collection[int]) -> None:
    """Lock the rows of tables in the order of their oids: who changes several at once must not meet another halfway.

    An UPDATE alone would take them in the order of its plan.
    """
    connection.execute(
        "SELECT FROM pgsub.subscription_rel WHERE subid = %s AND srrelid = ANY (%s::oid[]) ORDER BY srrelid FOR UPDATE",
        (subid, list(relids)),
    )


def next_group(connection: psycopg.Connection, subid: int) -> int:
    """A number that no group of tables of this subscription has had."""
    row = connection.execute(
        "UPDATE pgsub.subscription SET sync_groups = sync_groups + 1 WHERE subid = %s RETURNING sync_groups", (subid,)
    ).fetchone()
    if row is None:
        raise Fenced("the subscription was removed from the ledger")
    return int(row[0])


def start_copy(connection: psycopg.Connection, claims: Sequence[Claim], slot: str) -> dict[int, int]:
    """``i`` or ``d`` → ``d`` with the slot's name as intent: durable before the slot exists.

    :return: the number of this attempt for each table.
    """
    with durable(connection):
        workers.fence_all(connection, claims)
        lock_tables(connection, claims[0].subid, _workers(claims))
        rows = connection.execute(
            "UPDATE pgsub.subscription_rel SET srsubstate = 'd', sync_slot = %s, attempt = attempt + 1,"
            " copy_mode = NULL, handover_lsn = NULL WHERE subid = %s AND srrelid = ANY (%s)"
            " AND srsubstate IN ('i', 'd') RETURNING srrelid::bigint, attempt",
            (slot, claims[0].subid, _workers(claims)),
        ).fetchall()
        if len(rows) != len(claims):
            raise Fenced("the state of a table changed meanwhile")
    return dict(rows)


def slot_position(connection: psycopg.Connection, claims: Sequence[Claim], position: int) -> None:
    """The sync slot's consistent point is where the sync workers' own progress begins."""
    with durable(connection):
        workers.fence_all(connection, claims)
        connection.execute(
            "INSERT INTO pgsub.progress AS p (subid, worker, remote_lsn, reported_lsn)"
            " SELECT %s, w, %s::pg_lsn, %s::pg_lsn FROM pg_catalog.unnest(%s::oid[]) AS w"
            " ON CONFLICT (subid, worker) DO UPDATE SET remote_lsn = excluded.remote_lsn,"
            " reported_lsn = excluded.reported_lsn, remote_commit_ts = NULL",
            (claims[0].subid, format_lsn(position), format_lsn(position), _workers(claims)),
        )


def _workers(claims: Sequence[Claim]) -> list[int]:
    return [claim.worker for claim in claims]


def finish_copy(connection: psycopg.Connection, claim: Claim, attempt: int) -> bool:
    """``d`` → ``f`` inside the caller's transaction, if every chunk of the attempt is done.

    :return: whether the state was changed.
    """
    workers.fence(connection, claim)
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


def try_syncdone(connection: psycopg.Connection, claim: Claim, sync_lsn: int) -> HandOver:
    """``f`` → ``s`` if apply has not passed the sync worker, or once that has reached the claimed position.

    Apply takes a transaction from then on if its finish LSN is not below ``srsublsn``; whatever apply decided before
    under its lock was covered by ``srsublsn`` already.

    :param sync_lsn: everything before is applied by this sync worker, and with a claim nothing beyond it but what
        came with the copy itself.
    """
    with changing(connection, claim.subid) as apply_lsn:
        workers.fence(connection, claim)
        handover = _handover(connection, claim)
        ready = apply_lsn <= sync_lsn if handover is None else sync_lsn >= handover
        # guard: a table changes hands only where apply has not passed it, always
        if ready:
            _set_done(connection, claim.subid, [claim.worker], sync_lsn)
        else:
            raise psycopg.Rollback()  # no need to make apply look again
    return HandOver(apply_lsn, handover, ready)


def try_syncdone_many(connection: psycopg.Connection, claims: Sequence[Claim], sync_lsn: int) -> set[int]:
    """:func:`try_syncdone` of tables that were copied at one position and whose slots nobody has streamed.

    :return: the tables that are ``s`` now.
    """
    with changing(connection, claims[0].subid) as apply_lsn:
        workers.fence_all(connection, claims)
        rows = connection.execute(
            "SELECT srrelid::bigint, handover_lsn::text FROM pgsub.subscription_rel WHERE subid = %s"
            " AND srrelid = ANY (%s) AND srsubstate = 'f' ORDER BY srrelid FOR UPDATE",
            (claims[0].subid, _workers(claims)),
        ).fetchall()
        done = {
            relid for relid, text in rows if (apply_lsn <= sync_lsn if text is None else sync_lsn >= parse_lsn(text))
        }
        if done:
            _set_done(connection, claims[0].subid, sorted(done), sync_lsn)
        else:
            raise psycopg.Rollback()
    return done


def _set_done(connection: psycopg.Connection, subid: int, relids: list[int], at: int) -> None:
    connection.execute(
        "UPDATE pgsub.subscription_rel SET srsubstate = 's', srsublsn = %s, handover_lsn = NULL"
        " WHERE subid = %s AND srrelid = ANY (%s) AND srsubstate = 'f'",
        (format_lsn(at), subid, relids),
    )


def claim_before_copy(connection: psycopg.Connection, claims: Sequence[Claim]) -> None:
    """Claim tables (``d``) where apply is now, before their slot exists: apply keeps off their changes beyond.

    Whatever lies between this and the slot's consistent point comes with the copy, so unless apply loses its patience
    the tables change hands at the consistent point without any streaming.
    """
    with changing(connection, claims[0].subid) as apply_lsn:
        workers.fence_all(connection, claims)
        _move_claims(connection, claims, apply_lsn, standing=False)


def move_claims(connection: psycopg.Connection, claims: Sequence[Claim], position: int) -> None:
    """The slot exists: apply need not wait at what the copy brings; claims that were taken back stay so."""
    with changing(connection, claims[0].subid):
        workers.fence_all(connection, claims)
        _move_claims(connection, claims, position, standing=True)


def _move_claims(connection: psycopg.Connection, claims: Sequence[Claim], position: int, *, standing: bool) -> None:
    lock_tables(connection, claims[0].subid, _workers(claims))
    connection.execute(
        "UPDATE pgsub.subscription_rel SET handover_lsn = %s WHERE subid = %s AND srrelid = ANY (%s)"
        " AND srsubstate = 'd' AND (handover_lsn IS NOT NULL) = %s",
        (format_lsn(position), claims[0].subid, _workers(claims), standing),
    )


def claim_handover(connection: psycopg.Connection, claim: Claim, sync_lsn: int) -> int:
    """Fix where the table changes hands: H = max(apply, sync), unless a claim stands.

    :return: H.
    """
    with changing(connection, claim.subid) as apply_lsn:
        workers.fence(connection, claim)
        handover = _handover(connection, claim)
        if handover is None:
            handover = max(apply_lsn, sync_lsn)
            connection.execute(
                f"UPDATE pgsub.subscription_rel SET handover_lsn = %s WHERE {_REL} AND srsubstate = 'f'".encode(),
                (format_lsn(handover), claim.subid, claim.worker),
            )
    return handover


def withdraw_claims(connection: psycopg.Connection, subid: int, relids: Collection[int]) -> None:
    """Take claims back: apply waited long enough, or the sync worker failed. An error in one table stops no other."""
    with changing(connection, subid):
        lock_tables(connection, subid, relids)
        connection.execute(
            "UPDATE pgsub.subscription_rel SET handover_lsn = NULL WHERE subid = %s AND srrelid = ANY (%s)"
            " AND srsubstate IN ('d', 'f')",
            (subid, list(relids)),
        )


def _handover(connection: psycopg.Connection, claim: Claim) -> int | None:
    row = connection.execute(
        f"SELECT srsubstate::text, handover_lsn::text FROM pgsub.subscription_rel WHERE {_REL} FOR UPDATE".encode(),
        (claim.subid, claim.worker),
    ).fetchone()
    if row is None or row[0] != "f":
        raise Fenced("the table is not waiting for a hand-over")
    return lsn_or_none(row[1])


def set_ready(connection: psycopg.Connection, subid: int, position: int) -> None:
    """``s`` → ``r`` for tables whose srsublsn apply has passed; srsublsn stays, and is checked in ``r`` too."""
    with changing(connection, subid):
        connection.execute(
            "WITH passed AS MATERIALIZED (SELECT srrelid FROM pgsub.subscription_rel WHERE subid = %(subid)s"
            " AND srsubstate = 's' AND srsublsn <= %(position)s ORDER BY srrelid FOR UPDATE)"
            " UPDATE pgsub.subscription_rel SET srsubstate = 'r' WHERE subid = %(subid)s"
            " AND srrelid IN (SELECT srrelid FROM passed)",
            {"subid": subid, "position": format_lsn(position)},
        )
