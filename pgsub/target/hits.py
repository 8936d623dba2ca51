"""Which rows of the target stand in the way of a row: looked for after a unique violation, index by index.

Mirrors FindConflictTuple and GetTupleTransactionInfo (conflict.c). The server looks inside the transaction that fails;
here it is rolled back already, so what the transaction itself had done before is not seen.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import psycopg
from psycopg import pq, sql

from pgsub.target import roles
from pgsub.target.relation import TargetColumn, TargetRelation, describe
from pgsub.target.statements import Statement, shown

#: Milliseconds that the look may take.
TIMEOUT = 5000

# Unique indexes that stop a row at once, in the order in which the server reports them. What they depend on is told by
# pg_depend for expressions and predicates, by indkey for columns.
_INDEXES = """
SELECT c.relname::text,
       ARRAY(SELECT pg_catalog.pg_get_indexdef(x.indexrelid, k, true)
               FROM pg_catalog.generate_series(1, x.indnkeyatts::int) k ORDER BY k),
       ARRAY(SELECT pg_catalog.quote_ident(n.nspname) || '.' || o.oprname
               FROM pg_catalog.generate_series(1, x.indnkeyatts::int) k
               JOIN pg_catalog.pg_opclass p ON p.oid = x.indclass[k - 1]
               JOIN pg_catalog.pg_amop a ON a.amopfamily = p.opcfamily AND a.amoplefttype = p.opcintype
                AND a.amoprighttype = p.opcintype AND a.amopstrategy = 3
               JOIN pg_catalog.pg_operator o ON o.oid = a.amopopr
               JOIN pg_catalog.pg_namespace n ON n.oid = o.oprnamespace ORDER BY k),
       ARRAY(SELECT pg_catalog.quote_ident(n.nspname) || '.' || pg_catalog.quote_ident(l.collname)
               FROM pg_catalog.generate_series(1, x.indnkeyatts::int) k
               LEFT JOIN pg_catalog.pg_collation l ON l.oid = x.indcollation[k - 1]
               LEFT JOIN pg_catalog.pg_namespace n ON n.oid = l.collnamespace ORDER BY k),
       pg_catalog.pg_get_expr(x.indpred, x.indrelid),
       coalesce((pg_catalog.to_jsonb(x) ->> 'indnullsnotdistinct')::bool, false),
       ARRAY(SELECT t.attname::text FROM pg_catalog.pg_attribute t WHERE t.attrelid = x.indrelid
                AND (t.attnum = ANY (x.indkey::smallint[]) OR EXISTS (
                    SELECT FROM pg_catalog.pg_depend d WHERE d.classid = 'pg_catalog.pg_class'::regclass
                       AND d.objid = x.indexrelid AND d.refclassid = d.classid AND d.refobjid = x.indrelid
                       AND d.refobjsubid = t.attnum)))
  FROM pg_catalog.pg_index x
  JOIN pg_catalog.pg_class c ON c.oid = x.indexrelid
  JOIN pg_catalog.pg_am m ON m.oid = c.relam AND m.amname = 'btree'
 WHERE x.indrelid = %s::oid AND x.indisunique AND x.indimmediate AND x.indisready AND NOT x.indisexclusion
 ORDER BY x.indexrelid
"""

_EXPRESSIONS = """
SELECT a.attname::text, a.attgenerated <> '', pg_catalog.pg_get_expr(d.adbin, d.adrelid)
  FROM pg_catalog.pg_attribute a
  LEFT JOIN pg_catalog.pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
 WHERE a.attrelid = %s::oid AND a.attnum > 0 AND NOT a.attisdropped AND (d.oid IS NOT NULL OR a.attidentity <> '')
"""

_WRITTEN = """
SELECT w.at::text, CASE WHEN w.roident <> 0 THEN coalesce(o.roname, '') END,
       ((extract(epoch FROM w.at) - 946684800) * 1000000)::bigint
  FROM (SELECT * FROM pg_catalog.pg_xact_commit_timestamp_origin(%s::xid)) AS w (at, roident)
  LEFT JOIN pg_catalog.pg_replication_origin o ON o.roident = w.roident
 WHERE pg_catalog.current_setting('track_commit_timestamp')::bool AND w.at IS NOT NULL
