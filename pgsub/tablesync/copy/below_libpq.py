"""Rows of a COPY moved from the publisher's connection to the target's, below libpq, in messages composed here."""

from __future__ import annotations

import select
import struct
from collections.abc import Callable

import psycopg
from psycopg import pq

from pgsub.common import server_words
from pgsub.publisher.stream.channel import poll
from pgsub.publisher.stream.transport import Transport
from pgsub.tablesync.copy.copy_out import CopyOut, Stage

#: Called repeatedly with the number of bytes moved so far.
Moved = Callable[[int], None]

_BUFFER = 1 << 18
_HEADER = struct.Struct(">cI")


class TargetSpoke(Exception):
    """The target ended the copy; its result tells why."""


class SourceError(Exception):
    """The publisher failed or was lost. ``error`` is the exception that psycopg would have raised."""

    def __init__(self, error: psycopg.Error) -> None:
        super().__init__(server_words.said(error).message)
        self.error = error


class Passthrough:
    """The passage of rows: the publisher's answer is read here, and its rows are sent on in our own CopyData messages.

    No header of the publisher reaches the target. So every message that the target sees is ours, whatever the publisher
    sends. libpq does not know of the query. Once ReadyForQuery has been read, it has missed nothing.
    """

    def __init__(self, source: Transport, target: Transport, pgconn: pq.abc.PGconn, meter: Moved) -> None:
        self._source, self._target = source, target
        self._pgconn = pgconn
        self._meter = meter
        self._buffer = bytearray(_BUFFER)
        self._have = 0  #: bytes in the buffer
        self._answer = CopyOut()
        self._size = 0
        self._spoke = False  #: the target has an error to report

    def run(self, copy_out: str) -> int:
        """Send the query and move all rows; return the bytes of the rows.

        :raises SourceError: the publisher failed.
        :raises ProtocolViolation: the answer is not that to a COPY.
        """
        query = copy_out.encode() + b"\0"
        self._ask(memoryview(b"Q" + struct.pack(">I", len(query) + 4) + query))
        while self._answer.stage is not Stage.ENDED:
            self._receive()
            self._hand_on()
            self._meter(self._size)
        # guard: a copy that the publisher terminates fails
        if self._answer.failure is not None:
            raise SourceError(self._answer.failure)
        if self._source.end() or self._have:  # a server that ends its session between two queries: libpq would miss it
            raise self._lost(None)
        return self._size

    def _ask(self, query: memoryview) -> None:
        while query:
            try:
                query = query[self._source.write(query) :]
            except BlockingIOError:
                wait(self._source.fileno(), select.POLLOUT)
            except OSError as error:
                raise self._lost(error) from None

    def _receive(self) -> None:
        while True:
            try:
                count = self._source.read(memoryview(self._buffer)[self._have :])
            except BlockingIOError:
                wait(self._source.fileno(), select.POLLIN, self._idle)
                continue
            except OSError as error:
                raise self._lost(error) from None
            if not count:
                raise self._lost(None)
            self._have += count
            return

    def _idle(self) -> None:
        """Report progress while waiting, as a sign of life of the task."""
        self._meter(self._size)

    def _lost(self, error: OSError | None) -> SourceError:
        reason = f": {error.strerror}" if error is not None else ""
        return SourceError(self._answer.failure or psycopg.OperationalError(f"the connection was lost{reason}"))

    def _hand_on(self) -> None:
        """Send the buffer, except the beginning of a message that is not complete enough to be checked."""
        stretches, done = self._answer.cut(self._buffer, self._have)
        if size := sum(map(len, stretches)):
            self._send(memoryview(b"".join([_HEADER.pack(b"d", size + 4), *stretches])))
            self._size += size
            if self._spoke:
                raise TargetSpoke
        self._buffer[: self._have - done] = self._buffer[done : self._have]
        self._have -= done

    def _send(self, data: memoryview) -> None:
        """Finish a message that was begun, even if the target failed: libpq's next one must not end up in it."""
        while data:
            wanted = select.POLLOUT if self._spoke else select.POLLIN | select.POLLOUT
            if wait(self._target.fileno(), wanted, self._idle) & ~select.POLLOUT:
                self._listen()
            try:
                data = data[self._target.write(data) :]
            except BlockingIOError:
                continue
            except OSError as error:
                if self._spoke:
                    raise TargetSpoke from None
                raise _target_lost(error) from None

    def _listen(self) -> None:
        """Read the target's message. After an error the target discards what it reads, so the copy ends."""
        try:
            kind = self._target.peek()
        except BlockingIOError:
            return
        except OSError as error:
            raise _target_lost(error) from None
        if kind == b"":
            raise TargetSpoke
        if kind == b"E":
            self._spoke = True
        else:
            self._pgconn.consume_input()


def _target_lost(error: OSError) -> psycopg.OperationalError:
    return psycopg.OperationalError(f"the connection was lost: {error.strerror}")


def wait(what: int, events: int, idle: Callable[[], None] = lambda: None) -> int:
    """Wait for one of these events of poll(2); return the events that occurred.

    :param idle: called twice a second while waiting.
    """
    while not (came := poll(what, events, 0.5)):
        idle()
    return came
