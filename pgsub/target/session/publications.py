"""Publications of the target. To their subscribers, a change without a replication origin is a local change.

A publisher that subscribes to the target with ``origin = none`` would receive it, and lose its own rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import psycopg

from pgsub.common.errors import StateForbids
from pgsub.common.query import row
from pgsub.target.session import origins

_TABLES = """
SELECT p.pubname::text, g.relid::regclass::text FROM pg_catalog.pg_publication p,
       LATERAL pg_catalog.pg_get_publication_tables(p.pubname::text) AS g"""
_PUBLISHING_TRUNCATE = f"{_TABLES} WHERE p.pubtruncate AND g.relid = ANY (%s::oid[]) ORDER BY 1, 2"
_PUBLISHING = f"""{_TABLES}
 WHERE g.relid IN (SELECT %(relid)s::oid UNION SELECT relid FROM pg_catalog.pg_partition_tree(%(relid)s::oid)
       UNION SELECT relid FROM pg_catalog.pg_partition_ancestors(%(relid)s::oid)) ORDER BY 1, 2
"""


def publication_of(connection: psycopg.Connection, relid: int) -> tuple[str, str] | None:
    """Return a publication of a table, its partitions or ancestors, and the name of the table that it publishes."""
    found = row(connection, _PUBLISHING, {"relid": relid})
    return None if found is None else (found[0], found[1])


def check_not_published(connection: psycopg.Connection, relid: int) -> None:
    """Refuse to adopt a table that the target publishes without a replication origin.

    :raises StateForbids: a publication of the target has it.
    """
    if found := publication_of(connection, relid):
        raise _replicated(connection, *found, "the adoption")


def check_truncate_not_published(connection: psycopg.Connection, relids: Sequence[int]) -> None:
    """Refuse TRUNCATE without a replication origin of tables whose TRUNCATE the target publishes.

    :raises StateForbids: a publication of the target has one of them.
    """
    if found := row(connection, _PUBLISHING_TRUNCATE, (relids,)):
        raise _replicated(connection, found[0], found[1], "the TRUNCATE")


def _replicated(connection: psycopg.Connection, publication: str, table: str, what: str) -> StateForbids:
    return StateForbids(
        f'{what} of table {table} would be replicated by publication "{publication}" of the target',
        detail="Without a replication origin its subscribers take it for a local change; a publisher that"
        " subscribes to the target would lose its own rows.",
        hint=f"Let a superuser run:\n{origins.grant_hint(connection)}",
    )
