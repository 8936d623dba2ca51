"""The statements that a pipeline has prepared in its session. Those that were prepared first make room for others."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
from psycopg import sql

from pgsub.target.sql.statement_builder import Statement

#: Maximum cost of prepared statements, counted in parameters, because session and server keep them. Updates of a table
#: with many columns have a statement for each set of columns that are NULL or not sent.
PREPARED = 40_000
_STATEMENT = 8  #: cost of a statement without parameters

_OWN_STATEMENTS = "SELECT name FROM pg_catalog.pg_prepared_statements WHERE pg_catalog.starts_with(name, %s)"

#: invalid_sql_statement_name: after a rollback that it sees, psycopg deallocates every prepared statement of a session,
#: including the pipeline's. This is no fault of a row; the statements are prepared again.
DEALLOCATED = "26000"


class PreparedStatements:
    """The prepared statements of one pipeline.

    :param prefix: prefix of their names, unique in the session.
    :param sent: called after each command in the pipeline, with the tag and the statement that it prepares, if any.
    """

    def __init__(
        self, connection: psycopg.Connection, prefix: str, sent: Callable[[object, Statement | None], None]
    ) -> None:
        self._prefix = f"{prefix}_"
        self._connection = connection
        self._sent = sent
        self._known: dict[int, tuple[bytes, Statement]] = {}  # by name or text; oldest first
        self._names = self._cost = 0

    def name(self, statement: Statement, tag: object) -> bytes:
        """Prepare the statement once, and return its name. Of one that is not prepared, return the text."""
        known = self._known.get(id(statement))
        if known is not None:
            return known[0]
        self._cost += _STATEMENT + len(statement.types)
        while self._cost > PREPARED and self._known:
            self._deallocate(next(iter(self._known)), tag)
        name = text = statement.text.as_bytes(self._connection)
        if not statement.replanned:
            self._names += 1
            name = f"{self._prefix}{self._names}".encode()
            self._connection.pgconn.send_prepare(name, text, statement.types or None)
            self._sent(tag, statement)
        self._known[id(statement)] = (name, statement)  # holding the statement keeps its id unique
        return name

    def _deallocate(self, key: int, tag: object) -> None:
        name, statement = self._known.pop(key)
        self._cost -= _STATEMENT + len(statement.types)
        if not statement.replanned:
            self._connection.pgconn.send_query_params(b"DEALLOCATE " + name, None)
            self._sent(tag, None)

    def forget(self) -> None:
        """Forget all, because a failed Parse leaves no statement behind and none may be missing."""
        self._known.clear()
        self._cost = 0

    def deallocate_forgotten(self) -> None:
        """Deallocate them one by one: psycopg has its own in the session, and does not notice every DEALLOCATE ALL."""
        for (name,) in self._connection.execute(_OWN_STATEMENTS, (self._prefix,), prepare=False).fetchall():
            text = sql.SQL("DEALLOCATE {}").format(sql.Identifier(name))
            self._connection.execute(text, prepare=False)
