"""Names of replication slots: valid names, and names of slots that synchronize a subscription's tables.

:mod:`pgsub.commands.subscription.definition` chooses the name of the subscription's own slot.

Mirrors ReplicationSlotValidateName (``slot.c``) and ReplicationSlotNameForTablesync (``tablesync.c``).
"""

from __future__ import annotations

import re

from pgsub.common.errors import UsageError

_NAME_LENGTH = 63  # NAMEDATALEN - 1
_RESERVED = "pg_conflict_detection"


def valid_slot_name(name: str) -> str:
    """Check a slot name as ReplicationSlotValidateName does, and return it.

    :raises UsageError: it is invalid; in the server's words.
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
    """Return the name of the slot that synchronizes one table (ReplicationSlotNameForTablesync).

    :param relid: OID of the target's table.
    :param sysid: system identifier of the *target*, so that copies of the target never use the same slot.
    """
    return valid_slot_name(f"pgsub_{subid}_sync_{relid}_{sysid}"[:_NAME_LENGTH])


def group_slot_name(subid: int, number: int, sysid: str) -> str:
    """Return the name of a slot that synchronizes several tables.

    :param number: a number that the subscription has not used before.
    """
    return valid_slot_name(f"pgsub_{subid}_sync_g{number}_{sysid}"[:_NAME_LENGTH])


def is_sync_slot(subid: int, name: str) -> bool:
    """Return whether slots with this name synchronize tables of the subscription."""
    return re.fullmatch(rf"pgsub_{subid}_sync_[a-z0-9_]+", name) is not None
