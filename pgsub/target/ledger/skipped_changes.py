"""Changes that were not applied, kept in ``pgsub.skipped_change``, and which of them were replayed.

The server keeps nothing: changes that ALTER SUBSCRIPTION ... SKIP leaves out are lost.
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

#: Maximum number of changes that one statement reads, or whose ids it sends.
CHUNK = 1000

#: A time in SQL as text that can be compared.
UTC_TEXT = """pg_catalog.to_char({} AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')"""
_OPERATION = "body->>'operation'"


@dataclass(frozen=True, slots=True)
class SkippedChange:
    """A skipped change.

    :ivar body: written by :class:`pgsub.apply.commit.skipped_writer.SkippedChanges`.
    """

    id: int
    xid: int
    schemaname: str
    relname: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SkippedTransaction:
    """The skipped changes of one transaction, or some of them.

    :ivar ids: ids of the changes that were not replayed, in order.
    :ivar totals: their number by schema, table and operation.
    :ivar replayed: number of changes that were replayed.
    :ivar last_replayed_at: when the last of them was replayed.
    """

    xid: int
    ids: list[int]
    totals: dict[tuple[str, str, str], int]
    replayed: int
    last_replayed_at: str | None


class Usage(NamedTuple):
    """The size of a subscription's part of ``pgsub.skipped_change``.

    :ivar waiting: number of changes that were not replayed.
    :ivar replayed: number of changes that were replayed.
    :ivar bytes: stored size of all of them.
    """

    waiting: int
    replayed: int
    bytes: int


class Pruning(NamedTuple):
    """A selection of changes to remove.

    :ivar replayed: only changes that were replayed.
    :ivar before: only changes that were skipped before this time of the target, as RFC 3339 text; None: any.
    """

    replayed: bool
    before: str | None = None


class Covered(NamedTuple):
    """The records that are older than the copy of their table, which has what they left out.

    :ivar skip: the last id of pgsub.skipped_change.
    :ivar event: the last id of pgsub.event.
    """

    skip: int = 0
    event: int = 0

    def has_skip(self, change: int) -> bool:
        """Return whether the copy has a skipped change. LSNs do not say that (:func:`~.states.start_copy`)."""
        # guard: a skipped change that is older than the copy of its table is not replayed
        return change <= self.skip

    def has_event(self, event: int | None) -> bool:
        """Return whether a conflict was recorded before the copy. One that stopped a worker has no event."""
        return event is not None and event <= self.event


def of_transaction(
    connection: psycopg.Connection,
    subid: int,
    finish_lsn: int,
    *,
    table: str | None = None,
    ids: Sequence[int] | None = None,
) -> SkippedTransaction | None:
    """Return the kept changes of a transaction; None if there are none.

    :param table: restricts them to this table (schema.name).
    :param ids: restricts them to these ids.
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
    """Return the ids of the changes that were recorded with a conflict of this reference."""
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
    """Return the ids of the changes whose row has these values; if none has, of all with this operation on the table.

    :param row: values of the new row of an INSERT or UPDATE, or of the old row of a DELETE; columns may be missing.
    """
    side = "old" if operation == "DELETE" else "new"
    rows = connection.execute(
        f"SELECT id, body->'{side}' @> %s FROM pgsub.skipped_change WHERE subid = %s AND finish_lsn = %s"
        f" AND schemaname = %s AND relname = %s AND {_OPERATION} = %s ORDER BY id".encode(),
        (jsonb(connection, row), subid, format_lsn(finish_lsn), *table, operation),
    ).fetchall()
    return [row[0] for row in rows if row[1]] or [row[0] for row in rows]


def covered_by_copies(connection: psycopg.Connection, subid: int) -> dict[int, Covered]:
    """Return what the copies of tables have, by OID. Tables that were not copied are left out."""
    rows = connection.execute(
        "SELECT srrelid::bigint, coalesce(covered_skips, 0), covered_events FROM pgsub.subscription_rel"
        " WHERE subid = %s AND covered_events IS NOT NULL",
        (subid,),
    )
    return {relid: Covered(*last) for relid, *last in rows}


def mark_replayed(connection: psycopg.Connection, subid: int, ids: Sequence[int]) -> int:
    """Mark changes as replayed in the open transaction. Concurrent replays of the same changes wait for its end.

    :return: number of changes that exist and were not replayed before.
    """
    # guard: a skipped change is replayed only once, without " AND replayed_at IS NULL"
    return connection.execute(
        "UPDATE pgsub.skipped_change SET replayed_at = pg_catalog.now()"
        " WHERE subid = %s AND id = ANY (%s) AND replayed_at IS NULL",
        (subid, list(ids)),
    ).rowcount


def read(connection: psycopg.Connection, subid: int, ids: Sequence[int]) -> Iterator[SkippedChange]:
    """Read changes in the order of their ids, :data:`CHUNK` at a time. The session is free between two reads."""
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
    """Measure the kept changes.

    :param pruning: restricts them to those that it would remove; None: all.
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
    """Return the time on the target that many seconds ago, in the format of :class:`Pruning`."""
    ago = UTC_TEXT.format("(pg_catalog.now() - pg_catalog.make_interval(secs => %s))")
    return str(scalar(connection, f"SELECT {ago}", (seconds,)))


def prune(connection: psycopg.Connection, subid: int, pruning: Pruning) -> int:
    """Remove at most :data:`CHUNK` changes for good. It waits for concurrent replays of them.

    :return: number of removed changes; less than :data:`CHUNK` if none is left.
    """
    return connection.execute(
        "DELETE FROM pgsub.skipped_change WHERE id = ANY (ARRAY(SELECT id FROM pgsub.skipped_change"
        f" WHERE {_PRUNED} ORDER BY id LIMIT {CHUNK})) AND {_PRUNED}".encode(),
        _pruned(subid, pruning),
    ).rowcount


def _pruned(subid: int, pruning: Pruning) -> dict[str, Any]:
    return {"subid": subid, **pruning._asdict()}
