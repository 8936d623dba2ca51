"""DDL that makes the target's tables fit what the publisher sends. It is shown to the operator, never executed.

A schema fault stops apply before its commit. The hint spares the operator a search for the definition of the
publisher's table. After DDL that replaced a subscribed table, it says to refresh the subscription instead. Types come
from Relation messages (attribute type and modifier) and Type messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import psycopg
from psycopg import sql

from pgsub.common import quoting
from pgsub.common.errors import SchemaFault
from pgsub.protocol.messages import Column, Relation, TypeName
from pgsub.target.catalog.table_names import name_of

#: The first OID that is not assigned to a built-in type. From here on, an OID has no meaning on another server.
FIRST_UNPINNED = 10000
_NAME_BYTES = 63

_DO = "Run this on the target; apply continues by itself:"

# A type that the target lacks is shown by the name that the publisher sent. The name of an array type begins with "_".
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
    """Format the types of the publisher's columns as SQL for the target.

    :param names: Type messages by the publisher's OID. The publisher sends them for types that are not built in; for a
        domain, it sends the base type.
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
    """Format a HINT with a statement to run on the target.

    :param more: a shell command to run after the statement.
    """
    text = quoting.statement(statement) + ";"
    if more:
        return f"Run this on the target, then refresh the subscription:\n{text}\n{more}"
    return f"{_DO}\n{text}"


def create_table(relation: Relation, schema: str, types: Sequence[str]) -> sql.Composed:
    """Compose CREATE TABLE for the publisher's table. The replica identity becomes the primary key."""
    parts: list[sql.Composable] = [_column(c.name, text) for c, text in zip(relation.columns, types, strict=True)]
    if key := published_key(relation):
        parts.append(sql.SQL("PRIMARY KEY ({})").format(_names(key)))
    return sql.SQL("CREATE TABLE {} ({})").format(sql.Identifier(schema, relation.name), sql.SQL(", ").join(parts))


def create_partition(relation: Relation, schema: str, parent: str, bound: str, key: Sequence[str]) -> sql.Composed:
    """Compose CREATE TABLE ... PARTITION OF. The partition takes its columns from the partitioned table.

    :param bound: FOR VALUES clause as SQL, which the caller has checked.
    :param key: columns of the primary key, if the partitioned table does not have one.
    """
    own = sql.SQL(" (PRIMARY KEY ({}))").format(_names(key)) if key else sql.SQL("")
    names = sql.Identifier(relation.namespace, relation.name), sql.Identifier(schema, parent)
    return sql.SQL("CREATE TABLE {} PARTITION OF {}{} {}").format(*names, own, sql.SQL(bound))


def published_key(relation: Relation) -> list[str]:
    """Return the key columns of the publisher's replica identity; none if the identity is FULL or NOTHING."""
    if relation.replica_identity not in ("d", "i"):
        return []
    return [c.name for c in relation.columns if c.is_key]


def add_columns(schema: str, table: str, columns: Sequence[tuple[str, str]]) -> sql.Composed:
    """Compose ALTER TABLE ... ADD COLUMN for columns that the target lacks; types are SQL."""
    added = [sql.SQL("ADD COLUMN {}").format(_column(name, text)) for name, text in columns]
    return _alter(schema, table, *added)


def retype(schema: str, table: str, column: str, text: str) -> sql.Composed:
    """Compose ALTER TABLE ... ALTER COLUMN ... TYPE with the publisher's type."""
    # format_type and quote_ident wrote the type on the target, so it is SQL already
    return _alter(schema, table, sql.SQL("ALTER COLUMN {} TYPE {}").format(sql.Identifier(column), sql.SQL(text)))


def nullable(schema: str, table: str, column: str) -> sql.Composed:
    """Compose ALTER TABLE ... DROP NOT NULL for a column of the target."""
    return _alter(schema, table, sql.SQL("ALTER COLUMN {} DROP NOT NULL").format(sql.Identifier(column)))


def ordinary(schema: str, table: str, column: str, text: str, *, virtual: bool) -> sql.Composed:
    """Compose ALTER TABLE that makes a generated column ordinary. A virtual one has no values and is re-created."""
    if not virtual:
        return _alter(schema, table, sql.SQL("ALTER COLUMN {} DROP EXPRESSION").format(sql.Identifier(column)))
    dropped = sql.SQL("DROP COLUMN {}").format(sql.Identifier(column))
    return _alter(schema, table, dropped, sql.SQL("ADD COLUMN {}").format(_column(column, text)))


def add_primary_key(schema: str, table: str, columns: Sequence[str]) -> sql.Composed:
    """Compose ALTER TABLE that adds the publisher's key to a target without a key."""
    return _alter(schema, table, sql.SQL("ADD PRIMARY KEY ({})").format(_names(columns)))


def identify(schema: str, table: str, columns: Sequence[str]) -> sql.Composed:
    """Compose ALTER TABLE that makes the publisher's key the replica identity of a target with another key."""
    name = sql.Identifier(table.encode()[: _NAME_BYTES - 15].decode(errors="ignore") + "_pgsub_identity")
    needed = [sql.SQL("ALTER COLUMN {} SET NOT NULL").format(sql.Identifier(column)) for column in columns]
    unique = sql.SQL("ADD CONSTRAINT {} UNIQUE ({})").format(name, _names(columns))
    return _alter(schema, table, *needed, unique, sql.SQL("REPLICA IDENTITY USING INDEX {}").format(name))


def rename(now: tuple[str, str], wanted: tuple[str, str]) -> list[sql.Composed]:
    """Compose the statements that give a table the name that it had on the publisher when the changes were written."""
    statements = []
    if now[0] != wanted[0]:
        statements.append(_alter(*now, sql.SQL("SET SCHEMA {}").format(sql.Identifier(wanted[0]))))
    if now[1] != wanted[1]:
        statements.append(_alter(wanted[0], now[1], sql.SQL("RENAME TO {}").format(sql.Identifier(wanted[1]))))
    return statements


def replaced(
    connection: psycopg.Connection, subname: str, name: tuple[str, str], known: int, found: int
) -> SchemaFault:
    """Make the error for a table that is not the subscribed one of its name, which may have been dropped.

    :param known: OID of the subscribed table; ``found``: of the table that has the name now.
    """
    now = name_of(connection, known)
    what, where, sub = "was dropped and created again", "", quoting.word(subname)
    if now is not None:
        what, where = "is not the table that was subscribed", f' which is "{now[0]}.{now[1]}" now,'
    return SchemaFault(
        f'logical replication target relation "{name[0]}.{name[1]}" {what}',
        detail=f"The subscription knows OID {known},{where} the table now has OID {found}.",
        hint="Refresh the subscription. The new table is copied; or, if it has rows already, as after pg_restore, only"
        f" those that differ are sent:\npgsub refresh {sub} --adopt",
    )


def _column(name: str, text: str) -> sql.Composed:
    return sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(text))


def _names(columns: Sequence[str]) -> sql.Composed:
    return sql.SQL(", ").join(map(sql.Identifier, columns))


def _alter(schema: str, table: str, *actions: sql.Composable) -> sql.Composed:
    return sql.SQL("ALTER TABLE {} {}").format(sql.Identifier(schema, table), sql.SQL(", ").join(actions))
