"""Bytes of a COPY moved from the publisher's connection to the target's. Mirrors copy_read_data (tablesync.c).

NOTES
Rows go from connection to connection below libpq (:mod:`pgsub.tablesync.copy.below_libpq`), and a row of any size
passes through one small buffer. libpq would make an object of every row and copy it several times. It is used only for
connections that nothing else can read, such as those encrypted by GSSAPI. In both cases the target receives messages
composed here, and no header of the publisher: nothing that a publisher sends can end the COPY and begin a query there.

The passage below libpq must leave both connections as libpq expects them. The publisher's libpq does not know of the
query, so ReadyForQuery must be the last byte read. The target's libpq is inside COPY, so a message that was begun is
sent completely even after the target has failed. A copy counts only after the publisher's CommandComplete and the
target's row count have both been received. Memory is limited to one buffer, whatever the size of a row.
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

_BLOCK = 1 << 17  #: for libpq: one row per message takes twice the time of rows that are joined to blocks
_RECORD_READS = 3


def move(
    source: Connection, session: psycopg.Connection, copy_out: str, copy_in: str, moved: Moved, *, direct: bool
) -> tuple[int, int]:
    """Run both statements and move all rows, in the open transactions of both connections.

    After an error both connections must be closed.

    :param direct: both are :func:`~pgsub.publisher.stream.transport.reachable`.
    :return: number of rows stored on the target, and bytes of the rows.
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
    """A meter that reports progress, and passes a failpoint once a block."""

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
        """Report progress again while waiting for a server, as a sign of life of the task."""
        self._moved(self._size)


def _through_libpq(source: pq.abc.PGconn, target: pq.abc.PGconn, copy_out: str, meter: _Meter) -> int:
    """Move the rows with libpq on both ends.

    poll waits for both connections, because libpq's blocking calls would hold the interpreter lock. A block is flushed
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
    # rows end in the same way after an error of the publisher: only the result tells
    result_or_none = _answer(source, meter)
    if result_or_none is None or result_or_none.status != pq.ExecStatus.COMMAND_OK:
        raise SourceError(_error(result_or_none))
    if _answer(source, meter) is not None:
        raise SourceError(psycopg.OperationalError("the publisher sent more than was asked for"))
    return size


def _row(source: pq.abc.PGconn, meter: _Meter) -> tuple[int, memoryview]:
    """Read the publisher's next row; its length is negative at the end."""
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
    """Read into libpq repeatedly, and wait only if no data is available already.

    Data inside OpenSSL does not make the socket readable. One TLS record (16 kB) may need several reads into libpq's
    buffer, which has 8 kB or more free.
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
    """Return the server's error. One without an SQLSTATE is libpq's error of a lost connection."""
    if result is None or result.status != pq.ExecStatus.FATAL_ERROR:
        return psycopg.OperationalError("the connection was lost")
    error = psycopg.errors.error_from_result(result)
    return error if error.sqlstate else psycopg.OperationalError(server_words.said(error).message)
