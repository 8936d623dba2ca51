"""TRUNCATE of tables that are copied again, and the checks before it. Mirrors ExecuteTruncate (tablecmds.c).

If PostgreSQL would reject it, it is rejected before anything is changed, naming the constraint, the trigger or the
GRANT. It is also rejected if rows of another subscription would be truncated, or the TRUNCATE would be replicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import psycopg
from psycopg import sql

from pgsub.common import quoting, table_lock
from pgsub.common.errors import PermissionMissing, StateForbids, one_line
from pgsub.common.query import STATEMENT, current_role, row, shown
from pgsub.target.session import publications

_TRUNCATES = 1 << 5  #: TRIGGER_TYPE_TRUNCATE

_TABLES = """
SELECT c.oid::bigint, n.nspname::text, c.relname::text, c.relkind::text,
       pg_catalog.has_table_privilege(c.oid, 'TRUNCATE'),
       ARRAY(SELECT c.oid UNION SELECT relid FROM pg_catalog.pg_partition_tree(c.oid))::bigint[],
       CASE WHEN k.known THEN k.rows END, k.bytes
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace CROSS JOIN LATERAL (
       SELECT coalesce(pg_catalog.bool_and(l.reltuples >= 0 OR pg_catalog.pg_relation_size(l.oid) = 0), true) AS known,
              coalesce(pg_catalog.sum(greatest(l.reltuples, 0)), 0)::bigint AS rows,
              coalesce(pg_catalog.sum(pg_catalog.pg_relation_size(l.oid)), 0)::bigint AS bytes
         FROM pg_catalog.pg_class l
        WHERE l.relkind = 'r' AND (l.oid = c.oid OR l.oid IN (
              SELECT relid FROM pg_catalog.pg_partition_tree(c.oid)))) AS k
 WHERE c.oid = ANY (%s::oid[]) ORDER BY c.oid
"""
_FOREIGN_KEYS = """
SELECT k.conname::text, k.conrelid::regclass::text, k.confrelid::regclass::text FROM pg_catalog.pg_constraint k
 WHERE k.contype = 'f' AND k.confrelid = ANY (%s::oid[]) AND k.conrelid <> ALL (%s::oid[])
 ORDER BY k.conparentid <> 0, 3, 2, 1
"""
_TRIGGERS = """
SELECT t.tgname::text, t.tgrelid::regclass::text FROM pg_catalog.pg_trigger t
 WHERE t.tgrelid = ANY (%s::oid[]) AND NOT t.tgisinternal AND t.tgtype & %s <> 0 AND t.tgenabled = ANY (%s)
 ORDER BY 2, 1
"""
_OTHERS = """
SELECT s.subname::text, r.srrelid::regclass::text FROM pgsub.subscription_rel r JOIN pgsub.subscription s USING (subid)
 WHERE r.subid <> %s AND r.srrelid = ANY (%s::oid[])
 UNION ALL
SELECT s.subname::text, r.srrelid::regclass::text FROM pg_catalog.pg_subscription_rel r
  JOIN pg_catalog.pg_subscription s ON s.oid = r.srsubid WHERE r.srrelid = ANY (%s::oid[])
 ORDER BY 2, 1
"""
_HOLDERS = f"""
SELECT DISTINCT a.pid, a.usename::text, a.application_name, a.state,
       {STATEMENT.format("a")}
  FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_stat_activity a USING (pid)
 WHERE l.locktype = 'relation' AND l.granted AND l.pid <> pg_catalog.pg_backend_pid()
   AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
   AND l.relation = ANY (%s::oid[]) ORDER BY 1
