"""Connection strings: environment, passwords, redaction. No connection is opened here.

libpq fills what a conninfo leaves out from PGHOST and its like. With two servers that is a trap: the publisher
would silently become the target. So the process's own PG* variables are taken out of the environment at start
and only ever complete the *target*.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
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

#: a field of a line of a passfile, whose colons and backslashes are escaped
_FIELD = re.compile(r"(?:^|:)((?:[^:\\]|\\.)*)")

#: A peer that vanished without a FIN is noticed within a minute, whether it owes an answer (keepalives) or an
#: acknowledgement (tcp_user_timeout; without it the system sends again for a quarter of an hour).
KEEPALIVES = {
    "connect_timeout": "10",
    "keepalives": "1",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "60000",
}

#: of libpq's words only the name of an option is shown: anything else may be a part of a password
_UNKNOWN_KEYWORD = re.compile(r'invalid (?:connection option|URI query parameter:?) ("[a-z_]{1,30}")')
#: Settings of every session, whatever a role's or a database's defaults are: text values, the meaning of statements and
#: long waits rely on them. A row security policy must fail and not filter.
PINNED = {
    "search_path": "",
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    "default_transaction_deferrable": "off",
    "datestyle": "ISO",  # and in which order text of a text column names day and month stays the server's own
    "extra_float_digits": "3",
    "row_security": "off",
    "array_nulls": "on",
    "transform_null_equals": "off",
    "lc_monetary": "C",  # money is written by the one server as the other reads it
    "gin_fuzzy_search_limit": "0",  # an index gives all rows that it has
    "standard_conforming_strings": "on",
    "quote_all_identifiers": "off",
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    # the servers, too, are to notice a launcher that vanished: its sessions hold locks, a snapshot, a temporary slot.
    # No tcp_user_timeout: a peer that takes nothing for so long would count as vanished, and apply may wait for a lock
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
}
#: Minor versions that came with restrict_nonsystem_relation_kind; from 17 on it is always there.
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
    """Return whether there are variables that :func:`take_environment` would take: they can name a target."""
    return any(os.environ.get(name) for name in _ENVIRONMENT)


def parse(conninfo: str, side: str) -> dict[str, str]:
    """Parse a conninfo or URI with libpq's own parser.

    :param side: ``publisher`` or ``target``, for the error.
    :raises UsageError: where libpq refuses it; the text never repeats the conninfo.
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


def usable(params: Mapping[str, str]) -> dict[str, str]:
    """Leave out a passfile that is not there, where PGPASSFILE names one: on an executor the launcher's files are not.

    libpq ignores a passfile that it cannot read, but prefers it to the variable.
    """
    named = params.get("passfile")
    if named is None or "PGPASSFILE" not in os.environ or os.access(named, os.R_OK):
        return dict(params)
    return {key: value for key, value in params.items() if key != "passfile"}


def complete_target(params: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Fill the target's gaps from the PG* variables taken by :func:`take_environment`.

    A service named in the conninfo is not mixed with variables, as libpq gives the service precedence.
    """
    if "service" in params:
        return dict(params)
    return {**{k: v for k, v in environment.items() if k != "application_name"}, **params}


def missing_defaults(given: Mapping[str, str], defaults: Mapping[str, str]) -> dict[str, str]:
    """Return the defaults that neither the conninfo nor the service it names overrides.

    :param given: from :func:`parse`.
    """
    said = given.keys() | (_said_by_service(given["service"]) if "service" in given else set())
    return {key: value for key, value in defaults.items() if key not in said}


def _said_by_service(service: str) -> set[str]:
    """Read the keywords of a service by libpq: it completes a conninfo before it finds that this one leads nowhere."""
    nowhere = pq.PGconn.connect_start(make_conninfo("", service=service, host="/", hostaddr="").encode())
    try:
        return {option.keyword.decode() for option in nowhere.info if option.val is not None}
    finally:
        nowhere.finish()


def only_tables(version: int) -> dict[str, str]:
    """Return the setting that refuses views and foreign tables of users, where the server has it.

    A relation that is read by name and was exchanged for one of them, or got a foreign child or partition, would be
    code (as in pg_dump, CVE-2024-7348): a foreign server may run what it likes as the role that a user mapping names.
    """
    since = _RESTRICTS_SINCE.get(version // 10000, 170000)
    return {"restrict_nonsystem_relation_kind": "view, foreign-table"} if version >= since else {}


def pin(connection: psycopg.Connection[Any], side: str, more: Mapping[str, str]) -> int:
    """Set :data:`PINNED`, more settings and the session's role, in one statement.

    It sets nothing behind a pooler: settings would stay there.

    :param side: ``publisher`` or ``target``, for the error.
    :return: oid of the session's database.
    :raises StateForbids: behind a pooler, whose keys do not name the backend that answers.
    :raises ProtocolViolation: the answer is none that a server gives.
    """
    version = connection.info.server_version
    settings = {**PINNED, **{name: "0" for name, since in _PINNED_SINCE.items() if version >= since}, **more}
    # qualified: until then the search path is what the database's owner wants (CVE-2018-1058)
    calls = sql.SQL(", ").join(
        sql.SQL("pg_catalog.set_config({}, {}, false)").format(sql.Literal(name), sql.Literal(value))
        for name, value in settings.items()
    )
    role, pid = session_role.pinned(connection.info.options), sql.Literal(connection.pgconn.backend_pid)
    statement = sql.SQL("SELECT {}, {}, ({}) WHERE pg_catalog.pg_backend_pid() OPERATOR(pg_catalog.=) {}")
    found = _answer(connection, statement.format(calls, role, sql.SQL(_DATABASE), pid), side)
    # an old pgbouncer refuses replication outright; a newer one passes it on and can only be seen so
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
    """Return the row that a query gives, None where it gives none.

    :raises ProtocolViolation: the answer is none that a query has.
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
        detail="What came for the query that sets up the session is no answer to it.",
        hint="Check that host and port are those of the server itself.",
    )


