"""The privilege CONNECT of a database: revoked from all but some roles, and restored.

A role that has a privilege with the grant option may grant it, too. Such a grant can be revoked only in the name of
that role. But it depends on a grant of the owner, so CASCADE revokes all of them. They are restored in the same order:
grants of the owner first, then grants of roles that have the privilege again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, LiteralString, NamedTuple

import psycopg
from psycopg import sql

from pgsub.common.connections import session_role
from pgsub.common.errors import StateForbids
from pgsub.common.query import scalar, shown

_SET_SINCE = 160000
# PUBLIC has no name. Superusers grant in the name of the owner.
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

    :ivar role: None for PUBLIC.
    :ivar grantable: whether it has the grant option.
    :ivar grantor: None for the owner.
    """

    role: str | None
    grantable: bool
    grantor: str | None


def take(session: psycopg.Connection, roles: Collection[str]) -> dict[str, Any]:
    """Revoke CONNECT from all roles but some, in the open transaction.

    :param roles: the roles that keep or get the privilege.
    :return: the argument for :func:`give_back`.
    :raises StateForbids: a grant could not be restored because its grantor's role cannot be assumed.
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
    """Restore the grants of CONNECT in the open transaction, except those of dropped roles."""
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
    # one that was made in a database of another encoding may have a name that is no UTF-8
    return {name for (name,) in shown(session, "SELECT rolname::text FROM pg_catalog.pg_roles")}


def _run(session: psycopg.Connection, statement: LiteralString, role: str | None) -> None:
    """Run a statement for a role."""
    database = sql.Identifier(session.info.dbname)
    name = sql.SQL("PUBLIC") if role is None else sql.Identifier(role)
    session.execute(sql.SQL(statement).format(database, name))
