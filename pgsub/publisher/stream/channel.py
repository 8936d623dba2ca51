"""The transport of a walsender's stream: the interface of both channels for :mod:`pgsub.publisher.stream.walsender`."""

from __future__ import annotations

import math
import select
import socket
from typing import Protocol

from pgsub.common.errors import PublisherUnavailable
from pgsub.protocol.frames import Frames
from pgsub.publisher.server_errors import ServerError

ENDED = "data stream from publisher has ended"
#: Timeout of START_REPLICATION, which a walsender answers before it reads any WAL.
START_SECONDS = 60.0


class Refused(Exception):
    """The server reported an error: ``report`` has its fields."""

    def __init__(self, report: ServerError) -> None:
        super().__init__(report.message)
        self.report = report


class Channel(Protocol):
    """One stream. Lost connections raise psycopg errors.

    :ivar skipped_publication: the publisher has warned that it decodes changes without a publication, which is missing.
    """

    skipped_publication: bool

    def start(self, command: bytes) -> None:
        """Run START_REPLICATION.

        :raises Refused: the server did not start to stream. The connection takes commands again.
        :raises PublisherUnavailable: no answer within :data:`START_SECONDS`.
        """

    def receive(self, limit_messages: int, limit_bytes: int) -> Frames | None:
        """Return the complete messages that have arrived, without waiting; None at the end of the stream.

        :param limit_messages: maximum number of messages.
        :param limit_bytes: the message that reaches this size is the last one.
        :raises Refused: the server ended the stream with an error.
        """

    def fill(self) -> int:
        """Read what has arrived, without waiting, as far as there is space for it.

        :return: number of bytes that are kept for :meth:`receive`; also 0 if unknown.
        """

    def pending(self) -> bool:
        """Return whether :meth:`receive` may return something although the socket is not readable."""

    def send(self, content: bytes) -> None:
        """Send a CopyData message.

        :raises PublisherUnavailable: the peer did not read for too long.
        """

    def stop(self, deadline: float) -> None:
        """Send CopyDone and wait for the publisher's. Messages that arrive meanwhile are dropped.

        :param deadline: by the monotonic clock.
        :raises Refused: the server reported an error.
        :raises PublisherUnavailable: the deadline passed.
        """


def poll(what: socket.socket | int, events: int, timeout: float) -> int:
    """Wait for one of these events of poll(2) for ``timeout`` seconds.

    :return: the events that occurred; 0: none.
    """
    poller = select.poll()
    poller.register(what, events)
    ready = poller.poll(max(0, math.ceil(timeout * 1000)))
    return ready[0][1] if ready else 0


def unanswered(what: str) -> PublisherUnavailable:
    """Make the error for a publisher that did not answer the request to ``start`` or ``end`` the stream."""
    return PublisherUnavailable(f"could not {what} WAL streaming: no answer from the publisher in time")


def unread() -> PublisherUnavailable:
    """Make the error for a publisher that does not read what was sent."""
    return PublisherUnavailable("could not send data to WAL stream: the publisher does not read")
