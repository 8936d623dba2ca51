"""The walsender stream: START_REPLICATION, CopyData in and out, the end of a stream. Bytes only, no decoding.

Mirrors the streaming half of ``src/backend/replication/libpqwalreceiver/libpqwalreceiver.c``. It talks to libpq
directly because DB-API has no word for COPY BOTH.
"""

from __future__ import annotations

import math
import select
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import psycopg
from psycopg import pq

from pgsub.errors import InternalError, PgsubError, PublisherUnavailable, ReplicationBroken
from pgsub.protocol.lsn import format_lsn
from pgsub.publisher.connect import Connection
from pgsub.publisher.faults import ServerError, classify, translate

_RECEIVE = "receive data from WAL stream"
_SEND = "send data to WAL stream"
_END = "end WAL streaming"


class Negotiated(NamedTuple):
    """What was asked of the publisher, as far as a decoder must know it."""

    proto_version: int
    streaming: str  #: off, on, parallel
    parallel_streaming: bool  #: Stream Abort carries LSN and time


def quote_identifier(name: str) -> str:
    """A name in the replication grammar: double quotes doubled (``repl_scanner.l``, state xd)."""
    return '"' + name.replace('"', '""') + '"'


def quote_literal(value: str) -> str:
    """A string in the replication grammar: single quotes doubled and nothing else; a backslash is itself (state xq)."""
    return "'" + value.replace("'", "''") + "'"


def start_options(
    server_version: int,
    publications: Sequence[str],
    *,
    binary: bool,
    streaming: str,
    origin: str,
    two_phase: bool = False,
    messages: bool = False,
) -> dict[str, str]:
    """Options of pgoutput, by the publisher's version (``libpqrcv_startstreaming``, ``start_apply``).

    :param server_version: of the publisher, as in 180006.
    :param publications: names; sent as identifiers, else the server would fold them.
    :param streaming: off, on or parallel; parallel becomes on before 16.
    :param origin: any or none; not sent before 16.
    :param two_phase: only for the start that enables it: it changes the slot for good.
    """
    protocol = next((p for since, p in ((160000, 4), (150000, 3), (140000, 2)) if server_version >= since), 1)
    if streaming == "parallel" and protocol < 4:
        streaming = "on"
    options = {"proto_version": str(protocol), "publication_names": ",".join(map(quote_identifier, publications))}
    if streaming != "off" and protocol >= 2:
        options["streaming"] = streaming
    if binary and protocol >= 2:
        options["binary"] = "true"
    if messages and protocol >= 2:
        options["messages"] = "true"
    if two_phase and protocol >= 3:
        options["two_phase"] = "on"
    if protocol >= 4:
        options["origin"] = origin
    return options


def negotiated(options: Mapping[str, str]) -> Negotiated:
    """What a decoder must be told about a stream started with these options."""
    streaming = options.get("streaming", "off")
    return Negotiated(int(options["proto_version"]), streaming, streaming == "parallel")


