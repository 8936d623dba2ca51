"""Receives the stream from the publisher in a thread. Mirrors LogicalRepApplyLoop's outer half (worker.c).

Receiving and applying overlap. Keepalives are answered while a large batch runs on the target. The thread that owns the
connection is the only one that sends feedback.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pgsub.apply.stream.publisher_shutdown import STANDSTILL_SECONDS, PublisherShutdown
from pgsub.common import failpoints
from pgsub.common.errors import PublisherUnavailable
from pgsub.common.threads import SupervisedThread
from pgsub.protocol import frames, walsender_messages
from pgsub.protocol.frames import Frames
from pgsub.protocol.lsn import format_lsn
from pgsub.protocol.walsender_messages import Keepalive, XLogData, since_2000
from pgsub.publisher.stream.walsender import WalSender

QUEUE_BYTES = 64 << 20  #: limit of the bytes that apply has not taken; beyond it, the socket is not read
#: While apply is busy, received bytes are held back up to this size and time. Fewer, larger pieces cost less.
HOLD_BYTES, HOLD_SECONDS = 256 << 10, 0.05
#: After a read of FLOW_BYTES or more, the socket is left alone for FLOW_SECONDS, because more will follow. Reading each
#: of a walsender's small writes at once doubles the cost on both sides: each becomes a packet and wakes up the reader,
#: while the kernel joins the ones that wait. A read of MUCH_BYTES or more consists of large writes, which waiting would
#: slow down.
FLOW_BYTES, FLOW_SECONDS, MUCH_BYTES = 2048, 0.02, 512 << 10
#: Minimum seconds between two equal status updates: a publisher that is shutting down asks again as soon as it is
#: answered. After this time the write position is also reported alone; usually apply has more to report before.
_SOON_SECONDS = 0.1


def now() -> int:
    """Return the microseconds since 2000-01-01 UTC, the clock of the protocol; for display and feedback only."""
    return since_2000(time.time_ns() // 1000)


@dataclass(frozen=True, slots=True)
class Timing:
    """Intervals of a stream, in seconds.

    :ivar status_interval: time between unsolicited status updates.
    :ivar timeout: silence after which the publisher counts as lost; infinite for never.
    :ivar idle_interval: time between writes to the ledger for WAL without a transaction, unless the publisher asks.
    """

    status_interval: float = 10.0
    timeout: float = 60.0
    idle_interval: float = 10.0


class Receiver(SupervisedThread):
    """A thread that receives until :meth:`close`; :meth:`take` raises the errors of the stream.

    :param walsender: a started stream.
    :param position: start of the stream and first write position.
    :param flushed: first flush and apply position; at most the one reported according to the ledger.
    :param applies: returns a value that changes whenever anything is applied.
    """

    def __init__(
        self, walsender: WalSender, position: int, flushed: int, timing: Timing, applies: Callable[[], object]
    ) -> None:
        super().__init__("apply_receiver", "receiver", on_death=self._wake_taker)
        self._walsender = walsender
        self._status_interval = timing.status_interval
        self._timeout = timing.timeout
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._ready = threading.Condition()
        self._queue: deque[Frames] = deque()
        self._queued = 0
        self._error: Exception | None = None
        self._closing = False
        self._held = 0  #: bytes that were read and not delivered
        self.flows = False  #: the last read was large enough that more will follow
        self._floods = False  #: the last read was very large
        self._held_since = 0.0  #: receipt of the oldest byte held back, 0.0 for none
        self._due = self._ping = False
        self._asked = False  #: the publisher requested a reply
        self._unreported_since = 0.0  #: receipt of the first byte not covered by feedback, 0.0 for none
        self._applies = applies
        self._standstill = PublisherShutdown(walsender.connection)
        self.received = position
        self.applied = self.flushed = flushed
        self.reported = 0  #: flush position of the last feedback that was sent
        self.latest_end_lsn = 0  #: apply position of the last feedback, as in pg_stat_subscription
        self.last_send_ts = 0
        self.last_receipt_ts = 0

    # called by the applying thread

    def take(self, timeout: float) -> Frames | None:
        """Take the next burst of CopyData messages; return None after the timeout.

        :raises PgsubError: the stream ended or broke, and everything received before was taken.
        """
        with self._ready:
            if not self._queue and self._error is None and self.fatal_error is None:
                self._ready.wait(timeout)
            if self._queue:
                burst = self._queue.popleft()
                was_full = self._queued >= QUEUE_BYTES
                self._queued -= len(burst.buffer)
                if (was_full and self._queued < QUEUE_BYTES) or (self._held_since and not self._queue):
                    self._wake()
                return burst
            if self._error is not None or self.fatal_error is not None:
                raise self._error or self.fatal_error or AssertionError
            return None

    def idle(self) -> bool:
        """Return whether no received message is left."""
        return not self._queue and not self._held_since

    def progress(self, *, applied: int | None = None, flushed: int | None = None) -> None:
        """Advance the positions of the next feedback, and send it soon if they changed."""
        applied, flushed = max(self.applied, applied or 0), max(self.flushed, flushed or 0)
        if (applied, flushed) != (self.applied, self.flushed):
            self.applied, self.flushed = applied, flushed
            self._due = True
            self._wake()

    def ping(self) -> None:
        """Request a keepalive from the publisher, so that hand-overs finish on an idle publisher too."""
        self._ping = True
        self._wake()

    def close(self) -> None:
        """Send the last feedback, end the stream, stop the thread."""
        self._closing = True
        self._wake()
        self.join(10)
        if not self.is_alive():  # a thread that hangs in a dead connection still polls them
            os.close(self._wake_write)
            os.close(self._wake_read)

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"x")
        except BlockingIOError:
            pass  # the pipe is full of wake-ups already

    # the thread

    def work(self) -> None:
        """Receive until :meth:`close`, then end the stream."""
        try:
            self._loop()
            self._walsender.stop(timeout=3)
        except Exception as error:
            self._error = error
            self._wake_taker()
            # the received messages may take a while to apply, and the publisher must not wait for that
            with contextlib.suppress(Exception):
                self._walsender.stop(timeout=1)
            with contextlib.suppress(Exception):
                self._walsender.connection.close()

    def _wake_taker(self) -> None:
        with self._ready:
            self._ready.notify_all()

    def _loop(self) -> None:
        last_heard = last_status = time.monotonic()
        pinged, more = False, True  # the start may have left messages in libpq's buffer
        while not self._closing:
            self.checkpoint()
            # parts of a large message count as well: receiving it may take longer than the timeout
            if self.flows and not self._floods:
                time.sleep(FLOW_SECONDS)
            heard = not more and self._wait(self._longest_wait(last_status))
            full = self._queued >= QUEUE_BYTES
            burst = None if full or self._holds() else self._walsender.receive()
            clock, more = time.monotonic(), bool(burst)
            if burst or heard or full:
                last_heard, pinged = clock, False
            if burst:
                self._deliver(burst)
            elif self._silent(clock - last_heard) and not pinged:
                pinged = self._ping = True
            if self._is_feedback_due(clock, last_status):
                self._feedback()
                last_status = clock
            if self._standstill.in_vain(clock, (self.received, self.flushed, self._applies()), unread=full):
                raise self._shut_down()
        self._feedback()

    def _longest_wait(self, last_status: float) -> float:
        soon = self._asked or self._unreported_since
        longest = HOLD_SECONDS if self._held_since else _SOON_SECONDS if soon else 1.0
        return max(0.0, min(longest, last_status + self._status_interval - time.monotonic()))

    def _silent(self, seconds: float) -> bool:
        """Return whether the publisher was silent for half of the timeout, after which it is asked for a keepalive."""
        # guard: a silent publisher is disconnected
        if seconds > self._timeout:
            raise PublisherUnavailable("terminating logical replication worker due to timeout")
        return seconds > self._timeout / 2

    def _is_feedback_due(self, clock: float, last_status: float) -> bool:
        answers = self._asked and clock - last_status >= _SOON_SECONDS
        late = self._unreported_since and clock - self._unreported_since >= _SOON_SECONDS
        return bool(self._due or self._ping or answers or late or clock - last_status >= self._status_interval)

    def _shut_down(self) -> PublisherUnavailable:
        received, flushed = format_lsn(self.received), format_lsn(self.flushed)
        return PublisherUnavailable(
            "terminating logical replication worker because the publisher is shutting down",
            detail=f"Nothing has moved for {STANDSTILL_SECONDS:.0f} seconds: WAL was received up to {received} and"
            f" confirmed up to {flushed}.",
            hint="The publisher sends it again when it is back. What apply waits for on the target, such as a lock, is"
            " in pg_stat_activity there.",
        )

    def _holds(self) -> bool:
        """Read the socket, and return whether to hold the bytes back until more are received."""
        before, held = self._held, self._walsender.fill()
        self._held, self.flows = held, held - before >= FLOW_BYTES
        self._floods = held - before >= MUCH_BYTES
        clock = time.monotonic()
        since = self._held_since or clock
        if self._queue and 0 < held < HOLD_BYTES and clock - since < HOLD_SECONDS:
            self._held_since = since
            return True
        return False

    def _wait(self, timeout: float) -> bool:
        """Wait for the publisher, a wake-up or the timeout; return whether the publisher has sent anything.

        Bytes that libpq has already read do not make the socket readable.
        """
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        if self._queued < QUEUE_BYTES:
            poll.register(self._walsender.fileno, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(timeout * 1000)}
        if self._wake_read in ready:
            os.read(self._wake_read, 4096)
        return self._walsender.fileno in ready

    def _deliver(self, burst: Frames) -> None:
        last, before = walsender_messages.parse(burst.head(len(burst) - 1)), self.received
        self.received = max(before, last.wal_end, last.start if isinstance(last, XLogData) else 0)
        if self.received > before:
            self._unreported_since = self._unreported_since or time.monotonic()
        self.last_send_ts, self.last_receipt_ts = last.send_ts, now()
        if frames.KEEPALIVE in burst.codes:
            keepalives = (
                walsender_messages.parse(burst[at]) for at, code in enumerate(burst.codes) if code == frames.KEEPALIVE
            )
            if any(isinstance(one, Keepalive) and one.reply_requested for one in keepalives):
                self._asked = True
                self._standstill.asked(time.monotonic())
        with self._ready:
            self._held, self._held_since = 0, 0.0
            self._queue.append(burst)
            self._queued += len(burst.buffer)
            self._ready.notify()

    def _feedback(self) -> None:
        ping, self._ping, self._due, self._asked, self._unreported_since = self._ping, False, False, False, 0.0
        flushed = self.flushed
        write = max(self.received, self.applied, flushed)
        self._walsender.send(walsender_messages.standby_status(write, flushed, self.applied, now(), ping))
        self.latest_end_lsn = max(self.applied, flushed)
        if flushed > self.reported:
            self.reported = flushed
            failpoints.point("apply.after_feedback")
