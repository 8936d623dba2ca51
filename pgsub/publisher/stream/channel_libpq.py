"""A walsender's stream through libpq, for connections that nothing else can read. Mirrors libpqrcv_receive."""

from __future__ import annotations

import select
import struct
import time

import psycopg
from psycopg import pq

from pgsub.protocol import frames
from pgsub.protocol.frames import Frames
from pgsub.publisher.connect import Connection
from pgsub.publisher.server_errors import ServerError
from pgsub.publisher.stream.channel import START_SECONDS, Refused, poll, unanswered, unread

_HEADER = struct.Struct(">cI")


class LibpqChannel:
    """A :class:`~pgsub.publisher.stream.channel.Channel` through libpq."""

    def __init__(self, connection: Connection, send_timeout: float) -> None:
        self._connection = connection
        self._pgconn = connection.pgconn
        self._send_timeout = send_timeout
        self.skipped_publication = False
        connection.add_notice_handler(self._notice)
        self._ended = False  # the stream has ended, perhaps behind messages that are returned first
        self._unread = False  # libpq may hold bytes that do not make the socket readable
        # One TLS record (16 kB) may need several reads into libpq's buffer, and data inside OpenSSL does not make the
        # socket readable.
        self._reads = 4 if self._pgconn.ssl_in_use or self._pgconn.used_gssapi else 1

    def _notice(self, notice: psycopg.errors.Diagnostic) -> None:
        self.skipped_publication |= notice.source_function == "LoadPublications"

    def start(self, command: bytes) -> None:
        """See the protocol."""
        deadline = time.monotonic() + START_SECONDS
        self._pgconn.send_query(command)
        self._flush()
        result = self._result(deadline, "start")
        if result is not None and result.status == pq.ExecStatus.COPY_BOTH:
            self._unread = True
            return
        while self._result(deadline, "start") is not None:
            pass
        if result is None or result.status != pq.ExecStatus.FATAL_ERROR:
            raise Refused(ServerError(None, "the publisher did not begin to stream"))
        raise self._refused(result)

    def _refused(self, result: pq.abc.PGresult) -> Refused:
        return Refused(ServerError.from_result(result, self._connection.info.encoding))

    def receive(self, limit_messages: int, limit_bytes: int) -> Frames | None:
        """See the protocol."""
        parts: list[bytes] = []
        edges = [0]
        if not self._ended:  # libpq reports the end only once
            self._ended = self._drain(parts, edges, limit_messages, limit_bytes)
        self._unread = len(edges) > 1
        if not self._ended or self._unread:
            return Frames(b"".join(parts), edges)
        result = self._result(time.monotonic() + self._send_timeout)
        if result is not None and result.status == pq.ExecStatus.FATAL_ERROR:
            raise self._refused(result)
        return None

    def _drain(self, parts: list[bytes], edges: list[int], limit_messages: int, limit_bytes: int) -> bool:
        """Move what has arrived into ``parts``; return True at the end of the stream."""
        get, consume, pack = self._pgconn.get_copy_data, self._pgconn.consume_input, _HEADER.pack
        size, before, reads = 0, -1, self._reads
        while True:
            length, data = get(1)
            if length > 0:
                parts += pack(b"d", length + 4), bytes(data)
                size += length + frames.HEADER
                edges.append(size)
                if size >= limit_bytes or len(edges) > limit_messages:
                    return False
            elif length < 0:
                return True
            else:
                if len(edges) != before:
                    before, reads = len(edges), self._reads
                elif reads == 0:
                    return False
                reads -= 1
                consume()

    def fill(self) -> int:
        """See the protocol."""
        return 0

    def pending(self) -> bool:
        """See the protocol."""
        return self._unread

    def send(self, content: bytes) -> None:
        """See the protocol."""
        if self._pgconn.put_copy_data(content) == 0:
            self._flush()
            self._pgconn.put_copy_data(content)
        self._flush()

    def stop(self, deadline: float) -> None:
        """See the protocol."""
        self._pgconn.put_copy_end()
        self._flush()
        while (length := self._pgconn.get_copy_data(1)[0]) >= 0:
            if length == 0:
                self._read_more(deadline)
        while (result := self._result(deadline)) is not None:  # two CommandComplete, or an error
            if result.status == pq.ExecStatus.FATAL_ERROR:
                raise self._refused(result)

    def _result(self, deadline: float, what: str = "end") -> pq.abc.PGresult | None:
        while self._pgconn.is_busy():
            self._read_more(deadline, what)
        return self._pgconn.get_result()

    def _read_more(self, deadline: float, what: str = "end") -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise unanswered(what)
        poll(self._pgconn.socket, select.POLLIN, min(left, 1.0))
        self._pgconn.consume_input()

    def _flush(self) -> None:
        deadline = time.monotonic() + self._send_timeout
        while self._pgconn.flush():
            if time.monotonic() >= deadline:
                raise unread()
            # Also read: a walsender that is blocked in its own send reads nothing until we do.
            if poll(self._pgconn.socket, select.POLLIN | select.POLLOUT, 1.0) & ~select.POLLOUT:
                self._pgconn.consume_input()
                self._unread = True
