"""The publisher's WAL as bytes, as a physical standby receives it, up to one position. Mirrors walreceiver.c.

It needs no slot, and leaves nothing on the publisher. Meanwhile it uses one of ``max_wal_senders``.
"""

from __future__ import annotations

import select
from time import monotonic

from pgsub.common.query import row, scalar
from pgsub.protocol import walsender_messages
from pgsub.protocol.lsn import format_lsn
from pgsub.protocol.wal_records import Unreadable, Unused, Wal
from pgsub.protocol.walsender_messages import XLogData
from pgsub.publisher.connect import Connection
from pgsub.publisher.stream.channel import Refused, poll
from pgsub.publisher.stream.channel_libpq import LibpqChannel

#: Timeout of an answer, in seconds.
_SECONDS = 10.0
#: Number of pages that are read before the page with the position. A record is rarely longer than some pages.
_PAGES_BEFORE = 3
_FIRST_RECORD = 64  #: bytes of a segment that contain the header of its first record
_LARGEST_PAGE = 1 << 16  #: maximum of XLOG_BLCKSZ
_POWERS = {str(1 << n): 1 << n for n in range(10, 31)}  #: powers of two up to WalSegMaxSize
_SIZES = """
SELECT max(setting) FILTER (WHERE name = 'wal_block_size'), max(setting) FILTER (WHERE name = 'wal_segment_size')
  FROM pg_catalog.pg_settings
"""
#: Identifies one run of one server, because several servers may share an address.
_STARTED = "SELECT pg_catalog.pg_postmaster_start_time()::pg_catalog.text"


def same_server(one: Connection, other: Connection) -> bool:
    """Return whether two sessions are connected to the same server, without a restart between them."""
    return bool(scalar(one, _STARTED) == scalar(other, _STARTED))


def has_transaction(connection: Connection, lsn: int, time: int, oldest: int) -> bool:
    """Return whether a transaction ends at a position, which the WAL must have reached.

    :param connection: a replication connection. It must be closed afterwards, see
        :class:`~pgsub.publisher.stream.walsender.WalSender`.
    :param time: time of the transaction, see :meth:`~pgsub.protocol.wal_records.Wal.ended_transaction`.
    :param oldest: no earlier WAL is requested, because it may be gone.
    :raises Unreadable: the server does not have or send the WAL.
    :raises psycopg.Error: the session broke.
    :raises PublisherUnavailable: the server does not answer.
    """
    page, segment = _sizes(connection)
    last = (lsn - 1) // page * page
    begin = min(last, max(last - _PAGES_BEFORE * page, oldest // page * page))
    wal, written = _read(connection, begin, lsn, page)
    try:
        return wal.ended_transaction(lsn, time)
    except Unused:
        following = -(-lsn // segment) * segment
        if written != following:
            rest, _ = _read(connection, following, following + _FIRST_RECORD, page)
            if rest.last_record_before() >= lsn:
                raise
        return False


def _sizes(connection: Connection) -> tuple[int, int]:
    """Return the sizes of a page and of a segment in bytes."""
    first, second, *_ = (*(row(connection, _SIZES) or ()), None, None)
    page, segment = _POWERS.get(str(first), 0), _POWERS.get(str(second), 0)
    # these values decide how much is read
    if not 0 < page <= _LARGEST_PAGE < segment:
        raise Unreadable("the server does not say how its WAL is divided")
    return page, segment


def _read(connection: Connection, begin: int, end: int, page: int) -> tuple[Wal, int]:
    """Read WAL from the beginning of a page on; return it, and the end of the server's WAL when it was sent."""
    channel = LibpqChannel(connection, _SECONDS)
    try:
        channel.start(f"START_REPLICATION PHYSICAL {format_lsn(begin)}".encode())
        content, written = _received(channel, connection.pgconn.socket, begin, end)
        channel.stop(monotonic() + _SECONDS)  # otherwise the server logs an unexpected disconnect
    except Refused as refused:
        raise Unreadable(refused.report.message) from None
    return Wal(begin, content, page), written


def _received(channel: LibpqChannel, socket: int, begin: int, end: int) -> tuple[bytes, int]:
    deadline = monotonic() + _SECONDS
    content, written = b"", 0
    while len(content) < end - begin:
        frames = channel.receive(1000, 1 << 20)
        if frames is None or monotonic() > deadline:
            raise Unreadable("the server sends no WAL")
        for message in map(walsender_messages.parse, frames):
            written = message.wal_end
            if isinstance(message, XLogData):
                if message.start != begin + len(content):
                    raise Unreadable("the server sent other WAL than was requested")
                content += message.payload
        if not frames:
            poll(socket, select.POLLIN, 0.1)
    return content, written
