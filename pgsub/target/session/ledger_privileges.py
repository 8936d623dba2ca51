"""The ledger's owner and grantees: which roles are trusted with the ledger, and which may use it.

A ledger's owner can attach code to its tables. The code runs with the rights of every role that writes there. So the
owner must be the session's user, a superuser or the database's owner. A ledger that a superuser creates belongs to the
bootstrap superuser, which cannot lose this attribute. Other superusers can lose it, so they get GRANTs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psycopg
from psycopg import sql

from pgsub.common import quoting
from pgsub.common.errors import PermissionMissing
from pgsub.common.query import scalar
from pgsub.target.session import advisory_locks, ledger_code, roles
from pgsub.target.session.ledger_code import TRUSTED

_EVERYTHING = ("SCHEMA pgsub", "ALL TABLES IN SCHEMA pgsub")
_LOCK_KEY = 0x7067737562  #: "pgsub", different from the launcher's key

_STRANGERS = f"""
WITH {TRUSTED},
ledger AS (
     SELECT n.oid, n.nspowner AS owner, NULL::text AS name FROM pg_catalog.pg_namespace n
      WHERE n.nspname = 'pgsub' AND EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.relnamespace = n.oid)
      UNION ALL
     SELECT c.oid, c.relowner, c.relname::text
       FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
      WHERE n.nspname = 'pgsub' AND c.relkind IN ('r', 'p', 'v', 'm', 'f'))
SELECT l.name, o.rolname::text FROM ledger l JOIN pg_catalog.pg_roles o ON o.oid = l.owner
 WHERE l.owner NOT IN (SELECT oid FROM trusted) ORDER BY l.name NULLS FIRST
"""
# Privileges that were granted to the role itself. A superuser may do everything, but only as long as it is one.
_UNGRANTED = """
SELECT r.rolname::text FROM pg_catalog.pg_namespace n, pg_catalog.pg_roles r
 WHERE n.nspname = 'pgsub' AND r.rolname = coalesce(%s, current_user) AND r.oid <> n.nspowner AND (
       NOT EXISTS (SELECT FROM pg_catalog.aclexplode(n.nspacl) a WHERE a.grantee = r.oid AND a.privilege_type = 'USAGE')
       OR EXISTS (
          SELECT FROM pg_catalog.pg_class c, pg_catalog.unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS w
           WHERE c.relnamespace = n.oid AND c.relkind = 'r' AND c.relowner <> r.oid
             AND NOT EXISTS (SELECT FROM pg_catalog.aclexplode(c.relacl) a
                              WHERE a.grantee = r.oid AND a.privilege_type = w)))
"""
# A schema without tables is not a ledger yet, and no code is attached to it.
_EMPTY = f"""
WITH {TRUSTED}
SELECT n.oid FROM pg_catalog.pg_namespace n
 WHERE n.nspname = 'pgsub' AND n.nspowner NOT IN (SELECT oid FROM trusted)
   AND NOT EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.relnamespace = n.oid)
"""
_GRANTEES = """
SELECT DISTINCT r.rolname::text
  FROM pg_catalog.pg_namespace n, pg_catalog.aclexplode(n.nspacl) a, pg_catalog.pg_roles r
 WHERE n.nspname = 'pgsub' AND r.oid = a.grantee AND a.grantee <> n.nspowner
"""
# Roles that would keep what an owner who is not trusted has granted. 0 is PUBLIC.
_OTHERS = f"""
WITH {TRUSTED}
SELECT DISTINCT r.rolname::text
  FROM (SELECT a.grantee FROM pg_catalog.pg_namespace n, pg_catalog.aclexplode(n.nspacl) a WHERE n.nspname = 'pgsub'
         UNION
        SELECT a.grantee FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace,
               pg_catalog.aclexplode(c.relacl) a WHERE n.nspname = 'pgsub'
         UNION
        SELECT a.grantee FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
          JOIN pg_catalog.pg_attribute t ON t.attrelid = c.oid, pg_catalog.aclexplode(t.attacl) a
         WHERE n.nspname = 'pgsub') g
  LEFT JOIN pg_catalog.pg_roles r ON r.oid = g.grantee
 WHERE g.grantee NOT IN (SELECT oid FROM trusted) AND (g.grantee = 0 OR r.oid IS NOT NULL) ORDER BY 1
"""
# Code of another owner, run as that owner, could reset the role.
_MAY_GIVE = f"""
WITH {TRUSTED}
SELECT o.rolname::text FROM pg_catalog.pg_namespace n JOIN pg_catalog.pg_roles o ON o.oid = n.nspowner
 WHERE n.nspname = 'pgsub' AND pg_catalog.pg_has_role(current_user, o.oid, %s) AND o.oid IN (SELECT oid FROM trusted)
