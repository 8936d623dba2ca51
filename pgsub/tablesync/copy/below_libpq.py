"""Rows of a COPY from the publisher's connection to the target's, below libpq, in messages made here."""

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

#: Called again and again with the bytes moved so far.
Moved = Callable[[int], None]

_BUFFER = 1 << 18
_HEADER = struct.Struct(">cI")


class TargetSpoke(Exception):
    """The target ended the copy by itself; its result says why."""


class SourceError(Exception):
    """The publisher failed, or was lost; ``error`` is what psycopg would have raised."""

    def __init__(self, error: psycopg.Error) -> None:
        super().__init__(server_words.said(error).message)
        self.error = error


class Passthrough:
    """The publisher's bytes read here, the rows in its answer sent on in CopyData messages made here.

    No header of the publisher's reaches the target, so what the target takes for a message is one of ours whatever the
    publisher sends. libpq knows nothing of the query, and once ReadyForQuery has been read has missed nothing.
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
        """Send the query and move all rows.

        :return: bytes of the rows.

        :raises SourceError: the publisher failed.
        :raises ProtocolViolation: what came is no answer to a COPY.
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
        if self._source.end() or self._have:  # libpq would miss it: a server that ends its session between two queries
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
        """Report progress while waiting: it shows that the task lives."""
        self._meter(self._size)

    def _lost(self, error: OSError | None) -> SourceError:
        reason = f": {error.strerror}" if error is not None else ""
        return SourceError(self._answer.failure or psycopg.OperationalError(f"the connection was lost{reason}"))

    def _hand_on(self) -> None:
        """Send what is in the buffer but the beginning of a message that is not known yet."""
        stretches, done = self._answer.cut(self._buffer, self._have)
        if size := sum(map(len, stretches)):
            self._send(memoryview(b"".join([_HEADER.pack(b"d", size + 4), *stretches])))
            self._size += size
            if self._spoke:
                raise TargetSpoke
        self._buffer[: self._have - done] = self._buffer[done : self._have]
        self._have -= done

    def _send(self, data: memoryview) -> None:
        """Finish a message that has begun, whatever the target says: libpq's next one must not end up in it."""
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
        """Read what the target says meanwhile: after an error it reads on without storing, so the copy ends."""
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
    """Wait for one of these events of poll(2); return which of them came.

    :param idle: called twice a second meanwhile.
    """
    while not (came := poll(what, events, 0.5)):
        idle()
    return came
