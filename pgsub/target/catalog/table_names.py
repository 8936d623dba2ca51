"""Names and OIDs of tables of the target and of their partitions, also after a rename."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import psycopg

from pgsub.common.query import row

_MEMBERS = """
WITH RECURSIVE member AS (
     SELECT %s::oid AS oid
      UNION
     SELECT c.oid FROM member m JOIN pg_catalog.pg_inherits i ON i.inhparent = m.oid
       JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid AND c.relispartition)
SELECT c.oid::bigint, n.nspname::text, c.relname::text {constraint}
  FROM member m JOIN pg_catalog.pg_class c ON c.oid = m.oid AND c.relkind <> 'p'
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace {condition} ORDER BY c.oid
"""
#: Partitions of a table that have storage, or the table itself: OID, schema, name. It locks none.
MEMBERS = _MEMBERS.format(constraint="", condition="")
_CONSTRAINT = ", pg_catalog.pg_get_partition_constraintdef(c.oid)"
#: The same with the partition constraint (NULL: none). It locks each in ACCESS SHARE mode.
PARTITIONS = _MEMBERS.format(constraint=_CONSTRAINT, condition="")
#: Whether this transaction has locked a table (c), so that it waits for nobody who locks it again.
LOCKED_HERE = """c.oid IN (
       SELECT l.relation FROM pg_catalog.pg_locks l WHERE l.pid = pg_catalog.pg_backend_pid()
          AND l.locktype = 'relation' AND l.granted AND l.mode <> 'SIReadLock')"""
_PARTITIONS_LOCKED_HERE = _MEMBERS.format(constraint=_CONSTRAINT, condition=f"WHERE {LOCKED_HERE}")
#: Longest wait for the lock of a partition that a change does not touch.
_PATIENCE = "SET LOCAL lock_timeout = '200ms'"
Found = TypeVar("Found")
#: A partition with storage: OID, schema, name, partition constraint.
Partition = tuple[int, str, str, str | None]


_OIDS = """
SELECT n.nspname::text, c.relname::text, c.oid::bigint
  FROM unnest(%s::text[], %s::text[]) AS w (nspname, relname)
  JOIN pg_catalog.pg_namespace n ON n.nspname = w.nspname
  JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = w.relname
"""


def find_oids(connection: psycopg.Connection, names: Iterable[tuple[str, str]]) -> dict[tuple[str, str], int]:
    """Find the OIDs of the relations that have these names now. Names without a relation are left out.

    :param names: schema and name of each.
    """
    wanted = list(names)
    rows = connection.execute(_OIDS.encode(), ([schema for schema, _ in wanted], [name for _, name in wanted]))
    return {(schema, name): oid for schema, name, oid in rows}


def partitions_locked_here(connection: psycopg.Connection, root: int) -> list[Partition]:
    """Read the partitions of a table that the open transaction has locked, as those that its changes reached."""
    return connection.execute(_PARTITIONS_LOCKED_HERE.encode(), (root,)).fetchall()


def partitions_at_once(connection: psycopg.Connection, root: int) -> list[Partition]:
    """Read all partitions of a table, and give their locks back; return none if they cannot be locked at once."""
    return at_once(connection, lambda: connection.execute(PARTITIONS.encode(), (root,)).fetchall()) or []


def at_once(connection: psycopg.Connection, read: Callable[[], Found]) -> Found | None:
    """Read what locks partitions, and give their locks back; return None if they cannot be locked at once.

    Somebody may have locked one for long, and the server's lock table may have no space for all.
    """
    try:
        with connection.transaction(force_rollback=True):
            # guard: a partition that somebody has locked is not waited for
            connection.execute(_PATIENCE)
            return read()
    except (psycopg.errors.LockNotAvailable, psycopg.errors.OutOfMemory):
        return None


def names_below(connection: psycopg.Connection, root: int) -> list[tuple[str, str]]:
    """Return schema and name of each partition that has storage, or of the table itself."""
    return [(schema, name) for _, schema, name in connection.execute(MEMBERS.encode(), (root,))]


_NAME = """
SELECT n.nspname::text, c.relname::text FROM pg_catalog.pg_class c
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE c.oid ="""


_NAMES = """
SELECT c.oid::bigint, n.nspname::text, c.relname::text FROM pg_catalog.pg_class c
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = ANY (%s::oid[])
"""


def name_of(connection: psycopg.Connection, oid: int) -> tuple[str, str] | None:
    """Return the present schema and name of a table; None if it was dropped."""
    return row(connection, f"{_NAME} %s::oid", (oid,))


def names_of(connection: psycopg.Connection, oids: Iterable[int]) -> dict[int, tuple[str, str]]:
    """Return the present schema and name of the tables that exist, as of one statement, so that no two are the same."""
    rows = connection.execute(_NAMES.encode(), (list(oids),))
    return {oid: (schema, name) for oid, schema, name in rows}


def renamed(connection: psycopg.Connection, subid: int, schema: str, name: str) -> tuple[str, str] | None:
    """Return the present name of a table that a subscription recorded by this name; None if there is no such table."""
    known = "(SELECT srrelid FROM pgsub.subscription_rel WHERE subid = %s AND schemaname = %s AND relname = %s)"
    return row(connection, f"{_NAME} {known}", (subid, schema, name))
