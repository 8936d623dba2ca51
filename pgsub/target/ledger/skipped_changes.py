"""Changes that were not applied, kept in ``pgsub.skipped_change``, and which of them were replayed.

The server has nothing of the kind: what ALTER SUBSCRIPTION ... SKIP leaves out is lost.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import psycopg

from pgsub.common.query import scalar
from pgsub.protocol.lsn import format_lsn
from pgsub.target.sql.jsonb import jsonb

#: Changes that are read, or whose ids are sent, at once.
CHUNK = 1000

_OPERATION = "body->>'operation'"


@dataclass(frozen=True, slots=True)
class SkippedChange:
    """One change.

    :ivar body: as :class:`pgsub.apply.commit.skipped_writer.SkippedChanges` wrote it.
    """

    id: int
    xid: int
    schemaname: str
    relname: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SkippedTransaction:
    """The skipped changes of one transaction, or of a part of it.

    :ivar ids: of the changes that were not replayed, in their order.
    :ivar totals: how many of them by schema, table and operation.
    :ivar replayed: how many others were, and ``last_replayed_at`` when the last of them was.
    """

    xid: int
    ids: list[int]
    totals: dict[tuple[str, str, str], int]
    replayed: int
    last_replayed_at: str | None


class Usage(NamedTuple):
    """The size of a subscription's part of ``pgsub.skipped_change``.

    :ivar waiting: changes that were not replayed; ``replayed`` those that were.
    :ivar bytes: that all of them take, as stored.
    """

    waiting: int
    replayed: int
    bytes: int


class Pruning(NamedTuple):
    """The changes to be removed.

    :ivar replayed: only those that were replayed.
    :ivar before: only those that were skipped before this time of the target, as RFC 3339 text; None for any.
    """

    replayed: bool
    before: str | None = None


def of_transaction(
    connection: psycopg.Connection,
    subid: int,
    finish_lsn: int,
    *,
    table: str | None = None,
    ids: Sequence[int] | None = None,
) -> SkippedTransaction | None:
    """Return what is kept of a transaction.

    :param table: only of this one, schema.name.
    :param ids: only these.
    :return: None where nothing is.
    """
    rows = connection.execute(
        f"SELECT id, xid, schemaname, relname, {_OPERATION}, replayed_at::text FROM pgsub.skipped_change"
        " WHERE subid = %(subid)s AND finish_lsn = %(lsn)s AND (%(table)s::text IS NULL OR schemaname || '.' || relname"
        " = %(table)s) AND (%(ids)s::bigint[] IS NULL OR id = ANY (%(ids)s)) ORDER BY id".encode(),
        {"subid": subid, "lsn": format_lsn(finish_lsn), "table": table, "ids": None if ids is None else list(ids)},
    ).fetchall()
    if not rows:
        return None
    # guard: a skipped change is replayed only once, without " if row[5] is None"
    waiting = [row for row in rows if row[5] is None]
    totals: dict[tuple[str, str, str], int] = {}
    for _, _, schema, name, operation, _ in waiting:
        totals[schema, name, operation] = totals.get((schema, name, operation), 0) + 1
    last = max((row[5] for row in rows if row[5] is not None), default=None)
    return SkippedTransaction(rows[0][1], [row[0] for row in waiting], totals, len(rows) - len(waiting), last)


def by_ref(connection: psycopg.Connection, subid: int, finish_lsn: int, ref: str) -> list[int]:
    """Return ids of the changes that a conflict of this reference was recorded with."""
    rows = connection.execute(
        "SELECT id FROM pgsub.skipped_change WHERE subid = %s AND finish_lsn = %s AND body->>'ref' = %s ORDER BY id",
        (subid, format_lsn(finish_lsn), ref),
    )
    return [row[0] for row in rows]


def by_content(
    connection: psycopg.Connection,
    subid: int,
    finish_lsn: int,
    table: tuple[str, str],
    operation: str,
    row: dict[str, str | None],
) -> list[int]:
    """Return ids of the changes whose row has these values; if none has, of all of this operation on the table.

    :param row: of an INSERT or UPDATE the new row, of a DELETE the old one; not all of its columns, perhaps.
    """
    side = "old" if operation == "DELETE" else "new"
    rows = connection.execute(
        f"SELECT id, body->'{side}' @> %s FROM pgsub.skipped_change WHERE subid = %s AND finish_lsn = %s"
        f" AND schemaname = %s AND relname = %s AND {_OPERATION} = %s ORDER BY id".encode(),
        (jsonb(connection, row), subid, format_lsn(finish_lsn), *table, operation),
    ).fetchall()
    return [row[0] for row in rows if row[1]] or [row[0] for row in rows]


def mark_replayed(connection: psycopg.Connection, subid: int, ids: Sequence[int]) -> int:
    """Mark them as replayed in the open transaction; who else wants one of them waits for its end.

    :return: how many were not replayed before, and are there.
    """
    # guard: a skipped change is replayed only once, without " AND replayed_at IS NULL"
    return connection.execute(
        "UPDATE pgsub.skipped_change SET replayed_at = pg_catalog.now()"
        " WHERE subid = %s AND id = ANY (%s) AND replayed_at IS NULL",
        (subid, list(ids)),
    ).rowcount


def read(connection: psycopg.Connection, subid: int, ids: Sequence[int]) -> Iterator[SkippedChange]:
    """Read changes in the order of their ids, :data:`CHUNK` at a time; between two of them the session is free."""
    for start in range(0, len(ids), CHUNK):
        yield from [
            SkippedChange(number, xid, schema, name, json.loads(body))
            for number, xid, schema, name, body in connection.execute(
                "SELECT id, xid, schemaname, relname, body::text FROM pgsub.skipped_change"
                " WHERE subid = %s AND id = ANY (%s) ORDER BY id",
                (subid, list(ids[start : start + CHUNK])),
            ).fetchall()
        ]


_PRUNED = (
    "subid = %(subid)s AND (NOT %(replayed)s OR replayed_at IS NOT NULL)"
    " AND (%(before)s::timestamptz IS NULL OR skipped_at < %(before)s::timestamptz)"
)


def usage(connection: psycopg.Connection, subid: int, pruning: Pruning | None = None) -> Usage:
    """Count what is kept.

    :param pruning: only what it would remove.
    """
    row = connection.execute(
        "SELECT pg_catalog.count(*) FILTER (WHERE replayed_at IS NULL),"
        " pg_catalog.count(*) FILTER (WHERE replayed_at IS NOT NULL),"
        " coalesce(pg_catalog.sum(pg_catalog.pg_column_size(body)), 0)::bigint"
        f" FROM pgsub.skipped_change WHERE {_PRUNED}".encode(),
        _pruned(subid, pruning or Pruning(False)),
    ).fetchone()
    assert row is not None
    return Usage(*row)


def time_ago(connection: psycopg.Connection, seconds: float) -> str:
    """Return the time on the target that many seconds ago, as :class:`Pruning` takes it."""
    query = """
        SELECT pg_catalog.to_char((pg_catalog.now() - pg_catalog.make_interval(secs => %s)) AT TIME ZONE 'UTC',
                                  'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')"""
    return str(scalar(connection, query, (seconds,)))


def prune(connection: psycopg.Connection, subid: int, pruning: Pruning) -> int:
    """Remove at most :data:`CHUNK` changes for good; a replay of one of them under way is waited for.

    :return: how many were removed: fewer than :data:`CHUNK` once nothing is left to be removed.
    """
    return connection.execute(
        "DELETE FROM pgsub.skipped_change WHERE id = ANY (ARRAY(SELECT id FROM pgsub.skipped_change"
        f" WHERE {_PRUNED} ORDER BY id LIMIT {CHUNK})) AND {_PRUNED}".encode(),
        _pruned(subid, pruning),
    ).rowcount


def _pruned(subid: int, pruning: Pruning) -> dict[str, Any]:
    return {"subid": subid, **pruning._asdict()}
