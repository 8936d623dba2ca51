"""Connection strings: environment, redaction, settings of their sessions. No connection is opened here.

libpq completes a conninfo from PGHOST and similar variables. With two servers that is a trap: the publisher would
silently become the target. So the process's own PG* variables are removed from the environment at the start, and only
complete the *target*.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import psycopg
from psycopg import pq, sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgsub.common import query
from pgsub.common.connections import session_role
from pgsub.common.errors import ProtocolViolation, StateForbids, UsageError
from pgsub.common.subscription import SECRETS

_ENVIRONMENT = {
    "PGHOST": "host",
    "PGHOSTADDR": "hostaddr",
    "PGPORT": "port",
    "PGDATABASE": "dbname",
    "PGUSER": "user",
    "PGPASSWORD": "password",
    "PGOPTIONS": "options",
    "PGSERVICE": "service",
    "PGAPPNAME": "application_name",
}

#: Matches a field in a line of a passfile, where colons and backslashes are escaped.

#: A peer that vanished without a FIN is noticed within a minute, whether it owes a reply (keepalives) or an
#: acknowledgement (tcp_user_timeout; without it the system retransmits for a quarter of an hour).
KEEPALIVES = {
    "connect_timeout": "10",
    "keepalives": "1",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "60000",
}

#: Only the name of an option is shown from libpq's message, because anything else may be part of a password.
_UNKNOWN_KEYWORD = re.compile(r'invalid (?:connection option|URI query parameter:?) ("[a-z_]{1,30}")')
#: Settings of every session, whatever a role's or a database's defaults are. Text values, the meaning of statements and
#: long waits depend on them. A row security policy must fail instead of filtering.
PINNED = {
    "search_path": "",
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    "default_transaction_deferrable": "off",
    "datestyle": "ISO",  # the order of day and month in a text column remains the server's own
    "extra_float_digits": "3",
    "row_security": "off",
    "array_nulls": "on",
    "transform_null_equals": "off",
    "lc_monetary": "C",  # money is written by one server as the other reads it
    "gin_fuzzy_search_limit": "0",  # an index returns all of its rows
    "standard_conforming_strings": "on",
    "quote_all_identifiers": "off",
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    # the servers must notice a vanished launcher too: its sessions hold locks, a snapshot, a temporary slot. No
    # tcp_user_timeout: a peer that reads nothing for so long would count as vanished, and apply may wait for a lock
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
}
#: Minor versions that introduced restrict_nonsystem_relation_kind; from 17 on it always exists.
_RESTRICTS_SINCE = {14: 140013, 15: 150008, 16: 160004}
_PINNED_SINCE = {"idle_session_timeout": 140000, "transaction_timeout": 170000}
_DATABASE = """
SELECT d.oid FROM pg_catalog.pg_database d
 WHERE d.datname OPERATOR(pg_catalog.=) pg_catalog.current_database()"""


def take_environment() -> dict[str, str]:
    """Remove libpq's connection variables from the environment and return them by conninfo keyword."""
    taken = {key: os.environ.pop(name) for name, key in _ENVIRONMENT.items() if name in os.environ}
    return {key: value for key, value in taken.items() if value}


def in_environment() -> bool:
    """Return whether :func:`take_environment` would find variables, which can name a target."""
    return any(os.environ.get(name) for name in _ENVIRONMENT)


def parse(conninfo: str, side: str) -> dict[str, str]:
    """Parse a conninfo or URI with libpq's own parser.

    :param side: ``publisher`` or ``target``, for the error.
    :raises UsageError: libpq refuses it; the text never repeats the conninfo.
    """
    try:
        parsed = conninfo_to_dict(conninfo)
    except Exception as error:
        unknown = _UNKNOWN_KEYWORD.search(str(error))
        raise UsageError(
            f"invalid connection string for the {side}",
            detail=f"It has no option {unknown[1]}." if unknown else None,
            hint='Use keywords and values ("host=db1 dbname=app user=repl") or a URI (postgresql://repl@db1/app).',
        ) from None
    return {key: str(value) for key, value in parsed.items() if value is not None}


def usable(given: Mapping[str, str]) -> dict[str, str]:
    """Make the parameters of an attempt to connect. What is stored and shown remains as the user wrote it.

    An unreadable passfile is removed if PGPASSFILE is set, because an executor does not have the launcher's files.
    libpq ignores a passfile that it cannot read, but prefers it to the variable.

    ``read-write`` becomes ``primary``: libpq would refuse a server that is fenced, or read-only for clients, before
    :data:`PINNED` makes the session writable.

    :param given: from :func:`parse`.
    """
    params = dict(given)
    named = given.get("passfile")
    if named is not None and "PGPASSFILE" in os.environ and not os.access(named, os.R_OK):
        del params["passfile"]
    # guard: a server that is read-only for clients is connected to though the connection string asks for read-write
    if _session_attrs(given) == "read-write":
        params["target_session_attrs"] = "primary"
    return params


def _session_attrs(given: Mapping[str, str]) -> str | None:
    by_environment = {"target_session_attrs": os.environ.get("PGTARGETSESSIONATTRS")}
    return {**by_environment, **_by_service(given), **given}["target_session_attrs"]


