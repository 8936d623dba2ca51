"""Queries for one row or one value, and checks of values from a server."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import psycopg
from psycopg import sql
from psycopg.abc import Params
from psycopg.pq import TransactionStatus

from pgsub.common import quoting
from pgsub.common.errors import ProtocolViolation


def row(
    connection: psycopg.Connection, query: str | sql.Composable, params: Params | None = None
) -> tuple[Any, ...] | None:
    """Return the first row of a query; None if there is none."""
    text = query.encode() if isinstance(query, str) else sql.Composed([query])
    return connection.execute(text, params).fetchone()


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
