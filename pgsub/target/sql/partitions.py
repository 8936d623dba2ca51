"""The partition that a row of a partitioned table belongs to. Mirrors ExecFindPartition (execPartition.c).

The server does not tell it outside of an INSERT. So partition constraints are evaluated for many rows at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import psycopg
from psycopg import sql

from pgsub.common import table_lock
from pgsub.common.errors import TableReplaced
from pgsub.target.catalog import typmod
from pgsub.target.catalog.relation import TargetRelation
from pgsub.target.catalog.relation_map import RelationMap
from pgsub.target.catalog.table_names import (
    LOCKED_HERE,
    Partition,
    at_once,
    partitions_at_once,
    partitions_locked_here,
)
from pgsub.target.session import roles
from pgsub.target.sql.row_queries import row_texts
from pgsub.target.sql.statement_builder import Builder, Statement

#: Schema and name of a table.
Name = tuple[str, str]

_COLUMNS = """
SELECT a.attname::text FROM pg_catalog.pg_attribute a
  JOIN pg_catalog.pg_class c ON c.oid = a.attrelid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = %s AND c.relname = %s AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum
"""

# A column depends on the partitioned table whose partition key has it, also in an expression. The constraint of a
# partition reads the keys of all tables above it. A partition that is being detached takes no rows.
_LEVELS = """
WITH RECURSIVE member AS (
     SELECT %(root)s::oid AS oid, 0 AS depth
      UNION ALL
     SELECT c.oid, m.depth + 1
       FROM member m JOIN pg_catalog.pg_inherits i ON i.inhparent = m.oid AND NOT i.inhdetachpending
       JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid AND c.relispartition)
SELECT c.relkind = 'p', c.relname::text, pg_catalog.pg_get_partition_constraintdef(c.oid), ARRAY(
       SELECT a.attname::text FROM pg_catalog.pg_depend d
         JOIN pg_catalog.pg_attribute a ON a.attrelid = d.objid AND a.attnum = d.objsubid
        WHERE d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.objid = p.partrelid AND d.deptype = 'i'
          AND d.refclassid = d.classid AND d.refobjid = d.objid AND d.refobjsubid = 0
        ORDER BY pg_catalog.array_position(p.partattrs::smallint[], a.attnum), a.attnum),
       ARRAY(
       SELECT a.attname::text FROM pg_catalog.pg_partition_ancestors(c.oid) AS above (oid)
         JOIN pg_catalog.pg_depend d ON d.objid = above.oid
         JOIN pg_catalog.pg_attribute a ON a.attrelid = d.objid AND a.attnum = d.objsubid
        WHERE m.depth = 0 AND d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.deptype = 'i'
          AND d.refclassid = d.classid AND d.refobjid = d.objid AND d.refobjsubid = 0)
  FROM member m JOIN pg_catalog.pg_class c ON c.oid = m.oid
  LEFT JOIN pg_catalog.pg_partitioned_table p ON p.partrelid = c.oid
 {condition}
 ORDER BY c.relkind = 'p', m.depth DESC, c.oid
