"""Published tables with all details: columns, row filters, leaves, sizes.

Mirrors ``fetch_remote_table_info`` (tablesync.c), for many tables at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from psycopg import sql

from pgsub.common.errors import PgsubError, SchemaFault, StateForbids
from pgsub.publisher.connect import Connection
from pgsub.publisher.publication import published
from pgsub.publisher.server_errors import translating

Name = tuple[str, str]  #: schema and name of a table


@dataclass(frozen=True, slots=True)
class RemoteColumn:
    """A published column of a table."""

    attnum: int
    name: str
    type_oid: int
    type_schema: str
    type_name: str
    typmod: int
    is_key: bool  #: part of the replica identity index
    generated: bool
    large: bool = False  #: its values may be stored out of line; an update does not send those that it does not change


@dataclass(frozen=True, slots=True)
class Leaf:
    """A relation with storage: a plain table, or a partition without partitions."""

    oid: int
    schema: str
    name: str
    pages: int  #: present blocks of the main fork, not those of the last ANALYZE
    bytes: int  #: present size, with TOAST
    reltuples: float  #: -1: never analyzed
    readable: bool = True  #: can be read directly: a root's privileges and policies do not apply to its partitions
    foreign: bool = False  #: a foreign table
    replica_identity: str = "d"
    toasted: bool = False  #: has a TOAST table, as the server makes for rows that may become large


@dataclass(frozen=True, slots=True)
class RemoteTable:
    """A published table, with what the copy and the relation map need."""

    oid: int
    schema: str
    name: str
    relkind: str  #: r plain, p partitioned
    replica_identity: str  #: d default, n nothing, f full, i index
    columns: tuple[RemoteColumn, ...]
    row_filter: str | None  #: an expression in parentheses; None: all rows
    leaves: tuple[Leaf, ...]
    bytes: int
    reltuples: float  #: -1: no leaf was ever analyzed

    @property
    def foreign_partitions(self) -> bool:
        """Whether some of its rows are in foreign tables, which pgsub does not read."""
        return any(leaf.foreign for leaf in self.leaves)

    @property
    def leaving_out(self) -> tuple[Leaf, ...]:
        """The leaves whose updates do not send a large value in the new row if they do not change it."""
        large = any(column.large and not (column.is_key or column.generated) for column in self.columns)
        return tuple(leaf for leaf in self.leaves if large and leaf.toasted)


class DescribedTables(NamedTuple):
    """Tables by schema and name. ``faults`` has the errors of tables that cannot be described."""

    tables: dict[Name, RemoteTable]
    faults: dict[Name, PgsubError]


def describe_tables(
    connection: Connection, names: Iterable[Name], publications: Sequence[str] | None
) -> DescribedTables:
    """Read all details of tables in a few round trips. With a slot's snapshot, they are what the copy will see.

    :param names: schema and name of each table.
    :param publications: None: describe whole tables, whether they are published or not.
    :raises PgsubError: translated. An error of a single table is in the result's ``faults``.
    """
    with translating(connection, "fetch table info from publisher"):
        return _describe(connection, list(dict.fromkeys(names)), publications)


def only_published(connection: Connection, names: Iterable[Name], publications: Sequence[str]) -> list[Name]:
    """Return which tables are published as a whole, or as part of another.

    :param names: schema and name of each, as the ledger has them: the target must not decide what is read.
    """
    wanted = list(names)
    rows = connection.execute(_RELATIONS, ([schema for schema, _ in wanted], [name for _, name in wanted])).fetchall()
    oids = {(schema, name): oid for schema, name, oid, *_ in rows}
    restrictions = _restrictions(connection, list(oids.values()), publications)
    return [name for name in wanted if oids.get(name) in restrictions]


def _describe(connection: Connection, names: Sequence[Name], publications: Sequence[str] | None) -> DescribedTables:
    found = DescribedTables({}, {})
    if not names:
        return found
    wanted = ([schema for schema, _ in names], [name for _, name in names])
    relations = {(row[0], row[1]): row[2:] for row in connection.execute(_RELATIONS, wanted).fetchall()}
    oids = [oid for oid, *_ in relations.values()]
    columns = _by_table(connection.execute(_COLUMNS, (oids,)).fetchall())
    leaves = _by_table(connection.execute(_LEAVES, {"oids": oids}).fetchall())
    restrictions = _restrictions(connection, oids, publications)
    for key in names:
        if key not in relations:
            found.faults[key] = _fault(key, "not found on publisher")
            continue
        oid = relations[key][0]
        if oid not in restrictions:
            # the target gave the names of tables to copy, and it must not decide what may be read here
            found.faults[key] = _fault(
                key,
                "is not published by the publications of the subscription",
                hint="Add it to a publication, or refresh the subscription to remove the table from it.",
            )
            continue
        try:
            found.tables[key] = _table(
                key, relations[key], columns.get(oid, []), leaves.get(oid, []), restrictions[oid]
            )
        except StateForbids as fault:
            found.faults[key] = fault
    return found


def _restrictions(
    connection: Connection, oids: Sequence[int], publications: Sequence[str] | None
) -> dict[int, list[Sequence[Any]]]:
    """Read column lists (attribute numbers) and row filters by table; None: no restriction.

    A table that is published only as part of another has the restrictions of the other.

    :param publications: None: whole tables.
    :return: without tables that are not published, or only in part.
    """
    if publications is None:
        return {oid: [(None, None)] for oid in oids}
    found = _by_table(_listed(connection, _OWN, oids, publications))
    unnamed = [oid for oid in oids if oid not in found]
    return {**found, **_by_table(_listed(connection, _RELATED, unnamed, publications))} if unnamed else found


def _listed(
    connection: Connection, query: sql.SQL, oids: Sequence[int], publications: Sequence[str]
) -> list[tuple[Any, ...]]:
    text = query.format(published(connection))
    return connection.execute(text, {"publications": list(publications), "oids": list(oids)}).fetchall()


def _fault(key: Name, what: str, hint: str | None = None) -> SchemaFault:
    fault = SchemaFault(f'table "{".".join(key)}" {what}', hint=hint)
    fault.relation = ".".join(key)
    return fault


def _by_table(rows: Iterable[Sequence[Any]]) -> dict[int, list[Sequence[Any]]]:
    """Group rows by their first column, a table's OID, and remove that column."""
    tables: dict[int, list[Sequence[Any]]] = {}
    for oid, *row in rows:
        tables.setdefault(oid, []).append(row)
    return tables


