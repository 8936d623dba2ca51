"""How clients are kept from writing to a database, and let in again.

NOTES
*read-only* sets default_transaction_read_only for the database. Sessions take it when they begin, so all that are
there are ended. A client that sets it off for itself is not kept out. *connect* takes the privilege CONNECT from all
roles but those of pgsub: superusers and the database's owner are not kept out. *command* leaves it to the user.
pgsub's own sessions set default_transaction_read_only off.

A fence is put and lifted in the caller's transaction, together with the row of the journal. What it replaced is kept
there.
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

from pgsub.common import server_words
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
# What a session without pg_read_all_stats may not see of others is NULL.
_SESSIONS = """
SELECT a.pid FROM pg_catalog.pg_stat_activity a
 WHERE a.datname = current_database() AND a.pid <> pg_catalog.pg_backend_pid() AND a.pid <> ALL(%s::int[])
   AND coalesce(a.backend_type, 'client backend') = 'client backend' AND a.usesysid IS NOT NULL
   AND NOT EXISTS (SELECT FROM pg_catalog.pg_stat_replication w WHERE w.pid = a.pid)
   AND NOT (a.application_name ~ '^pgsub [0-9]+ ' AND coalesce(
        pg_catalog.has_table_privilege(a.usesysid, pg_catalog.to_regclass('pgsub.control'), 'UPDATE'), false))
"""
# InitPostgres takes this lock before it reads settings and privileges, and holds it until the session is shown.
_STARTING = """
SELECT l.pid FROM pg_catalog.pg_locks l
 WHERE l.locktype = 'object' AND l.classid = 'pg_catalog.pg_database'::regclass AND l.granted
   AND l.objid = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = current_database())
   AND l.pid <> pg_catalog.pg_backend_pid() AND l.pid <> ALL(%s::int[])
"""
_OLD = f"{_SESSIONS} AND (a.backend_start <= %s::timestamptz OR a.pid = ANY(%s::int[]))"
_POLL = 0.01
# Runs a command, and kills it with all that it started where standard input ends without a line: this process is gone
# then, whatever ended it, and the next run may be told to do the opposite. What watches is no child of the command,
# which may wait for all that it has.
_WATCHED = """
exec 3<&0 </dev/null
( { read -r _ <&3 || kill -s KILL 0; } & )
exec 3<&-
exec /bin/sh -c "$1"
"""


def put(session: psycopg.Connection, way: str, roles: Collection[str]) -> dict[str, Any]:
    """Keep clients from writing, in the open transaction; sessions that are there are not ended yet.

    :param way: one of :data:`WAYS`; ``command`` does nothing here.
    :param roles: who may connect all the same.
    :return: what was replaced.
    :raises psycopg.Error: the session's role may not.
    """
    if way == READ_ONLY:
        before = scalar(session, _PREVIOUS)
        session.execute(_alter(sql.SQL(_ON), session))
        return {"setting": before}
    if way == CONNECT:
        return connect_privilege.take(session, roles)
    return {}


def restore(session: psycopg.Connection, way: str, saved: Mapping[str, Any]) -> None:
    """Lift a fence, in the open transaction: as it was before it was put."""
    if way == READ_ONLY:
        before = saved.get("setting")
        change = sql.SQL(_RESET)
        if before is not None:
            change = sql.SQL("SET default_transaction_read_only = {}").format(sql.Literal(before))  # type: ignore[assignment]
        session.execute(_alter(change, session))
    elif way == CONNECT:
        connect_privilege.give_back(session, saved)


def lift(session: psycopg.Connection, way: str, saved: Mapping[str, Any]) -> None:
    """Let clients write, in the open transaction, whatever was set before.

    :param saved: what the first fence of this database replaced.
    """
    if way != READ_ONLY:
        restore(session, way, saved)
    # said in so many words: the whole server may be read-only, or its owner may have kept clients from writing
    if way != COMMAND or scalar(session, _PREVIOUS) is not None:
        session.execute(_alter(sql.SQL(_OFF), session))


def end_sessions(session: psycopg.Connection, keep: Collection[int], deadline: float) -> int:
    """End the sessions of clients that began before this call, and wait until none of them is left.

    Walsenders and sessions of pgsub's workers stay.

    :param keep: pids that stay.
    :param deadline: of ``time.monotonic()``.
    :return: how many were ended.
    :raises PermissionMissing: the role may not.
    :raises TimeoutExpired: some stay.
    """
    now = str(scalar(session, "SELECT pg_catalog.clock_timestamp()::text"))
    first = set(sessions(session, keep))
    # guard: a session that is starting counts as one that began before
    first.update(_starting(session, keep))
    ended: set[int] = set()
    while True:
        # those are waited for: some are no clients, and end or show themselves in a moment; asked for first, as one
        # that shows itself between the two questions would be in neither answer
        starting = [pid for pid in _starting(session, keep) if pid in first]
        shown = [pid for (pid,) in session.execute(_OLD, (list(keep), now, list(first))).fetchall()]
        if not shown and not starting:
            return len(ended)
        ended.update(shown)
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
    """Return the pids of clients' sessions."""
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
    """Run a command of the user's: ``sh -c``, with what it is for in its environment; its output goes to stderr.

    :param action: PGSUB_SWITCHOVER: fence, release or promote.
    :param giving: connection string of PGSUB_GIVING; ``taking`` of PGSUB_TAKING, both without secrets.
    :param seconds: after which it is killed.
    :raises TimeoutExpired: it took longer.
    :raises PgsubError: it ended with another status than 0.
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
                os.killpg(process.pid, signal.SIGKILL)  # with all that it started: none of it may have an effect later
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


def _alter(change: sql.Composable, session: psycopg.Connection) -> sql.Composed:
    return sql.SQL("ALTER DATABASE {} {}").format(sql.Identifier(session.info.dbname), change)
