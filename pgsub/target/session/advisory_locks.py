"""Advisory locks in the target database.

Anyone who may connect to the database can hold one. A prepared transaction, which belongs to no session, can hold one
too. So every wait for a lock is limited, and the error names the holder.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import psycopg

from pgsub.common import quoting
from pgsub.common.errors import LockHeld
from pgsub.common.query import row, shown

#: "pgsu", used with a subid: this lock ensures one launcher per subscription, across hosts and state stores.
LAUNCHER = 0x70677375
#: Seconds to wait for a lock that sessions of pgsub hold for a moment.
PATIENCE_SECONDS = 5.0
_PAUSE = 0.05

#: A lock as an argument of the server's functions: one bigint, or two integers.
Key = tuple[int] | tuple[int, int]

_HOLDER = """
SELECT a.pid, coalesce(a.usename, x.owner)::text, coalesce(a.application_name, x.gid),
       CASE WHEN a.wait_event = 'SyncRep' THEN 'a synchronous standby of the target to confirm a commit'
            WHEN a.wait_event_type = 'Lock' THEN 'another lock' END
  FROM pg_catalog.pg_locks l LEFT JOIN pg_catalog.pg_stat_activity a USING (pid)
  LEFT JOIN pg_catalog.pg_locks own ON l.pid IS NULL AND own.pid IS NULL AND own.locktype = 'transactionid'
   AND own.granted AND own.virtualtransaction = l.virtualtransaction
  LEFT JOIN pg_catalog.pg_prepared_xacts x ON x.transaction = own.transactionid
 WHERE l.locktype = 'advisory' AND l.granted AND coalesce(a.pid <> pg_catalog.pg_backend_pid(), x.gid IS NOT NULL)
   AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database())
   AND (l.classid, l.objid, l.objsubid) = (%s::bigint::oid, %s::bigint::oid, %s) ORDER BY l.mode LIMIT 1
"""


class Holder(NamedTuple):
    """The session, or prepared transaction, that holds a lock.

    :ivar pid: PID of the session; None: a prepared transaction.
    :ivar name: application_name of the session, or the identifier of the transaction.
    :ivar waits_for: what the session waits for; None: nothing, or it is hidden (see pg_read_all_stats).
    """

    pid: int | None
    user: str
    name: str
    waits_for: str | None


def take(
    connection: psycopg.Connection,
    key: Key,
    *,
    scope: str = "",
    seconds: float | None = None,
    pause: Callable[[float], object] = time.sleep,
) -> bool:
    """Take a lock, or give up, and return whether the session has it.

    :param scope: ``xact_`` for a lock of the open transaction; otherwise it is a session lock.
    :param seconds: maximum wait; None: :data:`PATIENCE_SECONDS`.
    :param pause: waits for the given seconds. A true result ends the wait for the lock, as with ``Event.wait``.
    """
    query = f"SELECT pg_catalog.pg_try_advisory_{scope}lock({', '.join(['%s'] * len(key))})"
    deadline = time.monotonic() + (PATIENCE_SECONDS if seconds is None else seconds)
    while row(connection, query, key) != (True,):
        if time.monotonic() > deadline or pause(_PAUSE):
            return False
    return True


def release(connection: psycopg.Connection, key: Key) -> None:
    """Release a lock of the session."""
    row(connection, f"SELECT pg_catalog.pg_advisory_unlock({', '.join(['%s'] * len(key))})", key)


@contextlib.contextmanager
def holding(connection: psycopg.Connection, key: Key, seconds: float | None = None) -> Iterator[bool]:
    """Hold a session lock for the duration of the block; yield whether the session has it, as :func:`take`."""
    taken = take(connection, key, seconds=seconds)
    try:
        yield taken
    finally:
        with contextlib.suppress(psycopg.Error):  # the session ended, and its locks with it
            if taken:
                release(connection, key)


def take_for_transaction(connection: psycopg.Connection, key: Key, what: str) -> None:
    """Take a lock of the open transaction.

    :param what: error message, which tells what the holder is doing.
    :raises LockHeld: it was not free within :data:`PATIENCE_SECONDS`.
    """
    if not take(connection, key, scope="xact_"):
        raise held(connection, key, what)


def holder(connection: psycopg.Connection, key: Key) -> Holder | None:
    """Return the other session or the prepared transaction that holds a lock; None if there is none."""
    high, low = key if len(key) == 2 else (key[0] >> 32, key[0] & 0xFFFFFFFF)
    found = shown(connection, _HOLDER, (high, low, len(key)))
    return Holder(*found[0]) if found else None


def held(connection: psycopg.Connection, key: Key, message: str, hint: str = "") -> LockHeld:
    """Make the error for a lock that was not free in time. It names the holder.

    A session of pgsub that waits in a statement outlives its client, because the server does not check the connection
    meanwhile (SyncRepWaitForLSN, ProcSleep). pgsub cannot see whether the client is gone, so it ends no such session.
    To end one loses nothing: a COMMIT that waits for a standby is done, and is only not confirmed to the client.

    :param hint: a sentence before the statement that ends the session that holds it.
    """
    found = holder(connection, key)
    if found is None:
        detail = "Its advisory lock on the target was held until a moment ago."
        return LockHeld(message, detail=detail, hint="Try again.")
    if found.pid is None:  # pgsub takes none of these locks in a transaction that it prepares
        return LockHeld(
            message,
            detail=f'Prepared transaction "{found.name}" of role "{found.user}" on the target holds the advisory lock.',
            hint="It is none of pgsub. Let that role decide it, or roll it back on the target:\n"
            f"ROLLBACK PREPARED {quoting.literal(found.name)};",
        )
    waits, ended = "", ""
    if found.waits_for is not None:
        waits, ended = f" It waits for {found.waits_for}, even if its client is gone.", ", or its pgsub has ended"
    return LockHeld(
        message,
        detail=f'PID {found.pid} of the target, user "{found.user}", application_name "{found.name}", holds the'
        f" advisory lock.{waits}",
        hint=f"{hint}{' ' if hint else ''}If that is no session of pgsub{ended}, end it on the target:\n"
        f"SELECT pg_terminate_backend({quoting.literal(found.pid)});",
    )
