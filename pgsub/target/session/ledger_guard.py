"""Sessions that only read a ledger, mostly that of the publisher's server, whose ledger nobody may have made yet.

A role with CREATE on that database can make a schema ``pgsub`` where there is none, even while a command runs. A type
with a cast of its own, or the predicate of an index, would run code with the rights of the session's user. Nobody but
its owner, or a superuser, can exchange a schema that is there. Therefore the owner and the form of the ledger are
checked before each statement that names it.
"""

from __future__ import annotations

import re
from typing import Any

import psycopg
from psycopg import sql

from pgsub.common.errors import StateForbids
from pgsub.common.query import scalar
from pgsub.common.quoting import word
from pgsub.target.session import ledger_privileges
from pgsub.target.session.ledger_code import TRUSTED

#: A relation of the ledger in a statement, which a literal, such as for to_regclass, is not.
_LEDGER = re.compile(r"(?<!['\w])\"?pgsub\"?\.")
#: Whether the schema's owner is trusted; no row without it. A schema without tables is no ledger, but may become one.
_OWNED = f"""
WITH {TRUSTED}
SELECT n.nspowner IN (SELECT oid FROM trusted) FROM pg_catalog.pg_namespace n WHERE n.nspname = 'pgsub'
"""


def guard(connection: psycopg.Connection[Any]) -> None:
    """Let a session read the ledger only if it is trusted.

    A statement that reads another one raises :class:`~pgsub.common.errors.StateForbids`, or
    ``psycopg.errors.UndefinedTable`` if there is none.
    """
    client = issubclass(connection.cursor_factory, psycopg.ClientCursor)
    connection.cursor_factory = _GuardedClientCursor if client else _GuardedCursor


class _GuardedCursor(psycopg.Cursor[Any]):
    def execute(self, query: Any, params: Any = None, **more: Any) -> Any:
        """Execute a statement, after a check if it is about the ledger."""
        _check(self.connection, query)
        return super().execute(query, params, **more)


class _GuardedClientCursor(psycopg.ClientCursor[Any]):
    def execute(self, query: Any, params: Any = None, **more: Any) -> Any:
        """Execute a statement, after a check if it is about the ledger."""
        _check(self.connection, query)
        return super().execute(query, params, **more)


def _check(connection: psycopg.Connection[Any], query: Any) -> None:
    text = query.as_string(connection) if isinstance(query, sql.Composable) else query
    if _LEDGER.search(text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)) is None:
        return
    readable = trusted(connection)
    if readable is None:
        raise psycopg.errors.UndefinedTable('schema "pgsub" does not exist')
    # guard: a ledger that somebody planted on the publisher is not read
    if not readable:
        raise _untrusted(connection)


def trusted(connection: psycopg.Connection[Any]) -> bool | None:
    """Return whether the ledger may be read, now and later: nobody else can exchange it. None if there is none."""
    owned = scalar(connection, _OWNED)
    return None if owned is None else owned is True and ledger_privileges.trusted(connection)


def _untrusted(connection: psycopg.Connection[Any]) -> StateForbids:
    info = connection.info
    return StateForbids(
        f'schema "pgsub" of database "{info.dbname}" on host "{info.host}", port {info.port} cannot be trusted',
        detail="It belongs to a role that is neither the session's user, nor a superuser, nor the database's owner, or"
        f' something is attached to it that pgsub did not make. It could run code with the rights of "{info.user}".',
        hint="Find out who made it, and remove it or give it to the database's owner:\n"
        f"psql -d {word(info.dbname)} -c '\\dn+ pgsub' -c '\\d+ pgsub.*'",
        sqlstate="42501",
    )
