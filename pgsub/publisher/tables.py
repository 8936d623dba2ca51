"""Published tables in full: columns, row filters, leaves, sizes.

Mirrors ``fetch_remote_table_info`` (tablesync.c), for many tables at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from psycopg import sql

from pgsub.common.errors import PgsubError, SchemaFault, StateForbids
from pgsub.publisher.connect import Connection
from pgsub.publisher.faults import translating
from pgsub.publisher.publication import published

Name = tuple[str, str]  #: schema and name of a table


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
    readable: bool = True  #: by itself: a root's privileges and policies are not its partitions'
    foreign: bool = False  #: a partition whose rows are another server's


@dataclass(frozen=True, slots=True)
class RemoteTable:
    """A published table, as the copy and the relation map must know it."""

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

    @property
    def foreign_partitions(self) -> bool:
        """Whether some of its rows are another server's, which no session of pgsub asks."""
        return any(leaf.foreign for leaf in self.leaves)


class DescribedTables(NamedTuple):
    """Tables by schema and name; what cannot be described is in ``faults`` and does no harm to the others."""

    tables: dict[Name, RemoteTable]
    faults: dict[Name, PgsubError]


def describe_tables(
    connection: Connection, names: Iterable[Name], publications: Sequence[str] | None
) -> DescribedTables:
    """Read everything of tables in a few round trips; inside a slot's snapshot it is what the copy will see.

    :param names: schema and name of each.
    :param publications: None for whole tables, whether they are published or not.
    :raises PgsubError: translated; what concerns a single table is in the result's ``faults``.
    """
    with translating(connection, "fetch table info from publisher"):
        return _describe(connection, list(dict.fromkeys(names)), publications)


def _describe(connection: Connection, names: Sequence[Name], publications: Sequence[str] | None) -> DescribedTables:
    found = DescribedTables({}, {})
    if not names:
        return found
    wanted = ([schema for schema, _ in names], [name for _, name in names])
    relations = {(row[0], row[1]): row[2:] for row in connection.execute(_RELATIONS, wanted).fetchall()}
    oids = [oid for oid, *_ in relations.values()]
    columns = _by_table(connection.execute(_COLUMNS, (oids,)).fetchall())
    leaves = _by_table(connection.execute(_LEAVES, {"oids": oids}).fetchall())
    restrictions, published_else = _published(connection, oids, publications)
    for key in names:
        if key not in relations:
            found.faults[key] = _fault(key, "not found on publisher")
            continue
        oid = relations[key][0]
        if oid not in restrictions and oid not in published_else:
            # names of tables to copy come from the target, which is not to decide what it may read here
            found.faults[key] = _fault(
                key,
                "is not published by the publications of the subscription",
                hint="Add it to a publication, or refresh the subscription to remove the table from it.",
            )
            continue
        try:
            found.tables[key] = _table(
                key, relations[key], columns.get(oid, []), leaves.get(oid, []), restrictions.get(oid, [])
            )
        except StateForbids as fault:
            found.faults[key] = fault
    return found


def _published(
    connection: Connection, oids: Sequence[int], publications: Sequence[str] | None
) -> tuple[dict[int, list[Sequence[Any]]], set[int]]:
    """Read column lists and row filters by table, and which others are published as part of another."""
    if publications is None:
        return {}, set(oids)
    restrictions = _by_table(_restrictions(connection, oids, publications))
    unnamed = [oid for oid in oids if oid not in restrictions]
    return restrictions, _otherwise_published(connection, unnamed, publications) if unnamed else set()


def _fault(key: Name, what: str, hint: str | None = None) -> SchemaFault:
    fault = SchemaFault(f'table "{".".join(key)}" {what}', hint=hint)
    fault.relation = ".".join(key)
    return fault


def _by_table(rows: Iterable[Sequence[Any]]) -> dict[int, list[Sequence[Any]]]:
    """Group rows by their first column, a table's oid, and leave that out."""
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
    # Without a row it is published as part of another. From 16 a missing list comes as a list of all columns.
    lists = {plain if attrs is None else tuple(attrs) for attrs, _ in restrictions} or {plain}
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
    """Combine the filters of several publications; one without a filter publishes every row."""
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
        COALESCE(a.attnum = ANY(i.indkey), false), a.attgenerated <> ''
    FROM wanted w JOIN pg_catalog.pg_attribute a ON a.attrelid = w.oid
        JOIN pg_catalog.pg_type t ON t.oid = a.atttypid JOIN pg_catalog.pg_namespace n ON n.oid = t.typnamespace
        LEFT JOIN pg_catalog.pg_index i ON i.indexrelid = w.key
    WHERE a.attnum > 0 AND NOT a.attisdropped
    ORDER BY a.attrelid, a.attnum"""

# pg_partition_tree() of a plain table is empty.
_LEAVES = """
    SELECT l.root, c.oid, n.nspname::text, c.relname::text,
        COALESCE(pg_catalog.pg_relation_size(c.oid) / pg_catalog.current_setting('block_size')::bigint, 0),
        COALESCE(pg_catalog.pg_table_size(c.oid), 0), c.reltuples::float8,
        pg_catalog.has_any_column_privilege(c.oid, 'SELECT') AND NOT pg_catalog.row_security_active(c.oid)
            AND pg_catalog.has_schema_privilege(c.relnamespace, 'USAGE'), c.relkind = 'f'
    FROM (SELECT w.oid AS root, w.oid AS leaf FROM unnest(%(oids)s::oid[]) AS w (oid)
            JOIN pg_catalog.pg_class k ON k.oid = w.oid WHERE k.relkind <> 'p'
            UNION ALL
            SELECT w.oid, t.relid FROM unnest(%(oids)s::oid[]) AS w (oid)
            CROSS JOIN LATERAL pg_catalog.pg_partition_tree(w.oid) t WHERE t.isleaf AND t.relid <> w.oid) AS l
        JOIN pg_catalog.pg_class c ON c.oid = l.leaf JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    ORDER BY 1, 6 DESC, 2"""


def _restrictions(connection: Connection, oids: Sequence[int], publications: Sequence[str]) -> list[tuple[Any, ...]]:
    """Read per table and publication column list (attribute numbers) and row filter, None where there is none."""
    query = sql.SQL("""
        SELECT gpt.relid, gpt.attrs::int2[], pg_catalog.pg_get_expr(gpt.qual, gpt.relid) FROM {}
        WHERE gpt.relid = ANY(%(oids)s::oid[])""").format(published(connection))
    return connection.execute(query, {"publications": list(publications), "oids": list(oids)}).fetchall()


def _otherwise_published(connection: Connection, oids: Sequence[int], publications: Sequence[str]) -> set[int]:
    """Find tables whose rows are published, but as those of a partitioned table or of partitions."""
    rows = connection.execute(
        """
        WITH published AS MATERIALIZED (
            SELECT g.relid::oid FROM pg_catalog.pg_publication p,
                LATERAL pg_catalog.pg_get_publication_tables(p.pubname::text) g
            WHERE p.pubname = ANY(%(publications)s::name[])),
        family AS (
            SELECT w.oid, a.relid::oid FROM unnest(%(oids)s::oid[]) AS w (oid),
                LATERAL pg_catalog.pg_partition_ancestors(w.oid) a
            UNION ALL
            SELECT w.oid, t.relid::oid FROM unnest(%(oids)s::oid[]) AS w (oid),
                LATERAL pg_catalog.pg_partition_tree(w.oid) t)
        SELECT DISTINCT f.oid FROM family f JOIN published p USING (relid)""",
        {"publications": list(publications), "oids": list(oids)},
    )
    return {oid for (oid,) in rows}
