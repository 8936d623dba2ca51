"""Privileges that ``refresh`` needs on already subscribed tables and that were revoked."""

from __future__ import annotations

from collections.abc import Sequence

import psycopg

from pgsub.commands.preflight import privileges
from pgsub.commands.preflight.findings import Caution, Table
from pgsub.commands.preflight.tables import pairs
from pgsub.common.errors import PermissionMissing
from pgsub.common.subscription import Subscription
from pgsub.publisher import connect as publisher
from pgsub.publisher.tables import describe_tables
from pgsub.target.catalog.relation import describe_many
from pgsub.target.ledger.subscriptions import RelationState


def lacking(
    source: publisher.Connection,
    session: psycopg.Connection,
    sub: Subscription,
    relations: Sequence[RelationState],
    *,
    mode: str,
) -> list[Caution]:
    """Return the missing privileges of the two roles on these tables, each kind with its GRANT.

    :param mode: how they are copied again: none, atomic or adopt.
    """
    names = [(one.schemaname, one.relname) for one in relations]
    remote = describe_tables(source, names, sub.publications).tables
    local = describe_many(session, names)
    tables = [Table(remote[name], local[name], mode) for name in names if name in remote and name in local]
    unowned = list(privileges.owners(tables, sub))  # also sets the role that writes
    found = pairs(source, session, sub, tables)
    both = [*privileges.publisher(found, source.info.user), *privileges.target(found, session.info.user)]
    return both + unowned if mode == "none" else both


def check_copied(
    source: publisher.Connection,
    session: psycopg.Connection,
    sub: Subscription,
    relations: Sequence[RelationState],
    mode: str,
) -> None:
    """Check that tables can be copied again before they are emptied.

    :param mode: atomic or adopt.
    :raises PermissionMissing: a privilege was revoked.
    """
    for one in lacking(source, session, sub, relations, mode=mode) if relations else ():
        raise PermissionMissing(one.message, detail=one.detail, hint=one.hint, sqlstate="42501")
