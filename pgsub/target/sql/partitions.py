"""The partition that a row of a partitioned table belongs to. Mirrors ExecFindPartition (execPartition.c).

The server does not tell it outside of an INSERT. So partition constraints are evaluated for many rows at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import psycopg
from psycopg import sql

from pgsub.common import table_lock
from pgsub.common.errors import TableReplaced
from pgsub.target.catalog import typmod
from pgsub.target.catalog.relation import TargetRelation
from pgsub.target.catalog.table_names import PARTITIONS
from pgsub.target.session import roles

#: Schema and name of a table.
Name = tuple[str, str]

_COLUMNS = """
SELECT a.attname::text FROM pg_catalog.pg_attribute a
  JOIN pg_catalog.pg_class c ON c.oid = a.attrelid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = %s AND c.relname = %s AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum
"""


def columns(connection: psycopg.Connection, leaf: Name) -> list[str]:
    """Read the columns of a partition in their own order, which may differ from the partitioned table's."""
    return [name for (name,) in connection.execute(_COLUMNS.encode(), leaf)]


def leaves(
    connection: psycopg.Connection, table: TargetRelation, rows: Sequence[Mapping[str, str | None]]
) -> list[Name | None]:
    """Find the partition of each row; None if it cannot be evaluated.

    In an open transaction it runs in a savepoint, so a value that an input function rejects does no harm.

    :param table: a partitioned table.
    :param rows: values as text, by column. Missing columns are NULL.
    """
    try:
        with connection.transaction(), roles.acting(connection, table.acts_as):
            table_lock.verify_types(connection, table.named_types, table.schema, table.name)
            found = [leaf[1:] for leaf in connection.execute(PARTITIONS, (table.oid,))]
            return _routed(connection, table, rows, found) if found else [None] * len(rows)
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
    found: Sequence[tuple[str, str, str | None]],
) -> list[Name | None]:
    columns = [column for column in table.columns if not column.generated]
    # types and constraints are SQL from the catalogs
    cases = sql.SQL(" ").join(
        sql.SQL("WHEN ({}) THEN {}").format(sql.SQL(constraint or "true"), sql.Literal(number))
        for number, (_, _, constraint) in enumerate(found)
    )
    names = sql.SQL(", ").join(sql.Identifier(f"v{n}") for n in range(len(columns)))
    values = sql.SQL(", ").join(
        sql.SQL("{} AS {}").format(typmod.value(column, sql.Identifier(f"v{n}")), sql.Identifier(column.name))
        for n, column in enumerate(columns)
    )
    arrays = sql.SQL(", ").join(sql.SQL(f"${n}::text[]") for n in range(1, len(columns) + 1))
    query = sql.SQL(
        "SELECT CASE {} END FROM (SELECT pgsub_number, {} FROM unnest({})"
        " WITH ORDINALITY AS pgsub_rows ({}, pgsub_number)) AS {} ORDER BY pgsub_number"
    ).format(cases, values, arrays, names, sql.Identifier(table.name))
    parameters = [[row.get(column.name) for row in rows] for column in columns]
    with psycopg.RawCursor(connection) as cursor:  # names and constraints may hold a percent sign
        numbers = cursor.execute(query, parameters).fetchall()
    return [None if number is None else (found[number][0], found[number][1]) for (number,) in numbers]
