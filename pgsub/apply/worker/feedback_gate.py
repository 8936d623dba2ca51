"""How far feedback may go while the launcher has yet to log what was recorded.

NOTES: A session that waits for ``replay_lsn`` may rely on log and ``state.db``. So feedback passes no event of the
ledger that the launcher has not mirrored, and the launcher removes an event once it is. An id beyond the mark's was
given after the mark's position was reached. An event of a prepared transaction shows late, with an older id, and is in
the way until it is mirrored.
"""

from __future__ import annotations

from pgsub.target.ledger.progress import Progress


class FeedbackGate:
    """Positions that feedback may name: everything recorded before them is in the launcher's log.

    Waiting until no event is left would never end where events are recorded all the time, and the publisher would keep
    its WAL for ever. So a mark is set, and passed once the events of that time are gone.

    :ivar passed: the furthest position that is known to be such.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._mark: tuple[int, int] | None = None  #: id of an event and a position: what is before it has no later one
        self.passed = progress.reported_lsn

    def check(self, position: int) -> bool:
        """Read which events are left.

        :param position: reached by now; every event before it is committed.
        :return: whether an event is left.
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
