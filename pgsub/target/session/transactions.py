"""Transactions of a target session: durable ones, and ones with a short lock timeout."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psycopg


@contextlib.contextmanager
def durable(connection: psycopg.Connection) -> Iterator[psycopg.Connection]:
    """Open a transaction that is flushed to disk at its commit, whatever the subscription's synchronous_commit is."""
    with connection.transaction():
        # guard: state changes are durable
        connection.execute("SET LOCAL synchronous_commit = on")
        yield connection


def lock_timeout(connection: psycopg.Connection) -> None:
    """Limit the wait for a lock of the ledger, because the session holds another one meanwhile."""
    connection.execute("SET LOCAL lock_timeout = '1s'")
