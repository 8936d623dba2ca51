"""Maps subtransactions of a streamed transaction to savepoints. Mirrors pa_start_subtrans and pa_stream_abort
(applyparallelworker.c).
"""

from __future__ import annotations

from pgsub.apply.execute.executor import Executor

#: Maximum number of open subtransactions; with more, replaying the file costs less than the savepoints.
SAVEPOINTS = 1000


class ReplayFromFile(Exception):
    """A request to replay the transaction from its file."""


class Savepoints:
    """The savepoints of one target transaction.

    :param xid: xid of the publisher's top-level transaction.
    """

    def __init__(self, executor: Executor, xid: int) -> None:
        self.executor = executor
        self._xid = xid
        self._levels: dict[int, set[int]] = {}  #: per savepoint's subtransaction, those with changes since
        self._aborted: set[int] = set()

    def enter(self, subxid: int) -> None:
        """Set a savepoint before the first change of a subtransaction.

        :raises ReplayFromFile: there are too many savepoints.
        """
        levels = self._levels
        if subxid != self._xid and subxid not in levels:
            if len(levels) >= SAVEPOINTS:
                raise ReplayFromFile("too many subtransactions")
            self.executor.savepoint()
            levels[subxid] = set()
        if levels:
            next(reversed(levels.values())).add(subxid)

    def abort(self, subxid: int) -> None:
        """Note an abort on the publisher; :meth:`take_back` undoes it later, as a subtree is aborted one by one."""
        self._aborted.add(subxid)

    def take_back(self) -> None:
        """Roll back what was aborted since the last change; in a subtree, the inner subtransactions were aborted first.

        :raises ReplayFromFile: that would also undo something that was not aborted.
        """
        levels = list(self._levels)
        first = next((i for i, subxid in enumerate(levels) if subxid in self._aborted), None)
        if first is None:
            return
        if any(not self._levels[subxid] <= self._aborted for subxid in levels[first:]):
            raise ReplayFromFile("subtransactions were rolled back in an order that savepoints do not allow")
        self.executor.rollback_to(first)
        for subxid in levels[first:]:
            del self._levels[subxid]
