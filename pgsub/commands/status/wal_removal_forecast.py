"""Forecast of when the publisher removes WAL that a slot needs. Mirrors the limit of ``max_slot_wal_keep_size``."""

from __future__ import annotations

from pgsub.catalog.rows import SlotRow


def lost_in(slot: SlotRow) -> int | None:
    """Return the seconds until the publisher removes WAL that the slot needs, None if it is not expected to."""
    if slot.safe_wal_size is None or slot.wal_bytes_per_second is None:
        return None
    if slot.safe_wal_size <= 0:
        return 0
    return slot.safe_wal_size // slot.wal_bytes_per_second if slot.wal_bytes_per_second > 0 else None
