"""One published table in full, and the COPY statements that read it.

Mirrors ``fetch_remote_table_info`` and ``copy_table`` (tablesync.c), for any leaf and any range of its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import psycopg
from psycopg import sql

from pgsub.errors import SchemaFault, StateForbids
from pgsub.publisher.connect import Connection
from pgsub.publisher.faults import translate
from pgsub.publisher.publication import published


@dataclass(frozen=True, slots=True)
class RemoteColumn:
    """A column that the publisher sends."""

    attnum: int
    name: str
    type_oid: int
    type_schema: str
    type_name: str
    typmod: int
    is_key: bool  #: part of the replica identity index
    generated: bool


@dataclass(frozen=True, slots=True)
class Leaf:
    """A relation with rows of its own: a plain table, or a partition without partitions."""

    oid: int
    schema: str
    name: str
    pages: int  #: blocks of the main fork now, not when it was last analyzed
    bytes: int  #: with TOAST
    reltuples: float  #: -1: never analyzed


@dataclass(frozen=True, slots=True)
class RemoteTable:
    """What the copy and the relation map must know of a published table."""

    oid: int
    schema: str
    name: str
    relkind: str  #: r plain, p partitioned
    replica_identity: str  #: d default, n nothing, f full, i index
    columns: tuple[RemoteColumn, ...]
    row_filter: str | None  #: one expression in parentheses
    leaves: tuple[Leaf, ...]
    bytes: int
    reltuples: float  #: -1: no leaf was ever analyzed


def describe_table(connection: Connection, schema: str, name: str, publications: Sequence[str]) -> RemoteTable:
    """Read everything of one table; inside a slot's snapshot it is what the copy will see.

    :raises SchemaFault: there is no such table.
    :raises StateForbids: different column lists.
    :raises PgsubError: translated.
    """
    try:
        return _describe(connection, schema, name, publications)
    except psycopg.Error as error:
        doing = f'fetch table info for table "{schema}.{name}" from publisher'
        raise translate(error, doing, table=(schema, name), user=connection.info.user) from None


def _describe(connection: Connection, schema: str, name: str, publications: Sequence[str]) -> RemoteTable:
    row = connection.execute(_RELATION, (schema, name)).fetchone()
    if row is None:
        fault = SchemaFault(f'table "{schema}.{name}" not found on publisher')
        fault.relation = f"{schema}.{name}"
        raise fault
    oid, replica_identity, relkind = row
    everything = [RemoteColumn(*column) for column in connection.execute(_COLUMNS, (oid,)).fetchall()]
    plain = tuple(column.attnum for column in everything if not column.generated)
    listed, filters = _restrictions(connection, oid, publications)
    lists = {plain if attrs is None else attrs for attrs in listed} or {plain}
    if len(lists) > 1:
        raise StateForbids(f'cannot use different column lists for table "{schema}.{name}" in different publications')
    (sent,) = lists
    columns = tuple(column for column in everything if column.attnum in sent)
    leaves = tuple(Leaf(*leaf) for leaf in connection.execute(_LEAVES, {"oid": oid}).fetchall())
    known = [leaf.reltuples for leaf in leaves if leaf.reltuples >= 0]
    return RemoteTable(
        oid=oid,
        schema=schema,
        name=name,
        relkind=relkind,
        replica_identity=replica_identity,
        columns=columns,
        row_filter=None if None in filters or not filters else f"({' OR '.join(sorted(map(str, filters)))})",
        leaves=leaves,
        bytes=sum(leaf.bytes for leaf in leaves),
        reltuples=sum(known) if known else -1,
    )


_RELATION = """
    SELECT c.oid, c.relreplident::text, c.relkind::text
    FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = %s AND c.relname = %s"""

_COLUMNS = """
    SELECT a.attnum, a.attname::text, a.atttypid, n.nspname::text, t.typname::text, a.atttypmod,
        COALESCE(a.attnum = ANY(i.indkey), false), a.attgenerated <> ''
    FROM pg_catalog.pg_attribute a
        JOIN pg_catalog.pg_type t ON t.oid = a.atttypid JOIN pg_catalog.pg_namespace n ON n.oid = t.typnamespace
        LEFT JOIN pg_catalog.pg_index i ON i.indexrelid = pg_catalog.pg_get_replica_identity_index(a.attrelid)
    WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped
    ORDER BY a.attnum"""

# pg_partition_tree() of a plain table is empty.
_LEAVES = """
    SELECT c.oid, n.nspname::text, c.relname::text,
        COALESCE(pg_catalog.pg_relation_size(c.oid) / pg_catalog.current_setting('block_size')::bigint, 0),
        COALESCE(pg_catalog.pg_table_size(c.oid), 0), c.reltuples::float8
    FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE (c.oid = %(oid)s AND c.relkind <> 'p')
        OR c.oid IN (SELECT t.relid FROM pg_catalog.pg_partition_tree(%(oid)s) t WHERE t.isleaf AND t.relid <> %(oid)s)
    ORDER BY 5 DESC, 1"""


def _restrictions(
    connection: Connection, oid: int, publications: Sequence[str]
) -> tuple[set[tuple[int, ...] | None], set[str | None]]:
    """Column lists (attribute numbers) and row filters of a table, None for a publication without.

    Both are empty where no publication has the table. From 16 a missing list comes as a list of all columns.
    """
    query = sql.SQL("""
        SELECT gpt.attrs::int2[], pg_catalog.pg_get_expr(gpt.qual, gpt.relid) FROM {} WHERE gpt.relid = %(oid)s
        """).format(published(connection))
    rows = connection.execute(query, {"publications": list(publications), "oid": oid}).fetchall()
    lists = {None if attrs is None else tuple(attrs) for attrs, _ in rows}
    return lists, {expression for _, expression in rows}


def copy_statement(
    table: RemoteTable,
    *,
    columns: Sequence[str] | None = None,
    leaf: Leaf | None = None,
    ctid_from: int | None = None,
    ctid_to: int | None = None,
    binary: bool = False,
) -> sql.Composed:
    """COPY … TO STDOUT of a table, of one of its leaves, or of a range of a leaf's blocks.

    A partitioned root is read by SELECT, which every version can; a plain table with ONLY, for inheritance children
    are published on their own.

    :param columns: names in the order wanted; None: all of ``table.columns``.
    :param leaf: None: the whole table.
    :param ctid_from: first block.
    :param ctid_to: block after the last one; None for the last range, which so includes what was added meanwhile.
    """
    names = [column.name for column in table.columns] if columns is None else list(columns)
    listed = sql.SQL(", ").join(map(sql.Identifier, names))
    relation = sql.Identifier(leaf.schema, leaf.name) if leaf else sql.Identifier(table.schema, table.name)
    conditions = _conditions(table, ctid_from, ctid_to)
    partitioned = leaf is None and table.relkind == "p"
    generated = {column.name for column in table.columns if column.generated}
    if conditions or partitioned or generated.intersection(names):
        source = sql.SQL("(SELECT {} FROM {}{}{})").format(
            listed, sql.SQL("") if partitioned else sql.SQL("ONLY "), relation, _where(conditions)
        )
    elif names:
        source = sql.SQL("{} ({})").format(relation, listed)
    else:
        source = sql.SQL("{}").format(relation)
    return sql.SQL("COPY {} TO STDOUT{}").format(source, sql.SQL(" WITH (FORMAT binary)" if binary else ""))


def _conditions(table: RemoteTable, ctid_from: int | None, ctid_to: int | None) -> list[sql.Composable]:
    conditions: list[sql.Composable] = []
    if ctid_from:
        conditions.append(sql.SQL("ctid >= {}").format(_tid(ctid_from)))
    if ctid_to is not None:
        conditions.append(sql.SQL("ctid < {}").format(_tid(ctid_to)))
    if table.row_filter is not None:
        # The publisher's own text, deparsed with an empty search_path, goes back to where it came from.
        conditions.append(sql.SQL(table.row_filter))
    return conditions


def _where(conditions: Sequence[sql.Composable]) -> sql.Composable:
    if not conditions:
        return sql.SQL("")
    return sql.SQL(" WHERE {}").format(sql.SQL(" AND ").join(conditions))


def _tid(block: int) -> sql.Composable:
    return sql.SQL("{}::pg_catalog.tid").format(sql.Literal(f"({block},0)"))