def split_password(params: Mapping[str, str]) -> tuple[dict[str, str], str | None]:
    """Split conninfo parameters into those that are no secrets, and the password or None."""
    public = {key: value for key, value in params.items() if key not in SECRETS}
    return public, params.get("password")


def join(params: Mapping[str, str], **more: str) -> str:
    """Make a conninfo string from parameters."""
    return make_conninfo("", **{**params, **more})


def store_password(params: Mapping[str, str], passfile: Path) -> dict[str, str]:
    """Move a password into a 0600 passfile; the returned parameters name the file instead.

    :param passfile: written whole or not at all, whatever ends first, process or power; its folder is 0700.
    """
    public, password = split_password(params)
    if password is None:
        return public
    passfile.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = passfile.with_name(passfile.name + ".new")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.writelines(f"{entry}:{_escaped(password)}\n" for entry in _servers(public))
        file.flush()
        os.fsync(descriptor)  # the state store, which will name it, outlives a loss of power
    draft.replace(passfile)
    return {**public, "passfile": str(passfile)}


def stored_password(passfile: Path) -> str:
    """Return the password that :func:`store_password` wrote.

    :raises StateForbids: the file is not there, or not as it was written.
    """
    try:
        line = passfile.read_text().partition("\n")[0]
    except OSError as error:
        raise StateForbids(f'could not read passfile "{passfile}": {error.strerror}') from None
    parts = _FIELD.findall(line)
    if len(parts) != 5:
        raise StateForbids(f'passfile "{passfile}" is not as pgsub wrote it')
    return re.sub(r"\\(.)", r"\1", parts[-1])


def _servers(params: Mapping[str, str]) -> list[str]:
    """Return what each line of a passfile says before the password: whose it is (``passwordFromFile``, fe-connect.c).

    Files may be put together, as one for executors; with wildcards the first password would go to every server.
    """
    hosts = (params.get("host") or params.get("hostaddr") or "").split(",")
    ports = (params.get("port") or "").split(",")
    user = _escaped(params["user"]) if params.get("user") else "*"
    if "service" in params:  # which may name what is missing here
        hosts, ports = ((hosts if hosts != [""] else ["*"]), (ports if ports != [""] else ["*"]))
    elif len(hosts) > 1 and len(ports) == 1:
        ports *= len(hosts)
    found = []
    for number, host in enumerate(hosts):
        port = ports[number] if number < len(ports) else ""
        # libpq compares a socket's folder that is the default of its build as localhost
        names = ["localhost", host] if host.startswith("/") else [host or "localhost"]
        found += [f"{name if name == '*' else _escaped(name)}:{port or '*'}:*:{user}" for name in names]
    return found


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace(":", "\\:")


def endpoint(params: Mapping[str, str]) -> str:
    """Format the parameters that may be shown: host, port, database, user."""
    shown = {k: params[k] for k in ("service", "host", "port", "dbname", "user") if k in params}
    return " ".join(f"{key}={value}" for key, value in shown.items())
