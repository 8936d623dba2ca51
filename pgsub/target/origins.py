"""Replication origins as tags: what pgsub writes is told apart from local writes. Mirrors origin.c's session API.

A peer that subscribes to the target with ``origin = none`` must not be sent what came from elsewhere. One session an
origin at a time, so each writing session takes a free one of the pool ``pgsub_<subid>[_n]``. Progress is not kept in
them: the ledger is the authority.
"""

from __future__ import annotations

import contextlib

import psycopg

from pgsub.protocol.lsn import format_lsn

#: Sessions of one subscription that write at once: apply, sync workers, chunks.
POOL = 32

_FUNCTIONS = (
    "pg_catalog.pg_replication_origin_oid(text)",
    "pg_catalog.pg_replication_origin_create(text)",
    "pg_catalog.pg_replication_origin_drop(text)",
    "pg_catalog.pg_replication_origin_session_setup(text)",
    "pg_catalog.pg_replication_origin_xact_setup(pg_lsn, timestamptz)",
)


def allowed(connection: psycopg.Connection) -> bool:
    """Whether the role may use origins: superusers may, others need EXECUTE on the functions."""
    row = connection.execute(
        "SELECT bool_and(pg_catalog.has_function_privilege(f, 'EXECUTE')) FROM pg_catalog.unnest(%s::text[]) AS f",
        (list(_FUNCTIONS),),
    ).fetchone()
    return bool(row and row[0])


def grant_hint(role: str) -> str:
    """The statements that allow a role to use origins.

    :param role: quoted name.
    """
    return "\n".join(f"GRANT EXECUTE ON FUNCTION {f.removeprefix('pg_catalog.')} TO {role};" for f in _FUNCTIONS)


def attach(connection: psycopg.Connection, subid: int) -> str | None:
    """Tag everything that this session commits from now on.

    :param connection: autocommit, outside a transaction.
    :return: the origin's name; None where the role may not use origins or the server has no free one
        (max_active_replication_origins): pgsub works without.
    """
    if not allowed(connection):
        return None
    for number in range(POOL):
        name = f"pgsub_{subid}" + (f"_{number}" if number else "")
        try:
            _create(connection, name)
            connection.execute("SELECT pg_catalog.pg_replication_origin_session_setup(%s)", (name,))
        except psycopg.errors.ObjectInUse:
            continue
        except (psycopg.errors.ConfigurationLimitExceeded, psycopg.errors.InsufficientPrivilege):
            return None
        return name
    return None


def _create(connection: psycopg.Connection, name: str) -> None:
    row = connection.execute("SELECT pg_catalog.pg_replication_origin_oid(%s)", (name,)).fetchone()
    if row is not None and row[0] is None:
        try:
            connection.execute("SELECT pg_catalog.pg_replication_origin_create(%s)", (name,))
        except (psycopg.errors.UniqueViolation, psycopg.errors.DuplicateObject):
            pass  # another session of this subscription was faster


def drop_all(connection: psycopg.Connection, subid: int) -> None:
    """Remove the subscription's origins; its writing sessions must have ended."""
    if allowed(connection):
        connection.execute(
            "SELECT pg_catalog.pg_replication_origin_drop(roname) FROM pg_catalog.pg_replication_origin"
            " WHERE roname ~ %s",
            (f"^pgsub_{subid}(_[0-9]+)?$",),
        )


def advance(connection: psycopg.Connection, subid: int, position: int) -> None:
    """Let the subscription's origin show a position that no commit carried; the ledger has it already.

    Without the privilege, or while a session of the subscription holds the origin, the next commit will.
    """
    function = "pg_catalog.pg_replication_origin_advance(text, pg_lsn)"
    with contextlib.suppress(psycopg.errors.ObjectInUse):
        connection.execute(
            "SELECT pg_catalog.pg_replication_origin_advance(roname, %s::pg_lsn) FROM pg_catalog.pg_replication_origin"
            " WHERE roname = %s AND pg_catalog.has_function_privilege(%s, 'EXECUTE')",
            (format_lsn(position), f"pgsub_{subid}", function),
        )
