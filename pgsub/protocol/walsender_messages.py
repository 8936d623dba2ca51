"""The CopyData envelopes of streaming replication: WAL data and keepalives in, standby status updates out.

Mirrors ``src/backend/replication/walsender.c`` (``XLogSendLogical``, ``WalSndKeepalive``,
``ProcessStandbyReplyMessage``); protocol section "Streaming Replication Protocol".
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from pgsub.common.errors import ProtocolViolation

_WAL_DATA = struct.Struct(">QQq")
_KEEPALIVE = struct.Struct(">QqB")
_STATUS = struct.Struct(">cQQQqB")

_WAL_DATA_HEADER = 1 + _WAL_DATA.size
_KEEPALIVE_SIZE = 1 + _KEEPALIVE.size
#: 2000-01-01 UTC in microseconds since 1970. Times of the protocol begin there (datatype/timestamp.h).
EPOCH_2000 = 946_684_800_000_000


class XLogData(NamedTuple):
    """``w``: one pgoutput message; start and wal_end are 0 for Relation and Type messages."""

    start: int
    wal_end: int
    send_ts: int
    payload: bytes


class Keepalive(NamedTuple):
    """``k``: the position that the publisher has sent, and whether it requests an immediate reply."""

    wal_end: int
    send_ts: int
    reply_requested: bool


def parse(copydata: bytes | memoryview) -> XLogData | Keepalive:
    """Parse one CopyData message of a walsender.

    :param copydata: its content without the CopyData header.
    :return: the envelope; its payload is always a copy.
    :raises ProtocolViolation: any other kind or length.
    """
    size = len(copydata)
    kind = copydata[0] if size else None
    if kind == 0x77:
        if size < _WAL_DATA_HEADER:
            raise ProtocolViolation(f"WAL data message of {size} bytes is too short")
        start, wal_end, send_ts = _WAL_DATA.unpack_from(copydata, 1)
        return XLogData(start, wal_end, send_ts, bytes(copydata[_WAL_DATA_HEADER:]))
    if kind == 0x6B:
        if size != _KEEPALIVE_SIZE:
            raise ProtocolViolation(f"keepalive message has {size} bytes instead of {_KEEPALIVE_SIZE}")
        wal_end, send_ts, reply = _KEEPALIVE.unpack_from(copydata, 1)
        return Keepalive(wal_end, send_ts, reply != 0)
    if kind is None:
        raise ProtocolViolation("empty replication message")
    raise ProtocolViolation(f"unexpected replication message type 0x{kind:02X}")


def standby_status(write: int, flush: int, apply: int, now_ts: int, reply_requested: bool = False) -> bytes:
    """Build the standby status update ``r``; the slot's confirmed_flush_lsn follows ``flush``.

    :param write: last byte received + 1.
    :param flush: last byte durable on the target + 1.
    :param apply: last byte visible on the target + 1.
    :param now_ts: microseconds since 2000-01-01 UTC.
    :param reply_requested: request an immediate keepalive from the publisher.
    """
    return _STATUS.pack(b"r", write, flush, apply, now_ts, reply_requested)


def since_2000(microseconds: int) -> int:
    """Convert microseconds since 1970-01-01 UTC, the system's time, to the protocol's time."""
    return microseconds - EPOCH_2000
