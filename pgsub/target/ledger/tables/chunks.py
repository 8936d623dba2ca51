"""Rows of pgsub.copy_chunk: which chunks of a copy are planned, in progress, and durably done.

The task that copies a chunk locks its row, and sets its xid in the transaction that writes the copied rows. So a chunk
is copied once, however many tasks look for work and however often one of them dies.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, LiteralString

import psycopg
from psycopg import sql

from pgsub.common.query import scalar
from pgsub.target.ledger import worker_takeover
from pgsub.target.ledger.tables import states
from pgsub.target.ledger.worker_takeover import Claim
from pgsub.target.session.connect import SessionName


@dataclass(frozen=True, slots=True)
class ChunkKey:
    """A chunk in an attempt to copy a table, and the claim under which it is copied."""

    claim: Claim
    attempt: int
    number: int

    @property
    def params(self) -> tuple[int, int, int, int]:
        """The values of the primary key."""
        return self.claim.subid, self.claim.worker, self.attempt, self.number


@dataclass(frozen=True, slots=True)
class Part:
    """The blocks of a publisher's table that a chunk reads, and the columns that it copies.

    :ivar until: the block after the last one.
    """

    schema: str
    name: str
    first: int
    until: int
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Brought:
    """A chunk that is done. Its rows on the target have its xid.

    :ivar part: None if the rows of the chunk cannot be compared with the publisher's.
    :ivar xid: without its epoch, like xmin.
    """

    key: ChunkKey
    part: Part | None
    xid: int
    rows: int
    bytes: int


#: A planned chunk: its key, estimated bytes and rows, and the part that it reads.
Planned = tuple[ChunkKey, int | None, int | None, Part | None]

_KEY = "subid = %s AND srrelid = %s AND attempt = %s AND chunk = %s"


def plan(connection: psycopg.Connection, rows: Sequence[Planned], mode: str) -> None:
    """Write the chunks of one or more tables, and how they are copied, in the caller's transaction.

    :param mode: atomic or chunked.
    """
    subid, relids = rows[0][0].claim.subid, {key.claim.worker for key, *_ in rows}
    states.lock_tables(connection, subid, relids)
    connection.execute(
        "UPDATE pgsub.subscription_rel SET copy_mode = %s WHERE subid = %s AND srrelid = ANY (%s)",
        (mode, subid, list(relids)),
    )
    keys = [key for key, *_ in rows]
    # chunks that an earlier attempt has not done
    connection.execute(
        "DELETE FROM pgsub.copy_chunk WHERE subid = %s AND srrelid = ANY (%s) AND xid IS NULL", (subid, list(relids))
    )
    connection.execute(
        "INSERT INTO pgsub.copy_chunk (subid, srrelid, attempt, chunk, bytes_total, rows_total, part)"
        " SELECT %s, n.* FROM unnest(%s::oid[], %s::int4[], %s::int4[], %s::int8[], %s::int8[], %s::json[]) AS n",
        (
            subid,
            worker_takeover.numbers([key.claim for key in keys]),
            [key.attempt for key in keys],
            [key.number for key in keys],
            [size for _, size, _, _ in rows],
            [count for _, _, count, _ in rows],
            [None if part is None else json.dumps(asdict(part)) for *_, part in rows],
        ),
    )


def brought(connection: psycopg.Connection, claim: Claim) -> list[Brought]:
    """Return the chunks that are done, of all attempts to copy a table."""
    rows = connection.execute(
        "SELECT attempt, chunk, part::text, (xid::text::numeric %% 4294967296)::bigint, rows_done, bytes_done"
        " FROM pgsub.copy_chunk WHERE subid = %s AND srrelid = %s AND xid IS NOT NULL ORDER BY attempt, chunk",
        (claim.subid, claim.worker),
    )
    return [
        Brought(ChunkKey(claim, attempt, number), None if part is None else _part(json.loads(part)), *done)
        for attempt, number, part, *done in rows
    ]


def _part(value: dict[str, Any]) -> Part:
    return Part(**{**value, "columns": tuple(value["columns"])})


def lessen(connection: psycopg.Connection, key: ChunkKey, rows: int) -> None:
    """Record that rows of a chunk were removed, in the transaction that removes them."""
    worker_takeover.fence(connection, key.claim)
    connection.execute(
        f"UPDATE pgsub.copy_chunk SET rows_done = rows_done - %s WHERE {_KEY}".encode(), (rows, *key.params)
    )


def remove(connection: psycopg.Connection, keys: Iterable[ChunkKey]) -> None:
    """Remove chunks whose rows were all removed, in the transaction that removes these rows."""
    for key in keys:
        worker_takeover.fence(connection, key.claim)
        connection.execute(f"DELETE FROM pgsub.copy_chunk WHERE {_KEY}".encode(), key.params)


def next_number(connection: psycopg.Connection, claim: Claim, attempt: int) -> int:
    """Return an unused chunk number of an attempt."""
    query = (
        "SELECT coalesce(max(chunk) + 1, 0) FROM pgsub.copy_chunk WHERE subid = %s AND srrelid = %s AND attempt = %s"
    )
    return int(scalar(connection, query, (claim.subid, claim.worker, attempt)))


def supplement(connection: psycopg.Connection, claim: Claim, attempt: int, part: Part, rows: int, size: int) -> None:
    """Record rows that were added to a part after its copy, in the transaction that writes them."""
    worker_takeover.fence(connection, claim)
    connection.execute(
        "INSERT INTO pgsub.copy_chunk (subid, srrelid, attempt, chunk, rows_done, bytes_done, xid, part)"
        " VALUES (%s, %s, %s, %s, %s, %s, pg_catalog.pg_current_xact_id(), %s)",
        (
            *(claim.subid, claim.worker, attempt, next_number(connection, claim, attempt), rows, size),
            json.dumps(asdict(part)),
        ),
    )


def begin(session: psycopg.Connection, key: ChunkKey, more: LiteralString = "", *, durable: bool) -> bool:
    """Begin the chunk's transaction and lock its row.

    During the transaction the session has the table's name, so that a take-over of the table ends it.

    :param more: a statement that sets something for the transaction.
    :param durable: whether the commit is synchronous, whatever the session's default is.
    :return: False if there is nothing to do: the chunk is done or in progress, or its attempt is over. No transaction
        is open then.
    """
    name = SessionName(key.claim.subid, f"copy:{key.claim.worker}", key.claim.epoch)
    opening = sql.SQL("BEGIN; SET LOCAL application_name = {}").format(sql.Literal(str(name)))
    session.execute(opening + sql.SQL("; SET LOCAL synchronous_commit = on; " if durable else "; ") + sql.SQL(more))
    # guard: a chunk is copied only once, without " AND xid IS NULL"
    lock = f"SELECT true FROM pgsub.copy_chunk WHERE {_KEY} AND xid IS NULL FOR UPDATE SKIP LOCKED"
    locked = scalar(session, lock, key.params) is True
    if not locked:
        session.execute("ROLLBACK")
    return locked


def finish(session: psycopg.Connection, key: ChunkKey, rows: int, size: int, *, atomic: bool) -> bool:
    """Record the chunk as done in the transaction that writes its rows.

    :param atomic: it is the only chunk, so the table's copy is done with it.
    :return: whether this attempt is still the table's; if not, the caller rolls back.
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
    """Remove the records of copies and of sync workers' progress, in the caller's transaction."""
    connection.execute("DELETE FROM pgsub.copy_chunk WHERE subid = %s AND srrelid = ANY (%s)", (subid, list(relids)))
    connection.execute(
        "DELETE FROM pgsub.progress WHERE subid = %s AND worker = ANY (%s) AND worker <> 0", (subid, list(relids))
    )
