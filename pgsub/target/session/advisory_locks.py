"""Advisory locks of the target database.

Anyone who may connect to the database can hold one. So a lock is never waited for without an end, and the error names
the session that holds it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import psycopg

from pgsub.common import quoting
from pgsub.common.errors import LockHeld
from pgsub.common.query import row

#: "pgsu", with a subid: the lock that makes it one launcher a subscription, whatever host and state store it runs on.
LAUNCHER = 0x70677375
#: Seconds to wait for a lock that sessions of pgsub hold for a moment.
PATIENCE_SECONDS = 5.0
_PAUSE = 0.05

#: A lock as the server's functions name it: one bigint, or two integers.
Key = tuple[int] | tuple[int, int]

_HOLDER = """
SELECT a.pid, a.usename::text, a.application_name
  FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_stat_activity a USING (pid)
 WHERE l.locktype = 'advisory' AND l.granted AND a.pid <> pg_catalog.pg_backend_pid()
   AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database())
   AND (l.classid, l.objid, l.objsubid) = (%s::bigint::oid, %s::bigint::oid, %s) ORDER BY l.mode LIMIT 1
"""


def take(
    connection: psycopg.Connection,
    key: Key,
    *,
    scope: str = "",
    seconds: float | None = None,
    pause: Callable[[float], object] = time.sleep,
) -> bool:
    """Take a lock, or give up.

    :param scope: ``xact_`` for a lock of the open transaction; otherwise of the session.
    :param seconds: None for :data:`PATIENCE_SECONDS`.
    :param pause: waits for so many seconds; a true result ends the wait, as that of ``Event.wait``.
    :return: whether the session has the lock.
    """
    query = f"SELECT pg_catalog.pg_try_advisory_{scope}lock({', '.join(['%s'] * len(key))})"
    deadline = time.monotonic() + (PATIENCE_SECONDS if seconds is None else seconds)
    while row(connection, query, key) != (True,):
        if time.monotonic() > deadline or pause(_PAUSE):
            return False
    return True


@contextlib.contextmanager
def holding(connection: psycopg.Connection, key: Key, seconds: float | None = None) -> Iterator[bool]:
    """Hold a lock of the session as long as the block lasts; give whether the session has it, as :func:`take`."""
    taken = take(connection, key, seconds=seconds)
    try:
        yield taken
    finally:
        with contextlib.suppress(psycopg.Error):  # the session ended, and its locks with it
            if taken:
                row(connection, f"SELECT pg_catalog.pg_advisory_unlock({', '.join(['%s'] * len(key))})", key)


def take_for_transaction(connection: psycopg.Connection, key: Key, what: str) -> None:
    """Take a lock of the open transaction.

    :param what: what others do who hold it, for the error.
    :raises LockHeld: it was not free within :data:`PATIENCE_SECONDS`.
    """
    if not take(connection, key, scope="xact_"):
        raise held(connection, key, what)


def holder(connection: psycopg.Connection, key: Key) -> tuple[int, str, str] | None:
    """Return PID, user and application_name of the other session that holds a lock, None where there is none."""
    high, low = key if len(key) == 2 else (key[0] >> 32, key[0] & 0xFFFFFFFF)
    found = row(connection, _HOLDER, (high, low, len(key)))
    return None if found is None else (found[0], found[1], found[2])


def held(connection: psycopg.Connection, key: Key, message: str, hint: str = "") -> LockHeld:
    """Return the error for a lock that was not free in time, with the session that holds it.

    :param hint: a sentence that goes before the statement that ends the holder.
    """
    found = holder(connection, key)
    if found is None:
        detail = "Its advisory lock on the target was held until a moment ago."
        return LockHeld(message, detail=detail, hint="Try again.")
    pid, user, name = found
    return LockHeld(
        message,
        detail=f'PID {pid} of the target, user "{user}", application_name "{name}", holds the advisory lock.',
        hint=f"{hint}{' ' if hint else ''}If that is no session of pgsub, end it on the target:\n"
        f"SELECT pg_terminate_backend({quoting.literal(pid)});",
    )
