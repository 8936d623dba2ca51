"""The transport of a walsender's stream, as :mod:`pgsub.publisher.stream.walsender` uses either of the two."""

from __future__ import annotations

import math
import select
import socket
from typing import Protocol

from pgsub.common.errors import PublisherUnavailable
from pgsub.protocol.frames import Frames
from pgsub.publisher.faults import ServerError

ENDED = "data stream from publisher has ended"
#: A walsender answers START_REPLICATION before it reads any WAL.
START_SECONDS = 60.0


class Refused(Exception):
    """The server reported an error.

    :ivar report: its fields.
    """

    def __init__(self, report: ServerError) -> None:
        super().__init__(report.message)
        self.report = report


class Channel(Protocol):
    """One stream. Lost connections are psycopg errors."""

    def start(self, command: bytes) -> None:
        """Run START_REPLICATION.

        :raises Refused: the server did not begin to stream; the connection takes commands again.
        :raises PublisherUnavailable: no answer within :data:`START_SECONDS`.
        """

    def receive(self, limit_messages: int, limit_bytes: int) -> Frames | None:
        """Return messages that are here now, without waiting; none if none is whole, None at the end of the stream.

        :param limit_messages: at most so many.
        :param limit_bytes: none after the one that reaches so many bytes.
        :raises Refused: the server ended the stream with an error.
        """

    def fill(self) -> int:
        """Read what is here, without waiting and as far as it can be kept.

        :return: bytes that are kept for :meth:`receive`; 0 also where that is not known.
        """

    def pending(self) -> bool:
        """Return whether :meth:`receive` has something although the socket may be silent."""

    def send(self, content: bytes) -> None:
        """Send a CopyData message.

        :raises PublisherUnavailable: the peer left our bytes unread for too long.
        """

    def stop(self, deadline: float) -> None:
        """Send CopyDone and wait for the publisher's; what still arrives is dropped.

        :param deadline: on the monotonic clock.
        :raises Refused: the server had an error to report.
        :raises PublisherUnavailable: not in time.
        """


def poll(what: socket.socket | int, events: int, timeout: float) -> int:
    """Wait for one of these events of poll(2).

    :param timeout: seconds.
    :return: which came, 0 where none did in time.
    """
    poller = select.poll()
    poller.register(what, events)
    ready = poller.poll(max(0, math.ceil(timeout * 1000)))
    return ready[0][1] if ready else 0


def unanswered(what: str) -> PublisherUnavailable:
    """Make the error of a publisher that did not answer what was to ``start`` or ``end`` the stream."""
    return PublisherUnavailable(f"could not {what} WAL streaming: no answer from the publisher in time")


def unread() -> PublisherUnavailable:
    """Make the error of a publisher that leaves our bytes where they are."""
    return PublisherUnavailable("could not send data to WAL stream: the publisher does not read")
