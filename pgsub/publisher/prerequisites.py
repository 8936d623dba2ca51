"""What a publisher must have before a subscription can be created; asked so that the answer comes with its remedy.

Mirrors ``CheckLogicalDecodingRequirements`` (logical.c) and ``CheckSlotPermissions`` (slot.c).
"""

from __future__ import annotations

import psycopg

from pgsub.errors import PermissionMissing, StateForbids
from pgsub.publisher.connect import Connection, scalar
from pgsub.publisher.faults import WAL_LEVEL_HINT, replication_hint, translate


def check_wal_level(connection: Connection) -> None:
    """Check that the publisher can decode; from 19 ``replica`` suffices, for a logical slot switches decoding on.

    :raises StateForbids: with the setting to change.
    """
    try:
        level = scalar(connection, "SHOW wal_level")
    except psycopg.Error as error:
        raise translate(error, "read wal_level of the publisher") from None
    enough = ("logical", "replica") if connection.info.server_version >= 190000 else ("logical",)
    if level not in enough:
        raise StateForbids(
            f'logical decoding requires "wal_level" >= "{enough[-1]}"',
            detail=f'The publisher runs with wal_level "{level}".',
            hint=WAL_LEVEL_HINT,
            sqlstate="55000",
        )


def check_replication_role(connection: Connection) -> None:
    """Check that the role may use slots: REPLICATION, superuser, or member of rds_replication on managed servers.

    :raises PermissionMissing: with the command that gives it.
    """
    query = """
        SELECT r.rolreplication OR r.rolsuper OR EXISTS (SELECT FROM pg_catalog.pg_roles m
            WHERE m.rolname = 'rds_replication' AND pg_catalog.pg_has_role(r.oid, m.oid, 'MEMBER'))
        FROM pg_catalog.pg_roles r WHERE r.rolname = CURRENT_USER"""
    try:
        allowed = scalar(connection, query)
    except psycopg.Error as error:
        raise translate(error, "read the role's attributes on the publisher") from None
    if not allowed:
        user = connection.info.user
        raise PermissionMissing(
            "permission denied to use replication slots",
            detail="Only roles with the REPLICATION attribute may use replication slots.",
            hint=replication_hint(user),
            sqlstate="42501",
        )