def complete_target(params: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Complete the target's parameters from the PG* variables that :func:`take_environment` returned.

    If the conninfo names a service, variables are not used, because in libpq the service takes precedence.
    """
    if "service" in params:
        return dict(params)
    return {**{k: v for k, v in environment.items() if k != "application_name"}, **params}


def missing_defaults(given: Mapping[str, str], defaults: Mapping[str, str]) -> dict[str, str]:
    """Return the defaults that neither the conninfo nor its service overrides.

    :param given: from :func:`parse`.
    """
    said = given.keys() | _by_service(given).keys()
    return {key: value for key, value in defaults.items() if key not in said}


def _by_service(given: Mapping[str, str]) -> dict[str, str]:
    """Return what a service says, completed by libpq's defaults."""
    named = {key: given[key] for key in ("service", "servicefile") if key in given}
    return resolved(named) if named else {}


def resolved(given: Mapping[str, str]) -> dict[str, str]:
    """Complete parameters from their service and libpq's defaults, by libpq, which then refuses the sslmode."""
    refused = pq.PGconn.connect_start(make_conninfo("", **{**given, "sslmode": "none"}).encode())
    try:
        found = {one.keyword.decode(): one.val.decode(errors="replace") for one in refused.info if one.val is not None}
    finally:
        refused.finish()
    return {**found, **given}


def by_host(given: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the parameters for each host by itself. Lists that libpq refuses remain as they are."""
    known = resolved(given)
    lists = {key: known[key].split(",") for key in ("host", "hostaddr", "port") if known.get(key)}
    count = max(len(lists.get(key, ())) for key in ("host", "hostaddr"))
    if count > 1 and len(lists.get("port", ())) == 1:
        lists["port"] *= count
    # guard: a host that only starts up is not overlooked because another one of the connection string does not answer
    if count > 1 and all(len(values) == count for values in lists.values()):
        return [{**given, **{key: values[index] for key, values in lists.items()}} for index in range(count)]
    return [dict(given)]


def only_tables(version: int) -> dict[str, str]:
    """Return the setting that refuses users' views and foreign tables, if the server has it.

    A relation that was replaced by one of them, or has got a foreign child or partition, would run code when it is read
    by name (as in pg_dump, CVE-2024-7348). A foreign server may run anything as the role of a user mapping.
    """
    since = _RESTRICTS_SINCE.get(version // 10000, 170000)
    return {"restrict_nonsystem_relation_kind": "view, foreign-table"} if version >= since else {}


def pin(connection: psycopg.Connection[Any], side: str, more: Mapping[str, str]) -> int:
    """Set :data:`PINNED`, more settings and the session's role in one statement.

    Nothing is set behind a pooler, where settings would remain.

    :param side: ``publisher`` or ``target``, for the error.
    :return: oid of the session's database.
    :raises StateForbids: the session is behind a pooler: its keys do not name the backend that answers.
    :raises ProtocolViolation: no server gives such an answer.
    """
    version = connection.info.server_version
    settings = {**PINNED, **{name: "0" for name, since in _PINNED_SINCE.items() if version >= since}, **more}
    # names are qualified: before this, the database's owner chooses the search path (CVE-2018-1058)
    calls = sql.SQL(", ").join(
        sql.SQL("pg_catalog.set_config({}, {}, false)").format(sql.Literal(name), sql.Literal(value))
        for name, value in settings.items()
    )
    role, pid = session_role.pinned(connection.info.options), sql.Literal(connection.pgconn.backend_pid)
    statement = sql.SQL("SELECT {}, {}, ({}) WHERE pg_catalog.pg_backend_pid() OPERATOR(pg_catalog.=) {}")
    found = _answer(connection, statement.format(calls, role, sql.SQL(_DATABASE), pid), side)
    # an old pgbouncer refuses replication; a newer one forwards it and can be detected only in this way
    if found is None:
        raise StateForbids(
            f"the {side}'s connection goes through a connection pooler",
            detail="pgsub needs sessions of its own: streams, locks and settings live as long as they do.",
            hint="Give the address and port of the server itself.",
        )
    if len(found) != len(settings) + 2:
        raise _no_server(side)
    return query.number(found[-1], "OID of the database")


def _answer(connection: psycopg.Connection[Any], statement: sql.Composed, side: str) -> tuple[Any, ...] | None:
    """Return the row of a query, None if there is none.

    :raises ProtocolViolation: no query has such an answer.
    """
    try:
        return query.row(connection, statement)
    except (psycopg.OperationalError, psycopg.InterfaceError):
        raise
    except psycopg.Error as error:
        if error.sqlstate is not None:
            raise
        raise _no_server(side) from None


def _no_server(side: str) -> ProtocolViolation:
    return ProtocolViolation(
        f"the {side} does not answer as a PostgreSQL server does",
        detail="The reply to the query that sets up the session is not valid.",
        hint="Check that host and port are those of the server itself.",
    )


def split_password(params: Mapping[str, str]) -> tuple[dict[str, str], str | None]:
    """Split conninfo parameters into those that are not secrets, and the password or None."""
    public = {key: value for key, value in params.items() if key not in SECRETS}
    return public, params.get("password")


def join(params: Mapping[str, str], **more: str) -> str:
    """Make a conninfo string from parameters."""
    return make_conninfo("", **{**params, **more})


def endpoint(params: Mapping[str, str]) -> str:
    """Format the parameters that may be shown: service, host, port, database, user."""
    shown = {k: params[k] for k in ("service", "host", "port", "dbname", "user") if k in params}
    return " ".join(f"{key}={value}" for key, value in shown.items())
