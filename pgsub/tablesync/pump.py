"""Bytes of a COPY from the publisher's connection to the target's, as they come. Mirrors copy_read_data (tablesync.c).

CopyData messages look the same in both directions. So between connections that nothing encrypts the publisher's
messages are handed on as they are: only their lengths are read, and a row of any size passes through one small buffer.
libpq would make an object of every row and copy each several times; it remains for encrypted connections.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Callable

import psycopg
from psycopg import pq

from pgsub import failpoints
from pgsub.publisher.connect import Connection

#: Called again and again with the bytes moved so far.
Moved = Callable[[int], None]

_BUFFER = 1 << 18
_BLOCK = 1 << 17  #: libpq's way: one row a message costs twice the time of messages joined to blocks
_LENGTH = struct.Struct(">xI")
_COPY_DATA = ord("d")


class SourceError(Exception):
    """The publisher failed, or was lost; ``error`` is what psycopg would have raised."""

    def __init__(self, error: psycopg.Error) -> None:
        super().__init__(str(error))
        self.error = error


def plain(*connections: psycopg.Connection) -> bool:
    """Whether nothing encrypts what goes over the sockets of these connections."""
    query = "SELECT encrypted FROM pg_catalog.pg_stat_gssapi WHERE pid = pg_catalog.pg_backend_pid()"
    return not any(c.pgconn.ssl_in_use or c.execute(query).fetchone() == (True,) for c in connections)


def move(
    source: Connection, session: psycopg.Connection, copy_out: str, copy_in: str, moved: Moved, *, raw: bool
) -> tuple[int, int]:
    """Run both statements and move all rows, inside the open transactions of both connections.

    After an error neither connection is good for anything but closing.

    :param raw: :func:`plain` holds for both.
    :return: rows stored on the target, and bytes of the rows.
    :raises SourceError: the publisher failed.
    :raises psycopg.Error: the target failed.
    """
    session.pgconn.nonblocking = 1
    result = session.pgconn.exec_(copy_in.encode())
    if result.status != pq.ExecStatus.COPY_IN:
        raise _error(result)
    meter = _Meter(moved)
    if raw:
        with _dup(source) as sender, _dup(session) as receiver:
            size = _Raw(sender, receiver, session.pgconn, meter).run(copy_out)
    else:
        size = _through_libpq(source.pgconn, session.pgconn, copy_out, meter)
    failpoints.point("copy.middle")
    return _end(session.pgconn), size


def _end(target: pq.abc.PGconn) -> int:
    target.put_copy_end()
    _flush(target)
    result = _answer(target)
    if result is None or result.status != pq.ExecStatus.COMMAND_OK:
        raise _error(result)
    while _answer(target) is not None:
        pass
    return result.command_tuples or 0


class _Meter:
    """Reports progress, and gives a failpoint its chance once a block."""

    def __init__(self, moved: Moved) -> None:
        self._moved = moved
        self._marked = 0

    def __call__(self, size: int) -> None:
        self._moved(size)
        if size - self._marked >= _BLOCK:
            self._marked = size
            failpoints.point("copy.middle")


class _Raw:
    """The publisher's socket read here, its CopyData handed on in stretches of whole and begun messages.

    libpq knows nothing of the query, and once ReadyForQuery has been read has missed nothing.
    """

    def __init__(self, source: socket.socket, target: socket.socket, pgconn: pq.abc.PGconn, meter: _Meter) -> None:
        self._source, self._target = source, target
        self._pgconn = pgconn
        self._meter = meter
        self._buffer = bytearray(_BUFFER)
        self._have = 0  #: bytes in the buffer
        self._left = 0  #: bytes to come of a message whose beginning was handed on
        self._size = 0
        self._rows = 0
        self._ended = False
        self._failure: psycopg.Error | None = None

    def run(self, copy_out: str) -> int:
        """:return: bytes of the rows, without the headers of their messages."""
        query = copy_out.encode() + b"\0"
        self._ask(memoryview(b"Q" + struct.pack(">I", len(query) + 4) + query))
        while not self._ended:
            self._receive()
            self._hand_on()
            self._meter(self._size)
        return self._size - 5 * self._rows

    def _ask(self, query: memoryview) -> None:
        while query:
            try:
                query = query[self._source.send(query, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                _wait(self._source, select.POLLOUT)
            except OSError as error:
                raise self._lost(error) from None

    def _receive(self) -> None:
        while True:
            try:
                count = self._source.recv_into(memoryview(self._buffer)[self._have :])
            except BlockingIOError:
                _wait(self._source, select.POLLIN)
                continue
            except OSError as error:
                raise self._lost(error) from None
            if not count:
                raise self._lost(None)
            self._have += count
            return

    def _lost(self, error: OSError | None) -> SourceError:
        reason = f": {error.strerror}" if error is not None else ""
        return SourceError(self._failure or psycopg.OperationalError(f"the connection was lost{reason}"))

    def _hand_on(self) -> None:
        """Everything in the buffer but the beginning of a message that is not known yet."""
        start = 0
        while start < self._have:
            end = self._rows_end(start)
            if end > start:
                self._send(memoryview(self._buffer)[start:end])
                self._size += end - start
            start = self._message_end(end)
            if start == end:
                break
        self._buffer[: self._have - start] = self._buffer[start : self._have]
        self._have -= start

    def _rows_end(self, start: int) -> int:
        """How far CopyData reaches."""
        buffer, have, position, length = self._buffer, self._have, start + self._left, _LENGTH.unpack_from
        while position + 5 <= have and buffer[position] == _COPY_DATA:
            position += 1 + length(buffer, position)[0]
        self._left = max(0, position - have)
        return min(position, have)

    def _message_end(self, start: int) -> int:
        """Take a message that is no CopyData; ``start`` where there is none, or not all of it."""
        if self._have - start < 5 or self._buffer[start] == _COPY_DATA:
            return start
        end = start + 1 + int(_LENGTH.unpack_from(self._buffer, start)[0])
        if end - start > _BUFFER:
            raise SourceError(psycopg.OperationalError("the publisher sent a message that is too long"))
        if end > self._have:
            return start
        self._message(bytes(self._buffer[start : start + 1]), bytes(self._buffer[start + 5 : end]))
        return end

    def _message(self, kind: bytes, body: bytes) -> None:
        if kind == b"E":
            self._failure = _report(body)
        elif kind == b"C":
            self._rows = int(body.rstrip(b"\0").rpartition(b" ")[2])
        elif kind == b"Z":
            if self._failure is not None:
                raise SourceError(self._failure)
            self._ended = True

    def _send(self, stretch: memoryview) -> None:
        while stretch:
            if _wait(self._target, select.POLLIN | select.POLLOUT) & ~select.POLLOUT:
                self._listen()
            try:
                stretch = stretch[self._target.send(stretch, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise psycopg.OperationalError(f"the connection was lost: {error.strerror}") from None

    def _listen(self) -> None:
        """The target speaks while rows are sent: an error ends the copy now, for it reads on without storing."""
        try:
            kind = self._target.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError as error:
            raise psycopg.OperationalError(f"the connection was lost: {error.strerror}") from None
        if kind in (b"", b"E"):
            _end(self._pgconn)
            raise psycopg.OperationalError("the target ended the copy")
        self._pgconn.consume_input()


def _report(body: bytes) -> psycopg.Error:
    """An ErrorResponse as psycopg would raise it."""
    fields = {field[:1]: field[1:].decode(errors="replace") for field in body.split(b"\0") if field}
    kind = psycopg.Error
    try:
        kind = psycopg.errors.lookup(fields.get(b"C", ""))
    except KeyError:
        pass
    lines = [fields.get(b"M", "unknown error"), fields.get(b"D"), fields.get(b"H")]
    error = kind("\n".join(line for line in lines if line))
    error.sqlstate = error.sqlstate or fields.get(b"C")
    return error


def _through_libpq(source: pq.abc.PGconn, target: pq.abc.PGconn, copy_out: str, meter: _Meter) -> int:
    """The same with libpq on both ends.

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
            count, data = _row(source)
        except psycopg.Error as error:
            raise SourceError(error) from None
        if count > 0:
            block.append(data)
            held += count
        if held >= _BLOCK or (count < 0 and held):
            target.put_copy_data(block[0] if len(block) == 1 else b"".join(block))
            _flush(target)
            size, held, block = size + held, 0, []
            meter(size)
        if count < 0:
            break
    # an error of the publisher ends the rows as their end does: only the result tells which it was
    result_or_none = _answer(source)
    if result_or_none is None or result_or_none.status != pq.ExecStatus.COMMAND_OK:
        raise SourceError(_error(result_or_none))
    while _answer(source) is not None:
        pass
    return size


