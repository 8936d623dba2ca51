"""Determines a session's own role: the user, or the role in the user's settings.

The database's owner may use ``ALTER DATABASE SET role``, and ALTER ROLE for all users of the database. They would make
sessions create objects for a role of the owner's choice. So only the conninfo's ``options`` and the settings of the
connecting user count. Only the user, or someone who may change its password, can set the latter.

``RESET ROLE`` returns to the role at the start of the connection, which the database's owner can choose. So the session
remembers its own role in a setting.
"""

from __future__ import annotations

import re

from psycopg import sql

_OWN = "pgsub.role"
#: Words of ``options``, split like pg_split_opts (postinit.c): a backslash escapes the next character.
_WORD = re.compile(r"(?:\\.|[^\s\\])+", re.DOTALL)
#: process_postgres_switches (postgres.c): ``-c role=x``, ``-crole=x``, ``--role=x``
_ROLE = re.compile(r"(?:-c\s*|--)role=(.*)", re.DOTALL | re.IGNORECASE)
#: The role that the server started with, if it is from a setting of the user and not of the database. They are compared
#: because a server that cannot set the user's role continues with the database's. No name depends on search_path.
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
    """Return the last role in command-line options, None if there is none."""
    words = [re.sub(r"\\(.)", r"\1", word, flags=re.DOTALL) for word in _WORD.findall(options)]
    joined = [f"{before} {word}" if before == "-c" else word for before, word in zip(["", *words], words, strict=False)]
    found = [match[1] for match in map(_ROLE.fullmatch, joined) if match is not None]
    return found[-1] if found else None


def pinned(options: str) -> sql.Composable:
    """Compose the call that sets a session's own role and remembers it.

    :param options: options of the connection, which the server prefers to all other settings.
    """
    role = named(options)
    own = sql.SQL(_USERS) if role is None else sql.Literal(role)
    return sql.SQL("pg_catalog.set_config('role', pg_catalog.set_config({}, {}, false), false)").format(_OWN, own)


def set_role(role: str | None) -> sql.Composed:
    """Compose the statement that sets the role until the end of the transaction; None for the session's own.

    Inside a subtransaction, ROLLBACK TO restores the previous role.
    """
    if role is None:
        # NULL, if someone else opened the session, acts as RESET ROLE
        own = "SELECT pg_catalog.set_config('role', pg_catalog.current_setting({}, true), true)"
        return sql.SQL(own).format(_OWN)
    return sql.SQL("SET LOCAL ROLE {}").format(sql.Identifier(role))
