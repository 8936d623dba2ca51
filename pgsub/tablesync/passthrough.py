"""CopyData of the publisher's socket handed on to the target's as it is: only the lengths of messages are read."""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Callable

import psycopg
from psycopg import pq

#: Called again and again with the bytes moved so far.
Moved = Callable[[int], None]

_BUFFER = 1 << 18
_LENGTH = struct.Struct(">xI")
_COPY_DATA = ord("d")


class TargetSpoke(Exception):
    """The target ended the copy by itself; its result says why."""


class SourceError(Exception):
    """The publisher failed, or was lost; ``error`` is what psycopg would have raised."""

    def __init__(self, error: psycopg.Error) -> None:
        super().__init__(str(error))
        self.error = error


class Passthrough:
    """The publisher's socket read here, its CopyData handed on in stretches of whole and begun messages.

    libpq knows nothing of the query, and once ReadyForQuery has been read has missed nothing.
    """

    def __init__(self, source: socket.socket, target: socket.socket, pgconn: pq.abc.PGconn, meter: Moved) -> None:
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
                wait(self._source, select.POLLOUT)
            except OSError as error:
                raise self._lost(error) from None

    def _receive(self) -> None:
        while True:
            try:
                count = self._source.recv_into(memoryview(self._buffer)[self._have :])
            except BlockingIOError:
                wait(self._source, select.POLLIN, self._idle)
                continue
            except OSError as error:
                raise self._lost(error) from None
            if not count:
                raise self._lost(None)
            self._have += count
            return

    def _idle(self) -> None:
        """Whoever waits still lives, and what it has moved is worth telling."""
        self._meter(self._size)

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
            if wait(self._target, select.POLLIN | select.POLLOUT, self._idle) & ~select.POLLOUT:
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
            raise TargetSpoke
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


def wait(what: socket.socket | int, events: int, idle: Callable[[], None] = lambda: None) -> int:
    """Wait for one of these events of poll(2); which of them came.

    :param idle: called twice a second meanwhile.
    """
    poll = select.poll()
    poll.register(what, events)
    while not (ready := poll.poll(500)):
        idle()
    return ready[0][1]
