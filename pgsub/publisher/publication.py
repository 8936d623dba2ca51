"""The contents of publications: tables, missing publications, tables that other subscriptions write.

Mirrors ``fetch_relation_list``, ``check_publications`` and ``check_publications_origin_tables`` (subscriptioncmds.c).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from psycopg import sql

from pgsub.common.errors import PublicationMissing, StateForbids
from pgsub.common.plural import some
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.publisher.connect import Connection
from pgsub.publisher.server_errors import translating

_GOES_ON = 180000


class PublishedTable(NamedTuple):
    """A table as a subscription sees it. A partitioned root represents its partitions if it is published itself."""

    schema: str
    name: str
    relkind: str  #: r plain, p partitioned
    columns: tuple[str, ...] | None  #: None: all columns that are not generated


class OtherOrigin(NamedTuple):
    """A published table that the publisher itself receives from another server."""

    publication: str
    schema: str
    name: str


def published(connection: Connection) -> sql.SQL:
    """Compose the FROM item ``gpt (relid, attrs, qual)`` for ``%(publications)s``, over all publications together.

    Partitions are left out if their root is published itself. From 16 on the server's function does this for several
    publications. Before, it does so for each alone, and rows would be copied twice.
    """
    version = connection.info.server_version
    if version >= 160000:
        return sql.SQL("""(
            SELECT (pg_catalog.pg_get_publication_tables(VARIADIC array_agg(p.pubname::text))).*
            FROM pg_catalog.pg_publication p WHERE p.pubname = ANY(%(publications)s::name[])) AS gpt""")
    columns = "g.attrs, g.qual" if version >= 150000 else "NULL::int2vector AS attrs, NULL::pg_node_tree AS qual"
    return sql.SQL(
        """(
            WITH listed AS (
                SELECT g.relid, {} FROM pg_catalog.pg_publication p,
                    LATERAL pg_catalog.pg_get_publication_tables(p.pubname::text) g
                WHERE p.pubname = ANY(%(publications)s::name[]))
            SELECT l.* FROM listed l WHERE NOT EXISTS (
                SELECT FROM pg_catalog.pg_partition_ancestors(l.relid) a JOIN listed r ON r.relid = a.relid
                WHERE a.relid <> l.relid)) AS gpt""".replace("{}", columns)
    )


def published_tables(connection: Connection, publications: Sequence[str]) -> list[PublishedTable]:
    """List the tables of some publications, ordered by name, without schema ``pgsub``.

    :raises StateForbids: one table has different column lists.
    """
    query = sql.SQL("""
        SELECT DISTINCT n.nspname::text, c.relname::text, c.relkind::text, CASE WHEN gpt.attrs IS NOT NULL THEN ARRAY(
                SELECT a.attname::text FROM pg_catalog.pg_attribute a
                WHERE a.attrelid = c.oid AND a.attnum = ANY(gpt.attrs) ORDER BY a.attnum) END,
            ARRAY(SELECT a.attname::text FROM pg_catalog.pg_attribute a
                WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''
                ORDER BY a.attnum)
        FROM {} JOIN pg_catalog.pg_class c ON c.oid = gpt.relid
            JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname <> 'pgsub'
        ORDER BY 1, 2""").format(published(connection))
    rows = _rows(connection, query, publications, "receive list of replicated tables from the publisher")
    tables: list[PublishedTable] = []
    for schema, name, relkind, sent, plain in rows:
        columns = None if sent is None or sent == plain else tuple(sent)
        if tables and tables[-1][:2] == (schema, name):
            if tables[-1].columns == columns:
                continue
            raise StateForbids(
                f'cannot use different column lists for table "{schema}.{name}" in different publications'
            )
        tables.append(PublishedTable(schema, name, relkind, columns))
    return tables


def missing_publications(connection: Connection, publications: Sequence[str]) -> list[str]:
    """Return the names that are no publication in the publisher's database, in the given order."""
    there = _there(connection, publications, sql.SQL("true"))
    return [name for name in publications if name not in there]


def existing_said(connection: Connection) -> str:
    """Say which publications exist, for a message about a missing one."""
    query = sql.SQL("SELECT p.pubname::text FROM pg_catalog.pg_publication p ORDER BY 1")
    there = [name for (name,) in _rows(connection, query, (), "receive list of publications from the publisher")]
    return f"Publications of its database are {some(there)}." if there else "Its database has no publication."


