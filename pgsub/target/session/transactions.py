"""Transactions of a target session: durable ones, ones with a short lock timeout, and their cancellation."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import psycopg

_CANCEL_SECONDS = 2.0
#: Seconds between two cancel requests: a statement may begin just after the first one.
AGAIN_SECONDS = 0.3


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


def cancel(session: psycopg.Connection) -> None:
    """Cancel the running statement from another thread; close the connection to a server that cannot be reached.

    If a COMMIT that waits for a synchronous standby is canceled, it is done nevertheless (SyncRepWaitForLSN).
    """
    try:
        session.cancel_safe(timeout=_CANCEL_SECONDS)
    except (psycopg.Error, OSError):
        with contextlib.suppress(psycopg.Error, OSError), socket.socket(fileno=os.dup(session.fileno())) as line:
            line.shutdown(socket.SHUT_RDWR)