"""
# Reading a constraint locks the table, so it is read of those that are locked already.
# guard: a lock on a partition holds up no missing row of another one, without "WHERE m.depth = 0 OR {LOCKED_HERE}"
_LEVELS_LOCKED_HERE = _LEVELS.format(condition=f"WHERE m.depth = 0 OR {LOCKED_HERE}")
_ALL_LEVELS = _LEVELS.format(condition="")


class Level(NamedTuple):
    """A partitioned table or one of its partitions.

    :ivar splits: it has partitions, not rows.
    :ivar constraint: as SQL; None: it takes every row.
    :ivar key: columns of its partition key, in their order; those in expressions are the last.
    :ivar above: of the table that changes name, columns of its own key and of those of the tables above it.
    """

    splits: bool
    name: str
    constraint: str | None
    key: tuple[str, ...]
    above: tuple[str, ...]


def levels(connection: psycopg.Connection, root: int) -> tuple[Level, ...]:
    """Read a partitioned table and its partitions: those with rows, then the others, and the table itself last.

    Partitions that the open transaction has not locked are left out. A change locks all that could have its row, unless
    the planner has found that no row can be the one that it searches.
    """
    return _levels(connection, _LEVELS_LOCKED_HERE, root)


def all_levels(connection: psycopg.Connection, root: int) -> tuple[Level, ...] | None:
    """Read all partitions as :func:`levels` does; return None if they cannot be locked at once."""
    return at_once(connection, lambda: _levels(connection, _ALL_LEVELS, root))


def _levels(connection: psycopg.Connection, query: str, root: int) -> tuple[Level, ...]:
    found = connection.execute(query.encode(), {"root": root})
    return tuple(
        Level(splits, name, constraint, tuple(key), tuple(above)) for splits, name, constraint, key, above in found
    )


def unrouted(relation: RelationMap, kinds: bytes, below: Sequence[Level]) -> Statement:
    """Compose a SELECT of the partitioned table that has no partition for a row, and of its key in the row.

    It returns a row if there is such a table, and if all columns of all partition keys were sent.

    :param kinds: column kinds of the row.
    :param below: result of :func:`levels`; the SELECT returns the number of one.
    """
    build = Builder(relation, kinds)
    keys = dict.fromkeys(name for level in below for name in (*level.key, *level.above))
    if not keys.keys() <= build.sent.keys():
        return Statement.fixed("SELECT WHERE false")
    by_name = {column.name: column for column in relation.target.columns}
    number_of = sql.Identifier(_free("pgsub_level", keys))
    # types and constraints are SQL from the catalogs
    values = sql.SQL(", ").join(
        sql.SQL("{} AS {}").format(
            by_name[name].collated(
                sql.SQL("{}::{}").format(build.value(build.sent[name]), sql.SQL(by_name[name].full_type))
            ),
            sql.Identifier(name),
        )
        for name in keys
    )
    takes = sql.SQL(" ").join(
        sql.SQL("WHEN ({}) THEN {}").format(
            sql.SQL(level.constraint or "true"), sql.SQL(str(number) if level.splits else "NULL")
        )
        for number, level in enumerate(below[:-1])
    )
    texts = sql.SQL(" ").join(
        sql.SQL("WHEN {} THEN {}").format(
            sql.SQL(str(number)), row_texts([by_name[name] for name in level.key], "pgsub_row")
        )
        for number, level in enumerate(below)
        if level.splits
    )
    text = sql.SQL(
        "SELECT {0}, CASE {0} {1} END FROM (SELECT *, CASE WHEN false THEN NULL {2} ELSE {3} END"
        " AS {0} FROM (SELECT {4}) AS {5}) AS pgsub_row WHERE {0} IS NOT NULL"
    ).format(number_of, texts, takes, sql.SQL(str(len(below) - 1)), values, sql.Identifier(relation.target.name))
    return build.done(text)


def _free(name: str, taken: Collection[str]) -> str:
    """Return a name that no column has."""
    while name in taken:
        name += "_"
    return name


def columns(connection: psycopg.Connection, leaf: Name) -> list[str]:
    """Read the columns of a partition in their own order, which may differ from the partitioned table's."""
    return [name for (name,) in connection.execute(_COLUMNS.encode(), leaf)]


def leaves(
    connection: psycopg.Connection, table: TargetRelation, rows: Sequence[Mapping[str, str | None]]
) -> list[Name | None]:
    """Find the partition of each row; None if it cannot be evaluated, or if somebody keeps partitions locked.

    In an open transaction it runs in a savepoint, so a value that an input function rejects does no harm.

    :param table: a partitioned table.
    :param rows: values as text, by column. Missing columns are NULL.
    """
    try:
        with connection.transaction(), roles.acting(connection, table.acts_as):
            table_lock.verify_types(connection, table.named_types, table.schema, table.name)
            found = _routed(connection, table, rows, partitions_locked_here(connection, table.oid))
            if None not in found:
                return found
            everywhere = _routed(connection, table, rows, partitions_at_once(connection, table.oid))
            return [here or there for here, there in zip(found, everywhere, strict=True)]
    except TableReplaced:
        return [None] * len(rows)
    except psycopg.Error as error:
        if error.sqlstate is None:
            raise  # the session is gone
        return [None] * len(rows)


def _routed(
    connection: psycopg.Connection,
    table: TargetRelation,
    rows: Sequence[Mapping[str, str | None]],
    found: Sequence[Partition],
) -> list[Name | None]:
    if not found:
        return [None] * len(rows)
    columns = [column for column in table.columns if not column.generated]
    # types and constraints are SQL from the catalogs
    cases = sql.SQL(" ").join(
        sql.SQL("WHEN ({}) THEN {}").format(sql.SQL(constraint or "true"), sql.Literal(number))
        for number, (*_, constraint) in enumerate(found)
    )
    names = sql.SQL(", ").join(sql.Identifier(f"v{n}") for n in range(len(columns)))
    number_of = sql.Identifier(_free("pgsub_number", [column.name for column in columns]))
    values = sql.SQL(", ").join(
        sql.SQL("{} AS {}").format(typmod.value(column, sql.Identifier(f"v{n}")), sql.Identifier(column.name))
        for n, column in enumerate(columns)
    )
    arrays = sql.SQL(", ").join(sql.SQL(f"${n}::text[]") for n in range(1, len(columns) + 1))
    query = sql.SQL(
        "SELECT CASE {0} END FROM (SELECT {5}, {1} FROM unnest({2})"
        " WITH ORDINALITY AS pgsub_rows ({3}, {5})) AS {4} ORDER BY {5}"
    ).format(cases, values, arrays, names, sql.Identifier(table.name), number_of)
    parameters = [[row.get(column.name) for row in rows] for column in columns]
    with psycopg.RawCursor(connection) as cursor:  # names and constraints may hold a percent sign
        numbers = cursor.execute(query, parameters).fetchall()
    return [None if number is None else found[number][1:3] for (number,) in numbers]
