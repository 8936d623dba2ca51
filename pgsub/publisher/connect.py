"""Connections to the publisher; no other module opens any. Mirrors libpqrcv_connect (libpqwalreceiver.c)."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import psycopg
from psycopg import pq
from psycopg.conninfo import make_conninfo
from psycopg.rows import TupleRow

from pgsub.common import server_words
from pgsub.common.connections import conninfo as ci
from pgsub.common.connections import conninfo_check
from pgsub.common.connections.ping import ping
from pgsub.common.errors import PermissionMissing, PgsubError, ProtocolViolation, PublisherUnavailable, StateForbids
from pgsub.common.machine.out_of_resources import no_descriptor
from pgsub.common.plural import counted
from pgsub.publisher.server_errors import REPLICATION_ROLE, replication_hint, translating

Connection = psycopg.Connection[TupleRow]

#: The oldest supported version of the publisher.
MINIMUM_VERSION = 140000
#: Settings that decide the text of values, beside :data:`pgsub.common.connections.conninfo.PINNED`. A walsender
#: applies a reload of its server's configuration to all other settings. One key could then have two texts in a change
#: set, and would count as two keys.
_ONE_TEXT = {"intervalstyle": "postgres", "timezone": "UTC", "bytea_output": "hex"}
#: A walsender says by a warning that it goes on without a publication. The role may have turned warnings off.
_WARNS = {"client_min_messages": "warning"}

#: Hints for a refused connection, for which libpq has no SQLSTATE. The first match counts.
_REFUSALS = (
    (r"password authentication failed|no password supplied|authentication failed|empty password",
     "Check the user and the password (passfile, service or --connection)."),
    (r"no pg_hba.conf entry|pg_hba.conf rejects",
     "Add a line for this user, address and the database itself to the publisher's pg_hba.conf; "
     "the keyword replication does not cover logical replication."),
    (r'role "[^"]*" (does not exist|is not permitted to log in)', "Check the user in --connection."),
    (r'database "[^"]*" does not exist', "Check dbname in --connection."),
    (r"starting up|shutting down|recovery mode|not (yet )?accepting connections|administrator command",
     "Try again when the publisher accepts connections."),
    (r"max_wal_senders", "Raise max_wal_senders on the publisher, or end a walsender that nobody needs."),
    (r"too many (clients|connections)|remaining connection slots",
     "Raise max_connections on the publisher, or end sessions that nobody needs."),
    (r"could not translate host name|failed to resolve|name resolution|Name or service|Temporary failure in name",
     "Check the host name in --connection."),
    (r"timeout expired|timed out|[Cc]onnection refused|No route|unreachable|No such file",
     "Check that the publisher runs and that host and port in --connection are right."),
    (r"SSL|certificate", "Check sslmode and the certificates named in --connection."),
    (r'definition of service "|service file "', "Correct service= in --connection, or define that service."),
)  # fmt: skip
_POOLER = re.compile(r"unsupported startup parameter|unsupported pkt type|FATAL:\s+no such database: ")
_POOLER_HINT = (
    "A connection pooler seems to answer, and logical replication does not work through one. "
    "Give the address and port of the server itself in --connection."
)


def connect(
    conninfo: str,
    *,
    application_name: str,
    replication: bool = False,
    encoding: str = "UTF8",
    timeout: int = 10,
    must_use_password: bool = False,
) -> Connection:
    """Open a session, in autocommit mode, with all settings that text values and long waits rely on.

    Parameters are interpolated by the client, because a walsender speaks only the simple query protocol.

    :param conninfo: as given by the user; it may name a passfile or service.
    :param application_name: used unless the conninfo has one, as the server uses the subscription's name.
    :param replication: make the session a walsender of the database.
    :param encoding: client_encoding: the encoding of the target's database.
    :param timeout: seconds for each host and address, unless the conninfo has connect_timeout.
    :param must_use_password: refuse a publisher that asks for no password; see :func:`password_missing`.
    :raises PublisherUnavailable: unreachable, refused, shutting down, wrong password, no such database.
    :raises PermissionMissing: the role may not start a walsender.
    :raises StateForbids: a connection pooler answered, a server older than 14, or one that asked for no password.
    """
    given = ci.usable(ci.parse(conninfo, "publisher"))
    belts = ci.missing_defaults(given, {**ci.KEEPALIVES, "connect_timeout": str(timeout)})
    params = {**belts, "fallback_application_name": application_name, **given, "client_encoding": encoding}
    params.pop("replication", None)
    if replication:
        params["replication"] = "database"
    try:
        connection: Connection = psycopg.connect(
            "",
            autocommit=True,
            prepare_threshold=None,
            cursor_factory=psycopg.ClientCursor,
            **params,  # type: ignore[arg-type]
        )
    except (psycopg.Error, OSError, UnicodeError) as error:
        raise refused(error, ci.endpoint(given), given.get("user")) from None
    with contextlib.ExitStack() as stack:
        stack.callback(connection.close)
        # guard: a required password is enforced
        if must_use_password and not connection.pgconn.used_password:
            raise password_missing("Non-superuser cannot connect if the server does not request a password.")
        with translating(connection, "prepare the session on the publisher"):
            _prepare_session(connection)
        stack.pop_all()
    return connection


def refused(error: BaseException, endpoint: str, user: str | None = None) -> PgsubError:
    """Make the error of a failed connection attempt. It never contains the conninfo or a password.

    :param endpoint: description of the server that may be shown.
    :param user: role name of the conninfo, if it has one.
    """
    lines = server_words.lines(error) or [type(error).__name__]
    lead = r"^(connection is bad: |(connection failed: )?(connection to server .* failed: )?)((FATAL|ERROR):\s+)?"
    message = f"could not connect to the publisher: {re.sub(lead, '', lines[0]) or lines[0]}"
    state = error.sqlstate if isinstance(error, psycopg.Error) else None
    whole = "\n".join(lines)
    more = [*lines[1:], conninfo_check.missing_service(whole) or ""]
    detail = " ".join(filter(None, [f"The publisher is {endpoint}." if endpoint else "", *more])) or None
    if _POOLER.search(whole):
        return StateForbids(message, detail=detail, hint=_POOLER_HINT, sqlstate=state)
    if REPLICATION_ROLE.search(whole):
        return PermissionMissing(message, detail=detail, hint=replication_hint(user), sqlstate=state or "42501")
    hint = next((hint for pattern, hint in _REFUSALS if re.search(pattern, whole)), None)
    if hint is None and (lack := no_descriptor()) is not None:
        message, hint = f"could not connect to the publisher: {lack.message}", lack.hint
    return PublisherUnavailable(message, detail=detail, hint=hint, sqlstate=state)


def password_missing(detail: str) -> StateForbids:
    """Make the error of libpqrcv_connect and libpqrcv_check_conninfo for a missing password that is required."""
    return StateForbids(
        "password is required",
        detail=detail,
        hint="Give user and password in --connection, and let pg_hba.conf of the publisher ask that user for it"
        " (scram-sha-256); or let a superuser of the target set --no-password-required.",
        sqlstate="2F003",
    )


def is_replication(connection: Connection) -> bool:
    """Return whether the session is a walsender, which takes replication commands."""
    return "replication" in connection.info.get_parameters()


def answer(connection: Connection, command: str, fields: int) -> tuple[Any, ...]:
    """Return the row of a replication command, after the checks of libpqwalreceiver.c.

    :param fields: minimum number of columns.
    :raises ProtocolViolation: there is not exactly one row, or it has fewer columns.
    """
    rows = connection.execute(command.encode()).fetchall()
    if len(rows) != 1 or len(rows[0]) < fields:
        found = counted(len(rows), "row") + (f" of {counted(len(rows[0]), 'field')}" if rows else "")
        raise ProtocolViolation(
            "invalid response from the publisher",
            detail=f"{command.partition(' ')[0]} gave {found}, expected 1 row of {fields} or more fields.",
        )
    return rows[0]


def address(connection: Connection) -> str:
    """Make a conninfo, without a password, for the server that a session is connected to; its own may name several."""
    info = connection.info
    params = {key: value for key, value in info.get_parameters().items() if key not in ("replication", "options")}
    where = {"host": info.host, "hostaddr": info.hostaddr, "port": str(info.port)}
    return make_conninfo("", **{**params, **where, "connect_timeout": "5"})


def refuses(conninfo: str) -> bool:
    """Return whether a server answers that it accepts no connections now, for example because it shuts down.

    PQping checks for SQLSTATE 57P03. So other refusals (user, number of connections) do not count, in any language.
    """
    return ping(conninfo) == pq.Ping.REJECT


def _prepare_session(connection: Connection) -> None:
    version = connection.info.server_version
    if version < MINIMUM_VERSION:
        raise StateForbids(
            f"the publisher runs PostgreSQL {version // 10000}, which is too old",
            hint="pgsub needs PostgreSQL 14 or newer as the publisher.",
        )
    # guard: a reload of the publisher's configuration gives no key another text, without "**_ONE_TEXT, "
    ci.pin(connection, "publisher", {**_ONE_TEXT, **_WARNS, **ci.only_tables(version)})
