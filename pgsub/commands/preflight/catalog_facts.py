"""Facts about tables and types from a server's catalogs, read for all of them at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import psycopg


@dataclass(frozen=True, slots=True)
class Column:
    """A column that is not dropped."""

    attnum: int
    name: str
    type_oid: int
    typmod: int
    type_text: str  #: as format_type returns it
    not_null: bool
    filled: bool  #: has a default, is an identity column, or is generated
    generated: bool


@dataclass(frozen=True, slots=True)
class Unique:
    """A unique index."""

    name: str
    columns: frozenset[str] | None  #: None for an index on expressions
    partial: bool
    valid: bool  #: false if CREATE INDEX CONCURRENTLY failed
    identity: bool  #: is the replica identity
    nulls_equal: bool  #: NULLS NOT DISTINCT
    definition: str  #: without the name


@dataclass(slots=True)
class Facts:
    """A table of either server, with privileges of the session's role."""

    oid: int
    replica_identity: str  #: d default, n nothing, f full, i index
    row_security: bool  #: whether a policy applies to the role
    usage: bool  #: whether the role has USAGE on the schema
    privileges: frozenset[str]  #: SELECT, INSERT, UPDATE, DELETE, TRUNCATE
    readable: frozenset[int]  #: columns that the session's user may select, if it may not select the whole table
    own_select: bool  #: whether the session's user, not the role, may select the table
    own_usage: bool  #: whether the session's user has USAGE on the schema
    columns: dict[str, Column] = field(default_factory=dict)
    unique: list[Unique] = field(default_factory=list)
    #: names of check and exclusion constraints, by definition
    constraints: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> frozenset[str]:
        """The columns of the replica identity index."""
        return next((one.columns for one in self.unique if one.identity and one.columns), frozenset())

    @property
    def identified(self) -> bool:
        """Whether UPDATE and DELETE can be published."""
        return self.replica_identity == "f" or bool(self.key)


@dataclass(frozen=True, slots=True)
class Type:
    """A type of either server."""

    oid: int
    schema: str
    name: str
    kind: str  #: typtype: b base, c composite, d domain, e enum, r range, m multirange
    element: int  #: element type of a true array, else 0
    base: int  #: base type of a domain, else 0
    base_typmod: int
    labels: list[str]  #: labels of an enum


