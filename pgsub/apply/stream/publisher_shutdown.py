"""Detects that a publisher that shuts down waits in vain. Mirrors, from the other end, WalSndDone (walsender.c).

A walsender ends with its server once the flush position has come to where it has sent to. The server's own subscriber
keeps it waiting while apply is blocked, until wal_sender_timeout; here keepalives are answered meanwhile, so nothing
would ever end it.
"""

from __future__ import annotations

from pgsub.common.threads import SupervisedThread
from pgsub.publisher import connect as publisher

#: Seconds without any progress after which a publisher that shuts down is kept waiting no longer.
STANDSTILL_SECONDS = 5.0
#: A walsender that ends asks again as soon as it is answered, for so long; any other asks only when it has not heard of
#: us for half of its wal_sender_timeout.
_ASKS_SECONDS, _AGAIN_SECONDS = 2.0, 1.0
#: Between two attempts to connect, made only where its requests cannot be read.
_CHECK_SECONDS = 5.0


class PublisherShutdown:
    """Watches one stream for its publisher's shutdown; asked by the thread that serves the stream."""

    def __init__(self, connection: publisher.Connection) -> None:
        self._address = publisher.address(connection)
        self._progress: object = None
        self._since = 0.0  #: when something moved last
        self._asks_since = self._asked = 0.0
        self._next_check = 0.0
        self._check_thread: SupervisedThread | None = None
        self._refused = False

    def asked(self, clock: float) -> None:
        """Note that the publisher wants a reply."""
        if clock - self._asked > _AGAIN_SECONDS:
            self._asks_since = clock
        self._asked = clock

    def in_vain(self, clock: float, progress: object, *, unread: bool) -> bool:
        """Return whether it shuts down and waits for what does not come.

        :param progress: differs where anything was received, applied or confirmed since it was asked last.
        :param unread: what the publisher says is left in the socket.
        """
        if progress != self._progress:
            self._progress, self._since = progress, clock
        if clock - self._since < STANDSTILL_SECONDS:
            return False
        asks = clock - self._asked <= _AGAIN_SECONDS and self._asked - self._asks_since >= _ASKS_SECONDS
        return asks or (unread and self._refuses(clock))

    def _refuses(self, clock: float) -> bool:
        """Return what the last attempt found; the next one has a thread of its own, for it may hang."""
        if clock >= self._next_check and (self._check_thread is None or not self._check_thread.is_alive()):
            self._next_check = clock + _CHECK_SECONDS
            self._check_thread = SupervisedThread("publisher_state", "publisher's state", self._check)
            self._check_thread.try_start()
        return self._refused

    def _check(self) -> None:
        self._refused = publisher.refuses(self._address)
