"""Detects a publisher that cannot finish its shutdown. Counterpart of WalSndDone (walsender.c).

During a shutdown a walsender ends once the flush position has reached the position that it has sent. The server's own
subscriber keeps it waiting while apply is blocked, until wal_sender_timeout. pgsub answers keepalives while apply is
blocked, so that timeout would never end the walsender.
"""

from __future__ import annotations

from pgsub.common.threads import SupervisedThread
from pgsub.publisher import connect as publisher

#: Seconds without progress after which the connection to a publisher that is shutting down is closed.
STANDSTILL_SECONDS = 5.0
#: Requests for a reply over the first period, at most the second apart, show a shutdown. A walsender that is not
#: shutting down requests a reply only after silence for half of wal_sender_timeout.
_ASKS_SECONDS, _AGAIN_SECONDS = 2.0, 1.0
#: Seconds between attempts to connect, which are made only while the publisher's requests cannot be read.
_CHECK_SECONDS = 5.0


class PublisherShutdown:
    """Detector of the shutdown of one stream's publisher; called by the thread that serves the stream."""

    def __init__(self, connection: publisher.Connection) -> None:
        self._address = publisher.address(connection)
        self._progress: object = None
        self._since = 0.0  #: time of the last progress
        self._asks_since = self._asked = 0.0
        self._next_check = 0.0
        self._check_thread: SupervisedThread | None = None
        self._refused = False

    def asked(self, clock: float) -> None:
        """Note that the publisher requested a reply."""
        if clock - self._asked > _AGAIN_SECONDS:
            self._asks_since = clock
        self._asked = clock

    def in_vain(self, clock: float, progress: object, *, unread: bool) -> bool:
        """Return whether the publisher is shutting down and waits for a confirmation that does not come.

        :param progress: a value that changes whenever anything is received, applied or confirmed.
        :param unread: messages of the publisher are left in the socket.
        """
        if progress != self._progress:
            self._progress, self._since = progress, clock
        if clock - self._since < STANDSTILL_SECONDS:
            return False
        asks = clock - self._asked <= _AGAIN_SECONDS and self._asked - self._asks_since >= _ASKS_SECONDS
        return asks or (unread and self._refuses(clock))

    def _refuses(self, clock: float) -> bool:
        """Return the result of the last attempt to connect. An attempt may hang, so it has a thread of its own."""
        if clock >= self._next_check and (self._check_thread is None or not self._check_thread.is_alive()):
            self._next_check = clock + _CHECK_SECONDS
            self._check_thread = SupervisedThread("publisher_state", "publisher's state", self._check)
            self._check_thread.try_start()
        return self._refused

    def _check(self) -> None:
        self._refused = publisher.refuses(self._address)
