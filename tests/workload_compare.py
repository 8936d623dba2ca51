"""What a workload left on its publisher and its targets: see :mod:`workload`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fix_servers import Database
from psycopg import sql
from psycopg.sql import Composable, Composed, Identifier
from workload import Table


def rows(database: Database, table: Table, columns: Composable | None = None) -> list[Any]:
    """A table's rows as a sorted list.

    :param columns: all without it.
    """
    text = sql.SQL("SELECT r::text FROM (SELECT {} FROM {}) r ORDER BY 1")
    return database.connection.execute(text.format(columns or sql.SQL("*"), table.name)).fetchall()


def wide(table: Table) -> Composed:
    """The published columns as the targets have them."""
    return sql.SQL(", ").join(
        sql.SQL("{}::text::{}").format(Identifier(column.name), sql.SQL(column.wide))
        for column in (*table.key, *table.columns)
    )


def unlike_publisher(publisher: Database, target: Database, tables: Sequence[Table]) -> Iterator[str]:
    """Tables of a target that do not hold the publisher's rows though they are meant to."""
    for table in tables:
        if table.alike and rows(target, table, wide(table)) != rows(publisher, table, wide(table)):
            yield f"{table.name.as_string()} on {target.name}"


def members(publisher: Database, names: Sequence[str]) -> set[tuple[str, str]]:
    """Return schema and name of tables, and of all partitions below them.

    :param names: as SQL has them.
    """
    query = """
        SELECT relnamespace::regnamespace::text, relname FROM unnest(%s::text[]) t,
               LATERAL (SELECT t::regclass::oid UNION SELECT relid FROM pg_partition_tree(t::regclass)) m (oid)
          JOIN pg_class USING (oid)"""
    return set(publisher.rows(query, names))
