"""The prerequisites of a subscription on the publisher. Each error names its remedy.

Mirrors ``CheckLogicalDecodingRequirements`` (logical.c) and ``CheckSlotPermissions`` (slot.c).
"""

from __future__ import annotations

from pgsub.common.errors import PermissionMissing, StateForbids
from pgsub.common.query import scalar
from pgsub.publisher.connect import Connection
from pgsub.publisher.server_errors import WAL_LEVEL_HINT, replication_hint, translating

#: The first version that enables logical decoding with its first logical slot if wal_level is replica.
_ON_DEMAND = 190000


def check_wal_level(connection: Connection) -> None:
    """Check that logical decoding is available on the publisher.

    From 19 on ``replica`` suffices on a primary, because its first logical slot enables decoding. A standby follows its
    primary: ``effective_wal_level`` tells.

    :raises StateForbids: it is not; the hint has the setting to change.
    """
    on_demand = connection.info.server_version >= _ON_DEMAND
    with translating(connection, "read wal_level of the publisher"):
        level = scalar(connection, "SHOW wal_level")
        if on_demand and scalar(connection, "SELECT pg_catalog.pg_is_in_recovery()"):
            _check_primary(str(scalar(connection, "SHOW effective_wal_level")))
    enough = ("logical", "replica") if on_demand else ("logical",)
    if level not in enough:
        raise StateForbids(
            f'logical decoding requires "wal_level" >= "{enough[-1]}"',
            detail=f'The publisher runs with wal_level "{level}".',
            hint=WAL_LEVEL_HINT,
            sqlstate="55000",
        )


def _check_primary(effective: str) -> None:
    if effective != "logical":
        raise StateForbids(
            'logical decoding on standby requires "effective_wal_level" >= "logical" on the primary',
            detail=f'The publisher is a standby, and its effective_wal_level is "{effective}".',
            hint="Run this on its primary, which keeps the slot for as long as the standby is to be subscribed to:\n"
            "SELECT pg_create_logical_replication_slot('decoding', 'pgoutput');",
            sqlstate="55000",
        )


def check_replication_role(connection: Connection) -> None:
    """Check that the role may use slots: REPLICATION, superuser, or member of rds_replication on managed servers.

    :raises PermissionMissing: it may not; the hint has the command for it.
    """
    query = """
        SELECT r.rolreplication OR r.rolsuper OR EXISTS (SELECT FROM pg_catalog.pg_roles m
            WHERE m.rolname = 'rds_replication' AND pg_catalog.pg_has_role(r.oid, m.oid, 'MEMBER'))
        FROM pg_catalog.pg_roles r WHERE r.rolname = CURRENT_USER"""
    with translating(connection, "read the role's attributes on the publisher"):
        allowed = scalar(connection, query)
    if not allowed:
        raise PermissionMissing(
            "permission denied to use replication slots",
            detail="Only roles with the REPLICATION attribute may use replication slots.",
            hint=replication_hint(connection.info.user),
            sqlstate="42501",
        )
