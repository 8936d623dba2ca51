"""A walsender's stream below libpq's framing, over the connection's socket or its TLS session.

libpq makes an object of every message, which takes 2 µs each. Here whole buffers are divided into frames, which takes
0.2 µs each. libpq does not know of the START_REPLICATION command. Once ReadyForQuery has been read, it has missed
nothing. Protocol sections "COPY Operations" and "Message Formats".
"""

from __future__ import annotations

import bisect
import select
import struct
import time
from collections.abc import Sequence

import psycopg

from pgsub.common.errors import ProtocolViolation
from pgsub.protocol import frames
from pgsub.protocol.frames import Frames
from pgsub.publisher.connect import Connection
from pgsub.publisher.server_errors import ServerError
from pgsub.publisher.stream.channel import START_SECONDS, Refused, poll, unanswered, unread
from pgsub.publisher.stream.transport import Transport

_BUFFER = 1 << 20
#: Less space is not worth a system call.
_LITTLE = 1 << 16
#: Maximum number of consecutive reads. The kernel may have more, but to chase a publisher that sends as fast as this
#: reads is expensive for both.
_READS = 8
#: The field of a NoticeResponse that names the server's function. Unlike the message, it is never translated.
_SKIPPED = b"\0RLoadPublications\0"
_LOST = "server closed the connection unexpectedly"


