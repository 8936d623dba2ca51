"""Rows of pgsub.copy_chunk: which pieces of a copy are to do, in progress, and durably done.

The task that copies a chunk locks its row, and sets its xid in the transaction of its rows. So a chunk is copied once,
however many tasks seek work and however often one of them dies.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import LiteralString

import psycopg
from psycopg import sql

from pgsub.target.ledger import states, worker_takeover
from pgsub.target.ledger.worker_takeover import Claim
from pgsub.target.query import scalar
from pgsub.target.session.connect import SessionName


@dataclass(frozen=True, slots=True)
class ChunkKey:
    """A chunk of an attempt of a table's copy, and the claim under which it is copied."""

    claim: Claim
    attempt: int
    number: int

    @property
    def params(self) -> tuple[int, int, int, int]:
        """Values of the primary key."""
        return self.claim.subid, self.claim.worker, self.attempt, self.number


_KEY = "subid = %s AND srrelid = %s AND attempt = %s AND chunk = %s"


def plan(connection: psycopg.Connection, rows: Sequence[tuple[ChunkKey, int | None, int | None]], mode: str) -> None:
    """Write the chunks of one or more tables and how they are copied, inside the caller's transaction.

    :param rows: chunk, estimated bytes, estimated rows.
    :param mode: atomic or chunked.
    """
    subid, relids = rows[0][0].claim.subid, {key.claim.worker for key, _, _ in rows}
    states.lock_tables(connection, subid, relids)
    connection.execute(
        "UPDATE pgsub.subscription_rel SET copy_mode = %s WHERE subid = %s AND srrelid = ANY (%s)",
        (mode, subid, list(relids)),
    )
    keys = [key for key, _, _ in rows]
    connection.execute(
        "INSERT INTO pgsub.copy_chunk (subid, srrelid, attempt, chunk, bytes_total, rows_total)"
        " SELECT %s, n.* FROM unnest(%s::oid[], %s::int4[], %s::int4[], %s::int8[], %s::int8[]) AS n",
        (
            subid,
            worker_takeover.numbers([key.claim for key in keys]),
            [key.attempt for key in keys],
            [key.number for key in keys],
            [size for _, size, _ in rows],
            [count for _, _, count in rows],
        ),
    )


def begin(session: psycopg.Connection, key: ChunkKey, more: LiteralString = "", *, durable: bool) -> bool:
    """Begin the chunk's transaction and lock its row.

    While it lasts the session goes by the table's name, so that a take-over of that table ends it.

    :param more: a statement that sets something for the transaction.
    :param durable: whether the commit is synchronous, whatever the session's default is.
    :return: False, and no transaction, where there is nothing to do: done, being done, or of an attempt that is over.
    """
    name = SessionName(key.claim.subid, f"copy:{key.claim.worker}", key.claim.epoch)
    opening = sql.SQL("BEGIN; SET LOCAL application_name = {}").format(sql.Literal(str(name)))
    session.execute(opening + sql.SQL("; SET LOCAL synchronous_commit = on; " if durable else "; ") + sql.SQL(more))
    # guard: a chunk is copied once, without " AND xid IS NULL"
    lock = f"SELECT true FROM pgsub.copy_chunk WHERE {_KEY} AND xid IS NULL FOR UPDATE SKIP LOCKED"
    locked = scalar(session, lock, key.params) is True
    if not locked:
        session.execute("ROLLBACK")
    return locked


def finish(session: psycopg.Connection, key: ChunkKey, rows: int, size: int, *, atomic: bool) -> bool:
    """Record the chunk as done in the transaction of its rows; with ``atomic`` the table's copy is done with it.

    :return: whether this attempt is still the table's; else the caller rolls back.
    :raises Fenced: the epoch was raised.
    """
    session.execute(
        "UPDATE pgsub.copy_chunk SET xid = pg_catalog.pg_current_xact_id(), rows_done = %s, bytes_done = %s"
        f" WHERE {_KEY}".encode(),
        (rows, size, *key.params),
    )
    if atomic:
        return states.finish_copy(session, key.claim, key.attempt)
    worker_takeover.fence(session, key.claim)
    return True


def undone(connection: psycopg.Connection, keys: Collection[ChunkKey]) -> set[ChunkKey]:
    """Return the chunks that are not done yet."""
    by_params = {key.params: key for key in keys}
    relids = sorted({key.claim.worker for key in keys})
    subids = sorted({key.claim.subid for key in keys})
    rows = connection.execute(
        "SELECT subid, srrelid::bigint, attempt, chunk FROM pgsub.copy_chunk"
        " WHERE subid = ANY (%s) AND srrelid = ANY (%s) AND xid IS NULL",
        (subids, relids),
    )
    return {by_params[row] for row in rows if row in by_params}


def forget(connection: psycopg.Connection, subid: int, relids: Collection[int]) -> None:
    """Remove the book-keeping of copies and of sync workers' progress, inside the caller's transaction."""
    connection.execute("DELETE FROM pgsub.copy_chunk WHERE subid = %s AND srrelid = ANY (%s)", (subid, list(relids)))
    connection.execute(
        "DELETE FROM pgsub.progress WHERE subid = %s AND worker = ANY (%s) AND worker <> 0", (subid, list(relids))
    )
