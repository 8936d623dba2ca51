"""Cancellation of statements in a session of the target, from another thread."""

from __future__ import annotations

import contextlib
import os
import socket

import psycopg

_CANCEL_SECONDS = 2.0
#: Seconds between two cancel requests: a statement may begin just after the first one.
AGAIN_SECONDS = 0.3


def cancel(session: psycopg.Connection) -> None:
    """Cancel the running statement, if any; close the connection to a server that cannot be reached.

    If a COMMIT that waits for a synchronous standby is canceled, it is done nevertheless (SyncRepWaitForLSN).
    """
    try:
        session.cancel_safe(timeout=_CANCEL_SECONDS)
    except (psycopg.Error, OSError):
        with contextlib.suppress(psycopg.Error, OSError), socket.socket(fileno=os.dup(session.fileno())) as line:
            line.shutdown(socket.SHUT_RDWR)
