"""Transactions of a target session: durable ones, and those that wait for no lock for long."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psycopg


@contextlib.contextmanager
def durable(connection: psycopg.Connection) -> Iterator[psycopg.Connection]:
    """A transaction that is on disk when it ends well, whatever the subscription's synchronous_commit is."""
    with connection.transaction():
        # guard: state changes are durable
        connection.execute("SET LOCAL synchronous_commit = on")
        yield connection


def lock_timeout(connection: psycopg.Connection) -> None:
    """Nothing waits long for a ledger row while it holds another (hand-over, TRUNCATE of a re-sync)."""
    connection.execute("SET LOCAL lock_timeout = '1s'")
