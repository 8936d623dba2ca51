"""Which tables are adopted: their rows are compared with the publisher's, and not added to."""

from __future__ import annotations

from collections.abc import Sequence

import psycopg

from pgsub.commands.preflight.findings import Table
from pgsub.common.errors import StateForbids
from pgsub.common.subscription import Subscription
from pgsub.publisher import connect as publisher
from pgsub.publisher.tables import describe_tables
from pgsub.reconcile.expressions import compared, not_comparable
from pgsub.target.catalog.relation import describe_many
from pgsub.target.ledger import schema
from pgsub.target.ledger.subscriptions import RelationState
from pgsub.target.sql import resync_truncate

MODE = "adopt"


def decide(session: psycopg.Connection, subid: int, tables: Sequence[Table]) -> None:
    """Decide that tables which have rows, or may have some, are adopted.

    :raises StateForbids: one cannot be.
    """
    filled = [table for table in tables if table.empty is not True]
    for table in filled:
        check(table)
        table.mode, table.reason, table.chunks = MODE, None, 1
    refuse_others(session, subid, [table.target.oid for table in filled])


def check(table: Table) -> None:
    """Check that the rows of a table can be compared.

    :raises StateForbids: they cannot.
    """
    reason = not_comparable(compared(table.remote, table.target))
    if reason is not None:
        raise StateForbids(
            f'table "{table.name}" cannot be adopted: {reason}',
            hint="Give the table a primary key on the target, or empty it: an empty table is copied.",
        )


def check_again(
    source: publisher.Connection, session: psycopg.Connection, sub: Subscription, tables: Sequence[RelationState]
) -> None:
    """Check tables that are subscribed already.

    :raises StateForbids: one cannot be adopted.
    """
    names = [(one.schemaname, one.relname) for one in tables]
    remote = describe_tables(source, names, sub.publications).tables
    local = describe_many(session, names)
    for name in names:
        if name in remote and name in local:
            check(Table(remote[name], local[name]))
    refuse_others(session, sub.subid, [one.srrelid for one in tables])


def refuse_others(session: psycopg.Connection, subid: int, relids: Sequence[int]) -> None:
    """Refuse tables that another subscription writes: its rows would be taken for too many.

    :raises StateForbids: there is one.
    """
    if relids and schema.installed_version(session):
        resync_truncate.check_writers(session, subid, resync_truncate.members(session, relids))
