"""Times of the replication protocol: microseconds since 2000-01-01 UTC, like timestamptz in datatype/timestamp.h."""

from __future__ import annotations

EPOCH_2000 = 946_684_800_000_000  #: 2000-01-01 UTC in microseconds since 1970


def since_2000(microseconds: int) -> int:
    """Convert microseconds since 1970-01-01 UTC, the system's time, to the protocol's time."""
    return microseconds - EPOCH_2000
