"""Changes of a table's srsubstate: who may make which, under which lock. Mirrors tablesync.c's transitions.

NOTES
``i`` → ``d`` → ``f`` → ``s`` → ``r`` are stored; ``w`` (syncwait) and ``c`` (catchup) exist only while a worker lives.
From ``f`` on, a crash never leads to another copy.

Apply decides about a change under the lock of its progress row, with table states as of a ``states_version``. So a
state change that affects this decision updates that row (lock and version in one statement) in its transaction:
:func:`changing`. Changes between states that apply treats alike (``i``, ``d``, ``f`` without a claim) do not.
Lock order everywhere: apply's row, then tables by relid. Only ``f`` is set in a transaction that also writes data. Each
state is on disk before anything depends on it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

import psycopg

from pgsub.common.errors import Fenced
from pgsub.common.query import row, scalar
from pgsub.protocol.lsn import format_lsn, parse_lsn
from pgsub.target.ledger import events, worker_takeover
from pgsub.target.ledger.worker_takeover import Claim
from pgsub.target.session.transactions import durable, lock_timeout

CATCHUP = "c"
TABLES = "subid = %s AND srrelid = ANY (%s::oid[])"


@contextlib.contextmanager
def changing(connection: psycopg.Connection, subid: int) -> Iterator[int]:
    """Open a durable transaction that holds apply's row and raises its version; yield apply's ``remote_lsn``.

    :raises psycopg.errors.LockNotAvailable: apply held the row for more than a second; try again.
    """
    with durable(connection):
        lock_timeout(connection)
        position = scalar(
            connection,
            "UPDATE pgsub.progress SET states_version = states_version + 1 WHERE subid = %s AND worker = 0"
            " RETURNING remote_lsn::text",
            (subid,),
        )
        yield parse_lsn(worker_takeover.present(position))


def lock_tables(connection: psycopg.Connection, subid: int, relids: Collection[int]) -> None:
    """Lock the rows of tables in the order of their OIDs, so that two sessions that change several do not deadlock.

    An UPDATE alone would lock them in the order of its plan.
    """
    connection.execute(
        f"SELECT FROM pgsub.subscription_rel WHERE {TABLES} ORDER BY srrelid FOR UPDATE".encode(),
        (subid, list(relids)),
    )


def next_group(connection: psycopg.Connection, subid: int) -> int:
    """Return an unused number for a group of tables of this subscription."""
    query = "UPDATE pgsub.subscription SET sync_groups = sync_groups + 1 WHERE subid = %s RETURNING sync_groups::text"
    return int(worker_takeover.present(scalar(connection, query, (subid,))))


def start_copy(connection: psycopg.Connection, claims: Sequence[Claim], slot: str) -> dict[int, int]:
    """Set ``i`` or ``d`` → ``d`` and record the slot's name, durably before the slot exists.

    What was left out of the tables until now is in the slot's snapshot. No worker that could leave out more is left.

    :return: the number of the attempt, by table.
    """
    subid, relids = claims[0].subid, worker_takeover.numbers(claims)
    with durable(connection):
        worker_takeover.fence(connection, *claims)
        lock_tables(connection, subid, relids)
        rows = connection.execute(
            "UPDATE pgsub.subscription_rel SET srsubstate = 'd', sync_slot = %s, attempt = attempt + 1,"
            f" copy_mode = NULL, handover_lsn = NULL, covered_skips = (SELECT max(id) FROM pgsub.skipped_change),"
            f" covered_events = %s WHERE {TABLES} AND srsubstate IN ('i', 'd')"
            " RETURNING srrelid::bigint, attempt".encode(),
            (slot, events.number(connection, subid), subid, relids),
        ).fetchall()
        if len(rows) != len(claims):
            raise Fenced("the state of a table changed meanwhile")
    return dict(rows)


def slot_position(connection: psycopg.Connection, claims: Sequence[Claim], position: int) -> None:
    """Set the sync workers' own progress to the consistent point of their slot."""
    with durable(connection):
        worker_takeover.fence(connection, *claims)
        connection.execute(
            "INSERT INTO pgsub.progress AS p (subid, worker, remote_lsn, reported_lsn)"
            " SELECT %s, w, %s::pg_lsn, %s::pg_lsn FROM pg_catalog.unnest(%s::oid[]) AS w"
            " ON CONFLICT (subid, worker) DO UPDATE SET remote_lsn = excluded.remote_lsn,"
            " reported_lsn = excluded.reported_lsn, remote_commit_ts = NULL",
            (claims[0].subid, format_lsn(position), format_lsn(position), worker_takeover.numbers(claims)),
        )