def unpublished_operations(connection: Connection, publications: Sequence[str]) -> dict[tuple[str, str], list[str]]:
    """Find tables whose publications omit operations by their option ``publish``.

    :return: by schema and name, the operations that none of the publications publishes.
    """
    query = sql.SQL("""
        SELECT t.schemaname::text, t.tablename::text, pg_catalog.bool_or(p.pubinsert), pg_catalog.bool_or(p.pubupdate),
            pg_catalog.bool_or(p.pubdelete), pg_catalog.bool_or(p.pubtruncate)
        FROM pg_catalog.pg_publication_tables t JOIN pg_catalog.pg_publication p USING (pubname)
        WHERE p.pubname = ANY(%(publications)s::name[]) GROUP BY 1, 2
        HAVING NOT (pg_catalog.bool_or(p.pubinsert) AND pg_catalog.bool_or(p.pubupdate)
            AND pg_catalog.bool_or(p.pubdelete) AND pg_catalog.bool_or(p.pubtruncate))""")
    rows = _rows(connection, query, publications, "receive list of replicated tables from the publisher")
    names = ("insert", "update", "delete", "truncate")
    return {(row[0], row[1]): [name for name, sent in zip(names, row[2:], strict=True) if not sent] for row in rows}


def publishing_sequences(connection: Connection, publications: Sequence[str]) -> list[str]:
    """Find the publications that also publish all sequences (FOR ALL SEQUENCES, PostgreSQL 19 and newer)."""
    if connection.info.server_version < 190000:
        return []
    return _there(connection, publications, sql.SQL("p.puballsequences"))


def _there(connection: Connection, publications: Sequence[str], condition: sql.SQL) -> list[str]:
    query = sql.SQL(
        "SELECT p.pubname::text FROM pg_catalog.pg_publication p"
        " WHERE p.pubname = ANY(%(publications)s::name[]) AND {} ORDER BY 1"
    ).format(condition)
    rows = _rows(connection, query, publications, "receive list of publications from the publisher")
    return [name for (name,) in rows]


def missing_warning(names: Sequence[str]) -> str:
    """Format the server's warning for missing publications; there must be one at least."""
    listed = ", ".join(f'"{name}"' for name in names)
    if len(names) == 1:
        return f"publication {listed} does not exist on the publisher"
    return f"publications {listed} do not exist on the publisher"


def absence(connection: Connection, sub: Subscription) -> PublicationMissing | None:
    """Check for a missing publication that nothing else reports.

    Servers before 18 report an error. Since 18 they only warn ("skipped loading publication") and continue.
    """
    if connection.info.server_version < _GOES_ON:
        return None
    absent = missing_publications(connection, sub.publications)
    if not absent:
        return None
    return PublicationMissing(
        missing_warning(absent),
        detail=f"The publisher does not send what only a missing publication publishes, now or later."
        f" {existing_said(connection)}",
        hint=f"See what to do:\npgsub status {word(sub.name)} --runbook",
    )


def tables_with_other_origins(
    connection: Connection,
    publications: Sequence[str],
    known: Collection[tuple[str, str]] = (),
    *,
    ledger: bool = False,
) -> list[OtherOrigin]:
    """Find published tables that a subscription on the publisher writes, because a copy cannot filter by origin.

    Partitions count for their roots and vice versa. A ledger that the role may not read is ignored.

    :param known: schema and name of tables that are subscribed already, so they are not copied.
    :param ledger: whether a ledger of pgsub may be read. (Planning the query evaluates expressions of its indexes.)
    """
    subscribed = "SELECT s.srrelid FROM pg_catalog.pg_subscription_rel s"
    doing = "receive list of replicated tables from the publisher"
    if ledger and _rows(connection, _LEDGER, publications, doing):
        # the ledger may have been replaced: output functions of built-in types are safe, a cast or a child may not be
        subscribed += " UNION SELECT pg_catalog.format('%%s', l.srrelid)::oid FROM ONLY pgsub.subscription_rel l"
    query = sql.SQL("""
        SELECT DISTINCT p.pubname::text, n.nspname::text, c.relname::text
        FROM pg_catalog.pg_publication p, LATERAL pg_catalog.pg_get_publication_tables(p.pubname::text) gpt
            JOIN pg_catalog.pg_class c ON c.oid = gpt.relid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace,
            ({}) AS s (srrelid)
        WHERE p.pubname = ANY(%(publications)s::name[]) AND n.nspname <> 'pgsub' AND (gpt.relid = s.srrelid
            OR gpt.relid IN (SELECT a.relid FROM pg_catalog.pg_partition_ancestors(s.srrelid) a
                UNION ALL SELECT t.relid FROM pg_catalog.pg_partition_tree(s.srrelid) t))
        ORDER BY 1, 2, 3""").format(sql.SQL(subscribed))
    found = [OtherOrigin(*row) for row in _rows(connection, query, publications, doing)]
    return [table for table in found if (table.schema, table.name) not in known]


_LEDGER = sql.SQL("""
    SELECT 1 FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = 'pgsub' AND c.relname = 'subscription_rel' AND c.relkind = 'r'
        AND EXISTS (SELECT FROM pg_catalog.pg_attribute a
            WHERE a.attrelid = c.oid AND a.attname = 'srrelid' AND a.atttypid = 'pg_catalog.oid'::regtype)
        AND has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT')""")


def _rows(
    connection: Connection, query: sql.SQL | sql.Composed, publications: Sequence[str], doing: str
) -> list[tuple[Any, ...]]:
    with translating(connection, doing):
        return connection.execute(query, {"publications": list(publications)}).fetchall()