"""


@dataclass(frozen=True, slots=True)
class Hit:
    """A row of the target that has a key already. What could not be read is None."""

    index: str
    key: str | None = None  #: of the index, as the server shows it: (a)=(1)
    row: dict[str, str | None] | None = None  #: by column, in the table's order
    xid: int | None = None  #: transaction on the target that wrote it
    commit_ts: str | None = None  #: when, where the target tracks it
    origin: str | None = None  #: None a local one, '' one that does not exist any more
    identical: bool = False  #: no column that came from the publisher differs
    ctid: str | None = None  #: where it is
    at: int | None = None  #: commit_ts in microseconds since 2000, as the protocol has it

    def told(self) -> dict[str, Any]:
        """For a record: without what is of use only for a moment."""
        return {name: value for name, value in asdict(self).items() if name not in ("ctid", "at")}


@dataclass(frozen=True, slots=True)
class Search:
    """What was found.

    :ivar hits: in the order of the server's report.
    :ivar remote: the row as it would be, by column; None where the row to be updated is not there.
    :ivar moved: it would leave the partition that it is in.
    :ivar indexes: all that stop a row at once, in the order in which the server looks into them; a violation of any
        other is none of its conflicts.
    """

    hits: list[Hit]
    remote: dict[str, str | None] | None
    moved: bool
    indexes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Index:
    name: str
    keys: list[str]
    operators: list[str]
    collations: list[str | None]
    predicate: str | None
    nulls_equal: bool
    columns: list[str]


def search(
    connection: psycopg.Connection,
    schema: str,
    name: str,
    change: Statement,
    values: Sequence[bytes | None],
    formats: Sequence[int],
    *,
    sent: Sequence[str],
    inserts: bool,
    role: str | None,
) -> Search | None:
    """Look for every row that stands in the way, without a lock and for :data:`TIMEOUT` at most.

    :param connection: between statements; what it is in of a transaction is rolled back by the caller, or read only.
    :param schema: with ``name`` the table, of a partitioned one the partition, that refused the row.
    :param change: :func:`~pgsub.target.statements.resulting`; ``values`` and ``formats`` are its parameters.
    :param sent: columns that came from the publisher.
    :param role: that changes are made as.
    :return: None where the table is gone.
    :raises psycopg.Error: not allowed, or not in time.
    """
    table = describe(connection, schema, name)
    if table is None:
        return None
    with _bounded(connection, role):
        return TableSearch(connection, table).search(change, values, formats, sent=sent, inserts=inserts)


def keys_of(connection: psycopg.Connection, oid: int, schema: str, name: str, index: str) -> list[str] | None:
    """What a unique index is of: columns and expressions as SQL.

    :param oid: of a table; with ``schema`` and ``name`` that one itself or a partition of it.
    :return: None where there is no such index, or it does not stop a row at once.
    """
    table = describe(connection, schema, name)
    family = "SELECT relid::oid FROM pg_catalog.pg_partition_tree(%s::oid) UNION SELECT %s::oid"
    if table is None or (table.oid,) not in connection.execute(family, (oid, oid)).fetchall():
        return None
    found = (_Index(*row) for row in connection.execute(_INDEXES.encode(), (table.oid,)))
    return next((one.keys for one in found if one.name == index), None)


class TableSearch:
    """As :func:`search` for many rows of one table, in the transaction and the role that the session is in."""

    def __init__(self, connection: psycopg.Connection, table: TargetRelation) -> None:
        self._connection = connection
        self.table = table
        self._indexes = [_Index(*row) for row in connection.execute(_INDEXES.encode(), (table.oid,))]
        self._expressions = connection.execute(_EXPRESSIONS.encode(), (table.oid,)).fetchall()
        tracked = connection.execute("SELECT pg_catalog.current_setting('track_commit_timestamp')::bool").fetchone()
        self._tracked = tracked == (True,)
        self._looks: dict[int, _Look] = {}

    def search(
        self,
        change: Statement,
        values: Sequence[bytes | None],
        formats: Sequence[int],
        *,
        sent: Sequence[str],
        inserts: bool,
    ) -> Search:
        """What stands in the way of a row. Parameters as of :func:`search`; ``change`` says what the others are."""
        look = self._looks.get(id(change))
        if look is None:  # which keeps the statement, so that its id stays its own
            look = self._looks[id(change)] = self._look(change, sent, inserts=inserts)
        names, found = tuple(index.name for index in self._indexes), look.remote(values, formats)
        if found is None:
            return Search([], None, moved=False, indexes=names)
        remote, tableoid = found
        hits = [self._written(hit) for hit in look.hits(values, formats)]
        return Search(hits, remote, moved=tableoid not in (None, self.table.oid), indexes=names)

    def _look(self, change: Statement, sent: Sequence[str], *, inserts: bool) -> _Look:
        generated = {name: text for name, is_generated, text in self._expressions if is_generated}
        # whose value an insert takes from a default: nobody knows it
        unknown = {name for name, of_table, _ in self._expressions if not of_table and inserts and name not in sent}
        indexes = [index for index in self._indexes if not unknown.intersection(index.columns)]
        remote = _result(self.table, change.text, generated)
        return _Look(self._connection, self.table, change, _Texts(self.table, remote, sent), indexes)

    def _written(self, hit: Hit) -> Hit:
        """With time and origin of the transaction that wrote it, where the target tracks them."""
        return written(self._connection, hit) if self._tracked else hit


def written(connection: psycopg.Connection, hit: Hit) -> Hit:
    """With time and origin of the transaction that wrote it; as it is where the target does not know them."""
    if hit.xid is None:
        return hit
    row = connection.execute(_WRITTEN.encode(), (str(hit.xid),)).fetchone()
    return hit if row is None else replace(hit, commit_ts=row[0], origin=row[1], at=row[2])


@contextlib.contextmanager
def _bounded(connection: psycopg.Connection, role: str | None) -> Iterator[None]:
    connection.execute("SET TRANSACTION READ ONLY")
    limits = sql.SQL("SET LOCAL statement_timeout = {0}; SET LOCAL lock_timeout = {0}").format(sql.Literal(TIMEOUT))
    connection.execute(limits)
    with roles.acting(connection, role):
        yield


def _result(table: TargetRelation, change: sql.Composed, generated: dict[str, str]) -> sql.Composed:
    """The row as it would be, generated columns included. Expressions of the catalog are SQL already."""
    more = [
        sql.SQL(", ({}) AS {}").format(sql.SQL(text), sql.Identifier(name))
        for name, text in generated.items()
        if not _column(table, name).virtual
    ]
    alias = sql.Identifier(table.name)
    return sql.SQL("SELECT {0}.*{1} FROM ({2}) AS {0}").format(alias, sql.Composed(more), change)


def _column(table: TargetRelation, name: str) -> TargetColumn:
    column = table.column(name)
    assert column is not None
    return column


class _Texts:
    """SQL that reads rows as the server's output functions write them, the change's values being parameters.

    :param remote: gives the row as it would be.
    :param sent: columns that came from the publisher.
    """

    def __init__(self, table: TargetRelation, remote: sql.Composed, sent: Sequence[str]) -> None:
        self._table = table
        self._remote = remote
        self._sent = sent
        self._columns = [column for column in table.columns if not column.virtual]

    def remote(self) -> sql.Composed:
        """The row as it would be, and the table that it is in."""
        return sql.SQL("SELECT pgsub_tableoid, {} FROM ({}) AS pgsub_remote").format(
            shown(self._columns, "pgsub_remote"), self._remote
        )

    def hit(self, index: _Index) -> sql.Composed:
        """The row that has the key of an index already."""
        return sql.SQL(
            "SELECT pgsub_local.pgsub_xmin, {same}, {keys}, {values}, pgsub_local.pgsub_ctid"
            " FROM (SELECT {alias}.*, {expressions}, ({predicate}) AS pgsub_in FROM ({remote}) AS {alias})"
            " AS pgsub_remote CROSS JOIN LATERAL ("
            "SELECT {alias}.*, xmin AS pgsub_xmin, ctid AS pgsub_ctid, {expressions} FROM ONLY {table}"
            " WHERE {condition} AND ({predicate})"
            " AND (tableoid, ctid) IS DISTINCT FROM (pgsub_remote.pgsub_tableoid, pgsub_remote.pgsub_ctid)"
            " LIMIT 1) AS pgsub_local WHERE pgsub_remote.pgsub_in"
        ).format(
            same=self._same(),
            keys=_listed(sql.Identifier("pgsub_local", f"pgsub_key{n}") for n in range(len(index.keys))),
            values=shown(self._columns, "pgsub_local"),
            alias=sql.Identifier(self._table.name),
            expressions=_listed(
                sql.SQL("{} AS {}").format(sql.SQL(text), sql.Identifier(f"pgsub_key{n}"))
                for n, text in enumerate(index.keys)
            ),
            predicate=sql.SQL(index.predicate or "true"),
            remote=self._remote,
            table=sql.Identifier(self._table.schema, self._table.name),
            condition=sql.SQL(" AND ").join(_equal(index, n) for n in range(len(index.keys))),
        )

    def _same(self) -> sql.Composed:
        parts = [
            sql.SQL("{}::text IS NOT DISTINCT FROM {}::text").format(
                sql.Identifier("pgsub_local", name), sql.Identifier("pgsub_remote", name)
            )
            for name in self._sent
        ]
        return sql.Composed([sql.SQL(" AND ").join(parts) if parts else sql.SQL("true")])


class _Look:
    """Runs them for rows of one shape: to compose them takes longer than that."""

    def __init__(
        self,
        connection: psycopg.Connection,
        table: TargetRelation,
        change: Statement,
        texts: _Texts,
        indexes: Sequence[_Index],
    ) -> None:
        self._connection = connection
        self._table = table
        self._change = change
        self._names = [c.name for c in table.columns if not c.virtual]
        self._remote = texts.remote().as_bytes(connection)
        self._indexes = [(index, texts.hit(index).as_bytes(connection)) for index in indexes]

    def remote(
        self, values: Sequence[bytes | None], formats: Sequence[int]
    ) -> tuple[dict[str, str | None], int | None] | None:
        """The row as it would be, and the oid of the table that it is in now; None where there is none."""
        found = self._one(self._remote, values, formats)
        if found is None:
            return None
        return self._row(found[1]), None if found[0] is None else int(found[0])

    def hits(self, values: Sequence[bytes | None], formats: Sequence[int]) -> Iterator[Hit]:
        """The rows that have the keys of indexes already."""
        for index, text in self._indexes:
            found = self._one(text, values, formats)
            if found is not None:
                yield self._hit(index, found)

    def _hit(self, index: _Index, found: Sequence[str | None]) -> Hit:
        width = len(index.keys)
        key_values = ", ".join("null" if value is None else value for value in found[2 : 2 + width])
        key = f"({', '.join(index.keys)})=({key_values})"
        row, ctid = self._row(found[2 + width]), found[3 + width]
        return Hit(index.name, key, row, int(found[0] or 0), identical=found[1] == "t", ctid=ctid)

    def _row(self, values: str | None) -> dict[str, str | None]:
        read = dict(zip(self._names, json.loads(values or "[]"), strict=True))
        # of a virtual column the server's word
        return {c.name: "virtual" if c.virtual else read[c.name] for c in self._table.columns}

    def _one(self, text: bytes, values: Sequence[bytes | None], formats: Sequence[int]) -> list[str | None] | None:
        """The first row as text."""
        result = self._connection.pgconn.exec_params(text, values, self._change.types, formats)
        if result.status != pq.ExecStatus.TUPLES_OK:
            raise psycopg.errors.error_from_result(result)
        if not result.ntuples:
            return None
        found = [result.get_value(0, n) for n in range(result.nfields)]
        return [None if value is None else value.decode("utf-8", "replace") for value in found]


def _equal(index: _Index, n: int) -> sql.Composed:
    """One column of a key: local and remote value are one for the index."""
    collation = index.collations[n]
    collate = sql.SQL(f" COLLATE {collation}" if collation else "")
    local = sql.SQL("({}){}").format(sql.SQL(index.keys[n]), collate)
    remote = sql.SQL("{}{}").format(sql.Identifier("pgsub_remote", f"pgsub_key{n}"), collate)
    # an operator's name cannot be quoted; the catalog query quoted its schema
    equal = sql.SQL("{} OPERATOR({}) {}").format(local, sql.SQL(index.operators[n]), remote)
    if not index.nulls_equal:
        return equal
    return sql.SQL("({} OR ({} IS NULL AND {} IS NULL))").format(equal, local, remote)


def _listed(parts: Iterator[sql.Composable]) -> sql.Composed:
    return sql.SQL(", ").join(list(parts))