"""


def check(connection: psycopg.Connection) -> None:
    """Check that the ledger's owner, and owners of code attached to it, are trusted. Do nothing if there is no ledger.

    Every command checks it before it writes there. :mod:`~pgsub.target.session.ledger_guard` says why that is not
    enough to read there afterwards.

    :raises PermissionMissing: they are not; the hint has the statements for a superuser.
    """
    strangers = connection.execute(_STRANGERS.encode()).fetchall()
    if strangers:
        raise _belongs_to(connection, strangers)
    ledger_code.check(connection)


def trusted(connection: psycopg.Connection) -> bool:
    """Return whether the ledger may be read: the :func:`check` for a server that must not be changed."""
    return not connection.execute(_STRANGERS.encode()).fetchall() and not ledger_code.runs_code(connection)


def _belongs_to(connection: psycopg.Connection, strangers: list[tuple[str | None, str]]) -> PermissionMissing:
    row = connection.execute(
        "SELECT current_user::text, r.rolname::text"
        " FROM pg_catalog.pg_database d JOIN pg_catalog.pg_roles r ON r.oid = d.datdba"
        " WHERE d.datname = pg_catalog.current_database()"
    ).fetchone()
    assert row is not None
    user, owner = row
    names = sorted({name for _, name in strangers})
    others = ["PUBLIC" if name is None else quoting.name(name) for (name,) in connection.execute(_OTHERS.encode())]
    everything = [f"REVOKE ALL ON {on} FROM {', '.join(others)} CASCADE;\n" for on in _EVERYTHING] if others else []
    things = ["SCHEMA pgsub" if name is None else f"TABLE {quoting.name('pgsub', name)}" for name, _ in strangers]
    return PermissionMissing(
        f'the ledger on the target belongs to role "{names[0]}"',
        detail="That is neither the user of --target, nor a superuser, nor the database's owner. Code that it attaches"
        f' to the tables of schema pgsub would run with the rights of "{user}".',
        hint="Find out who made it. If it is not the ledger of your subscriptions, remove it (DROP SCHEMA pgsub"
        " CASCADE). If it is, give it to the owner of the database, as a superuser on the target, and take it from all"
        " others. A role that is to use it from then on needs the same GRANTs:\n"
        + "".join(f"ALTER {thing} OWNER TO {quoting.name(owner)};\n" for thing in things)
        + "".join(everything)
        + grants(quoting.name(user)),
        sqlstate="42501",
    )


def grants(roles: str) -> str:
    """Return the GRANTs that roles other than the ledger's owner need.

    :param roles: as SQL.
    """
    return (
        f"GRANT USAGE ON SCHEMA pgsub TO {roles};\n"
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA pgsub TO {roles};"
    )


def _owner(connection: psycopg.Connection) -> str | None:
    right = "SET" if connection.info.server_version >= 160000 else "MEMBER"
    name: str | None = scalar(connection, _MAY_GIVE, (right,))
    return name


def give(connection: psycopg.Connection, role: str | None = None) -> None:
    """Grant the missing privileges to a role, if the session's user may; otherwise do nothing.

    :param role: None: the session's own role.
    """
    if not _lacking(connection, role):
        return
    with contextlib.suppress(psycopg.errors.InsufficientPrivilege), connection.transaction():
        lock(connection)
        for name in _lacking(connection, role):
            with acting(connection):
                connection.execute(grants(sql.Identifier(name).as_string()).encode())


def lock(connection: psycopg.Connection) -> None:
    """Protect the ledger's schema and privileges from changes by others until the open transaction ends.

    :raises LockHeld: another session changes them for too long.
    """
    message = "the ledger on the target is being changed by another session"
    advisory_locks.take_for_transaction(connection, (_LOCK_KEY,), message)


def _lacking(connection: psycopg.Connection, role: str | None) -> list[str]:
    return [name for (name,) in connection.execute(_UNGRANTED.encode(), (role,)).fetchall()]


@contextlib.contextmanager
def acting(connection: psycopg.Connection) -> Iterator[None]:
    """Act as the ledger's owner, or its future owner, in an open transaction, if the session's user may."""
    bootstrap = _bootstrap_superuser(connection)
    if bootstrap is not None and scalar(connection, _EMPTY) is not None:
        connection.execute(sql.SQL("ALTER SCHEMA pgsub OWNER TO {}").format(sql.Identifier(bootstrap)))
        for (name,) in connection.execute(_GRANTEES.encode()).fetchall():  # grantees of its creator
            connection.execute(sql.SQL("REVOKE ALL ON SCHEMA pgsub FROM {} CASCADE").format(sql.Identifier(name)))
    with roles.acting(connection, _owner(connection) or bootstrap):
        yield


def _bootstrap_superuser(connection: psycopg.Connection) -> str | None:
    """Return the bootstrap superuser, which owns a ledger that a superuser creates; None if the role is not one."""
    query = """
        SELECT b.rolname::text FROM pg_catalog.pg_roles b, pg_catalog.pg_roles me
         WHERE b.oid = 10 AND b.rolsuper AND me.rolname = current_user AND me.rolsuper"""
    name: str | None = scalar(connection, query)
    return name
