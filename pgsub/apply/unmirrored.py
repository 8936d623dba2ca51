"""What the launcher has yet to log, and how far feedback may go meanwhile."""

from __future__ import annotations

from pgsub.target.progress import Progress


class Unmirrored:
    """Positions that feedback may name: everything recorded before them is in the launcher's log.

    Waiting until nothing at all is left would never end where something is recorded all the time, and the publisher
    would keep its WAL for ever. So a mark is set, and passed when what was there then is gone.

    :ivar left: whether there was something at the last look.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._mark: tuple[int, int] | None = None  #: id of an event and a position: what is before it has no later one
        self.left = True

    def reportable(self, position: int) -> int | None:
        """Look again.

        :param position: reached by now; whatever was recorded before it is committed.
        :return: the furthest position that feedback may name, None for none that is new.
        """
        found = self._progress.unmirrored_events()
        self.left = found is not None
        if found is None:
            self._mark = None
            return position
        first, last = found
        passed = None
        if self._mark is not None and first > self._mark[0]:
            passed, self._mark = self._mark[1], None
        if self._mark is None:
            self._mark = last, position
        return passed