def _table(
    key: Name,
    relation: Sequence[Any],
    columns: Sequence[Sequence[Any]],
    leaf_rows: Sequence[Sequence[Any]],
    restrictions: Sequence[Sequence[Any]],
) -> RemoteTable:
    schema, name = key
    oid, replica_identity, relkind = relation
    everything = [RemoteColumn(*column) for column in columns]
    plain = tuple(column.attnum for column in everything if not column.generated)
    # From 16 on a list of all columns is sent instead of none.
    lists = {plain if attrs is None else tuple(attrs) for attrs, _ in restrictions}
    if len(lists) > 1:
        raise StateForbids(f'cannot use different column lists for table "{schema}.{name}" in different publications')
    (sent,) = lists
    leaves = tuple(Leaf(*leaf) for leaf in leaf_rows)
    return RemoteTable(
        oid=oid,
        schema=schema,
        name=name,
        relkind=relkind,
        replica_identity=replica_identity,
        columns=tuple(column for column in everything if column.attnum in sent),
        row_filter=_row_filter({expression for _, expression in restrictions}),
        leaves=leaves,
        bytes=sum(leaf.bytes for leaf in leaves),
        reltuples=_rows(leaves),
    )


def _rows(leaves: Sequence[Leaf]) -> float:
    known = [leaf.reltuples for leaf in leaves if leaf.reltuples >= 0]
    return sum(known) if known else -1


def _row_filter(filters: set[str | None]) -> str | None:
    """Combine the filters of several publications. A publication without a filter publishes every row."""
    return None if None in filters or not filters else f"({' OR '.join(sorted(map(str, filters)))})"


_RELATIONS = """
    SELECT n.nspname::text, c.relname::text, c.oid, c.relreplident::text, c.relkind::text
    FROM unnest(%s::text[], %s::text[]) AS w (nspname, relname)
        JOIN pg_catalog.pg_namespace n ON n.nspname = w.nspname
        JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = w.relname"""

