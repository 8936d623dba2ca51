"""The role that makes changes: each table's owner, or the session's user. Mirrors usercontext.c and run_as_owner.

The server's subscriber refuses to apply if it may not become the owner. So an owner's code (triggers, defaults,
expressions) never runs with more than the owner's rights. A client cannot keep such code from RESET ROLE, so a refusal
would protect nobody. Therefore a user that is no member of the owner, but has rights of its own on the table, makes the
changes as itself. A warning says so, unless the owner is a superuser, because nobody should be made a member of one.
If the user's rights do not suffice, the error is the server's: it may not become the owner.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import psycopg

from pgsub.common import quoting, table_lock
from pgsub.common.connections import session_role
from pgsub.common.errors import PermissionMissing
from pgsub.common.subscription import Subscription
from pgsub.target.catalog.relation import TargetRelation

FILTERED = "0A000"  #: feature_not_supported: SQLSTATE of the refusal because of row-level security
#: Privileges for a change, by message type. TRUNCATE is never made as the owner.
NEEDED = {"INSERT": ("INSERT",), "UPDATE": ("SELECT", "UPDATE"), "DELETE": ("SELECT", "DELETE")}

# A privilege on some columns counts as enough. If it is not, the change itself fails.
_LACKING = """
SELECT pg_catalog.has_schema_privilege(c.relnamespace, 'USAGE'),
       ARRAY(SELECT w FROM pg_catalog.unnest(%s::text[]) AS w
              WHERE NOT pg_catalog.has_table_privilege(c.oid, w)
                AND NOT (w <> 'DELETE' AND pg_catalog.has_any_column_privilege(c.oid, w)))
  FROM pg_catalog.pg_class c WHERE c.oid = %s
"""


def with_role(target: TargetRelation, sub: Subscription) -> TargetRelation:
    """Return the table with the role that makes its changes.

    :raises PermissionMissing: the user is a member of the owner and may not SET ROLE (SwitchToUntrustedUser), or a row
        security policy applies to the acting role (TargetPrivilegesCheck).
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
    """Make the server's refusal, with both remedies."""
    user, owner = quoting.name(target.user), quoting.name(target.owner)
    return PermissionMissing(
        f'role "{target.user}" cannot SET ROLE to "{target.owner}"',
        detail=f'The changes of "{target.schema}.{target.name}" are made as its owner.',
        hint=f"Run this on the target: GRANT {owner} TO {user} WITH SET TRUE;\nOr let changes be made as the user of"
        f" --target:\npgsub alter {quoting.word(sub.name)} --run-as-owner",
        sqlstate="42501",
    )


def check_own(connection: psycopg.Connection, target: TargetRelation, sub: Subscription, needed: str) -> None:
    """Check that a user that may not become the owner can make a change as itself.

    :param connection: its session, outside of a failed transaction.
    :param needed: message type of the change; a key of :data:`NEEDED`.
    :raises PermissionMissing: it lacks a privilege.
    """
    if sub.run_as_owner or target.access not in ("none", "trusted"):
        return
    row = connection.execute(_LACKING.encode(), (list(NEEDED.get(needed, ())), target.oid)).fetchone()
    usable, lacking = row or (True, [])
    if usable and not lacking:
        return
    user, owner = quoting.name(target.user), quoting.name(target.owner)
    what, grants = [], []
    if not usable:
        what.append(f'USAGE on schema "{target.schema}"')
        grants.append(f"GRANT USAGE ON SCHEMA {quoting.name(target.schema)} TO {user};")
    if lacking:
        what.append(f'{", ".join(lacking)} on table "{target.schema}.{target.name}"')
        table = quoting.name(target.schema, target.name)
        grants.append(f"GRANT {', '.join(lacking)} ON TABLE {table} TO {user};")
    become_it = ""
    if target.access == "none":
        option = " WITH SET TRUE" if target.server_version >= 160000 else ""
        become_it = (
            f"Run this on the target: GRANT {owner} TO {user}{option};\nOr let the role change the table as itself:\n"
        )
    raise PermissionMissing(
        f'role "{target.user}" cannot SET ROLE to "{target.owner}"',
        detail=f"Its own privileges do not suffice: it lacks {' and '.join(what)}.",
        hint=(become_it or "Run this on the target:\n") + "\n".join(grants),
        sqlstate="42501",
    )


def row_security(target: TargetRelation, role: str) -> PermissionMissing:
    """Make the server's refusal: policies would filter rows, or run code for each of them.

    An owner to whom the policies of the table apply may have chosen that, to be exempt from those of other tables.
    """
    table, user = quoting.name(target.schema, target.name), quoting.name(role)
    exempt = f"Run this on the target:\nALTER TABLE {table} NO FORCE ROW LEVEL SECURITY;"
    if role != target.owner:
        what = "Run this on the target, which exempts the role from the policies of all tables:"
        exempt = f"{what}\nALTER ROLE {user} BYPASSRLS;"
    return PermissionMissing(
        f'user "{role}" cannot replicate into relation with row-level security enabled: "{target.name}"',
        detail=f'A policy of "{target.schema}.{target.name}" applies to the role that makes its changes.',
        hint=exempt,
        sqlstate=FILTERED,
    )


@contextlib.contextmanager
def acting(connection: psycopg.Connection, role: str | None) -> Iterator[None]:
    """Act as a role in an open transaction. After an error, the rollback resets the role."""
    if role is not None:
        connection.execute(session_role.set_role(role))
    yield
    if role is not None:
        connection.execute(session_role.set_role(None))


@contextlib.contextmanager
def using(connection: psycopg.Connection, target: TargetRelation, purpose: str = table_lock.WRITING) -> Iterator[None]:
    """Act as the role of a table, lock the table and verify its name, in an open transaction.

    :param purpose: see :func:`~pgsub.common.table_lock.hold`.
    :raises TableReplaced: another table has the name.
    """
    with acting(connection, target.acts_as):
        table_lock.hold(connection, target.oid, target.schema, target.name, purpose)
        yield
