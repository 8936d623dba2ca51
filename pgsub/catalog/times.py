"""Times in the state store: RFC 3339 text in UTC with microseconds, so that text order is time order.

Mirrors ``timestamptz_out`` of the server. The protocol's epoch is from ``datatype/timestamp.h``.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

_WIRE_EPOCH = datetime(2000, 1, 1)
_STORED = re.compile(r"\b(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)\.\d{6}Z\b")


def utc_now() -> str:
    """Return the present time as RFC 3339 text."""
    return _text(datetime.now(UTC))


def utc_text(moment: datetime) -> str:
    """Return a time with a time zone as RFC 3339 text."""
    return _text(moment.astimezone(UTC))


def ago(seconds: float) -> str:
    """Return a time in the past as RFC 3339 text, or the earliest possible time."""
    try:
        return _text(datetime.now(UTC) - timedelta(seconds=seconds))
    except OverflowError:
        return _text(datetime.min)


def seconds_since(moment: str | None) -> float:
    """Return the seconds since a stored time, 0 for None or a future time."""
    return max((datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds(), 0.0) if moment else 0.0


def seconds_between(moment: str, later: str) -> float:
    """Return the seconds from one stored time to another, negative if that is earlier."""
    return (datetime.fromisoformat(later) - datetime.fromisoformat(moment)).total_seconds()


def wire_time(microseconds: int | None) -> str | None:
    """Return a timestamp of the replication protocol as RFC 3339 text.

    :param microseconds: since 2000-01-01 UTC. None and 0 mean "never".
    :return: None also for times outside of the calendar, because the publisher's clock is not trusted.
    """
    if not microseconds:
        return None
    try:
        return _text(_WIRE_EPOCH + timedelta(microseconds=microseconds))
    except OverflowError:
        return None


def readable(text: str | None) -> str:
    """Return a text in which such times are readable, to the second: ``2026-11-25 13:37:42 UTC``."""
    return _STORED.sub(r"\1 \2 UTC", text or "an unknown time")


def _text(moment: datetime) -> str:
    return moment.replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"