class SocketChannel:
    """A :class:`~pgsub.publisher.stream.channel.Channel` over a transport."""

    def __init__(self, connection: Connection, transport: Transport, send_timeout: float) -> None:
        self._transport = transport
        self._encoding = connection.info.encoding
        self._send_timeout = send_timeout
        self._buffer = bytearray(_BUFFER)
        self._have = 0  #: bytes in the buffer
        self.skipped_publication = False
        self._lost: str | None = None  #: why nothing more will arrive; None: the connection is alive

    def start(self, command: bytes) -> None:
        """See the protocol."""
        self._send(b"Q" + struct.pack(">I", len(command) + 5) + command + b"\0")
        failure: ServerError | None = None
        deadline = time.monotonic() + START_SECONDS
        while True:
            kind, body = self._next(b"EZ" if failure else b"WEZ", deadline, "start")
            if kind == b"W":
                return
            if kind == b"E":
                failure = ServerError.from_response(body, self._encoding)
            elif kind == b"Z":
                raise Refused(failure or ServerError(None, "the publisher did not begin to stream"))

    def receive(self, limit_messages: int, limit_bytes: int) -> Frames | None:
        """See the protocol."""
        while True:
            came = self._fill(limit_bytes)
            edges = frames.walk(self._buffer, self._have, limit_messages)
            if len(edges) > 1:
                return self._taken(edges, limit_bytes)
            kind, body = self._message(b"dEcCZ") or (b"", b"")
            if kind == b"E":
                raise Refused(ServerError.from_response(body, self._encoding))
            self.skipped_publication |= kind == b"N" and _SKIPPED in body
            if kind in (b"c", b"C", b"Z"):
                return None
            if not kind and not came:  # nothing arrived, or only a part of a message that is larger than the space
                if self._lost is not None:
                    raise psycopg.OperationalError(self._lost)
                return Frames(b"", [0])

    def _taken(self, edges: Sequence[int], limit_bytes: int) -> Frames:
        if edges[-1] > limit_bytes:
            edges = edges[: bisect.bisect_left(edges, limit_bytes) + 1]
        size = edges[-1]
        taken = bytes(memoryview(self._buffer)[:size])
        self._drop(size)
        return Frames(taken, edges)

    def fill(self) -> int:
        """See the protocol."""
        self._fill(_BUFFER)
        return 0 if self._lost is not None else self._have

    def pending(self) -> bool:
        """See the protocol."""
        return self._lost is not None or self._missing() == 0 or self._transport.waiting()

    def send(self, content: bytes) -> None:
        """See the protocol."""
        self._send(struct.pack(">cI", b"d", len(content) + 4) + content)

    def stop(self, deadline: float) -> None:
        """See the protocol."""
        self._send(struct.pack(">cI", b"c", 4))
        failure: ServerError | None = None
        while True:
            kind, body = self._next(b"dcCEZ", deadline, "end")
            if kind == b"E":
                failure = ServerError.from_response(body, self._encoding)
            elif kind == b"Z":
                if failure is not None:
                    raise Refused(failure)
                # a server that ends its session between two commands: libpq would miss it
                if self._transport.end() or self._have:
                    raise psycopg.OperationalError(_LOST)
                return

    # reading

    def _missing(self) -> int:
        """Return how many bytes the first message in the buffer lacks, or its header if that is incomplete."""
        if self._have < frames.HEADER:
            return frames.HEADER - self._have
        return max(0, frames.size_of(self._buffer, 0) - self._have)

    def _fill(self, enough: int) -> bool:
        """Read what has arrived, as far as there is space in the buffer.

        The buffer grows for a larger first message, but no faster than bytes arrive: an announced size costs nothing.
        """
        before = self._have
        room = self._have + self._missing()
        if room > len(self._buffer) and self._have == len(self._buffer):
            self._buffer.extend(bytes(min(room - self._have, self._have)))
        limit = min(len(self._buffer), max(room, enough, _LITTLE))
        for _ in range(_READS):
            if self._lost is not None or self._have == limit:
                break
            try:
                count = self._transport.read(memoryview(self._buffer)[self._have : limit])
            except BlockingIOError:
                break
            except OSError as error:
                self._lost = f"{error.strerror}"
                break
            if not count:
                self._lost = _LOST
            self._have += count
        return self._have > before

    def _drop(self, size: int) -> None:
        """Remove the first bytes. A buffer that had grown is reduced to the rest."""
        rest = self._have - size
        if len(self._buffer) > _BUFFER:
            kept = self._buffer[size : self._have]
            self._buffer = kept + bytes(max(0, _BUFFER - rest))
        else:
            self._buffer[:rest] = self._buffer[size : self._have]
        self._have = rest

    def _message(self, expected: bytes) -> tuple[bytes, bytes] | None:
        """Take the first message; return None while it is incomplete.

        :param expected: permitted kinds, besides those that a server may send at any time.
        :raises ProtocolViolation: another kind.
        """
        missing, kind = self._missing(), bytes(self._buffer[: min(1, self._have)])
        if kind and kind not in expected + frames.ANY_TIME:
            raise ProtocolViolation(f"unexpected message type 0x{kind.hex()} in the replication stream")
        if missing:
            return None
        end = frames.size_of(self._buffer, 0)
        body = bytes(self._buffer[frames.HEADER : end])
        self._drop(end)
        return kind, body

    def _next(self, expected: bytes, deadline: float, what: str) -> tuple[bytes, bytes]:
        while (message := self._message(expected)) is None:
            if self._fill(_BUFFER):
                continue
            if self._lost is not None:
                raise psycopg.OperationalError(self._lost)
            left = deadline - time.monotonic()
            if left <= 0:
                raise unanswered(what)
            poll(self._transport.fileno(), select.POLLIN, min(left, 1.0))
        return message

    # writing

    def _send(self, data: bytes) -> None:
        view = memoryview(data)
        deadline = time.monotonic() + self._send_timeout
        while view:
            try:
                view = view[self._transport.write(view) :]
                continue
            except BlockingIOError:
                pass
            except OSError as error:
                raise psycopg.OperationalError(str(error.strerror)) from None
            if time.monotonic() >= deadline:
                raise unread()
            # Also read: a walsender that is blocked in its own send reads nothing until we do.
            if poll(self._transport.fileno(), select.POLLIN | select.POLLOUT, 1.0) & ~select.POLLOUT:
                self._grow()

    def _grow(self) -> None:
        if len(self._buffer) - self._have < _LITTLE:
            self._buffer.extend(bytes(_BUFFER))
        self._fill(len(self._buffer))
        if self._lost is not None:
            raise psycopg.OperationalError(self._lost)
