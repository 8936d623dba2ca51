"""How clients are prevented from writing to a database, and allowed again.

NOTES

*read-only* sets default_transaction_read_only for the database. Sessions read it when they begin, so existing sessions
are ended. It does not stop a client that turns the setting off. *connect* revokes the privilege CONNECT from all roles
except pgsub's. It does not stop superusers and the database's owner. *command* leaves it to the user. pgsub's sessions
turn the setting off.

A fence is put up and lifted in the caller's transaction, together with the change of the journal, which also stores the
replaced settings.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Collection, Mapping
from typing import Any, LiteralString

import psycopg
from psycopg import sql

from pgsub.common import quoting, server_words
from pgsub.common.connections import conninfo as ci
from pgsub.common.errors import PermissionMissing, PgsubError, TimeoutExpired
from pgsub.common.query import current_role, scalar
from pgsub.common.subscription import SECRETS
from pgsub.switchover import connect_privilege

READ_ONLY, CONNECT, COMMAND = "read-only", "connect", "command"
WAYS = (READ_ONLY, CONNECT, COMMAND)

_ON: LiteralString = "SET default_transaction_read_only = on"
_OFF: LiteralString = "SET default_transaction_read_only = off"
_RESET: LiteralString = "RESET default_transaction_read_only"
_PREVIOUS = """
SELECT pg_catalog.split_part(c, '=', 2)
  FROM pg_catalog.pg_db_role_setting s, pg_catalog.unnest(s.setconfig) AS c
 WHERE s.setrole = 0 AND s.setdatabase = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
   AND c LIKE 'default\\_transaction\\_read\\_only=%'
"""
# Columns that require pg_read_all_stats are NULL for other roles.
_SESSIONS = """
SELECT a.pid FROM pg_catalog.pg_stat_activity a
 WHERE a.datname = current_database() AND a.pid <> pg_catalog.pg_backend_pid() AND a.pid <> ALL(%s::int[])
   AND coalesce(a.backend_type, 'client backend') = 'client backend' AND a.usesysid IS NOT NULL
   AND NOT EXISTS (SELECT FROM pg_catalog.pg_stat_replication w WHERE w.pid = a.pid)
   AND NOT (a.application_name ~ '^pgsub [0-9]+ ' AND coalesce(
        pg_catalog.has_table_privilege(a.usesysid, pg_catalog.to_regclass('pgsub.control'), 'UPDATE'), false))
"""
# InitPostgres takes this lock before it reads settings and privileges. It holds it until the session is visible.
_STARTING = """
SELECT l.pid FROM pg_catalog.pg_locks l
 WHERE l.locktype = 'object' AND l.classid = 'pg_catalog.pg_database'::regclass AND l.granted
   AND l.objid = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = current_database())
   AND l.pid <> pg_catalog.pg_backend_pid() AND l.pid <> ALL(%s::int[])
"""
_OLD = f"{_SESSIONS} AND (a.backend_start <= %s::timestamptz OR a.pid = ANY(%s::int[]))"
_POLL = 0.01
# Runs a command, and kills it with all of its processes if standard input ends without a line. In that case this
# process has died, and the next run may do the opposite. The watcher is not a child of the command, because the command
# may wait for its children.
_WATCHED = """
exec 3<&0 </dev/null
( { read -r _ <&3 || kill -s KILL 0; } & )
exec 3<&-
exec /bin/sh -c "$1"
"""


def put(session: psycopg.Connection, way: str, roles: Collection[str]) -> dict[str, Any]:
    """Prevent clients from writing, in the open transaction. Existing sessions are not ended yet.

    :param way: one of :data:`WAYS`. ``command`` does nothing here.
    :param roles: roles that may still connect.
    :return: the replaced settings.
    :raises psycopg.Error: the session's role has no permission.
    """
    if way == READ_ONLY:
        before = scalar(session, _PREVIOUS)
        session.execute(_alter(sql.SQL(_ON), session))
        return {"setting": before}
    if way == CONNECT:
        return connect_privilege.take(session, roles)
    return {}


def setting(session: psycopg.Connection) -> str | None:
    """Return the database's own setting of default_transaction_read_only, None if it has none."""
    found = scalar(session, _PREVIOUS)
    return None if found is None else str(found)


def restore(session: psycopg.Connection, way: str, saved: Mapping[str, Any]) -> None:
    """Lift a fence in the open transaction, and restore the former state."""
    if way == READ_ONLY:
        before = saved.get("setting")
        change = sql.SQL(_RESET)
        if before is not None:
            change = sql.SQL("SET default_transaction_read_only = {}").format(sql.Literal(before))  # type: ignore[assignment]
        session.execute(_alter(change, session))
    elif way == CONNECT:
        connect_privilege.give_back(session, saved)


