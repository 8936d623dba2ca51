"""The role of a session that is the session's own: the user, or the role that the user's settings name.

``ALTER DATABASE SET role``, and ALTER ROLE for all users of a database, are the database owner's. Sessions would create
objects that belong to a role of that owner's choice. So only these settings count: what the conninfo's ``options``
say, and those of the user that connects. Who may set the latter is the user itself or may give it another password.

``RESET ROLE`` goes back to the role of the connection's start, which the owner of the database can name. So the
session remembers its own role in a setting.
"""

from __future__ import annotations

import re

from psycopg import sql

_OWN = "pgsub.role"
#: Words of ``options``, as pg_split_opts (postinit.c) splits them: a backslash takes what follows as it is.
_WORD = re.compile(r"(?:\\.|[^\s\\])+", re.DOTALL)
#: process_postgres_switches (postgres.c): ``-c role=x``, ``-crole=x``, ``--role=x``
_ROLE = re.compile(r"(?:-c\s*|--)role=(.*)", re.DOTALL | re.IGNORECASE)
#: The role that the server began with, if it is from a setting of the user and not of the database. Where the server
#: could not set the user's, it went on to the database's: so they are compared. Nothing is found by search_path.
_USERS = """
CASE WHEN EXISTS (
     SELECT FROM pg_catalog.pg_db_role_setting s
       JOIN pg_catalog.pg_roles u ON u.oid OPERATOR(pg_catalog.=) s.setrole
       LEFT JOIN pg_catalog.pg_database d ON d.oid OPERATOR(pg_catalog.=) s.setdatabase
      WHERE u.rolname OPERATOR(pg_catalog.=) session_user
        AND (d.oid IS NULL OR d.datname OPERATOR(pg_catalog.=) pg_catalog.current_database())
        AND pg_catalog.concat('role=', pg_catalog.current_setting('role')) OPERATOR(pg_catalog.=) ANY (s.setconfig))
     THEN pg_catalog.current_setting('role') ELSE 'none' END"""


def named(options: str) -> str | None:
    """Return the role that command-line options name, the last one that they do; None where they name none."""
    words = [re.sub(r"\\(.)", r"\1", word, flags=re.DOTALL) for word in _WORD.findall(options)]
    joined = [f"{before} {word}" if before == "-c" else word for before, word in zip(["", *words], words, strict=False)]
    found = [match[1] for match in map(_ROLE.fullmatch, joined) if match is not None]
    return found[-1] if found else None


def pinned(options: str) -> sql.Composable:
    """Compose the call that gives a session its own role, and lets it remember that.

    :param options: that the session was opened with; the server prefers them to all other settings.
    """
    role = named(options)
    own = sql.SQL(_USERS) if role is None else sql.Literal(role)
    return sql.SQL("pg_catalog.set_config('role', pg_catalog.set_config({}, {}, false), false)").format(_OWN, own)


def set_role(role: str | None) -> sql.Composed:
    """Compose the statement that changes the role until the transaction ends; None for the session's own.

    Inside a subtransaction its end by ROLLBACK TO brings back the role from before.
    """
    if role is None:
        # NULL, where the session was opened by somebody else, is RESET ROLE
        own = "SELECT pg_catalog.set_config('role', pg_catalog.current_setting({}, true), true)"
        return sql.SQL(own).format(_OWN)
    return sql.SQL("SET LOCAL ROLE {}").format(sql.Identifier(role))
