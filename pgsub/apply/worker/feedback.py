"""The feedback to the publisher: a position is recorded in the ledger before it is reported.

NOTES: A session that waits for ``replay_lsn`` may rely on log and ``state.db``. So feedback passes no event of the
ledger that the launcher has not mirrored, and the launcher removes an event once it is. Waiting until no event is left
would never end where events are recorded all the time, and the publisher would keep its WAL for ever. So a mark is set,
and passed once the events of that time are gone. An id beyond the mark's was given after the mark's position was
reached. An event of a prepared transaction shows late, with an older id, and is in the way until it is mirrored.

``remote_lsn`` in ``state.db`` is no event. The apply position waits for the launcher's answer that it shows the last
transaction; the flush position, on which a publisher's shutdown and its WAL depend, does not.

What the ledger says was reported is named again only once the stream has come that far. The files of a publisher may
have been put back to a time before that was reported: then transactions of its new history end before this position,
and are still to be applied.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pgsub.apply.commit.ledger_commit import LedgerCommit
from pgsub.apply.rows.worker_sessions import WorkerStreams
from pgsub.apply.stream.receiver import Receiver
from pgsub.common import failpoints

#: Seconds between durable reports while transactions keep coming.
REPORT_SECONDS = 0.1
#: The launcher gets this long to record what feedback must not pass: at the end of a run, and for the apply position.
MIRROR_SECONDS = 2.0


class Feedback:
    """The positions that one worker reports to the publisher.

    :param ledger_commit: notes whether something was recorded that the launcher has yet to log.
    :param shown_lsn: returns up to where the state store shows what was applied, None where nothing new is known;
        itself None where nobody answers.
    :ivar requested: the publisher wants to hear how far its WAL is confirmed.
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
        ledger_commit.recorded = True  # an earlier worker may have left something
        self._mark: tuple[int, int] | None = None  #: id of an event, and a position: no event before it has a later id
        self._passed = self._progress.reported_lsn  #: the furthest position known to have no event before it
        self._next_report = self._next_idle = 0.0
        self._shown_lsn = shown_lsn
        self._shown = self._progress.remote_lsn  #: the last transaction that the state store is known to show
        self._unshown: tuple[int, int, float] | None = None  #: a transaction, a position behind it, since when
        self._answers = shown_lsn is not None  #: whether the launcher is waited for
        self.requested = False

    def reportable(self, position: int) -> int:
        """Return how far feedback may go: a position behind a conflict promises that the conflict can be read.

        :param position: everything before it is applied.
        """
        # guard: conflicts are logged before feedback, without "self._passed if self._ledger_commit.recorded else "
        return self._passed if self._ledger_commit.recorded else position

    def applied(self, position: int, remote_lsn: int) -> None:
        """Let the next feedback say how far the worker has applied, once the state store shows it.

        :param position: everything before it is applied, idle stretches included.
        :param remote_lsn: end LSN of the last committed transaction.
        """
        # guard: the apply position does not pass what state.db shows, always
        if self._is_shown(position, remote_lsn):
            self._receiver.progress(applied=self.reportable(position))

    @property
    def waits(self) -> bool:
        """Whether an answer of the launcher is waited for."""
        return self._unshown is not None

    def _is_shown(self, position: int, remote_lsn: int) -> bool:
        """Take what the launcher answered; return whether the state store shows the last transaction.

        A launcher that does not answer in time is not waited for until it does. A commit on the publisher that waits
        for this position is not delayed.
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
        """Report where it is time; return whether it was.

        :param position: everything before it is applied, idle stretches included.
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
        """Return whether the ledger is to be written for WAL without a transaction.

        Each write makes WAL on the target, which others may replicate, and two subscriptions may feed each other. So
        it is written only where the publisher asks, a commit there waits, or the interval is over.
        """
        return self.requested or clock >= self._next_idle or self._streams.standby.waits()

    def _report(self, position: int) -> None:
        """Record before report: the ledger's synchronous commit first, then the flush position of the feedback."""
        clock = time.monotonic()
        self._next_report, self._next_idle = clock + REPORT_SECONDS, clock + self._streams.timing.idle_interval
        # guard: a position is recorded before it is reported
        self._progress.report(position)
        failpoints.point("apply.after_reported_lsn")
        self._receiver.progress(flushed=position)

    def finish(self, position: int) -> None:
        """Report what can be reported, once the launcher has mirrored what was recorded or takes too long."""
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
        """Report again what the ledger says was reported, once the stream has come that far.

        :param position: everything before it is applied.
        """
        # guard: what was reported before is named again only when the stream has come that far, always
        if self._progress.reported_lsn <= position:
            self._receiver.progress(flushed=self._progress.reported_lsn)

    def _read_events(self, position: int) -> None:
        """Read which events are left.

        :param position: reached by now; every event before it is committed.
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
