"""The search for rows of the target that conflict with a row, after a unique violation, index by index.

Mirrors FindConflictTuple (execReplication.c) and GetTupleTransactionInfo (conflict.c). The server searches in the
transaction that fails. Here that transaction is already rolled back, so its own earlier changes are not seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import psycopg
from psycopg import pq, sql

from pgsub.common.query import row
from pgsub.target.catalog import unique_indexes
from pgsub.target.catalog.relation import TargetRelation, describe
from pgsub.target.catalog.table_names import MEMBERS
from pgsub.target.catalog.unique_indexes import UniqueIndex
from pgsub.target.session import roles
from pgsub.target.session.connect import tracks_commits
from pgsub.target.sql.conflict_search_sql import completed, conflicting_row, remote_row, stored
from pgsub.target.sql.row_queries import read_texts
from pgsub.target.sql.statement_builder import Statement

#: Timeout of a search, in milliseconds.
TIMEOUT = 5000
_IndexQueries = list[tuple[UniqueIndex, bytes]]

_EXPRESSIONS = """
SELECT a.attname::text, a.attgenerated <> '', pg_catalog.pg_get_expr(d.adbin, d.adrelid)
  FROM pg_catalog.pg_attribute a
  LEFT JOIN pg_catalog.pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
 WHERE a.attrelid = %s::oid AND a.attnum > 0 AND NOT a.attisdropped AND (d.oid IS NOT NULL OR a.attidentity <> '')
"""

# Columns that contain interval or money, at any depth. A session with another IntervalStyle or lc_monetary may read
# their text as another value. Dates are written as ISO, which every session reads alike.
_READ_OTHERWISE = """
WITH RECURSIVE kind AS (
     SELECT a.attname, a.atttypid AS oid FROM pg_catalog.pg_attribute a WHERE a.attrelid = %s::oid AND a.attnum > 0
      UNION
     SELECT k.attname, b.oid
       FROM kind k JOIN pg_catalog.pg_type t ON t.oid = k.oid
       LEFT JOIN pg_catalog.pg_range r ON t.oid IN (r.rngtypid, r.rngmultitypid)
       LEFT JOIN pg_catalog.pg_attribute a ON a.attrelid = t.typrelid AND a.attnum > 0
      CROSS JOIN LATERAL (VALUES (t.typbasetype), (t.typelem), (r.rngsubtype), (a.atttypid)) AS b (oid)
      WHERE b.oid <> 0)
SELECT DISTINCT attname::text FROM kind WHERE oid IN (790, 1186)
"""

_WRITTEN = """
SELECT w.at::text, CASE WHEN w.roident <> 0 THEN coalesce(o.roname, '') END,
       ((extract(epoch FROM w.at) - 946684800) * 1000000)::bigint
  FROM (SELECT * FROM pg_catalog.pg_xact_commit_timestamp_origin(%s::xid)) AS w (at, roident)
  LEFT JOIN pg_catalog.pg_replication_origin o ON o.roident = w.roident
 WHERE pg_catalog.current_setting('track_commit_timestamp')::bool AND w.at IS NOT NULL