class WalSender:
    """One replication connection and the one stream on it.

    After :meth:`stop` the connection takes other commands, but not a second stream: the server never resets the
    flags by which WalSndLoop (walsender.c) sees that the client is done, and would end the next one at once.

    :param connection: opened with ``replication=True``; stays the caller's to close. It is closed, not left by
        ``with``, while a stream is open: psycopg would try to commit.
    :param send_timeout: seconds that a peer may leave our bytes unread.
    """

    def __init__(self, connection: Connection, *, send_timeout: float = 30) -> None:
        self.connection = connection
        self._pgconn = connection.pgconn
        self._send_timeout = send_timeout
        self._streaming = self._used = False
        self._unread = False  # libpq may hold bytes that do not make the socket readable
        self._failure: PgsubError | None = None  # met after messages that had to be returned first
        # One TLS record (16 kB) may need several reads into libpq's buffer, and what waits inside OpenSSL
        # does not make the socket readable.
        self._reads = 4 if self._pgconn.ssl_in_use or self._pgconn.used_gssapi else 1

    @property
    def streaming(self) -> bool:
        """Whether the stream is open in both directions."""
        return self._streaming

    @property
    def fileno(self) -> int:
        """The socket, to be polled together with others."""
        return self._pgconn.socket

    def start(self, slot_name: str, lsn: int, options: Mapping[str, str]) -> None:
        """Start streaming; the server moves the position up to the slot's confirmed_flush_lsn without a word.

        :param lsn: end LSN of the last transaction that is done; 0 leaves the position to the slot.
        :param options: from :func:`start_options`.
        :raises PgsubError: as the server's error says, see :func:`~pgsub.publisher.faults.translate`.
        """
        if self._used:
            raise InternalError("a replication connection can carry one logical stream only")
        listed = ", ".join(f"{name} {quote_literal(value)}" for name, value in options.items())
        command = f"START_REPLICATION SLOT {quote_identifier(slot_name)} LOGICAL {format_lsn(lsn)} ({listed})"
        try:
            cursor = self.connection.execute(command.encode(self.connection.info.encoding))
        except psycopg.Error as error:
            raise translate(error, "start WAL streaming", user=self.connection.info.user) from None
        result = cursor.pgresult
        if result is None or result.status != pq.ExecStatus.COPY_BOTH:
            raise ReplicationBroken("could not start WAL streaming: the publisher did not begin to stream")
        self._streaming = self._used = self._unread = True

    def receive(self, limit_messages: int = 1000, limit_bytes: int = 1 << 20) -> list[bytes]:
        """Payloads of the CopyData messages that are here now; never blocks.

        :param limit_messages: at most so many.
        :param limit_bytes: no further one once so many bytes are reached.
        :return: in order; empty if nothing whole has arrived, and only then the socket tells of the next.
        :raises PublisherUnavailable: the connection broke or the publisher ended the stream; what arrived before
            was returned by an earlier call.
        :raises PgsubError: the server's error, by its SQLSTATE.
        """
        if self._failure is not None:
            known, self._failure = self._failure, None
            raise known
        messages: list[bytes] = []
        failure: PgsubError | None
        try:
            ended = self._drain(messages, limit_messages, limit_bytes)
            failure = self._ended() if ended else None
        except psycopg.Error as error:
            failure = self._broken(error)
        except PgsubError as error:
            failure = error
        self._unread = bool(messages)
        if failure is not None:
            self._streaming = False
            if not messages:
                raise failure
            self._failure = failure
        return messages

    def _drain(self, messages: list[bytes], limit_messages: int, limit_bytes: int) -> bool:
        """Move what is here into ``messages``; True at the end of the stream. The hottest loop of a catch-up."""
        append, get, consume = messages.append, self._pgconn.get_copy_data, self._pgconn.consume_input
        size, before, reads = 0, -1, self._reads
        while True:
            length, data = get(1)
            if length > 0:
                append(bytes(data))
                size += length
                if size >= limit_bytes or len(messages) >= limit_messages:
                    return False
            elif length < 0:
                return True
            else:
                if len(messages) != before:
                    before, reads = len(messages), self._reads
                elif reads == 0:
                    return False
                reads -= 1
                consume()

    def wait(self, timeout: float) -> bool:
        """Wait until there may be something to receive.

        Who polls :attr:`fileno` himself calls :meth:`receive` until it returns nothing before he polls: what libpq
        holds already, as of the start of the stream, does not make the socket readable.

        :param timeout: seconds.
        :return: False if nothing came.
        """
        return self._unread or self._failure is not None or bool(self._poll(select.POLLIN, timeout))

    def send(self, message: bytes) -> None:
        """Send one CopyData message, a standby status update.

        :raises PublisherUnavailable: connection lost, or the peer did not read for ``send_timeout``.
        """
        try:
            if self._pgconn.put_copy_data(message) == 0:
                self._flush()
                self._pgconn.put_copy_data(message)
            self._flush()
        except psycopg.Error as error:
            raise translate(error, _SEND) from None

    def stop(self, timeout: float = 30) -> None:
        """End the stream by CopyDone in both directions; the connection takes commands again, as a slot's drop.

        What still arrives is dropped: the publisher sends it again at the next start. A publisher that is decoding
        a large transaction answers only at its next output.

        :param timeout: seconds for all of it.
        :raises PublisherUnavailable: lost, or not ended in time; close the connection then.
        """
        if not self._streaming:
            return
        self._streaming = False
        deadline = time.monotonic() + timeout
        try:
            self._pgconn.put_copy_end()
            self._flush()
            while (length := self._pgconn.get_copy_data(1)[0]) >= 0:
                if length == 0:
                    self._read_more(deadline)
            self._finish(deadline)
        except psycopg.Error as error:
            raise translate(error, _END) from None

    def _finish(self, deadline: float) -> None:
        """Read results until none is left: two CommandComplete after CopyDone, or an error report."""
        while (result := self._result(deadline)) is not None:
            if result.status == pq.ExecStatus.FATAL_ERROR:
                raise self._said(result, _END)

    def _ended(self) -> PgsubError:
        """The server ended the copy: its error if it reported one, else it shut down in order."""
        result = self._result(time.monotonic() + self._send_timeout)
        if result is not None and result.status == pq.ExecStatus.FATAL_ERROR:
            return self._said(result, _RECEIVE)
        return PublisherUnavailable("data stream from publisher has ended")

    def _broken(self, error: psycopg.Error) -> PgsubError:
        return translate(error, _RECEIVE, user=self.connection.info.user)

    def _said(self, result: pq.abc.PGresult, doing: str) -> PgsubError:
        said = ServerError.from_result(result, self.connection.info.encoding)
        return classify(said, doing, user=self.connection.info.user)

    def _result(self, deadline: float) -> pq.abc.PGresult | None:
        while self._pgconn.is_busy():
            self._read_more(deadline)
        return self._pgconn.get_result()

    def _read_more(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise PublisherUnavailable(f"could not {_END}: no answer from the publisher in time")
        self._poll(select.POLLIN, min(left, 1.0))
        self._pgconn.consume_input()

    def _flush(self) -> None:
        deadline = time.monotonic() + self._send_timeout
        while self._pgconn.flush():
            if time.monotonic() >= deadline:
                raise PublisherUnavailable(f"could not {_SEND}: the publisher does not read")
            # Reading too: a walsender blocked in its own send reads nothing until we do.
            if self._poll(select.POLLIN | select.POLLOUT, 1.0) & ~select.POLLOUT:
                self._pgconn.consume_input()
                self._unread = True

    def _poll(self, events: int, timeout: float) -> int:
        poller = select.poll()
        poller.register(self._pgconn.socket, events)
        ready = poller.poll(max(0, math.ceil(timeout * 1000)))
        return ready[0][1] if ready else 0
