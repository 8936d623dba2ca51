"""Installation and upgrades of schema ``pgsub`` in the target database (:mod:`~pgsub.target.ledger.schema.versions`).

The ledger is kept here because only the target can commit progress in the same transaction as the data.
"""

from __future__ import annotations

from collections.abc import Callable

import psycopg

from pgsub.common import quoting, server_words
from pgsub.common.errors import PermissionMissing, StateForbids
from pgsub.common.query import current_role, scalar
from pgsub.target.ledger.schema.versions import GRANTS, MIGRATIONS, REVOKES
from pgsub.target.session import ledger_privileges

VERSION = max(MIGRATIONS)


def installed_version(connection: psycopg.Connection) -> int:
    """Return the ledger's version in this database; 0 if there is none.

    :raises PermissionMissing: its owner is not trusted. To read a view is to run its owner's code.
    """
    if not scalar(connection, "SELECT pg_catalog.to_regclass('pgsub.ledger_version') IS NOT NULL"):
        return 0
    # guard: a ledger of an untrusted owner is not read
    ledger_privileges.check(connection)
    return int(scalar(connection, "SELECT max(version) FROM pgsub.ledger_version") or 0)


def check(connection: psycopg.Connection) -> None:
    """Check that :func:`install` would succeed, without doing it.

    :raises PermissionMissing: the role may not create the missing objects.
    """
    row = connection.execute(
        "SELECT CASE WHEN n.oid IS NULL THEN pg_catalog.has_database_privilege(current_database(), 'CREATE')"
        " ELSE pg_catalog.has_schema_privilege(n.oid, 'USAGE') AND (pg_catalog.has_schema_privilege(n.oid, 'CREATE')"
        " OR EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.relnamespace = n.oid AND c.relkind = 'r'))"
        " AND NOT EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.relnamespace = n.oid AND c.relkind = 'r'"
        " AND NOT (pg_catalog.has_table_privilege(c.oid, 'SELECT') AND pg_catalog.has_table_privilege(c.oid, 'INSERT')"
        " AND pg_catalog.has_table_privilege(c.oid, 'UPDATE') AND pg_catalog.has_table_privilege(c.oid, 'DELETE'))) END"
        " FROM (VALUES (pg_catalog.to_regnamespace('pgsub')::oid)) AS n(oid)"
    ).fetchone()
    if not row or not row[0]:
        raise PermissionMissing(
            "permission denied to keep the ledger on the target",
            detail="pgsub keeps its progress in schema pgsub of the target database, committed with the data.",
            hint=_hint(connection),
            sqlstate="42501",
        )


def install(connection: psycopg.Connection, clear: Callable[[], None] = lambda: None) -> None:
    """Create or upgrade the ledger, and grant missing privileges to the session's user. Callers may run concurrently.

    :param clear: ends other users of the ledger; called before an upgrade, which locks the tables exclusively.
    :raises PermissionMissing: the role may not; the hint holds the statement to run.
    :raises StateForbids: the ledger was written by a newer pgsub.
    """
    ledger_privileges.give(connection)
    version = installed_version(connection)
    if version > VERSION:
        raise StateForbids(
            f"the ledger on the target has version {version}, this pgsub knows {VERSION}",
            hint="Upgrade pgsub.",
        )
    if version < VERSION:
        clear()
        _install(connection, version)
        ledger_privileges.give(connection)


def _install(connection: psycopg.Connection, version: int) -> None:
    try:
        with connection.transaction():
            ledger_privileges.lock(connection)
            connection.execute("SET LOCAL lock_timeout = '5s'")  # workers of other subscriptions are at work
            with ledger_privileges.acting(connection):
                _migrate(connection)
    except psycopg.errors.InsufficientPrivilege as error:
        if version:
            raise _not_upgraded(version, error) from None
        raise PermissionMissing(
            f"could not create the ledger schema on the target: {server_words.said(error).message}",
            detail="pgsub keeps its progress in schema pgsub of the target database, committed with the data.",
            hint=_hint(connection),
            sqlstate=error.sqlstate,
        ) from None


def _migrate(connection: psycopg.Connection) -> None:
    if scalar(connection, "SELECT pg_catalog.to_regnamespace('pgsub') IS NULL"):
        connection.execute("CREATE SCHEMA pgsub")
    version = installed_version(connection)
    for number in range(version + 1, VERSION + 1):
        connection.execute(MIGRATIONS[number].encode())
        connection.execute("INSERT INTO pgsub.ledger_version (version) VALUES (%s)", (number,))
    connection.execute((GRANTS if version else REVOKES).encode())


def _not_upgraded(version: int, error: psycopg.Error) -> PermissionMissing:
    statements = [
        f"{MIGRATIONS[number].strip()}\nINSERT INTO pgsub.ledger_version (version) VALUES ({number});"
        for number in range(version + 1, VERSION + 1)
    ]
    return PermissionMissing(
        f"could not upgrade the ledger on the target: {server_words.said(error).message}",
        detail=f"It has version {version}, this pgsub needs {VERSION}.",
        hint="\n".join(
            [
                "Let the owner of schema pgsub use this pgsub once, or run:",
                "BEGIN;",
                *statements,
                GRANTS.strip(),
                "COMMIT;",
            ]
        ),
        sqlstate=error.sqlstate,
    )


def _hint(connection: psycopg.Connection) -> str:
    user = current_role(connection)
    if scalar(connection, "SELECT pg_catalog.to_regnamespace('pgsub') IS NOT NULL"):
        return f"Let the owner of schema pgsub run:\n{ledger_privileges.grants(user)}"
    return (
        "Let an owner of the database run one of these:\n"
        f"GRANT CREATE ON DATABASE {quoting.name(connection.info.dbname)} TO {user};\n"
        f"CREATE SCHEMA pgsub AUTHORIZATION {user};"
    )
