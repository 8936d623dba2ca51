"""Decides which tables are adopted: their rows are compared with the publisher's instead of copied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import psycopg
from psycopg import sql

from pgsub.commands.preflight.findings import Caution, Table, concerning
from pgsub.common import quoting, table_lock
from pgsub.common.errors import StateForbids
from pgsub.common.subscription import Subscription
from pgsub.publisher import connect as publisher
from pgsub.publisher.copy_statements import selection
from pgsub.publisher.server_errors import translate
from pgsub.publisher.tables import describe_tables
from pgsub.reconcile.expressions import compared, not_comparable
from pgsub.tablesync.copy import plan
from pgsub.target.catalog.relation import describe_many
from pgsub.target.ledger.schema import installation
from pgsub.target.ledger.subscriptions import RelationState
from pgsub.target.session import connect as target
from pgsub.target.session import publications
from pgsub.target.sql import resync_truncate
from pgsub.target.sql.statement_builder import only

MODE = "adopt"
# Ordinary foreign keys are checked by ordinary triggers.
_OF_ITSELF = """
SELECT c.conname::text, current_user::text FROM pg_catalog.pg_constraint c
 WHERE c.contype = 'f' AND c.conrelid = %s AND c.confrelid = c.conrelid
   AND EXISTS (SELECT FROM pg_catalog.pg_trigger t WHERE t.tgconstraint = c.oid AND t.tgenabled IN ('O', 'A'))
 ORDER BY c.conname LIMIT 1
"""


def decide(
    source: publisher.Connection, session: psycopg.Connection, sub: Subscription, tables: Sequence[Table]
) -> Iterator[Caution]:
    """Mark tables that have or may have rows as adopted, and yield warnings of what may be lost.

    :raises StateForbids: a table cannot be adopted.
    """
    filled = [table for table in tables if table.empty is not True]
    for table in filled:
        table.mode, table.reason, table.chunks = MODE, None, 1
    return check(source, session, sub, filled)


def check(
    source: publisher.Connection, session: psycopg.Connection, sub: Subscription, tables: Sequence[Table]
) -> Iterator[Caution]:
    """Check that tables can be adopted, and yield warnings of what may be lost.

    :raises StateForbids: a table cannot be adopted.
    """
    for table in tables:
        _check_comparable(table)
        _check_order(session, table)
        _refuse_empty(source, table)
    relids = [table.target.oid for table in tables]
    if relids and installation.installed_version(session):
        resync_truncate.check_writers(session, sub.subid, resync_truncate.members(session, relids))
    if sub.origin != "none":
        return iter(())
    here = [table for table in tables if publications.publication_of(session, table.target.oid)]
    return concerning(
        [table.name for table in here],
        "the target publishes {}, and rows that only it has are deleted",
        "What was written on the target and has not reached the publisher yet would be gone there.",
        "Write nothing on the target until the tables are synchronized.",
    )


def _refuse_empty(source: publisher.Connection, table: Table) -> None:
    """Refuse a table that would lose all its rows, because the publisher may be the wrong one.

    :raises StateForbids: the publisher's table has no row that would be copied.
    :raises TableReplaced: the name now belongs to another table.
    """
    remote = table.remote
    query = sql.SQL("SELECT EXISTS ({})").format(selection(remote, []))
    try:
        with source.transaction():
            table_lock.hold(source, remote.oid, remote.schema, remote.name, table_lock.READING)
            found = source.execute(query).fetchone()
    except psycopg.errors.InsufficientPrivilege:
        return  # reported elsewhere with its GRANT
    except psycopg.Error as error:
        raise translate(error, "look for rows on the publisher", user=source.info.user) from None
    # guard: an empty publisher does not empty the target
    if found is not None and not found[0]:
        raise StateForbids(
            f'table "{table.name}" cannot be adopted: the publisher publishes no row of it',
            detail="All its rows on the target would be deleted.",
            hint=f"If that is right, empty it on the target first:\nTRUNCATE {quoting.statement(only(table.target))};",
        )


def _check_comparable(table: Table) -> None:
    reason = not_comparable(compared(table.remote, table.target))
    if reason is not None:
        raise StateForbids(
            f'table "{table.name}" cannot be adopted: {reason}',
            hint="Give the table a primary key on the target, or empty it: an empty table is copied.",
        )


def _check_order(session: psycopg.Connection, table: Table) -> None:
    """Refuse a self-referencing table if foreign keys are checked: its rows arrive in the order of hashes."""
    if target.is_replica(session):
        return
    found = session.execute(_OF_ITSELF.encode(), (table.target.oid,)).fetchone()
    # guard: a table whose rows refer to each other is not adopted in part
    if found is not None:
        constraint, role = found[0], quoting.name(found[1])
        raise StateForbids(
            f'table "{table.name}" cannot be adopted: its rows refer to each other',
            detail=f'Foreign key "{constraint}" would be checked for each of them, because role {role} cannot set'
            " session_replication_role.",
            hint=f"Run this on the target as a superuser:\nGRANT SET ON PARAMETER session_replication_role TO {role};",
            sqlstate="55000",
        )


def check_again(
    source: publisher.Connection, session: psycopg.Connection, sub: Subscription, tables: Sequence[RelationState]
) -> Iterator[Caution]:
    """Do the checks of :func:`check` for tables that are already subscribed.

    :raises StateForbids: a table cannot be adopted.
    """
    names = [(one.schemaname, one.relname) for one in tables]
    remote = describe_tables(source, names, sub.publications).tables
    local = describe_many(session, names)
    there = [Table(remote[name], local[name]) for name in names if name in remote and name in local]
    return check(source, session, sub, [table for table in there if not plan.is_empty(session, table.target)])
