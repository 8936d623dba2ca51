"""Locks a table and verifies its name before any statement is planned that names the table.

SQL names tables, and a name can come to mean another table. The owner of a schema or of the database may drop a table
in it and create another one of that name. Planning a statement is enough to run code of that table (an index predicate,
functions that are declared immutable), and so is a trigger. The server's own subscriber opens relations by oid
(logicalrep_rel_open, relation.c).

LOCK TABLE runs no code. A locked table cannot be dropped or renamed before the transaction ends. So a name that has the
known oid after the lock keeps it to the end. Renaming a *schema* takes no lock on its tables.

The same lock keeps others from altering the table. So the definition from which statements were made is compared with
the present one behind the lock. Otherwise, a session that waited for an ALTER TABLE would go on with the old key and
the old types. The server's own subscriber reads the definition after it has locked the relation.

Statements also name types and operators, whose names can be replaced in the same way: a domain runs code when a value
is cast to it. They are verified with the table, except those of pg_catalog, which is the server's. Nothing locks them.
"""

from __future__ import annotations

from collections.abc import Mapping

import psycopg
from psycopg import sql

from pgsub.common.errors import TableAltered, TableReplaced
from pgsub.common.query import scalar

#: Fails (:data:`CHANGED`) if a name ($1, as SQL) is not that of a table (oid $2); what follows is not even planned. It
#: reads the present catalog, whatever the transaction's snapshot.
VERIFY = "SELECT 1 / coalesce((pg_catalog.to_regclass($1)::pg_catalog.oid = $2)::pg_catalog.int4, 0)"
CHANGED = "22012"  #: division_by_zero
#: SQL of a text that DDL on a table (``{oid}``) changes, but not DDL on its partitions. TRUNCATE and VACUUM FULL write
#: another version of the row in pg_class, so its contents count.
DEFINITION = """(
       SELECT pg_catalog.sum(pg_catalog.hashtextextended(d.written, 0))::pg_catalog.text FROM (
              SELECT ROW(c.relnamespace, c.relowner, c.relkind, c.relnatts, c.relchecks, c.relrowsecurity,
                         c.relforcerowsecurity, c.relreplident, c.relispartition, c.relacl)::pg_catalog.text
                FROM pg_catalog.pg_class c WHERE c.oid = {oid}
               UNION ALL
              SELECT a.xmin::pg_catalog.text || a.ctid::pg_catalog.text
                FROM pg_catalog.pg_attribute a WHERE a.attrelid = {oid} AND a.attnum > 0
               UNION ALL
              SELECT x.xmin::pg_catalog.text || x.ctid::pg_catalog.text
                FROM pg_catalog.pg_index x WHERE x.indrelid = {oid}
               UNION ALL
              SELECT t.xmin::pg_catalog.text || t.ctid::pg_catalog.text
                FROM pg_catalog.pg_trigger t WHERE t.tgrelid = {oid}
               UNION ALL
              SELECT r.xmin::pg_catalog.text || r.ctid::pg_catalog.text
                FROM pg_catalog.pg_rewrite r WHERE r.ev_class = {oid}) AS d (written))"""
#: Whether a column of a table (``{oid}``) no longer has the name that the transaction's snapshot shows: the function
#: returns the present one. Statements find columns by their present names, and rows by the snapshot.
COLUMNS_RENAMED = """EXISTS (
       SELECT FROM pg_catalog.pg_attribute a
        CROSS JOIN LATERAL pg_catalog.pg_identify_object_as_address(
              'pg_catalog.pg_class'::pg_catalog.regclass, a.attrelid, a.attnum) AS present
        WHERE a.attrelid = {oid} AND a.attnum > 0 AND NOT a.attisdropped
          AND a.attname::pg_catalog.text IS DISTINCT FROM present.object_names[3])"""
#: Whether one of the columns (%(names)s) of a table (%(oid)s) has another number, type or modifier than it had.
_REDEFINED = """
SELECT EXISTS (
       SELECT FROM ROWS FROM (pg_catalog.unnest(%(names)s::pg_catalog.text[]),
                              pg_catalog.unnest(%(numbers)s::pg_catalog.int2[]),
                              pg_catalog.unnest(%(types)s::pg_catalog.oid[]),
                              pg_catalog.unnest(%(modifiers)s::pg_catalog.int4[])
       ) AS known (name, number, type, modifier)
        WHERE NOT EXISTS (
              SELECT FROM pg_catalog.pg_attribute a
               WHERE a.attrelid = %(oid)s AND a.attname = known.name
                 AND (a.attnum, a.atttypid, a.atttypmod) = (known.number, known.type, known.modifier)))
"""
#: Whether this transaction has altered a table ($1), whose lock it then had.
ALTERED_HERE = """EXISTS (
       SELECT FROM pg_catalog.pg_locks l JOIN (
              SELECT a.xmin FROM pg_catalog.pg_attribute a WHERE a.attrelid = $1
               UNION ALL SELECT x.xmin FROM pg_catalog.pg_index x WHERE x.indrelid = $1
               UNION ALL SELECT t.xmin FROM pg_catalog.pg_trigger t WHERE t.tgrelid = $1) AS d
           ON d.xmin = l.transactionid
        WHERE l.pid = pg_catalog.pg_backend_pid() AND l.locktype = 'transactionid' AND l.granted)"""
