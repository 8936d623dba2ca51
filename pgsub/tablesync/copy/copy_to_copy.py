"""Bytes of a COPY from the publisher's connection to the target's, as they come. Mirrors copy_read_data (tablesync.c).

NOTES
Rows go from connection to connection below libpq (:mod:`pgsub.tablesync.copy.below_libpq`), and a row of any size
passes through one small buffer. libpq would make an object of every row and copy each several times; it remains for
connections that only it can read, as those that GSSAPI encrypts. Either way the target is sent messages made here, and
no header of the publisher's: nothing that a publisher sends can end the COPY on the target and begin a query there.

The passthrough must leave both connections as libpq expects them. On the publisher's side libpq knows nothing of the
query, so ReadyForQuery must be the last byte read. On the target's side libpq is inside COPY, so a message that has
begun is sent whole even when the target has failed. A copy counts only when the publisher's CommandComplete and the
target's row count have both been seen; memory stays that of one buffer, whatever the size of a row.
"""

from __future__ import annotations

import select
from collections.abc import Iterator

import psycopg
from psycopg import pq

from pgsub.common import failpoints, server_words
from pgsub.publisher.connect import Connection
from pgsub.publisher.stream.transport import over
from pgsub.tablesync.copy.below_libpq import Moved, Passthrough, SourceError, TargetSpoke, wait

__all__ = ["SourceError", "move"]

_BLOCK = 1 << 17  #: libpq's way: one row a message costs twice the time of messages joined to blocks
_RECORD_READS = 3


def move(
    source: Connection, session: psycopg.Connection, copy_out: str, copy_in: str, moved: Moved, *, direct: bool
) -> tuple[int, int]:
    """Run both statements and move all rows, inside the open transactions of both connections.

    After an error neither connection is good for anything but closing.

    :param direct: both are :func:`~pgsub.publisher.stream.transport.reachable`.
    :return: rows stored on the target, and bytes of the rows.
    :raises SourceError: the publisher failed.
    :raises psycopg.Error: the target failed.
    """
    session.pgconn.nonblocking = 1
    result = session.pgconn.exec_(copy_in.encode())
    if result.status != pq.ExecStatus.COPY_IN:
        raise _error(result)
    meter = _Meter(moved)
    if direct:
        receiver = over(session.pgconn)
        try:
            size = Passthrough(over(source.pgconn), receiver, session.pgconn, meter).run(copy_out)
        except TargetSpoke:
            receiver.end()
            _end(session.pgconn, meter)
            raise psycopg.OperationalError("the target ended the copy") from None
        receiver.end()
    else:
        size = _through_libpq(source.pgconn, session.pgconn, copy_out, meter)
    failpoints.point("copy.middle")
    return _end(session.pgconn, meter), size


def _end(target: pq.abc.PGconn, meter: _Meter) -> int:
    target.put_copy_end()
    _flush(target, meter)
    result = _answer(target, meter)
    if result is None or result.status != pq.ExecStatus.COMMAND_OK:
        raise _error(result)
    while _answer(target, meter) is not None:
        pass
    return result.command_tuples or 0


class _Meter:
    """A meter that reports progress, and gives a failpoint its chance once a block."""

    def __init__(self, moved: Moved) -> None:
        self._moved = moved
        self._size = self._marked = 0

    def __call__(self, size: int) -> None:
        self._size = size
        self._moved(size)
        if size - self._marked >= _BLOCK:
            self._marked = size
            failpoints.point("copy.middle")

    def idle(self) -> None:
        """Report the progress again while a server is waited for: it shows that the task lives."""
        self._moved(self._size)


def _through_libpq(source: pq.abc.PGconn, target: pq.abc.PGconn, copy_out: str, meter: _Meter) -> int:
    """Move the rows with libpq on both ends.

    Both connections are waited for with poll: libpq's blocking calls would hold the interpreter. A block is flushed
    before the next one is read, so libpq keeps no more than that in memory.
    """
    result = source.exec_(copy_out.encode())
    if result.status != pq.ExecStatus.COPY_OUT:
        raise SourceError(_error(result))
    size = held = 0
    block: list[bytes | memoryview] = []
    while True:
        try:
            count, data = _row(source, meter)
        except psycopg.Error as error:
            raise SourceError(error) from None
        if count > 0:
            block.append(data)
            held += count
        if held >= _BLOCK or (count < 0 and held):
            target.put_copy_data(block[0] if len(block) == 1 else b"".join(block))
            _flush(target, meter)
            size, held, block = size + held, 0, []
            meter(size)
        if count < 0:
            break
    # an error of the publisher ends the rows as their end does: only the result says which it was
    result_or_none = _answer(source, meter)
    if result_or_none is None or result_or_none.status != pq.ExecStatus.COMMAND_OK:
        raise SourceError(_error(result_or_none))
    if _answer(source, meter) is not None:
        raise SourceError(psycopg.OperationalError("the publisher sent more than was asked for"))
    return size


def _row(source: pq.abc.PGconn, meter: _Meter) -> tuple[int, memoryview]:
    """Read the publisher's next row; the length is negative at the end."""
    reads = _reads(source, meter)
    while not (row := source.get_copy_data(1))[0]:
        next(reads)
    return row


def _answer(connection: pq.abc.PGconn, meter: _Meter) -> pq.abc.PGresult | None:
    """Wait for the next result."""
    reads = _reads(connection, meter)
    while connection.is_busy():
        next(reads)
    return connection.get_result()


def _reads(connection: pq.abc.PGconn, meter: _Meter) -> Iterator[None]:
    """Read into libpq again and again, waiting only for what does not wait there already.

    What waits inside OpenSSL does not make the socket readable, and one TLS record (16 kB) may need several reads into
    libpq's buffer, in which 8 kB or more are free.
    """
    while True:
        for _ in range(_RECORD_READS if connection.ssl_in_use or connection.used_gssapi else 0):
            connection.consume_input()
            yield
        wait(connection.socket, select.POLLIN, meter.idle)
        connection.consume_input()
        yield


def _flush(target: pq.abc.PGconn, meter: _Meter) -> None:
    while target.flush():
        if wait(target.socket, select.POLLIN | select.POLLOUT, meter.idle) & select.POLLIN:
            target.consume_input()


def _error(result: pq.abc.PGresult | None) -> psycopg.Error:
    """Return the server's error; one without an SQLSTATE is libpq's, of a lost connection."""
    if result is None or result.status != pq.ExecStatus.FATAL_ERROR:
        return psycopg.OperationalError("the connection was lost")
    error = psycopg.errors.error_from_result(result)
    return error if error.sqlstate else psycopg.OperationalError(server_words.said(error).message)
