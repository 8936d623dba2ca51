"""Sessions that read a ledger only if it is trusted, although there may be none when they are opened.

A role with CREATE on a database can make a schema ``pgsub`` where there is none, even while a command runs. A type with
a cast of its own, or the predicate of an index, would run code with the rights of the session's user. Nobody but its
owner, or a superuser, can exchange a schema that is there. Therefore the owner and the form of the ledger are checked
before a statement that names it, until it is known to belong to the session's user or to a superuser. That there was
none proves nothing for the next statement.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import psycopg
from psycopg import sql
from psycopg.pq import TransactionStatus

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
#: Whether the schema belongs to the session's user or a superuser; no row without it.
_OWN = """
SELECT o.rolsuper OR o.rolname = current_user
  FROM pg_catalog.pg_namespace n JOIN pg_catalog.pg_roles o ON o.oid = n.nspowner WHERE n.nspname = 'pgsub'
"""
#: Sessions that have found a ledger that nobody can exchange.
_known: WeakSet[psycopg.Connection[Any]] = WeakSet()


def guard(connection: psycopg.Connection[Any]) -> None:
    """Let a session read the ledger only if it is trusted.

    A statement that reads another one raises :class:`~pgsub.common.errors.StateForbids`, or
    ``psycopg.errors.UndefinedTable`` if there is none.
    """
    client = issubclass(connection.cursor_factory, psycopg.ClientCursor)
    connection.cursor_factory = _GuardedClientCursor if client else _GuardedCursor


def check(connection: psycopg.Connection[Any]) -> None:
    """Check that there is a ledger, and that it is trusted. Every worker and copy checks it when it starts.

    :raises PermissionMissing: see :func:`pgsub.target.session.ledger_privileges.check`.
    :raises psycopg.errors.UndefinedTable: there is none.
    """
    owned = scalar(connection, _OWNED)
    # guard: no ledger is no ledger that may be read
    if owned is None:
        raise _missing()
    ledger_privileges.check(connection)
    if not owned:
        raise _untrusted(connection)


class _GuardedCursor(psycopg.Cursor[Any]):
    def execute(self, query: Any, params: Any = None, **more: Any) -> Any:
        """Execute a statement, after a check if it is about the ledger."""
        _check(self.connection, query)
        return super().execute(query, params, **more)

    def executemany(self, query: Any, params_seq: Iterable[Any], **more: Any) -> None:
        """Execute a statement with each of several parameters, after a check if it is about the ledger."""
        _check(self.connection, query)
        super().executemany(query, params_seq, **more)


class _GuardedClientCursor(psycopg.ClientCursor[Any]):
    def execute(self, query: Any, params: Any = None, **more: Any) -> Any:
        """Execute a statement, after a check if it is about the ledger."""
        _check(self.connection, query)
        return super().execute(query, params, **more)


def _check(connection: psycopg.Connection[Any], query: Any) -> None:
    if connection in _known:
        return
    text = query.as_string(connection) if isinstance(query, sql.Composable) else query
    if _LEDGER.search(text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)) is None:
        return
    ended = connection.info.transaction_status == TransactionStatus.IDLE
    readable = trusted(connection)
    if readable is None:
        raise _missing()
    # guard: a ledger that somebody planted is not read
    if not readable:
        raise _untrusted(connection)
    # The database's owner could exchange a schema of its own. A transaction may have made it, and be rolled back.
    if ended and scalar(connection, _OWN) is True:
        _known.add(connection)


def _missing() -> psycopg.errors.UndefinedTable:
    return psycopg.errors.UndefinedTable('schema "pgsub" does not exist')


def trusted(connection: psycopg.Connection[Any], *, foreign: bool = False) -> bool | None:
    """Return whether the ledger may be read, None if there is none. Only its owner, or a superuser, can exchange it.

    :param foreign: pgsub does not use it, but only looks at it: the database's owner is not trusted with it.
    """
    owned = scalar(connection, _OWN if foreign else _OWNED)
    return None if owned is None else owned is True and ledger_privileges.trusted(connection)


def _untrusted(connection: psycopg.Connection[Any]) -> StateForbids:
    info = connection.info
    return StateForbids(
        f'schema "pgsub" of database "{info.dbname}" on host "{info.host}", port {info.port} cannot be trusted',
        detail="It belongs to a role that is neither the session's user, nor a superuser, nor the database's owner, or"
        f' something is attached to it that pgsub did not make. It could run code with the rights of "{info.user}".',
        hint="Remove it unless it is the ledger of your subscriptions. See who made it, and what is in it:\n"
        f"psql -d {word(info.dbname)} -c '\\dn+ pgsub' -c '\\d+ pgsub.*'",
        sqlstate="42501",
    )
