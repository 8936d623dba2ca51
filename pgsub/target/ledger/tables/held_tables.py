"""Held tables in the ledger: their changes are kept instead of applied, until the tables are released.

The server has nothing like it. Rows that apply depends on are changed as the state of a table is (:mod:`states`): under
the lock of apply's row. Kept changes are written by the transaction that would have applied them. If that is prepared,
they become visible later than others. A released table stays ``releasing`` until no kept change is left. Until then,
visible kept changes are applied before any newer change of the table.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

import psycopg

from pgsub.common.query import scalar
from pgsub.protocol.lsn import format_lsn, parse_lsn
from pgsub.target.ledger import worker_takeover
from pgsub.target.ledger.tables import states
from pgsub.target.ledger.tables.states import TABLES
from pgsub.target.ledger.worker_takeover import Claim

_EPOCH = "'2000-01-01 00:00:00+00'::timestamptz"
#: Maximum number of rows that one statement reads.
_READ_AT_ONCE = 5000


class HeldTable(NamedTuple):
    """A held table and its visible kept changes.

    :ivar held_at: as RFC 3339 text.
    :ivar releasing: the kept changes are being applied.
    :ivar bytes: size of the kept messages.
    """

    srrelid: int
    held_at: str
    releasing: bool
    changes: int
    bytes: int


class HeldChanges(NamedTuple):
    """The changes of one table in one remote transaction, in order.

    :ivar id: gives the order of a table's changes; 0 before it is written.
    :ivar commit_ts: as in :class:`~pgsub.apply.stream.transactions.RemoteTransaction`.
    :ivar relation: the Relation message that describes them.
    :ivar messages: see :mod:`pgsub.protocol.encoder`.
    :ivar changes: number of changes.
    """

    id: int
    srrelid: int
    xid: int
    finish_lsn: int
    commit_ts: int
    relation: bytes
    messages: bytes
    changes: int

    @property
    def transaction(self) -> tuple[int, int]:
        """The key that distinguishes the remote transaction from all others."""
        return self.xid, self.finish_lsn


@dataclass(slots=True)
class HeldPlace:
    """The place of a transaction in the order of kept changes.

    :ivar transaction: see :attr:`HeldChanges.transaction`.
    :ivar relids: the tables that it changes.
    :ivar first: id of its first stretch.
    :ivar last: id of its last stretch.
    :ivar count: number of stretches.
    """

    transaction: tuple[int, int]
    relids: set[int]
    first: int
    last: int
    count: int

    @classmethod
    def of(cls, stretches: Sequence[HeldChanges]) -> HeldPlace:
        """Return the place of stretches of one transaction."""
        relids = {one.srrelid for one in stretches}
        return cls(stretches[0].transaction, relids, stretches[0].id, stretches[-1].id, len(stretches))

    def extend(self, more: HeldPlace) -> None:
        """Add further stretches of the transaction."""
        self.relids |= more.relids
        self.last, self.count = more.last, self.count + more.count


def held(connection: psycopg.Connection, subid: int) -> dict[int, bool]:
    """Return the OIDs of held tables as of this statement, and whether each is being released."""
    rows = connection.execute("SELECT srrelid::bigint, releasing FROM pgsub.held_table WHERE subid = %s", (subid,))
    return dict(rows.fetchall())


def overview(connection: psycopg.Connection, subid: int) -> list[HeldTable]:
    """List all held tables with the size of their kept changes."""
    rows = connection.execute(
        "SELECT t.srrelid::bigint,"
        " pg_catalog.to_char(t.held_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"'),"
        " t.releasing, coalesce(k.changes, 0)::bigint, coalesce(k.bytes, 0)::bigint"
        " FROM pgsub.held_table t LEFT JOIN LATERAL (SELECT sum(changes) AS changes, sum(bytes) AS bytes"
        " FROM pgsub.held_change c WHERE c.subid = t.subid AND c.srrelid = t.srrelid) AS k ON true"
        " WHERE t.subid = %s ORDER BY t.srrelid",
        (subid,),
    )
    return [HeldTable(*row) for row in rows]


def hold(connection: psycopg.Connection, subid: int, relids: Collection[int]) -> None:
    """Hold tables, in the caller's transaction, which holds apply's row. Tables that are held already stay so.

    Changes that an earlier hold left behind, because the table was not subscribed meanwhile, are removed.
    """
    connection.execute(
        f"DELETE FROM pgsub.held_change c WHERE {TABLES} AND NOT EXISTS (SELECT FROM pgsub.held_table t"
        " WHERE t.subid = c.subid AND t.srrelid = c.srrelid)".encode(),
        (subid, list(relids)),
    )
    connection.execute(
        "INSERT INTO pgsub.held_table AS t (subid, srrelid) SELECT %s, r FROM pg_catalog.unnest(%s::oid[]) AS r"
        " ON CONFLICT (subid, srrelid) DO UPDATE SET releasing = false, drained_lsn = NULL WHERE t.releasing",
        (subid, list(relids)),
    )


def release(connection: psycopg.Connection, subid: int, relids: Collection[int]) -> None:
    """Begin to apply kept changes, in the caller's transaction, which holds apply's row."""
    connection.execute(
        f"UPDATE pgsub.held_table SET releasing = true, drained_lsn = NULL WHERE {TABLES} AND NOT releasing".encode(),
        (subid, list(relids)),
    )


def forget(connection: psycopg.Connection, subid: int, relids: Collection[int]) -> None:
    """End the hold of tables that are copied again or leave the subscription, and remove their kept changes.

    The caller's transaction holds apply's row.
    """
    for table in ("held_change", "held_table"):
        connection.execute(f"DELETE FROM pgsub.{table} WHERE {TABLES}".encode(), (subid, list(relids)))


def store(connection: psycopg.Connection, subid: int, stretches: Sequence[HeldChanges]) -> None:
    """Write held changes in order, in the transaction that moves apply past them."""
    _, relids, xids, lsns, times, relations, messages, changes = map(list, zip(*stretches, strict=True))
    connection.execute(
        "INSERT INTO pgsub.held_change (subid, srrelid, xid, finish_lsn, committed_at, relation, messages, changes,"
        f" bytes) SELECT %s, r, x, f, {_EPOCH} + t * '1 microsecond'::interval, d, m, n, pg_catalog.length(m)"
        " FROM ROWS FROM (pg_catalog.unnest(%s::oid[]), pg_catalog.unnest(%s::bigint[]),"
        " pg_catalog.unnest(%s::pg_lsn[]), pg_catalog.unnest(%s::bigint[]), pg_catalog.unnest(%b::bytea[]),"
        " pg_catalog.unnest(%b::bytea[]), pg_catalog.unnest(%s::integer[])) WITH ORDINALITY"
        " AS k (r, x, f, t, d, m, n, number) ORDER BY number".encode(),
        (subid, relids, xids, [format_lsn(lsn) for lsn in lsns], times, relations, messages, changes),
    )


def with_changes(connection: psycopg.Connection, subid: int, relids: Collection[int]) -> set[int]:
    """Find the tables that have kept changes, as of this statement."""
    rows = connection.execute(
        "SELECT r::bigint FROM pg_catalog.unnest(%s::oid[]) AS r WHERE EXISTS (SELECT FROM pgsub.held_change c"
        " WHERE c.subid = %s AND c.srrelid = r)",
        (list(relids), subid),
    )
    return {relid for (relid,) in rows}


def has_transaction(connection: psycopg.Connection, subid: int, finish_lsn: int) -> bool:
    """Return whether changes of the transaction with this finish LSN are kept. The rest of it is applied then."""
    query = """
        SELECT EXISTS (SELECT FROM pgsub.held_table t JOIN pgsub.held_change c USING (subid, srrelid)
                        WHERE t.subid = %s AND c.finish_lsn = %s)"""
    return scalar(connection, query, (subid, format_lsn(finish_lsn))) is True


def next_released(connection: psycopg.Connection, subid: int) -> set[int]:
    """Return the finish LSNs of the next transaction of each table that is being released."""
    rows = connection.execute(
        "SELECT c.finish_lsn::text FROM pgsub.held_table t, LATERAL (SELECT finish_lsn FROM pgsub.held_change h"
        " WHERE h.subid = t.subid AND h.srrelid = t.srrelid ORDER BY h.id LIMIT 1) AS c"
        " WHERE t.subid = %s AND t.releasing",
        (subid,),
    )
    return {parse_lsn(lsn) for (lsn,) in rows}


def read(
    connection: psycopg.Connection,
    subid: int,
    relids: Collection[int],
    size: int,
    after: HeldPlace | None = None,
) -> tuple[list[HeldChanges], bool]:
    """Read the first kept changes of these tables, in order: whole transactions, or a part of a large one.

    :param size: the read ends after this many bytes of messages.
    :param after: place of the part of a transaction that was read before; None: begin with a new transaction.
    :return: the changes, and whether more of the last transaction is left.
    """
    sizes = connection.execute(
        "SELECT c.id, c.bytes, c.xid, c.finish_lsn::text FROM pg_catalog.unnest(%s::oid[]) AS r,"
        " LATERAL (SELECT id, bytes, xid, finish_lsn FROM pgsub.held_change h WHERE h.subid = %s AND h.srrelid = r"
        " AND h.id > %s ORDER BY h.id LIMIT %s) AS c ORDER BY c.id LIMIT %s",
        (list(relids), subid, 0 if after is None else after.last, _READ_AT_ONCE, _READ_AT_ONCE),
    ).fetchall()
    places = [(number, length, (xid, parse_lsn(lsn))) for number, length, xid, lsn in sizes]
    if after is not None:
        places = list(takewhile(lambda one: one[2] == after.transaction, places))
    chosen, goes_on = _choose(places, size)
    rows = connection.execute(
        "SELECT id, srrelid::bigint, xid, finish_lsn::text, (extract(epoch FROM committed_at -"
        f" {_EPOCH}) * 1000000)::bigint, relation, messages, changes FROM pgsub.held_change"
        f" WHERE {TABLES} AND id = ANY (%s) ORDER BY id".encode(),
        (subid, list(relids), chosen),
        binary=True,  # a bytea of more than 512 MB cannot be sent in text form
    )
    found = map(HeldChanges._make, rows)
    return [one._replace(finish_lsn=parse_lsn(str(one.finish_lsn))) for one in found], goes_on


def _choose(places: Sequence[tuple[int, int, tuple[int, int]]], size: int) -> tuple[list[int], bool]:
    """Choose the first stretches. A transaction is chosen in part only if it is the first: its rest may be large.

    :param places: id, bytes and transaction of each stretch.
    """
    count = 0
    while count < len(places) and size > 0:
        size -= places[count][1]
        count += 1
    more = count == _READ_AT_ONCE if count == len(places) else places[count][2] == places[count - 1][2]
    if more:
        last = places[count - 1][2]
        whole = next(number for number, one in enumerate(places) if one[2] == last)
        count, more = whole or count, not whole
    return [number for number, *_ in places[:count]], more


def remove(connection: psycopg.Connection, subid: int, places: Sequence[HeldPlace]) -> bool:
    """Remove kept changes in the transaction that applies them; return False if some are gone already.

    A transaction that was prepared before may have kept later changes, so :func:`finish` must record apply's position
    again.
    """
    relids = list(set().union(*(one.relids for one in places)))
    # guard: a table is not released while a transaction prepared before may keep changes of it
    connection.execute(
        f"UPDATE pgsub.held_table SET drained_lsn = NULL WHERE {TABLES} AND drained_lsn IS NOT NULL".encode(),
        (subid, relids),
    )
    removed = connection.execute(
        f"DELETE FROM pgsub.held_change WHERE {TABLES} AND id BETWEEN %s AND %s".encode(),
        (subid, relids, places[0].first, places[-1].last),
    )
    return removed.rowcount == sum(one.count for one in places)


def finish(connection: psycopg.Connection, claim: Claim, relids: Collection[int]) -> bool:
    """End the release of tables without kept changes. They are ordinary tables from now on.

    An undecided prepared transaction may have kept changes, which become visible with its end. The release does not end
    before. A transaction that was prepared after all visible changes were applied has kept none.

    :return: whether the release of any table ended.
    :raises psycopg.errors.LockNotAvailable: another session holds apply's row.
    """
    with states.changing(connection, claim.subid) as apply_lsn:
        worker_takeover.fence(connection, claim)
        empty = list(set(relids) - with_changes(connection, claim.subid, relids))
        noted = connection.execute(
            f"UPDATE pgsub.held_table SET drained_lsn = %s WHERE {TABLES} AND releasing"
            " AND drained_lsn IS NULL".encode(),
            (format_lsn(apply_lsn), claim.subid, empty),
        ).rowcount
        ended = connection.execute(
            f"DELETE FROM pgsub.held_table t WHERE {TABLES} AND releasing AND NOT EXISTS (SELECT"
            " FROM pgsub.prepared_pending p WHERE p.subid = t.subid AND p.prepare_lsn < t.drained_lsn)".encode(),
            (claim.subid, empty),
        ).rowcount
        if not noted and not ended:
            raise psycopg.Rollback()
    return ended > 0