_COLUMNS = """
    WITH wanted AS MATERIALIZED (
        SELECT w.oid, pg_catalog.pg_get_replica_identity_index(w.oid) AS key FROM unnest(%s::oid[]) AS w (oid))
    SELECT a.attrelid, a.attnum, a.attname::text, a.atttypid, n.nspname::text, t.typname::text, a.atttypmod,
        COALESCE(a.attnum = ANY(i.indkey), false), a.attgenerated <> '', a.attstorage IN ('x', 'e')
    FROM wanted w JOIN pg_catalog.pg_attribute a ON a.attrelid = w.oid
        JOIN pg_catalog.pg_type t ON t.oid = a.atttypid JOIN pg_catalog.pg_namespace n ON n.oid = t.typnamespace
        LEFT JOIN pg_catalog.pg_index i ON i.indexrelid = w.key
    WHERE a.attnum > 0 AND NOT a.attisdropped
    ORDER BY a.attrelid, a.attnum"""

# pg_partition_tree() of a plain table returns no rows.
_LEAVES = """
    SELECT l.root, c.oid, n.nspname::text, c.relname::text,
        COALESCE(pg_catalog.pg_relation_size(c.oid) / pg_catalog.current_setting('block_size')::bigint, 0),
        COALESCE(pg_catalog.pg_table_size(c.oid), 0), c.reltuples::float8,
        pg_catalog.has_any_column_privilege(c.oid, 'SELECT') AND NOT pg_catalog.row_security_active(c.oid)
            AND pg_catalog.has_schema_privilege(c.relnamespace, 'USAGE'), c.relkind = 'f', c.relreplident::text,
        c.reltoastrelid <> 0
    FROM (SELECT w.oid AS root, w.oid AS leaf FROM unnest(%(oids)s::oid[]) AS w (oid)
            JOIN pg_catalog.pg_class k ON k.oid = w.oid WHERE k.relkind <> 'p'
            UNION ALL
            SELECT w.oid, t.relid FROM unnest(%(oids)s::oid[]) AS w (oid)
            CROSS JOIN LATERAL pg_catalog.pg_partition_tree(w.oid) t WHERE t.isleaf AND t.relid <> w.oid) AS l
        JOIN pg_catalog.pg_class c ON c.oid = l.leaf JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    ORDER BY 1, 6 DESC, 2"""

_OWN = sql.SQL("""
    SELECT gpt.relid, gpt.attrs::int2[], pg_catalog.pg_get_expr(gpt.qual, gpt.relid) FROM {}
    WHERE gpt.relid = ANY(%(oids)s::oid[])""")

# A partition has the row filter and columns of its published root, whose columns may have other attribute numbers. A
# partitioned table is published as a whole only if all its partitions are.
_RELATED = sql.SQL("""
    WITH wanted AS (SELECT w.oid FROM unnest(%(oids)s::oid[]) AS w (oid)),
    listed AS MATERIALIZED (
        SELECT gpt.relid::oid, gpt.attrs::int2[], pg_catalog.pg_get_expr(gpt.qual, gpt.relid) AS qual FROM {}),
    above AS MATERIALIZED (
        SELECT w.oid, CASE WHEN l.attrs IS NOT NULL THEN ARRAY(
                SELECT m.attnum FROM pg_catalog.pg_attribute a
                    JOIN pg_catalog.pg_attribute m ON m.attrelid = w.oid AND m.attname = a.attname
                WHERE a.attrelid = l.relid AND a.attnum = ANY(l.attrs) ORDER BY m.attnum) END AS attrs, l.qual
        FROM wanted w CROSS JOIN LATERAL pg_catalog.pg_partition_ancestors(w.oid) a JOIN listed l USING (relid)),
    whole AS MATERIALIZED (
        SELECT l.relid FROM listed l WHERE l.qual IS NULL AND (l.attrs IS NULL OR NOT EXISTS (
            SELECT FROM pg_catalog.pg_attribute a
            WHERE a.attrelid = l.relid AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''
                AND a.attnum <> ALL(l.attrs)))),
    leaf AS MATERIALIZED (
        SELECT w.oid, EXISTS (
                SELECT FROM pg_catalog.pg_partition_ancestors(t.relid) a JOIN whole USING (relid)) AS published
        FROM wanted w CROSS JOIN LATERAL pg_catalog.pg_partition_tree(w.oid) t
        WHERE t.isleaf AND w.oid NOT IN (SELECT oid FROM above))
    SELECT oid, attrs, qual FROM above
    UNION ALL
    SELECT oid, NULL, NULL FROM leaf GROUP BY oid HAVING pg_catalog.bool_and(published)""")
