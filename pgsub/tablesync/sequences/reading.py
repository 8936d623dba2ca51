"""Sequences read from the catalogs and from their own rows, in the same way on both servers and in every version.

Only PostgreSQL 18 and newer have a function for the row of a sequence (pg_get_sequence_data), and pg_sequences shows no
value before the first call. So the rows themselves are read, many sequences at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import psycopg
from psycopg import sql

from pgsub.common.connections import conninfo as ci
from pgsub.common.errors import ProtocolViolation
from pgsub.common.query import NAMED, named, number
from pgsub.tablesync.sequences.definition import Definition, LocalSequence, Name, Position, Use, identifier

#: Number of sequences in one statement, as in sequencesync.c (MAX_SEQUENCES_SYNC_PER_BATCH).
BATCH = 100
_PATIENCE = {"lock_timeout": "1s", "statement_timeout": "30s"}
_SEQUENCES_PUBLISHED_SINCE = 190000
_TYPES = ("smallint", "integer", "bigint")

# Partitions and partitioned tables share the sequences of their defaults. That of an identity column is the root's.
_USED = f"""
WITH wanted AS MATERIALIZED (
     SELECT c.oid
       FROM {NAMED}),
family AS MATERIALIZED (
     SELECT oid FROM wanted
      UNION SELECT a.relid::oid FROM wanted w, LATERAL pg_catalog.pg_partition_ancestors(w.oid) a
      UNION SELECT t.relid::oid FROM wanted w, LATERAL pg_catalog.pg_partition_tree(w.oid) t),
used AS (
     SELECT d.objid AS oid, d.refobjid AS relid, d.refobjsubid AS attnum, d.deptype = 'i' AS is_identity
       FROM family f JOIN pg_catalog.pg_depend d ON d.refobjid = f.oid
      WHERE d.refclassid = 'pg_catalog.pg_class'::regclass AND d.classid = 'pg_catalog.pg_class'::regclass
        AND d.deptype IN ('a', 'i')
      UNION
     SELECT d.refobjid, e.adrelid, e.adnum, false FROM family f JOIN pg_catalog.pg_attrdef e ON e.adrelid = f.oid
       JOIN pg_catalog.pg_depend d ON d.objid = e.oid AND d.classid = 'pg_catalog.pg_attrdef'::regclass
      WHERE d.refclassid = 'pg_catalog.pg_class'::regclass)
SELECT n.nspname::text, c.relname::text, tn.nspname::text, t.relname::text, a.attname::text, u.is_identity
  FROM used u JOIN pg_catalog.pg_class c ON c.oid = u.oid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_catalog.pg_class t ON t.oid = u.relid JOIN pg_catalog.pg_namespace tn ON tn.oid = t.relnamespace
  JOIN pg_catalog.pg_attribute a ON a.attrelid = t.oid AND a.attnum = u.attnum
 WHERE c.relkind = 'S' AND c.relpersistence <> 't'
 ORDER BY 1, 2, u.relid DESC, u.attnum DESC
"""

_PUBLISHED = """
SELECT schemaname::text, sequencename::text FROM pg_catalog.pg_publication_sequences
 WHERE pubname = ANY (%(publications)s::name[])
"""

_DESCRIBED = f"""
SELECT c.oid::bigint, n.nspname::text, c.relname::text,
       pg_catalog.format_type(s.seqtypid, NULL), s.seqstart, s.seqincrement, s.seqmin, s.seqmax, s.seqcycle,
       s.seqcache, current_user::text, o.rolname::text,
       CASE WHEN o.rolname = current_user THEN 'own'
            WHEN pg_catalog.pg_has_role(session_user, o.oid, %(may_set)s) THEN 'set'
            WHEN pg_catalog.pg_has_role(session_user, o.oid, 'MEMBER') THEN 'refused'
            WHEN o.rolsuper THEN 'trusted' ELSE 'none' END,
       pg_catalog.has_schema_privilege(n.oid, 'USAGE'), pg_catalog.has_table_privilege(c.oid, 'SELECT'),
       pg_catalog.has_table_privilege(c.oid, 'SELECT') AND pg_catalog.has_table_privilege(c.oid, 'UPDATE')
  FROM {NAMED}
  JOIN pg_catalog.pg_roles o ON o.oid = c.relowner
  LEFT JOIN pg_catalog.pg_sequence s ON s.seqrelid = c.oid
 ORDER BY 2, 3