def lift(session: psycopg.Connection, way: str, saved: Mapping[str, Any]) -> None:
    """Let clients write, in the open transaction, regardless of the former state.

    :param saved: the settings that the first fence of this database replaced.
    """
    if way != READ_ONLY:
        restore(session, way, saved)
    # Set explicitly, because the whole server may be read-only, or its owner may have prevented writes.
    if way != COMMAND or scalar(session, _PREVIOUS) is not None:
        session.execute(_alter(sql.SQL(_OFF), session))


def end_sessions(session: psycopg.Connection, keep: Collection[int], deadline: float) -> None:
    """End the client sessions that began before this call, and wait until none is left.

    Walsenders and sessions of pgsub's workers are not ended.

    :param keep: PIDs of sessions that are not ended.
    :param deadline: in time of ``time.monotonic()``.
    :raises PermissionMissing: the role has no permission.
    :raises TimeoutExpired: some sessions remain.
    """
    now = str(scalar(session, "SELECT pg_catalog.clock_timestamp()::text"))
    first = set(sessions(session, keep))
    # guard: a session that is starting counts as one that began before
    first.update(_starting(session, keep))
    while True:
        # Starting sessions are waited for: some are not clients, and end or become visible soon. They are read first,
        # because one that becomes visible between the two queries would be in neither result.
        starting = [pid for pid in _starting(session, keep) if pid in first]
        shown = [pid for (pid,) in session.execute(_OLD, (list(keep), now, list(first))).fetchall()]
        if not shown and not starting:
            return
        _terminate(session, shown)
        if time.monotonic() > deadline:
            raise TimeoutExpired(
                "timeout while waiting for sessions of clients to end",
                detail=f"PIDs: {', '.join(map(str, [*shown, *starting]))}.",
            )
        time.sleep(_POLL)


def _starting(session: psycopg.Connection, keep: Collection[int]) -> list[int]:
    return [pid for (pid,) in session.execute(_STARTING, (list(keep),)).fetchall()]


def sessions(session: psycopg.Connection, keep: Collection[int]) -> list[int]:
    """Return the PIDs of client sessions."""
    return [pid for (pid,) in session.execute(_SESSIONS, (list(keep),)).fetchall()]


def _terminate(session: psycopg.Connection, pids: Collection[int]) -> None:
    try:
        session.execute("SELECT pg_catalog.pg_terminate_backend(p) FROM pg_catalog.unnest(%s::int[]) p", (list(pids),))
    except psycopg.errors.InsufficientPrivilege as error:
        words = server_words.said(error)
        raise PermissionMissing(
            f"could not end sessions of clients: {words.message}",
            detail=words.detail,
            hint=f"Let a superuser run this there:\nGRANT pg_signal_backend TO {current_role(session)};\n"
            "Sessions of superusers are ended by a superuser only.",
            sqlstate=error.sqlstate,
        ) from None


def run(command: str, action: str, giving: str, taking: str, seconds: float | None) -> None:
    """Run a user's command with ``sh -c`` and environment variables. Its output goes to stderr.

    :param action: PGSUB_SWITCHOVER: fence, release or promote.
    :param giving: connection string for PGSUB_GIVING. ``taking`` is for PGSUB_TAKING. Secrets are removed.
    :param seconds: limit after which the command is killed, None for no limit.
    :raises TimeoutExpired: the command took too long.
    :raises PgsubError: its exit status is not 0.
    """
    environment = {
        **os.environ,
        "PGSUB_SWITCHOVER": action,
        "PGSUB_GIVING": _public(giving),
        "PGSUB_TAKING": _public(taking),
    }
    process = subprocess.Popen(
        ["/bin/sh", "-c", _WATCHED, "sh", command],
        bufsize=0,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=2,
        start_new_session=True,
    )
    assert process.stdin is not None
    with process.stdin as line:
        try:
            code = process.wait(seconds)
            with contextlib.suppress(OSError):
                line.write(b"done\n")
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # all of its processes, because none may take effect later
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise TimeoutExpired(f"timeout while running the command to {action}", detail=command) from None
            raise
    if code != 0:
        raise PgsubError(
            f"the command to {action} failed with exit code {code}",
            detail=command,
            hint=f"Its output is above. To try it:\nPGSUB_SWITCHOVER={action} sh -c {shlex.quote(command)}",
        )


def _public(conninfo: str) -> str:
    hidden = (*SECRETS, "passfile")
    return ci.join({key: value for key, value in ci.parse(conninfo, "target").items() if key not in hidden})


def reopening(database: str, before: str | None = None) -> str:
    """Return the statement with which a user lets clients write on a database that is read-only.

    :param before: the setting that it had, None if unknown.
    """
    change = _OFF if before == "off" else _RESET
    # guard: a told statement runs in a session that is read-only
    return f"BEGIN READ WRITE; ALTER DATABASE {quoting.name(database)} {change}; COMMIT;"


def _alter(change: sql.Composable, session: psycopg.Connection) -> sql.Composed:
    return sql.SQL("ALTER DATABASE {} {}").format(sql.Identifier(session.info.dbname), change)
