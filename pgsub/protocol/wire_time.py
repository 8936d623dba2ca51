"""Times of the replication protocol: microseconds since 2000-01-01 UTC, a timestamptz of datatype/timestamp.h."""

from __future__ import annotations

EPOCH_2000 = 946_684_800_000_000  #: 2000-01-01 UTC in microseconds since 1970


def since_2000(microseconds: int) -> int:
    """Return a time of the protocol.

    :param microseconds: since 1970-01-01 UTC, as the system has them.
    """
    return microseconds - EPOCH_2000