#: Fails in the same way if types or operators no longer have the known names ($1, JSON: kind, oid, name).
VERIFY_TYPES = """
SELECT 1 / (NOT EXISTS (
       SELECT FROM pg_catalog.json_array_elements($1) AS n (v)
        WHERE CASE v ->> 0 WHEN 'type' THEN pg_catalog.format_type((v ->> 1)::pg_catalog.oid, NULL)
                   ELSE (v ->> 1)::pg_catalog.oid::pg_catalog.regoperator::pg_catalog.text END
              IS DISTINCT FROM v ->> 2))::pg_catalog.int4
"""

#: Any of these privileges on the whole table allows the lock (LockTableAclCheck, lockcmds.c); one on columns does not.
WRITING = "INSERT, UPDATE, DELETE, TRUNCATE"
READING = "SELECT"
#: Privileges for stronger modes, which are taken at once: two sessions that upgrade a lock would wait for each other.
EMPTYING, ALONE = "TRUNCATE", "UPDATE, DELETE, TRUNCATE"
# A role without USAGE on the schema must get the error for that.
_MAY_LOCK = """
SELECT pg_catalog.has_table_privilege(c.oid, %s) OR NOT pg_catalog.has_schema_privilege(c.relnamespace, 'USAGE')
  FROM pg_catalog.pg_class c WHERE c.oid = %s::pg_catalog.oid
"""
_MODES = {
    WRITING: "ROW EXCLUSIVE",
    READING: "ACCESS SHARE",
    EMPTYING: "ACCESS EXCLUSIVE",
    ALONE: "SHARE ROW EXCLUSIVE",
}


def lock(schema: str, name: str, purpose: str = WRITING) -> sql.Composed:
    """Compose the statement that locks a table. Its partitions are found by oid, and locked when they are used."""
    return sql.SQL("LOCK TABLE ONLY {} IN {} MODE").format(
        sql.Identifier(schema, name),
        sql.SQL(_MODES[purpose]),
    )


def name_as_sql(schema: str, name: str) -> str:
    """Return the name in the form for :data:`VERIFY`."""
    return ".".join('"{}"'.format(part.replace('"', '""')) for part in (schema, name))


def hold(
    connection: psycopg.Connection,
    oid: int,
    schema: str,
    name: str,
    purpose: str = WRITING,
    *,
    may_lock: bool | None = None,
    named_types: str | None = None,
) -> bool:
    """Lock a table in the open transaction and verify that its name is its own; return whether it is locked.

    A role that has privileges on columns only may not lock the table; then the name is verified without a lock.

    :param purpose: :data:`WRITING`, :data:`READING`, :data:`EMPTYING`, or :data:`ALONE` to keep others from writing.
    :param may_lock: the role may lock the table; None to ask the server.
    :param named_types: see :func:`verify_types`.
    :raises TableReplaced: the name belongs to another table or to none, or one of the types was renamed.
    """
    if may_lock is None:
        may_lock = scalar(connection, _MAY_LOCK, (purpose, oid)) is True
    verify = sql.SQL(VERIFY.replace("$1", "{}").replace("$2", "{}")).format(name_as_sql(schema, name), oid)
    try:
        # guard: a table is locked and its name verified before a statement names it
        connection.execute(sql.SQL("; ").join([*([lock(schema, name, purpose)] if may_lock else []), verify]))
    except (
        psycopg.errors.DivisionByZero,
        psycopg.errors.UndefinedTable,
        psycopg.errors.InvalidSchemaName,
        psycopg.errors.WrongObjectType,
    ):
        raise replaced(oid, schema, name) from None
    verify_types(connection, named_types, schema, name)
    return may_lock


def check_columns(
    connection: psycopg.Connection, oid: int, schema: str, name: str, columns: Mapping[str, tuple[int, int, int]]
) -> None:
    """Check, after a statement that named columns of a table and so keeps it locked, that they were the known ones.

    An ALTER TABLE that gives a column another type may change its values, which rows that come later have not.

    :param columns: number, type and modifier by name.
    :raises TableAltered: another column has one of the names, or none, or a column has another type.
    """
    numbers, types, modifiers = ([one[n] for one in columns.values()] for n in range(3))
    known = {"oid": oid, "names": list(columns), "numbers": numbers, "types": types, "modifiers": modifiers}
    if columns and scalar(connection, _REDEFINED, known) is not False:
        message = f'columns of table "{schema}.{name}" were renamed or got another type meanwhile'
        raise TableAltered(message, sqlstate="40001")


def verify_types(connection: psycopg.Connection, named_types: str | None, schema: str, name: str) -> None:
    """Verify in the open transaction that the types and operators in statements about a table still have their names.

    :param named_types: in the form for :data:`VERIFY_TYPES`, None if there are none.
    :param schema: with ``name`` the table, for the message.
    :raises TableReplaced: one was renamed or dropped.
    """
    if named_types is None:
        return
    try:
        # guard: the names of types and operators are verified before anything is planned with them
        connection.execute(sql.SQL(VERIFY_TYPES.replace("$1", "{}")).format(named_types))
    except psycopg.errors.DivisionByZero:
        raise types_renamed(f'table "{schema}.{name}"') from None


def replaced(oid: int, schema: str, name: str) -> TableReplaced:
    """Return the error for a name that now belongs to another table."""
    return TableReplaced(
        f'table "{schema}.{name}" was replaced by another table, or dropped',
        detail=f"The name was expected to be that of OID {oid}.",
    )


def altered(schema: str, name: str) -> TableAltered:
    """Return the error for a table that has another definition than the known one."""
    return TableAltered(f'table "{schema}.{name}" was altered before it was locked', sqlstate="40001")


def types_renamed(table: str) -> TableReplaced:
    """Return the error for a type or operator that no longer has its name."""
    return TableReplaced(
        f"a type or operator of {table} was renamed or dropped",
        detail="Its name may now belong to another one.",
    )