"""


def prepare(connection: psycopg.Connection[Any]) -> None:
    """Limit the waits of a session on either server, and keep it from reading a view in a sequence's place.

    TRUNCATE with RESTART IDENTITY locks a table's sequences against readers until its transaction ends.
    """
    for setting in (*_PATIENCE.items(), *ci.only_tables(connection.info.server_version).items()):
        connection.execute("SELECT pg_catalog.set_config(%s, %s, false)", setting)


def of_tables(connection: psycopg.Connection[Any], tables: Iterable[Name]) -> dict[Name, Use]:
    """Find the sequences that tables own or use in defaults, with the first column that does so.

    A default that names its sequence as text (``nextval('s'::text)``) has no dependency and is not found.
    """
    rows = connection.execute(_USED.encode(), named(tables)).fetchall()
    return {(schema, name): Use((table_schema, table), *rest) for schema, name, table_schema, table, *rest in rows}


def published(source: psycopg.Connection[Any], publications: Sequence[str]) -> list[Name]:
    """Find the sequences that publications publish (PostgreSQL 19 and newer)."""
    if source.info.server_version < _SEQUENCES_PUBLISHED_SINCE:
        return []
    rows = source.execute(_PUBLISHED.encode(), {"publications": list(publications)}).fetchall()
    return [(schema, name) for schema, name in rows]


def describe(connection: psycopg.Connection[Any], names: Iterable[Name]) -> dict[Name, LocalSequence]:
    """Read the definitions of sequences. Missing sequences are left out."""
    may_set = "SET" if connection.info.server_version >= 160000 else "MEMBER"
    rows = connection.execute(_DESCRIBED.encode(), {**named(names), "may_set": may_set}).fetchall()
    found = (_sequence(*row) for row in rows)
    return {one.key: one for one in found}


def positions(connection: psycopg.Connection[Any], names: Iterable[Name]) -> dict[Name, Position]:
    """Read the positions of sequences. The session must have the privilege to read each of them."""
    found: dict[Name, Position] = {}
    wanted = list(names)
    for some in (wanted[first : first + BATCH] for first in range(0, len(wanted), BATCH)):
        rows = sql.SQL(" UNION ALL ").join(
            sql.SQL("SELECT {}::int, last_value, is_called FROM {}").format(place, identifier(name))
            for place, name in enumerate(some)
        )
        for place, last, called in connection.execute(rows):
            found[some[_number(place)]] = Position(_number(last), called is True)
    return found


def _sequence(oid: int, schema: str, name: str, type_name: str | None, *rest: Any) -> LocalSequence:
    *numbers, cache, user, owner, access, usable, readable, writable = rest
    definition = None if type_name is None else _definition(type_name, *numbers)
    return LocalSequence(oid, schema, name, definition, cache, user, owner, access, usable, readable, writable)


def _definition(type_name: str, start: Any, increment: Any, minimum: Any, maximum: Any, cycle: Any) -> Definition:
    """Make a definition of a server's values.

    :raises ProtocolViolation: they are invalid. A publisher may send anything, and they become a statement to run.
    """
    if type_name not in _TYPES:
        raise ProtocolViolation("invalid type of a sequence")
    return Definition(type_name, _number(start), _number(increment), _number(minimum), _number(maximum), cycle is True)


def _number(sent: Any) -> int:
    return number(sent, "value of a sequence")
