"""The privilege CONNECT of a database, taken from all roles but some, and given back as it was.

NOTES
Whoever has a privilege with the grant option may grant it, too, and such a grant can be revoked in the name of that
role only. But each depends on a grant of the owner, so CASCADE takes them all. They are given back in the same order:
what the owner granted, then what was granted by those who have it again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, LiteralString, NamedTuple

import psycopg
from psycopg import sql

from pgsub.common.connections import session_role
from pgsub.common.errors import StateForbids
from pgsub.common.query import scalar

_SET_SINCE = 160000
# PUBLIC has no name. The owner and superusers grant in the name of the owner.
_GRANTS = """
SELECT r.rolname::text, a.is_grantable, CASE WHEN a.grantor <> d.datdba THEN g.rolname::text END
  FROM pg_catalog.pg_database d
  CROSS JOIN pg_catalog.aclexplode(coalesce(d.datacl, pg_catalog.acldefault('d', d.datdba))) a
  JOIN pg_catalog.pg_roles g ON g.oid = a.grantor
  LEFT JOIN pg_catalog.pg_roles r ON r.oid = a.grantee
 WHERE d.datname = current_database() AND a.privilege_type = 'CONNECT' ORDER BY 3 NULLS FIRST, 1 NULLS FIRST
"""


class Grant(NamedTuple):
    """A grant of CONNECT.

    :ivar role: None is PUBLIC.
    :ivar grantable: with the grant option.
    :ivar grantor: None is the owner.
    """

    role: str | None
    grantable: bool
    grantor: str | None


def take(session: psycopg.Connection, roles: Collection[str]) -> dict[str, Any]:
    """Take CONNECT from all roles but some, in the open transaction.

    :param roles: who keep it, or get it.
    :return: what :func:`give_back` needs.
    :raises StateForbids: some was granted by a role in whose name it could not be granted again.
    """
    before = [Grant(*row) for row in session.execute(_GRANTS).fetchall()]
    kind = "SET" if session.info.server_version >= _SET_SINCE else "MEMBER"
    query = "SELECT pg_catalog.pg_has_role(%s::name, %s)"
    others = sorted({one.grantor for one in before if one.grantor is not None})
    refused = [role for role in others if scalar(session, query, (role, kind)) is not True]
    if refused:
        raise StateForbids(
            "CONNECT was granted by roles that this role cannot SET ROLE to, so it could not be given back",
            detail=f"Roles: {', '.join(refused)}.",
            hint="Let the owner of the database grant it, or keep clients from writing in another way:\n"
            "--fence read-only",
        )
    keep = _known(session) & set(roles)
    owners = {one.role for one in before if one.grantor is None}
    granted = sorted(keep - owners)  # type: ignore[type-var]
    for role in granted:
        _run(session, "GRANT CONNECT ON DATABASE {} TO {}", role)
    for role in owners - keep:
        _run(session, "REVOKE CONNECT ON DATABASE {} FROM {} CASCADE", role)
    for role in {one.role for one in before if one.grantor is None and one.grantable} & keep:
        _run(session, "REVOKE GRANT OPTION FOR CONNECT ON DATABASE {} FROM {} CASCADE", role)
    return {"before": [list(one) for one in before], "granted": granted}


def give_back(session: psycopg.Connection, saved: Mapping[str, Any]) -> None:
    """Grant CONNECT as it was granted before, in the open transaction; roles that are gone are left out."""
    known = {*_known(session), None}
    left = [one for one in (Grant(*row) for row in saved.get("before", ())) if {one.role, one.grantor} <= known]
    for role in saved.get("granted", ()):
        if role in known:
            _run(session, "REVOKE CONNECT ON DATABASE {} FROM {}", role)
    may: set[str | None] = {None}
    while ready := [one for one in left if one.grantor in may]:
        left = [one for one in left if one.grantor not in may]
        for one in ready:
            _grant(session, one)
        may = {one.role for one in ready if one.grantable}


def _grant(session: psycopg.Connection, one: Grant) -> None:
    option: LiteralString = " WITH GRANT OPTION" if one.grantable else ""
    if one.grantor is not None:
        session.execute(session_role.set_role(one.grantor))
    _run(session, "GRANT CONNECT ON DATABASE {} TO {}" + option, one.role)
    if one.grantor is not None:
        session.execute(session_role.set_role(None))


def _known(session: psycopg.Connection) -> set[str | None]:
    return {name for (name,) in session.execute("SELECT rolname::text FROM pg_catalog.pg_roles").fetchall()}


def _run(session: psycopg.Connection, statement: LiteralString, role: str | None) -> None:
    """Run a statement for a role."""
    database = sql.Identifier(session.info.dbname)
    name = sql.SQL("PUBLIC") if role is None else sql.Identifier(role)
    session.execute(sql.SQL(statement).format(database, name))
