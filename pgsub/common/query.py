"""Queries for one row or one value, and checks of values from a server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import psycopg
from psycopg import sql
from psycopg.abc import AdaptContext, Buffer, Params
from psycopg.adapt import Dumper, Loader, PyFormat
from psycopg.pq import Format, TransactionStatus

from pgsub.common import quoting
from pgsub.common.errors import ProtocolViolation
from pgsub.common.text import legible

#: SQL expression: the statement of another session of the same database, as one line of at most 80 characters. ``{}``
#: is the name of the row that has it. A database with SQL_ASCII sends only valid UTF-8, so there only ASCII is kept.
STATEMENT = """
pg_catalog.left(pg_catalog.regexp_replace({}.query,
    CASE pg_catalog.getdatabaseencoding() WHEN 'SQL_ASCII' THEN '[^!-~]+' ELSE '\\s+' END, ' ', 'g'), 80)"""


def row(
    connection: psycopg.Connection, query: str | sql.Composable, params: Params | None = None
) -> tuple[Any, ...] | None:
    """Return the first row of a query; None if there is none."""
    text = query.encode() if isinstance(query, str) else sql.Composed([query])
    return connection.execute(text, params).fetchone()


class _Legible(Loader):
    """A loader of texts that replaces bytes that are not in its encoding."""

    encoding = "UTF8"

    def load(self, data: Buffer) -> str:
        """Return the text."""
        return legible(bytes(data), self.encoding)


def shown(connection: psycopg.Connection, query: str, params: Params | None = None) -> list[tuple[Any, ...]]:
    """Return the rows of a query whose texts are only shown to people.

    Statements of sessions, names of roles and databases, and identifiers of prepared transactions have the encoding of
    the database in which they were written. The server converts them as if it was that of the session's database. If it
    cannot, they are read as it has them.
    """
    try:
        return _shown(connection, query, params)
    except (psycopg.errors.UntranslatableCharacter, psycopg.errors.CharacterNotInRepertoire):
        # parameters would not be converted either
        if connection.info.transaction_status is not TransactionStatus.IDLE or not repr(params).isascii():
            raise
    encoding = connection.info.parameter_status("server_encoding") or "UTF8"
    connection.execute("SET client_encoding = 'SQL_ASCII'")
    try:
        return _shown(connection, query, params, encoding)
    finally:
        connection.execute("SET client_encoding = 'UTF8'")


def _shown(
    connection: psycopg.Connection, query: str, params: Params | None, encoding: str = "UTF8"
) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.adapters.register_loader("text", type("_Loader", (_Legible,), {"encoding": encoding}))
        return cursor.execute(query.encode(), params).fetchall()


class Binary(NamedTuple):
    """A parameter of :func:`raw_cursor` in binary form, which the receive function of its type reads."""

    type_oid: int
    raw: bytes


class _BinaryDumper(Dumper):
    format = Format.BINARY

    def __init__(self, cls: type, context: AdaptContext | None = None, oid: int = 0) -> None:
        super().__init__(cls, context)
        self.oid = oid

    def get_key(self, obj: Binary, format: PyFormat) -> tuple[type, int]:  # type: ignore[override]
        """Return a key by which values of different types have different dumpers."""
        return self.cls, obj.type_oid

    def upgrade(self, obj: Binary, format: PyFormat) -> _BinaryDumper:
        """Return the dumper of a value's type."""
        return _BinaryDumper(self.cls, oid=obj.type_oid)

    def dump(self, obj: Binary) -> bytes:
        """Return the bytes."""
        return obj.raw


def raw_cursor(connection: psycopg.Connection) -> psycopg.RawCursor[tuple[Any, ...]]:
    """Return a cursor whose queries have ``$1`` and so on, and take :class:`Binary` values."""
    cursor = psycopg.RawCursor(connection)
    cursor.adapters.register_dumper(Binary, _BinaryDumper)
    return cursor


def scalar(connection: psycopg.Connection, query: str | sql.Composable, params: Params | None = None) -> Any:
    """Return the first column of the first row of a query; None if there is no row.

    :raises ProtocolViolation: the row has no column.
    """
    found = row(connection, query, params)
    if found == ():
        raise ProtocolViolation("the row of a query for one value has no column")
    return None if found is None else found[0]


def roll_back(connection: psycopg.Connection) -> None:
    """Roll back the open transaction, if there is one; the server logs a warning for a ROLLBACK without one."""
    if connection.info.transaction_status is not TransactionStatus.IDLE:
        connection.execute("ROLLBACK")


def leave_transaction(connection: psycopg.Connection) -> None:
    """Roll back the open transaction, if there is one. The session may have been lost; its next user gets the error."""
    with contextlib.suppress(psycopg.Error):
        roll_back(connection)


#: The relations of :func:`named` that exist: their names ``w``, namespaces ``n`` and rows ``c`` of pg_class.
NAMED = """unnest(%(schemas)s::text[], %(names)s::text[]) AS w (nspname, relname)
  JOIN pg_catalog.pg_namespace n ON n.nspname = w.nspname
  JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = w.relname"""


def named(names: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the parameters of a query over relations with these names: ``schemas`` and ``names``."""
    pairs = list(names)
    return {"schemas": [schema for schema, _ in pairs], "names": [name for _, name in pairs]}


def current_role(connection: psycopg.Connection) -> str:
    """Return the present role of the session, as a quoted name."""
    return quoting.name(str(scalar(connection, "SELECT current_user::text")))


def number(sent: Any, what: str) -> int:
    """Return an integer from a server that becomes part of a statement or of a line to paste.

    A server chooses the types of its columns: any of them may be text.

    :param what: description of the number, for the error.
    :raises ProtocolViolation: it is not an integer.
    """
    if not isinstance(sent, int):
        raise ProtocolViolation(f"invalid {what}")
    return sent
