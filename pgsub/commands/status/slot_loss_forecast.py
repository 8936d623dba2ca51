"""The forecast of a slot's loss: the seconds until the publisher removes WAL that the slot needs.

The server shows the remaining bytes (``safe_wal_size`` of pg_replication_slots), not the time.
"""

from __future__ import annotations

from pgsub.catalog.rows import SlotRow


def slot_lost_in(slot: SlotRow | None) -> int | None:
    """Return the seconds until the publisher removes WAL that the slot needs, None if it is not expected to."""
    if slot is None or slot.safe_wal_size is None or slot.wal_bytes_per_second is None:
        return None
    if slot.safe_wal_size <= 0:
        return 0
    return slot.safe_wal_size // slot.wal_bytes_per_second if slot.wal_bytes_per_second > 0 else None