"""


@dataclass(frozen=True, slots=True)
class TruncatedTable:
    """A table to truncate.

    :ivar members: OIDs of the table and its partitions.
    :ivar rows: the planner's estimate; None if the table was never analyzed and is not empty.
    :ivar bytes: size of its rows, without TOAST.
    """

    oid: int
    schema: str
    name: str
    relkind: str
    members: tuple[int, ...]
    rows: int | None
    bytes: int


def inspect(
    connection: psycopg.Connection, subid: int, relids: Sequence[int], *, replica: bool, tagged: bool
) -> list[TruncatedTable]:
    """Describe the tables if all of them may be truncated together.

    :param relids: tables of subscription ``subid``.
    :param replica: session_replication_role = replica is in effect. It decides which triggers would fire.
    :param tagged: the session carries a replication origin.
    :raises StateForbids: a foreign key, a trigger, another subscription or a publication forbids it.
    :raises PermissionMissing: no TRUNCATE privilege; the hint has the GRANT.
    """
    rows = connection.execute(_TABLES.encode(), (list(relids),)).fetchall()
    found = [
        TruncatedTable(oid, schema, name, kind, tuple(tree), *sizes)
        for oid, schema, name, kind, _, tree, *sizes in rows
    ]
    if gone := set(relids) - {table.oid for table in found}:
        raise StateForbids(
            "a table to copy again no longer exists on the target",
            detail=f"OIDs: {', '.join(map(str, sorted(gone)))}.",
            hint="If the table was dropped and created again, refresh without --resync.",
        )
    _check_privileges(connection, [(one[1], one[2]) for one in rows if not one[4]])
    members = [oid for table in found for oid in table.members]
    _check_foreign_keys(connection, members)
    _check_triggers(connection, members, replica)
    check_writers(connection, subid, members)
    if not tagged:
        publications.check_truncate_not_published(connection, members)
    return found


def _check_privileges(connection: psycopg.Connection, denied: Sequence[tuple[str, str]]) -> None:
    if not denied:
        return
    tables = quoting.statement(sql.SQL(", ").join(sql.Identifier(*name) for name in denied))
    raise PermissionMissing(
        f"permission denied to truncate table {tables}",
        detail="A table that is copied again is emptied first.",
        hint=f"Let the owner run:\nGRANT TRUNCATE ON TABLE {tables} TO {current_role(connection)};",
        sqlstate="42501",
    )


def _check_foreign_keys(connection: psycopg.Connection, members: Sequence[int]) -> None:
    rows = connection.execute(_FOREIGN_KEYS.encode(), (members, members)).fetchall()
    if rows:
        constraint, table = quoting.name(rows[0][0]), one_line(rows[0][1])
        raise StateForbids(
            "cannot truncate a table referenced in a foreign key constraint",
            detail="\n".join(
                dict.fromkeys(f'Table {source} references {to} by constraint "{name}".' for name, source, to in rows)
            ),
            hint="Copy the referencing tables again at the same time (--resync), if they are in the subscription; else"
            f" drop the constraint meanwhile:\nALTER TABLE {table} DROP CONSTRAINT {constraint};",
            sqlstate="0A000",
        )


def _check_triggers(connection: psycopg.Connection, members: Sequence[int], replica: bool) -> None:
    firing = ["A", "R"] if replica else ["A", "O"]
    if found := row(connection, _TRIGGERS, (members, _TRUNCATES, firing)):
        name, table = found
        raise StateForbids(
            f'trigger "{name}" of table {table} would fire',
            detail="It fires ON TRUNCATE, and a table that is copied again is truncated.",
            hint=f"Disable it meanwhile:\nALTER TABLE {one_line(table)} DISABLE TRIGGER {quoting.name(name)};",
        )


def members(connection: psycopg.Connection, relids: Sequence[int]) -> list[int]:
    """Return the OIDs of tables and of their partitions."""
    query = """
        SELECT w::bigint FROM pg_catalog.unnest(%s::oid[]) AS w
         UNION SELECT t.relid::bigint FROM pg_catalog.unnest(%s::oid[]) AS w, pg_catalog.pg_partition_tree(w) AS t"""
    return [oid for (oid,) in connection.execute(query, (list(relids), list(relids)))]


def other_writer(connection: psycopg.Connection, subid: int, members: Sequence[int]) -> tuple[str, str] | None:
    """Return another subscription that writes one of these tables or its ancestors, and the name of that table."""
    query = "SELECT a.relid::bigint FROM pg_catalog.unnest(%s::oid[]) AS w, pg_catalog.pg_partition_ancestors(w) AS a"
    written = [*members, *(oid for (oid,) in connection.execute(query, (list(members),)))]
    found = row(connection, _OTHERS, (subid, written, written))
    return None if found is None else (found[0], found[1])


def check_writers(
    connection: psycopg.Connection,
    subid: int,
    members: Sequence[int],
    hint: str = "Remove the rows of this publisher by hand, drop this subscription and create it again.",
) -> None:
    """Refuse tables that another subscription writes."""
    if found := other_writer(connection, subid, members):
        name, table = found
        raise StateForbids(
            f"table {table} has rows of another subscription too",
            detail=f'Subscription "{name}" writes it, and its rows would be lost.',
            hint=hint,
        )


def truncate(connection: psycopg.Connection, tables: Sequence[TruncatedTable]) -> None:
    """Truncate all tables in one statement, in the caller's transaction and with its lock_timeout.

    Inheritance children of a plain table are excluded: they are published and subscribed on their own.
    """
    if tables:
        for table in tables:
            table_lock.hold(connection, table.oid, table.schema, table.name, table_lock.EMPTYING)
        listed = sql.SQL(", ").join(
            sql.SQL("" if t.relkind == "p" else "ONLY ") + sql.Identifier(t.schema, t.name) for t in tables
        )
        connection.execute(sql.SQL("TRUNCATE TABLE {}").format(listed))


def lock_holders(connection: psycopg.Connection, tables: Sequence[TruncatedTable]) -> list[str]:
    """List the sessions that hold a lock on the tables: ``PID 4711 (app, psql, idle in transaction): SELECT …``."""
    members = [oid for table in tables for oid in table.members]
    rows = shown(connection, _HOLDERS, (members,))
    return [f"PID {pid} ({user}, {name or 'no name'}, {state}): {query}" for pid, user, name, state, query in rows]
