"""The end of what runs on a session of the target, from another thread."""

from __future__ import annotations

import contextlib
import os
import socket

import psycopg

_CANCEL_SECONDS = 2.0
#: Seconds between two cancellations: what was canceled last may have been about to begin.
AGAIN_SECONDS = 0.3


def cancel(session: psycopg.Connection) -> None:
    """Cancel what runs there, if anything does; hang up on a server that cannot be told.

    A COMMIT that waits for a synchronous standby is done when it is canceled (SyncRepWaitForLSN).
    """
    try:
        session.cancel_safe(timeout=_CANCEL_SECONDS)
    except (psycopg.Error, OSError):
        with contextlib.suppress(psycopg.Error, OSError), socket.socket(fileno=os.dup(session.fileno())) as line:
            line.shutdown(socket.SHUT_RDWR)
