"""Checks which tables of the target are empty, many at once, without waiting for locks."""

from __future__ import annotations

from collections.abc import Sequence

import psycopg
from psycopg import sql

from pgsub.commands.preflight import catalog_facts
from pgsub.commands.preflight.findings import Table
from pgsub.common import table_lock
from pgsub.target.catalog.relation import TargetRelation
from pgsub.target.sql.statement_builder import only

_BATCH = 50  #: tables that one query locks for reading
_SIZES = """
SELECT w.oid::bigint, (SELECT sum(pg_catalog.pg_relation_size(m.oid)) FROM (
       SELECT w.oid UNION SELECT t.relid FROM pg_catalog.pg_partition_tree(w.oid) t) AS m (oid))
  FROM unnest(%s::oid[]) AS w (oid)
"""


def are_empty(session: psycopg.Connection, tables: Sequence[Table]) -> list[bool | None]:
    """Return whether each target table is empty, None if the role may not read it or it is locked."""
    held = catalog_facts.locked(session)
    free = [table.target for table in tables if table.target.oid not in held]
    sizes = dict(_unless_locked(session, _SIZES.encode(), ([one.oid for one in free],)) or [])
    answers: dict[int, bool | None] = {oid: True for oid, size in sizes.items() if size == 0}
    left = [one for one in free if one.oid not in answers]
    for start in range(0, len(left), _BATCH):
        batch = left[start : start + _BATCH]
        if not _have_rows(session, batch, answers):
            for one in batch:
                _have_rows(session, [one], answers)
    return [answers.get(table.target.oid) for table in tables]


def _have_rows(session: psycopg.Connection, batch: Sequence[TargetRelation], answers: dict[int, bool | None]) -> bool:
    queries = [
        sql.SQL("SELECT {}::bigint, EXISTS (SELECT FROM {})").format(sql.Literal(one.oid), only(one)) for one in batch
    ]
    rows = _unless_locked(session, sql.SQL(" UNION ALL ").join(queries), named=batch)
    answers.update({oid: not there for oid, there in rows or []})
    return rows is not None


def _unless_locked(
    session: psycopg.Connection,
    query: bytes | sql.Composed,
    params: Sequence[object] | None = None,
    *,
    named: Sequence[TargetRelation] = (),
) -> list[tuple[int, int]] | None:
    """Run a query that must not wait for locks. Return None if it would wait, or the role may not run it.

    :param named: the tables that the query names.
    """
    try:
        with session.transaction():
            session.execute("SET LOCAL lock_timeout = '500ms'; SET LOCAL statement_timeout = '10s'")
            for one in named:
                table_lock.hold(session, one.oid, one.schema, one.name, table_lock.READING)
            return session.execute(query, params).fetchall()
    except (psycopg.errors.LockNotAvailable, psycopg.errors.QueryCanceled, psycopg.errors.InsufficientPrivilege):
        return None
