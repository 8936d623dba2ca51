"""Transactions of a target session: durable ones, and those that wait for no lock for long."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psycopg


@contextlib.contextmanager
def durable(connection: psycopg.Connection) -> Iterator[psycopg.Connection]:
    """Open a transaction that is on disk once it has committed, whatever the subscription's synchronous_commit is."""
    with connection.transaction():
        # guard: state changes are durable
        connection.execute("SET LOCAL synchronous_commit = on")
        yield connection


def lock_timeout(connection: psycopg.Connection) -> None:
    """Limit the wait for a lock of the ledger: it is waited for while another is held."""
    connection.execute("SET LOCAL lock_timeout = '1s'")
