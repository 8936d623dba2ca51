"""The DDL that helps where the target's tables do not fit what the publisher sends: text to read and to paste.

A schema fault stops apply before its commit. The operator who reads it at night should not have to find out what the
publisher's table is like. Types come from Relation messages (attribute type and modifier) and Type messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import psycopg
from psycopg import sql

from pgsub.common import quoting
from pgsub.protocol.messages import Column, Relation, TypeName

#: The first oid that belongs to no built-in type: from here on it means nothing on another server.
FIRST_UNPINNED = 10000
_NAME_BYTES = 63

_DO = "Run this on the target; apply goes on by itself:"

# A type that the target lacks is shown by its name: the array of a type is called by its name with an underscore.
_TYPES = """
SELECT CASE WHEN w.typname IS NULL AND w.oid >= 10000 THEN '???'
            WHEN w.typname IS NULL THEN pg_catalog.format_type(w.oid, w.typmod)
            WHEN t.oid IS NOT NULL THEN pg_catalog.format_type(t.oid, w.typmod)
            WHEN w.typname LIKE '\\_%%' THEN pg_catalog.format('%%I.%%I[]', w.nspname, pg_catalog.substr(w.typname, 2))
            ELSE pg_catalog.format('%%I.%%I', w.nspname, w.typname) END
  FROM unnest(%s::oid[], %s::int[], %s::text[], %s::text[])
       WITH ORDINALITY AS w (oid, typmod, nspname, typname, position)
  LEFT JOIN pg_catalog.pg_namespace n ON n.nspname = w.nspname
  LEFT JOIN pg_catalog.pg_type t ON t.typnamespace = n.oid AND t.typname = w.typname
 ORDER BY w.position
"""


def column_types(
    connection: psycopg.Connection, columns: Sequence[Column], names: Mapping[int, TypeName]
) -> tuple[str, ...]:
    """Format the publisher's column types as SQL of the target.

    :param names: what Type messages said of types that are not built in, by the publisher's oid; of a domain the
        publisher names the base type.
    """
    if not columns:
        return ()
    known = [names.get(c.type_oid) if c.type_oid >= FIRST_UNPINNED else None for c in columns]
    schemas = [one and (one.namespace or "pg_catalog") for one in known]
    found = (
        [c.type_oid for c in columns],
        [c.typmod for c in columns],
        schemas,
        [one and one.name for one in known],
    )
    return tuple(text for (text,) in connection.execute(_TYPES.encode(), found))


def hint(statement: sql.Composable, more: str = "") -> str:
    """Format a statement for the target as the last line of a HINT, or before a further command.

    :param more: a command of the shell that has to follow.
    """
    text = quoting.statement(statement) + ";"
    if more:
        return f"Run this on the target, then refresh the subscription:\n{text}\n{more}"
    return f"{_DO}\n{text}"


def create_table(relation: Relation, schema: str, types: Sequence[str]) -> sql.Composed:
    """Create the publisher's table as the protocol describes it, with the replica identity as primary key."""
    parts: list[sql.Composable] = [_column(c.name, text) for c, text in zip(relation.columns, types, strict=True)]
    if key := published_key(relation):
        parts.append(sql.SQL("PRIMARY KEY ({})").format(_names(key)))
    return sql.SQL("CREATE TABLE {} ({})").format(sql.Identifier(schema, relation.name), sql.SQL(", ").join(parts))


def create_partition(relation: Relation, schema: str, parent: str, bound: str, key: Sequence[str]) -> sql.Composed:
    """Create a table as a partition, from which it has its columns.

    :param bound: as SQL, which the caller has checked.
    :param key: columns of the primary key that it does not have from the partitioned table.
    """
    own = sql.SQL(" (PRIMARY KEY ({}))").format(_names(key)) if key else sql.SQL("")
    names = sql.Identifier(relation.namespace, relation.name), sql.Identifier(schema, parent)
    return sql.SQL("CREATE TABLE {} PARTITION OF {}{} {}").format(*names, own, sql.SQL(bound))


def published_key(relation: Relation) -> list[str]:
    """Return columns of the publisher's replica identity, where it is a key."""
    if relation.replica_identity not in ("d", "i"):
        return []
    return [c.name for c in relation.columns if c.is_key]


def add_columns(schema: str, table: str, columns: Sequence[tuple[str, str]]) -> sql.Composed:
    """Add columns that the target lacks, with the publisher's types."""
    added = [sql.SQL("ADD COLUMN {}").format(_column(name, text)) for name, text in columns]
    return _alter(schema, table, *added)


def retype(schema: str, table: str, column: str, text: str) -> sql.Composed:
    """Give a column of the target the publisher's type."""
    # what format_type and quote_ident wrote on the target is SQL already
    return _alter(schema, table, sql.SQL("ALTER COLUMN {} TYPE {}").format(sql.Identifier(column), sql.SQL(text)))


def nullable(schema: str, table: str, column: str) -> sql.Composed:
    """Let a column of the target be NULL."""
    return _alter(schema, table, sql.SQL("ALTER COLUMN {} DROP NOT NULL").format(sql.Identifier(column)))


def ordinary(schema: str, table: str, column: str, text: str, *, virtual: bool) -> sql.Composed:
    """Make an ordinary column of a generated one of the target; the values of a virtual one are nowhere."""
    if not virtual:
        return _alter(schema, table, sql.SQL("ALTER COLUMN {} DROP EXPRESSION").format(sql.Identifier(column)))
    dropped = sql.SQL("DROP COLUMN {}").format(sql.Identifier(column))
    return _alter(schema, table, dropped, sql.SQL("ADD COLUMN {}").format(_column(column, text)))


def add_primary_key(schema: str, table: str, columns: Sequence[str]) -> sql.Composed:
    """Give a target without a key the publisher's."""
    return _alter(schema, table, sql.SQL("ADD PRIMARY KEY ({})").format(_names(columns)))


def identify(schema: str, table: str, columns: Sequence[str]) -> sql.Composed:
    """Make the publisher's key the replica identity of a target that has another key."""
    name = sql.Identifier(table.encode()[: _NAME_BYTES - 15].decode(errors="ignore") + "_pgsub_identity")
    needed = [sql.SQL("ALTER COLUMN {} SET NOT NULL").format(sql.Identifier(column)) for column in columns]
    unique = sql.SQL("ADD CONSTRAINT {} UNIQUE ({})").format(name, _names(columns))
    return _alter(schema, table, *needed, unique, sql.SQL("REPLICA IDENTITY USING INDEX {}").format(name))


def rename(now: tuple[str, str], wanted: tuple[str, str]) -> list[sql.Composed]:
    """Give a table the name that what the publisher wrote before a rename there needs."""
    statements = []
    if now[0] != wanted[0]:
        statements.append(_alter(*now, sql.SQL("SET SCHEMA {}").format(sql.Identifier(wanted[0]))))
    if now[1] != wanted[1]:
        statements.append(_alter(wanted[0], now[1], sql.SQL("RENAME TO {}").format(sql.Identifier(wanted[1]))))
    return statements


def _column(name: str, text: str) -> sql.Composed:
    return sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(text))


def _names(columns: Sequence[str]) -> sql.Composed:
    return sql.SQL(", ").join(map(sql.Identifier, columns))


def _alter(schema: str, table: str, *actions: sql.Composable) -> sql.Composed:
    return sql.SQL("ALTER TABLE {} {}").format(sql.Identifier(schema, table), sql.SQL(", ").join(actions))
