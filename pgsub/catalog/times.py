"""Times as the state store writes them: RFC 3339 text in UTC with microseconds, so that text order is time order.

Mirrors what ``timestamptz_out`` is to the server; the wire's epoch is that of ``datatype/timestamp.h``.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

_WIRE_EPOCH = datetime(2000, 1, 1)


def utc_now() -> str:
    """Return the present time as RFC 3339 text."""
    return _text(datetime.now(UTC))


def utc_text(moment: datetime) -> str:
    """Return a time with a time zone as RFC 3339 text."""
    return _text(moment.astimezone(UTC))


def ago(seconds: float) -> str:
    """Return the time so many seconds before now as RFC 3339 text, or the earliest there is."""
    try:
        return _text(datetime.now(UTC) - timedelta(seconds=seconds))
    except OverflowError:
        return _text(datetime.min)


def wire_time(microseconds: int | None) -> str | None:
    """Return a timestamp of the replication protocol as RFC 3339 text.

    :param microseconds: since 2000-01-01 UTC; None and 0 mean "never".
    :return: None also for a time that no calendar holds: the publisher's clock is not ours to trust.
    """
    if not microseconds:
        return None
    try:
        return _text(_WIRE_EPOCH + timedelta(microseconds=microseconds))
    except OverflowError:
        return None


def _text(moment: datetime) -> str:
    return moment.replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"
