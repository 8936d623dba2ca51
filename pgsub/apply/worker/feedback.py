"""Sends feedback to the publisher. A position is recorded in the ledger before it is reported.

NOTES: A session that waits for ``replay_lsn`` may rely on the log and ``state.db``. So feedback does not pass an event
of the ledger until the launcher has mirrored it; the launcher then deletes the event. If events are recorded all the
time, there is never a moment without one, and the publisher would keep its WAL forever. So the worker sets a mark, and
feedback passes it once all events up to the mark's id are gone. An event with a greater id was recorded after the
mark's position was reached. An event of a prepared transaction appears late with an older id; it blocks until it is
mirrored.

``remote_lsn`` in ``state.db`` is not an event. The apply position waits for the launcher's answer that ``state.db``
shows the last transaction. The flush position does not wait, because a publisher's shutdown and WAL depend on it.

A position that the ledger has as reported is repeated only once the stream has reached it. The publisher's files may
have been restored to an earlier time. Then transactions of its new history end before this position and must be
applied.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pgsub.apply.commit.ledger_commit import LedgerCommit
from pgsub.apply.rows.worker_sessions import WorkerStreams
from pgsub.apply.stream.receiver import Receiver
from pgsub.common import failpoints

#: Seconds between durable reports under continuous load.
REPORT_SECONDS = 0.1
#: Seconds for the launcher to record what feedback must not pass, at the end of a run and for the apply position.
MIRROR_SECONDS = 2.0


class Feedback:
    """The positions that one worker reports to the publisher.

    :param ledger_commit: notes whether an event was recorded that the launcher must log.
    :param shown_lsn: returns the last transaction shown by the state store, None without news; None if nobody answers.
    :ivar requested: the publisher asks how far its WAL is confirmed.
    """

    def __init__(
        self,
        streams: WorkerStreams,
        receiver: Receiver,
        ledger_commit: LedgerCommit,
        shown_lsn: Callable[[], int | None] | None,
    ) -> None:
        self._progress = streams.session.progress
        self._streams = streams
        self._receiver = receiver
        self._ledger_commit = ledger_commit
        ledger_commit.recorded = True  # an earlier worker may have left events
        self._mark: tuple[int, int] | None = None  #: id of an event and a position; no event before it has a higher id
        self._passed = self._progress.reported_lsn  #: the furthest position known to have no event before it
        self._next_report = self._next_idle = 0.0
        self._shown_lsn = shown_lsn
        self._shown = self._progress.remote_lsn  #: the last transaction known to be shown by the state store
        self._unshown: tuple[int, int, float] | None = None  #: a transaction, a position behind it, start of the wait
        self._answers = shown_lsn is not None  #: whether to wait for the launcher
        self.requested = False

    def reportable(self, position: int) -> int:
        """Return how far feedback may go. Reporting a position promises that every conflict before it can be read.

        :param position: everything before it is applied.
        """
        # guard: conflicts are logged before feedback, without "self._passed if self._ledger_commit.recorded else "
        return self._passed if self._ledger_commit.recorded else position

    def applied(self, position: int, remote_lsn: int) -> None:
        """Advance the apply position of the next feedback, once the state store shows the last transaction.

        :param position: everything before it is applied, including idle stretches.
        :param remote_lsn: end LSN of the last committed transaction.
        """
        # guard: the apply position does not pass what state.db shows, always
        if self._is_shown(position, remote_lsn):
            self._receiver.progress(applied=self.reportable(position))

    @property
    def waits(self) -> bool:
        """Whether an answer of the launcher is awaited."""
        return self._unshown is not None

    def _is_shown(self, position: int, remote_lsn: int) -> bool:
        """Process the launcher's answer; return whether the state store shows the last transaction.

        A launcher that does not answer in time is ignored until it answers again. Nothing is awaited while commits on
        the publisher wait for this position.
        """
        if self._shown_lsn is not None and (shown := self._shown_lsn()) is not None:
            self._shown, self._answers = max(self._shown, shown), True
        clock = time.monotonic()
        if self._unshown is not None:
            lsn, behind, since = self._unshown
            if lsn <= self._shown:
                self._receiver.progress(applied=self.reportable(behind))
                self._unshown = None
            elif clock - since >= MIRROR_SECONDS:
                self._unshown, self._answers = None, False
        if remote_lsn <= self._shown or not self._answers or self._streams.standby.waited:
            self._unshown = None
            return True
        self._unshown = self._unshown or (remote_lsn, position, clock)
        return False

    def report_if_due(self, clock: float, position: int, remote_lsn: int) -> bool:
        """Report if a report is due; return whether one was.

        :param position: everything before it is applied, including idle stretches.
        :param remote_lsn: end LSN of the last committed transaction.
        """
        if clock < self._next_report:
            return False
        if self._ledger_commit.recorded:
            self._next_report = clock + REPORT_SECONDS
            self._read_events(position)
            self.applied(position, remote_lsn)
        reported, reportable = self._progress.reported_lsn, self.reportable(position)
        self._repeat(position)
        due = min(remote_lsn, reportable) > reported or (reportable > reported and self._wanted(clock))
        if due:
            self._report(reportable)
        self.requested = False  # a publisher that still waits asks again
        return due

    def _wanted(self, clock: float) -> bool:
        """Return whether to write the ledger for WAL without a transaction.

        Each write makes WAL on the target, which others may replicate, and two subscriptions may feed each other. So
        the ledger is written only if the publisher asks, a commit there waits, or the interval is over.
        """
        return self.requested or clock >= self._next_idle or self._streams.standby.waits()

    def _report(self, position: int) -> None:
        """Record the position with a synchronous commit of the ledger, then send it as the flush position."""
        clock = time.monotonic()
        self._next_report, self._next_idle = clock + REPORT_SECONDS, clock + self._streams.timing.idle_interval
        # guard: a position is recorded before it is reported
        self._progress.report(position)
        failpoints.point("apply.after_reported_lsn")
        self._receiver.progress(flushed=position)

    def finish(self, position: int) -> None:
        """Report the final position once the launcher has mirrored all events or takes too long."""
        deadline = time.monotonic() + MIRROR_SECONDS
        while self._ledger_commit.recorded:
            self._read_events(position)
            if time.monotonic() >= deadline:
                break
            time.sleep(0.05 if self._ledger_commit.recorded else 0.0)
        self._receiver.progress(applied=self.reportable(position))
        self._repeat(position)
        if self.reportable(position) > self._progress.reported_lsn:
            self._report(self.reportable(position))

    def _repeat(self, position: int) -> None:
        """Report again the position that the ledger has as reported, once the stream has reached it.

        :param position: everything before it is applied.
        """
        # guard: what was reported before is named again only when the stream has come that far, always
        if self._progress.reported_lsn <= position:
            self._receiver.progress(flushed=self._progress.reported_lsn)

    def _read_events(self, position: int) -> None:
        """Read which events are left.

        :param position: every event before it is committed.
        """
        found = self._progress.unmirrored_events()
        self._ledger_commit.recorded = found is not None
        if found is None:
            self._mark, self._passed = None, position
            return
        first, last = found
        if self._mark is not None and first > self._mark[0]:
            self._passed, self._mark = self._mark[1], None
        self._mark = self._mark or (last, position)