def _row(source: pq.abc.PGconn) -> tuple[int, memoryview]:
    """The publisher's next row; a negative length at the end."""
    while True:
        count, data = source.get_copy_data(1)
        if count:
            return count, data
        _wait(source.socket, select.POLLIN)
        source.consume_input()


def _answer(connection: pq.abc.PGconn) -> pq.abc.PGresult | None:
    """The next result."""
    while connection.is_busy():
        _wait(connection.socket, select.POLLIN)
        connection.consume_input()
    return connection.get_result()


def _flush(target: pq.abc.PGconn) -> None:
    while target.flush():
        if _wait(target.socket, select.POLLIN | select.POLLOUT) & select.POLLIN:
            target.consume_input()


def _error(result: pq.abc.PGresult | None) -> psycopg.Error:
    """The server's error; without an SQLSTATE it is libpq that speaks, of a connection that was lost."""
    if result is None or result.status != pq.ExecStatus.FATAL_ERROR:
        return psycopg.OperationalError("the connection was lost")
    error = psycopg.errors.error_from_result(result)
    return error if error.sqlstate else psycopg.OperationalError(str(error))


def _dup(connection: psycopg.Connection) -> socket.socket:
    """The connection's socket, non-blocking as libpq made it; closing it leaves the connection open."""
    return socket.socket(fileno=os.dup(connection.fileno()))


def _wait(what: socket.socket | int, events: int) -> int:
    poll = select.poll()
    poll.register(what, events)
    return poll.poll()[0][1]
