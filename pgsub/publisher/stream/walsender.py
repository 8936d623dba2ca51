"""The walsender stream: START_REPLICATION, CopyData in and out, the end of a stream. Bytes only, no decoding.

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
from pgsub.publisher.faults import classify, translating
from pgsub.publisher.stream.channel import ENDED, Channel, Refused, poll
from pgsub.publisher.stream.channel_libpq import LibpqChannel
from pgsub.publisher.stream.channel_socket import SocketChannel
from pgsub.publisher.stream.transport import over, reachable

_START = "start WAL streaming"
_RECEIVE = "receive data from WAL stream"
_SEND = "send data to WAL stream"
_END = "end WAL streaming"


def quote_identifier(name: str) -> str:
    """Quote a name in the replication grammar: double quotes doubled (``repl_scanner.l``, state xd)."""
    return '"' + name.replace('"', '""') + '"'


def quote_literal(value: str) -> str:
    """Quote a string in the replication grammar: only single quotes are doubled, a backslash is itself (state xq)."""
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
    """Choose options of pgoutput by the publisher's version (``libpqrcv_startstreaming``, ``start_apply``).

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
        self._send_timeout = send_timeout
        self._channel: Channel | None = None
        self._streaming = False
        self._failure: PgsubError | None = None  # raised before, and to be raised again

    @property
    def streaming(self) -> bool:
        """Whether the stream is open in both directions."""
        return self._streaming

    @property
    def fileno(self) -> int:
        """The socket, to be polled together with others."""
        return self.connection.pgconn.socket

    def start(self, slot_name: str, lsn: int, options: Mapping[str, str]) -> None:
        """Start streaming; the server moves the position up to the slot's confirmed_flush_lsn without a word.

        :param lsn: end LSN of the last transaction that is done; 0 leaves the position to the slot.
        :raises PgsubError: as the server's error says, see :func:`~pgsub.publisher.faults.translate`.
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
        """Return the CopyData messages that are here now; never block.

        :param limit_messages: at most so many.
        :param limit_bytes: no further one once so many bytes are reached.
        :return: in order; empty if nothing whole has arrived, and only then the socket becomes readable for the next.
        :raises PublisherUnavailable: the connection broke or the publisher ended the stream; what arrived before
            was returned by an earlier call.
        :raises PgsubError: the server's error, by its SQLSTATE.
        """
        if self._failure is not None or self._channel is None:
            raise self._failure or InternalError("nothing is streamed")
        try:
            with self._doing(_RECEIVE):
                received = self._channel.receive(limit_messages, limit_bytes)
        except PgsubError as failure:
            self._failure, self._streaming = failure, False
            raise
        if received is None:
            self._failure, self._streaming = PublisherUnavailable(ENDED), False
            raise self._failure
        return received

    def fill(self) -> int:
        """Take what is here off the socket without decoding it, as far as that makes a difference.

        :return: bytes of it that :meth:`receive` will return; errors come out there.
        """
        return self._channel.fill() if self._channel is not None and self._failure is None else 0

    def wait(self, timeout: float) -> bool:
        """Wait until there may be something to receive.

        Who polls :attr:`fileno` himself calls :meth:`receive` until it returns nothing before he polls: what was read
        already, as of the start of the stream, does not make the socket readable.

        :param timeout: seconds.
        :return: False if nothing came.
        """
        if self._failure is not None or (self._channel is not None and self._channel.pending()):
            return True
        return poll(self.fileno, select.POLLIN, timeout) != 0

    def send(self, message: bytes) -> None:
        """Send one CopyData message, a standby status update.

        :raises PublisherUnavailable: connection lost, or the peer did not read for ``send_timeout``.
        """
        if self._channel is None:
            raise self._failure or InternalError("nothing is streamed")
        with self._doing(_SEND):
            self._channel.send(message)

    def stop(self, timeout: float = 30) -> None:
        """End the stream by CopyDone in both directions; the connection takes commands again, as a slot's drop.

        What still arrives is dropped: the publisher sends it again at the next start. A publisher that is decoding
        a large transaction answers only at its next output.

        :param timeout: seconds for all of it.
        :raises PublisherUnavailable: lost, or not ended in time; close the connection then.
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