_TABLES = """
SELECT c.oid::bigint, c.relreplident::text, pg_catalog.row_security_active(c.oid),
       pg_catalog.has_schema_privilege(w.role, c.relnamespace, 'USAGE'),
       ARRAY(SELECT p FROM unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE', 'TRUNCATE']) AS p
              WHERE pg_catalog.has_table_privilege(
                    CASE WHEN p = 'TRUNCATE' THEN current_user ELSE w.role END, c.oid, p)),
       CASE WHEN pg_catalog.has_table_privilege(c.oid, 'SELECT') THEN '{}' ELSE ARRAY(
            SELECT a.attnum::int FROM pg_catalog.pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0
               AND NOT a.attisdropped AND pg_catalog.has_column_privilege(c.oid, a.attnum, 'SELECT')) END,
       pg_catalog.has_table_privilege(c.oid, 'SELECT'), pg_catalog.has_schema_privilege(c.relnamespace, 'USAGE')
  FROM (SELECT oid, coalesce(role, current_user)::name AS role
          FROM unnest(%s::oid[], %s::text[]) AS u (oid, role)) AS w
  JOIN pg_catalog.pg_class c ON c.oid = w.oid
"""
_COLUMNS = """
SELECT a.attrelid::bigint, a.attnum, a.attname::text, a.atttypid::bigint, a.atttypmod,
       pg_catalog.format_type(a.atttypid, a.atttypmod), a.attnotnull, a.atthasdef OR a.attidentity <> '',
       a.attgenerated <> ''
  FROM pg_catalog.pg_attribute a WHERE a.attrelid = ANY (%s::oid[]) AND a.attnum > 0 AND NOT a.attisdropped
"""
_UNIQUE = """
SELECT i.indrelid::bigint, c.relname::text,
       CASE WHEN i.indexprs IS NULL THEN ARRAY(
            SELECT a.attname::text FROM unnest(i.indkey::smallint[]) WITH ORDINALITY AS k(attnum, position)
              JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
             WHERE k.position <= i.indnkeyatts) END,
       i.indpred IS NOT NULL, i.indisvalid, i.indisvalid AND CASE t.relreplident
            WHEN 'd' THEN i.indisprimary AND i.indimmediate WHEN 'i' THEN i.indisreplident ELSE false END,
       COALESCE(pg_catalog.pg_get_indexdef(i.indexrelid), '')
  FROM pg_catalog.pg_index i JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid
  JOIN pg_catalog.pg_class t ON t.oid = i.indrelid
 WHERE i.indrelid = ANY (%s::oid[]) AND i.indisunique AND i.indislive
 ORDER BY 1, 2
"""
_CONSTRAINTS = """
SELECT k.conrelid::bigint, k.conname::text, COALESCE(pg_catalog.pg_get_constraintdef(k.oid), '')
  FROM pg_catalog.pg_constraint k WHERE k.conrelid = ANY (%s::oid[]) AND k.contype IN ('c', 'x')
"""
# Reading definitions or sizes of these relations would wait for the lock.
_LOCKED = """
SELECT l.relation::bigint FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_database d ON d.oid = l.database
 WHERE d.datname = current_database() AND l.locktype = 'relation' AND l.mode = 'AccessExclusiveLock' AND l.granted
   AND l.pid IS DISTINCT FROM pg_catalog.pg_backend_pid()
"""
_TYPES = """
WITH RECURSIVE seen AS (
     SELECT t.* FROM pg_catalog.pg_type t WHERE t.oid = ANY (%s::oid[])
      UNION
     SELECT t.* FROM seen s JOIN pg_catalog.pg_type t ON t.oid IN (s.typbasetype, s.typelem))
SELECT DISTINCT t.oid::bigint, n.nspname::text, t.typname::text, t.typtype::text,
       CASE WHEN t.typcategory = 'A' AND t.typtype = 'b' THEN t.typelem::bigint ELSE 0 END, t.typbasetype::bigint,
       t.typtypmod, ARRAY(SELECT e.enumlabel::text FROM pg_catalog.pg_enum e WHERE e.enumtypid = t.oid)
  FROM seen t JOIN pg_catalog.pg_namespace n ON n.oid = t.typnamespace
"""


def locked(connection: psycopg.Connection) -> set[int]:
    """Return the relations that another session has locked exclusively, whose readers may wait forever."""
    return {oid for (oid,) in connection.execute(_LOCKED.encode())}


def read(
    connection: psycopg.Connection, oids: Collection[int], acting: Mapping[int, str | None] | None = None
) -> dict[int, Facts]:
    """Read tables by OID in five round trips. Indexes and constraints of locked tables are not read.

    :param acting: roles whose privileges are read, None for the session's, which TRUNCATE is always checked for.
    """
    if not oids:
        return {}
    wanted = (list(oids),)
    found = {}
    roles = [(acting or {}).get(oid) for oid in oids]
    tables = connection.execute(_TABLES.encode(), (list(oids), roles))
    for oid, identity, policy, usage, privileges, readable, *own in tables:
        found[oid] = Facts(oid, identity, policy, usage, frozenset(privileges), frozenset(readable), *own)
    for oid, *values in connection.execute(_COLUMNS.encode(), wanted):
        column = Column(*values)
        found[oid].columns[column.name] = column
    held = locked(connection)
    free = ([oid for oid in oids if oid not in held],)
    for oid, name, columns, partial, valid, identity, definition in connection.execute(_UNIQUE.encode(), free):
        names = None if columns is None else frozenset(columns)
        body = definition.partition(" USING ")[2]
        found[oid].unique.append(Unique(name, names, partial, valid, identity, "NULLS NOT DISTINCT" in body, body))
    for oid, name, definition in connection.execute(_CONSTRAINTS.encode(), free):
        if not definition.endswith("NOT ENFORCED"):
            found[oid].constraints[definition] = name
    return found


def read_types(connection: psycopg.Connection, tables: Sequence[Facts]) -> dict[int, Type]:
    """Read the types of these tables' columns, and their base and element types."""
    oids = sorted({column.type_oid for table in tables for column in table.columns.values()})
    rows = connection.execute(_TYPES.encode(), (oids,)).fetchall() if oids else []
    found = (Type(*row) for row in rows)
    return {one.oid: one for one in found}
