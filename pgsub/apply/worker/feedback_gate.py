"""What the launcher has yet to log, and how far feedback may go meanwhile."""

from __future__ import annotations

from pgsub.target.ledger.progress import Progress


class FeedbackGate:
    """Positions that feedback may name: everything recorded before them is in the launcher's log.

    Waiting until nothing at all is left would never end where something is recorded all the time, and the publisher
    would keep its WAL for ever. So a mark is set, and passed when what was there then is gone.

    :ivar passed: the furthest position that is known to be such.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._mark: tuple[int, int] | None = None  #: id of an event and a position: what is before it has no later one
        self.passed = progress.reported_lsn

    def look(self, position: int) -> bool:
        """Look again.

        :param position: reached by now; whatever was recorded before it is committed.
        :return: whether something is left.
        """
        found = self._progress.unmirrored_events()
        if found is None:
            self._mark, self.passed = None, position
            return False
        first, last = found
        if self._mark is not None and first > self._mark[0]:
            self.passed, self._mark = self._mark[1], None
        if self._mark is None:
            self._mark = last, position
        return True
