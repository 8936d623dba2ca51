"""The walsender stream: START_REPLICATION, CopyData in and out, the end of a stream. It decodes nothing.

Mirrors the streaming half of ``src/backend/replication/libpqwalreceiver/libpqwalreceiver.c``.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Iterator, Mapping, Sequence

from pgsub.common.errors import InternalError, PgsubError, PublisherUnavailable
from pgsub.protocol.frames import Frames
from pgsub.protocol.lsn import format_lsn
from pgsub.publisher.connect import Connection
from pgsub.publisher.server_errors import RECEIVE, classify, translating
from pgsub.publisher.stream.channel import ENDED, Channel, Refused, poll
from pgsub.publisher.stream.channel_libpq import LibpqChannel
from pgsub.publisher.stream.channel_socket import SocketChannel
from pgsub.publisher.stream.transport import over, reachable

_START = "start WAL streaming"
_SEND = "send data to WAL stream"
_END = "end WAL streaming"


def quote_identifier(name: str) -> str:
    """Quote a name for the replication grammar: double quotes are doubled (``repl_scanner.l``, state xd)."""
    return '"' + name.replace('"', '""') + '"'


def quote_literal(value: str) -> str:
    """Quote a string for the replication grammar: only single quotes are doubled; a backslash is literal (state xq)."""
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
    """Choose the options of pgoutput by the publisher's version (``libpqrcv_startstreaming``, ``start_apply``).

    :param server_version: the publisher's, as in 180006.
    :param publications: names; they are sent quoted, because the server would fold them otherwise.
    :param streaming: off, on or parallel. parallel becomes on before 16.
    :param origin: any or none. Not sent before 16.
    :param two_phase: True only for the start that enables it. It changes the slot for good.
    """
    protocol = 4 if server_version >= 160000 else 3 if server_version >= 150000 else 2
    if streaming == "parallel" and protocol < 4:
        streaming = "on"
    options = {"proto_version": str(protocol), "publication_names": ",".join(map(quote_identifier, publications))}
    if streaming != "off":
        options["streaming"] = streaming
    if binary:
        options["binary"] = "true"
    if messages:
        options["messages"] = "true"
    if two_phase and protocol >= 3:
        options["two_phase"] = "on"
    if protocol >= 4:
        options["origin"] = origin
    return options


class WalSender:
    """A replication connection with one stream.

    After :meth:`stop` the connection takes other commands, but not a second stream: the server never resets the flags
    by which WalSndLoop (walsender.c) sees that the client is done, so it would end the next stream at once.

    :param connection: opened with ``replication=True``. The caller closes it, but not by leaving ``with`` while a
        stream is open: psycopg would try to commit.
    :param send_timeout: maximum seconds for which the peer may not read what was sent.
    """

    def __init__(self, connection: Connection, *, send_timeout: float = 30) -> None:
        self.connection = connection
        self._send_timeout = send_timeout
        self._channel: Channel | None = None
        self._streaming = False
        self._failure: PgsubError | None = None  # raised before, and raised again by the next call

    @property
    def streaming(self) -> bool:
        """Whether the stream is open in both directions."""
        return self._streaming

    @property
    def fileno(self) -> int:
        """The socket, for poll."""
        return self.connection.pgconn.socket

    def start(self, slot_name: str, lsn: int, options: Mapping[str, str]) -> None:
        """Start streaming. The server silently begins at the slot's confirmed_flush_lsn if that is later than ``lsn``.

        :param lsn: end LSN of the last transaction that is done; 0: begin at the slot's position.
        :raises PgsubError: the server's error, see :func:`~pgsub.publisher.server_errors.translate`.
        """
        if self._streaming or self._channel is not None:
            raise InternalError("a replication connection can carry one logical stream only")
        listed = ", ".join(f"{name} {quote_literal(value)}" for name, value in options.items())
        command = f"START_REPLICATION SLOT {quote_identifier(slot_name)} LOGICAL {format_lsn(lsn)} ({listed})"
        with self._doing(_START):
            channel = self._open()
            channel.start(command.encode(self.connection.info.encoding))
        self._channel, self._streaming = channel, True

    def _open(self) -> Channel:
        if reachable(self.connection):
            return SocketChannel(self.connection, over(self.connection.pgconn), self._send_timeout)
        return LibpqChannel(self.connection, self._send_timeout)

    def receive(self, limit_messages: int = 20_000, limit_bytes: int = 1 << 20) -> Frames:
        """Return the complete CopyData messages that have arrived; never wait.

        :param limit_messages: maximum number of messages.
        :param limit_bytes: the message that reaches this size is the last one.
        :return: in order. After an empty result, and only then, the socket becomes readable for the next message.
        :raises PublisherUnavailable: the connection broke or the publisher ended the stream. Earlier calls have
            returned what had arrived before.
        :raises PgsubError: the server's error, by its SQLSTATE.
        """
        if self._failure is not None or self._channel is None:
            raise self._failure or InternalError("nothing is streamed")
        try:
            with self._doing(RECEIVE):
                received = self._channel.receive(limit_messages, limit_bytes)
        except PgsubError as failure:
            self._failure, self._streaming = failure, False
            raise
        if received is None:
            self._failure, self._streaming = PublisherUnavailable(ENDED), False
            raise self._failure
        return received

    def fill(self) -> int:
        """Read from the socket without decoding, if the channel supports it.

        :return: number of bytes that :meth:`receive` will return. It also raises any error.
        """
        return self._channel.fill() if self._channel is not None and self._failure is None else 0

    def wait(self, timeout: float) -> bool:
        """Wait until there may be something to receive.

        A caller that polls :attr:`fileno` itself must call :meth:`receive` until it returns nothing. Data that was read
        before, for example at the start of the stream, does not make the socket readable.

        :param timeout: seconds.
        :return: False if nothing arrived.
        """
        if self._failure is not None or (self._channel is not None and self._channel.pending()):
            return True
        return poll(self.fileno, select.POLLIN, timeout) != 0

    def take_skipped_publication(self) -> bool:
        """Return whether the publisher has warned, since the last call, that it decodes without a publication.

        What :meth:`receive` returned before the warning had come is not concerned.
        """
        channel = self._channel
        if channel is None or not channel.skipped_publication:
            return False
        channel.skipped_publication = False
        return True

    def send(self, message: bytes) -> None:
        """Send one CopyData message, a standby status update.

        :raises PublisherUnavailable: the connection broke, or the peer did not read for ``send_timeout``.
        """
        if self._channel is None:
            raise self._failure or InternalError("nothing is streamed")
        with self._doing(_SEND):
            self._channel.send(message)

    def stop(self, timeout: float = 30) -> None:
        """End the stream by CopyDone in both directions. Then the connection takes commands, such as to drop a slot.

        Messages that still arrive are dropped: the publisher sends them again at the next start. A publisher that
        decodes a large transaction answers only at its next output.

        :param timeout: seconds for everything.
        :raises PublisherUnavailable: lost, or not ended in time; the connection must be closed.
        """
        if not self._streaming or self._channel is None:
            return
        self._streaming = False
        with self._doing(_END):
            self._channel.stop(time.monotonic() + timeout)

    @contextlib.contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        user = self.connection.info.user
        with translating(self.connection, what):
            try:
                yield
            except Refused as refused:
                raise classify(refused.report, what, user=user) from None
