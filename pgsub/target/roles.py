"""As whom changes are made: as each table's owner, or as the session's user. Mirrors usercontext.c and run_as_owner.

The server's subscriber refuses to apply where it may not become the owner, so that an owner's code (triggers, defaults,
expressions) never runs with more than the owner's rights. A client cannot keep code from RESET ROLE, so a user that is
no member of the owner but has rights of its own on the table goes on as itself: refusing would protect nobody. It is
warned of, unless the owner is a superuser, who needs no such way and whom nobody should be made a member of.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import psycopg
from psycopg import sql

from pgsub.errors import PermissionMissing
from pgsub.subscription import Subscription
from pgsub.target.relation import TargetRelation

FILTERED = "0A000"  #: feature_not_supported: the SQLSTATE of the refusal of row-level security


def decided(target: TargetRelation, sub: Subscription) -> TargetRelation:
    """The table with the role that its changes are made as.

    :raises PermissionMissing: the user is a member of the owner that may not SET ROLE (SwitchToUntrustedUser), or a
        row security policy applies to the acting role (TargetPrivilegesCheck).
    """
    role = None
    if not sub.run_as_owner and target.access in ("set", "refused"):
        if target.access == "refused":
            raise cannot_set_role(target, sub)
        role = target.owner
    if target.owner_row_security if role is not None else target.row_security:
        raise row_security(target, role or target.user)
    return replace(target, acts_as=role)


def cannot_set_role(target: TargetRelation, sub: Subscription) -> PermissionMissing:
    """The server's refusal, and both ways out."""
    user, owner = sql.Identifier(target.user).as_string(), sql.Identifier(target.owner).as_string()
    return PermissionMissing(
        f'role "{target.user}" cannot SET ROLE to "{target.owner}"',
        detail=f'The changes of "{target.schema}.{target.name}" are made as its owner.',
        hint=f"Run this on the target: GRANT {owner} TO {user} WITH SET TRUE;\nOr let changes be made as the user of"
        f" --target:\npgsub alter {sub.name} --run-as-owner",
        sqlstate="42501",
    )


def row_security(target: TargetRelation, role: str) -> PermissionMissing:
    """The server's refusal: policies would filter, or run code, row by row."""
    return PermissionMissing(
        f'user "{role}" cannot replicate into relation with row-level security enabled: "{target.name}"',
        detail=f'A policy of "{target.schema}.{target.name}" applies to the role that makes its changes.',
        hint=f"Run this on the target:\nALTER ROLE {sql.Identifier(role).as_string()} BYPASSRLS;",
        sqlstate=FILTERED,
    )


def become(role: str | None) -> sql.Composed:
    """The statement that changes the role until the transaction ends; None for the session's own.

    Inside a subtransaction its end by ROLLBACK TO brings back the role from before.
    """
    if role is None:
        return sql.SQL("RESET ROLE").format()
    return sql.SQL("SET LOCAL ROLE {}").format(sql.Identifier(role))


@contextlib.contextmanager
def acting(connection: psycopg.Connection, role: str | None) -> Iterator[None]:
    """Act as a role inside an open transaction; an error leaves it to the rollback to change back."""
    if role is not None:
        connection.execute(become(role))
    yield
    if role is not None:
        connection.execute(become(None))
