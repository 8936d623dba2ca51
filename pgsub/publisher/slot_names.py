"""Names of replication slots: which are valid, and which synchronize tables of a subscription.

The name of the subscription's own slot is chosen by :mod:`pgsub.commands.subscription.definition`.

Mirrors ReplicationSlotValidateName (``slot.c``) and ReplicationSlotNameForTablesync (``tablesync.c``).
"""

from __future__ import annotations

import re

from pgsub.common.errors import UsageError

_NAME_LENGTH = 63  # NAMEDATALEN - 1
_RESERVED = "pg_conflict_detection"


def valid_slot_name(name: str) -> str:
    """Check a slot name as ReplicationSlotValidateName does.

    :return: the name.
    :raises UsageError: with the server's text.
    """
    if not name:
        raise UsageError(f'replication slot name "{name}" is too short')
    if len(name.encode()) > _NAME_LENGTH:
        raise UsageError(f'replication slot name "{name}" is too long')
    if not re.fullmatch("[a-z0-9_]+", name):
        raise UsageError(
            f'replication slot name "{name}" contains invalid character',
            hint="Replication slot names may only contain lower case letters, numbers, and the underscore character.",
        )
    if name == _RESERVED:
        raise UsageError(
            f'replication slot name "{name}" is reserved',
            detail=f'The name "{_RESERVED}" is reserved for the conflict detection slot.',
        )
    return name


def sync_slot_name(subid: int, relid: int, sysid: str) -> str:
    """Name the slot that synchronizes one table (ReplicationSlotNameForTablesync).

    :param relid: oid of the target's table.
    :param sysid: system identifier of the *target*, so that copies of it never meet in one slot.
    """
    return valid_slot_name(f"pgsub_{subid}_sync_{relid}_{sysid}"[:_NAME_LENGTH])


def group_slot_name(subid: int, number: int, sysid: str) -> str:
    """Name a slot that synchronizes several tables.

    :param number: never used before by the subscription.
    """
    return valid_slot_name(f"pgsub_{subid}_sync_g{number}_{sysid}"[:_NAME_LENGTH])


def is_sync_slot(subid: int, name: str) -> bool:
    """Return whether a slot of this name synchronizes tables of a subscription."""
    return re.fullmatch(rf"pgsub_{subid}_sync_[a-z0-9_]+", name) is not None