def count_adopted(connection: psycopg.Connection, claim: Claim, rows: Sequence[int]) -> tuple[int, int, int]:
    """Add the rows that a transaction transfers to an adopted table, in that transaction.

    :param rows: missing, extra and different rows.
    :return: the totals of all transactions.
    """
    worker_takeover.fence(connection, claim)
    query = """
        UPDATE pgsub.subscription_rel SET adopted = ARRAY[coalesce(adopted[1], 0) + %s, coalesce(adopted[2], 0) + %s,
               coalesce(adopted[3], 0) + %s] WHERE subid = %s AND srrelid = %s
        RETURNING adopted[1], adopted[2], adopted[3]"""
    found = row(connection, query, (*rows, claim.subid, claim.worker))
    if found is None:
        raise Fenced("the table was removed from the subscription")
    missing, extra, different = found
    return missing, extra, different


def keep_replaced(connection: psycopg.Connection, claim: Claim, rows: int) -> int:
    """Count the replaced rows that a transaction keeps, in that transaction.

    The epoch is not checked: only one session adopts a table.

    :param rows: number of rows that the transaction replaces.
    :return: number of rows that it may keep.
    """
    query = """
        WITH may AS (SELECT least(keep, %s) AS rows FROM pgsub.subscription_rel WHERE subid = %s AND srrelid = %s)
        UPDATE pgsub.subscription_rel SET keep = keep - may.rows, kept = kept + may.rows FROM may
         WHERE subid = %s AND srrelid = %s RETURNING may.rows"""
    key = (claim.subid, claim.worker)
    return int(scalar(connection, query, (rows, *key, *key)) or 0)


def sync_position(connection: psycopg.Connection, claim: Claim) -> int:
    """Return the position of a sync worker. During the copy, this is the position of the snapshot."""
    query = "SELECT remote_lsn::text FROM pgsub.progress WHERE subid = %s AND worker = %s"
    return parse_lsn(worker_takeover.present(scalar(connection, query, (claim.subid, claim.worker))))


def kept(connection: psycopg.Connection, claim: Claim) -> int:
    """Return the number of rows that the adoption of a table has kept."""
    query = "SELECT kept FROM pgsub.subscription_rel WHERE subid = %s AND srrelid = %s"
    return int(scalar(connection, query, (claim.subid, claim.worker)) or 0)


def finish_copy(connection: psycopg.Connection, claim: Claim, attempt: int) -> bool:
    """Set ``d`` → ``f`` in the caller's transaction if every chunk of the attempt is done; return whether it is."""
    worker_takeover.fence(connection, claim)
    query = """
        UPDATE pgsub.subscription_rel r SET srsubstate = 'f'
         WHERE subid = %s AND srrelid = %s AND srsubstate = 'd' AND attempt = %s AND NOT EXISTS (
               SELECT FROM pgsub.copy_chunk c WHERE c.subid = r.subid AND c.srrelid = r.srrelid
                  AND c.attempt = r.attempt AND c.xid IS NULL)
        RETURNING true"""
    return scalar(connection, query, (claim.subid, claim.worker, attempt)) is True


def set_ready(connection: psycopg.Connection, subid: int, position: int) -> None:
    """Set ``s`` → ``r`` for tables whose srsublsn apply has passed. srsublsn stays, and is checked in ``r`` too."""
    with changing(connection, subid):
        connection.execute(
            "WITH passed AS MATERIALIZED (SELECT srrelid FROM pgsub.subscription_rel WHERE subid = %(subid)s"
            " AND srsubstate = 's' AND srsublsn <= %(position)s ORDER BY srrelid FOR UPDATE)"
            " UPDATE pgsub.subscription_rel SET srsubstate = 'r' WHERE subid = %(subid)s"
            " AND srrelid IN (SELECT srrelid FROM passed)",
            {"subid": subid, "position": format_lsn(position)},
        )
