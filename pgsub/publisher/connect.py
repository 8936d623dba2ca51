"""Connections to the publisher; no other module opens any. Mirrors libpqrcv_connect (libpqwalreceiver.c)."""

from __future__ import annotations

import contextlib
from typing import Any

import psycopg
from psycopg import pq
from psycopg.conninfo import make_conninfo
from psycopg.rows import TupleRow

from pgsub.common.connections import conninfo as ci
from pgsub.common.connections.ping import ping
from pgsub.common.errors import ProtocolViolation, StateForbids
from pgsub.common.plural import counted
from pgsub.publisher.faults import refused, translating

Connection = psycopg.Connection[TupleRow]

#: The oldest supported version of the publisher.
MINIMUM_VERSION = 140000
#: Settings that decide the text of values, beside :data:`pgsub.common.connections.conninfo.PINNED`. A walsender
#: applies a reload of its server's configuration to all other settings. One key could then have two texts in a change
#: set, and would count as two keys.
_ONE_TEXT = {"intervalstyle": "postgres", "timezone": "UTC", "bytea_output": "hex"}


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
    ci.pin(connection, "publisher", {**_ONE_TEXT, **ci.only_tables(version)})