"""


@dataclass(frozen=True, slots=True)
class ConflictingRow:
    """A row of the target that already has a key. Values that could not be read are None."""

    index: str
    key: str | None = None  #: key of the index, in the server's format: (a)=(1)
    row: dict[str, str | None] | None = None  #: by column, in the table's order
    xid: int | None = None  #: transaction on the target that wrote it
    commit_ts: str | None = None  #: its commit time, if the target tracks it
    origin: str | None = None  #: name of its origin; None: local; '': dropped since
    identical: bool = False  #: no column that the publisher sent differs
    ctid: str | None = None  #: the row's ctid
    at: int | None = None  #: commit_ts in microseconds since 2000, as in the protocol
    key_columns: list[str] | None = None  #: columns whose values in ``row`` identify the row; None: unknown

    def as_record(self) -> dict[str, Any]:
        """Return its fields for a record, without those that are valid only for a moment."""
        return {name: value for name, value in asdict(self).items() if name not in ("ctid", "at")}


@dataclass(frozen=True, slots=True)
class Search:
    """The result of a search.

    :ivar hits: in the order of the server's report.
    :ivar remote: the row as the change would make it, by column; None if the row to update does not exist.
    :ivar moved: the row would move to another partition.
    :ivar indexes: the indexes that are checked at once, in the order in which the server searches them. A violation of
        another index is not one of its conflicts.
    """

    hits: list[ConflictingRow]
    remote: dict[str, str | None] | None
    moved: bool
    indexes: tuple[str, ...]


class TableSearch:
    """A search for conflicting rows of one table, in the session's transaction and role, without locks."""

    def __init__(self, connection: psycopg.Connection, table: TargetRelation) -> None:
        self._connection = connection
        self.table = table
        self._indexes = unique_indexes.immediate(connection, table.oid)
        self._expressions = connection.execute(_EXPRESSIONS.encode(), (table.oid,)).fetchall()
        self._tracked = tracks_commits(connection)
        self._queries: dict[
            int, tuple[Statement, bytes, _IndexQueries]
        ] = {}  # holding the statement keeps its id unique

    def search(
        self,
        change: Statement,
        values: Sequence[bytes | None],
        formats: Sequence[int],
        *,
        sent: Sequence[str],
        inserts: bool,
    ) -> Search:
        """Look for every row that conflicts with a row.

        :param change: :func:`~pgsub.target.sql.row_queries.resulting_row`; ``values`` and ``formats`` are its
            parameters. Calls with the same object must have the same ``sent`` and ``inserts``.
        :param sent: columns that the publisher sent.
        :raises psycopg.Error: not permitted, or a timeout.
        """
        if id(change) not in self._queries:  # it takes longer to compose them than to run them
            self._queries[id(change)] = change, *self._compose(change, sent, inserts=inserts)
        _, remote, indexes = self._queries[id(change)]

        def first(query: bytes) -> list[str | None] | None:
            result = self._connection.pgconn.exec_params(query, values, change.types, formats)
            if result.status != pq.ExecStatus.TUPLES_OK:
                raise psycopg.errors.error_from_result(result)
            if not result.ntuples:
                return None
            found = [result.get_value(0, n) for n in range(result.nfields)]
            return [None if value is None else value.decode("utf-8", "replace") for value in found]

        names, found = tuple(index.name for index in self._indexes), first(remote)
        if found is None:
            return Search([], None, moved=False, indexes=names)
        hits = [self._hit(index, hit) for index, query in indexes if (hit := first(query)) is not None]
        moved = found[0] is not None and int(found[0]) != self.table.oid
        return Search(hits, self._row(found[1]), moved=moved, indexes=names)

    def has_key(self, hit: ConflictingRow, names: Collection[str]) -> bool:
        """Return whether a row was found by an index of exactly these columns: its key is equal, whatever its text."""
        keys = {column.quoted for column in self.table.columns if column.name in names}
        return any(one.name == hit.index and one.predicate is None and {*one.keys} == keys for one in self._indexes)

    def _compose(self, change: Statement, sent: Sequence[str], *, inserts: bool) -> tuple[bytes, _IndexQueries]:
        """Compose the query for the row as the change would make it, and for the conflicting row in each index."""
        generated = {name: text for name, is_generated, text in self._expressions if is_generated}
        # an insert takes these values from a default, so they are unknown
        unknown = {name for name, of_table, _ in self._expressions if not of_table and inserts and name not in sent}
        remote = completed(self.table, change.text, generated)
        known = [index for index in self._indexes if not unknown.intersection(index.columns)]
        searches = [(one, conflicting_row(self.table, one, remote, sent).as_bytes(self._connection)) for one in known]
        return remote_row(self.table, remote).as_bytes(self._connection), searches

    def _hit(self, index: UniqueIndex, found: Sequence[str | None]) -> ConflictingRow:
        width = len(index.keys)
        key_values = ", ".join("null" if value is None else value for value in found[2 : 2 + width])
        key, values = f"({', '.join(index.keys)})=({key_values})", self._row(found[2 + width])
        hit = ConflictingRow(
            index.name,
            key,
            values,
            int(found[0] or 0),
            identical=found[1] == "t",
            ctid=found[3 + width],
            key_columns=self._key_columns(index, values, found[2 : 2 + width]),
        )
        return written(self._connection, hit) if self._tracked else hit

    def _key_columns(
        self, index: UniqueIndex, row: dict[str, str | None], key: Sequence[str | None]
    ) -> list[str] | None:
        """Return the columns of an index if a comparison of all of them by ``=`` identifies the row; else None.

        The comparison uses the text of their values and must hold in any session.
        """
        by_name = {column.quoted: column for column in self.table.columns}
        columns = [by_name.get(text) for text in index.keys]
        if index.predicate is not None:
            return None
        names = []
        for column, operator, value in zip(columns, index.operators, key, strict=True):
            if column is None or column.equality != operator or not column.deterministic:
                return None
            if value is None or row.get(column.name) != value:  # of a large value, ``row`` has only the size
                return None
            names.append(column.name)
        return None if self._read_otherwise.intersection(names) else names

    @cached_property
    def _read_otherwise(self) -> set[str]:
        """The columns whose text another session may read as another value."""
        return {name for (name,) in self._connection.execute(_READ_OTHERWISE.encode(), (self.table.oid,))}

    def _row(self, values: str | None) -> dict[str, str | None]:
        read = dict(zip((c.name for c in stored(self.table)), read_texts(values), strict=True))
        # the server shows "virtual" for a virtual column
        return {c.name: read.get(c.name, "virtual") for c in self.table.columns}


def written(connection: psycopg.Connection, hit: ConflictingRow) -> ConflictingRow:
    """Add time and origin of the transaction that wrote a row, if the target tracks them."""
    found = row(connection, _WRITTEN, (str(hit.xid),)) if hit.xid is not None else None
    return hit if found is None else replace(hit, commit_ts=found[0], origin=found[1], at=found[2])


def member(connection: psycopg.Connection, root: TargetRelation, name: tuple[str, str]) -> TargetRelation | None:
    """Describe the table with this name if it is ``root`` or one of its partitions."""
    table = describe(connection, *name)
    if table is None or table.oid == root.oid:
        return table
    members = connection.execute(MEMBERS.encode(), (root.oid,)).fetchall() if root.relkind == "p" else []
    return table if table.oid in {oid for oid, *_ in members} else None


@contextlib.contextmanager
def bounded(connection: psycopg.Connection, role: str | None) -> Iterator[None]:
    """Read as a role, with a timeout of :data:`TIMEOUT`, in a transaction that the caller rolls back."""
    connection.execute("SET TRANSACTION READ ONLY")
    limits = sql.SQL("SET LOCAL statement_timeout = {0}; SET LOCAL lock_timeout = {0}").format(sql.Literal(TIMEOUT))
    connection.execute(limits)
    with roles.acting(connection, role):
        yield
