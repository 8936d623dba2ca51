"""Subtransactions of a transaction that is applied while it arrives, as savepoints. Mirrors pa_start_subtrans and
pa_stream_abort (applyparallelworker.c).
"""

from __future__ import annotations

from pgsub.apply.execute.executor import Executor

#: Subtransactions that may be open at once: beyond, replaying the file is cheaper than that many savepoints.
SAVEPOINTS = 1000


class ReplayFromFile(Exception):
    """The transaction is better replayed from its file."""


class Savepoints:
    """The savepoints of one target transaction.

    :param xid: of the publisher's top-level transaction.
    """

    def __init__(self, executor: Executor, xid: int) -> None:
        self.executor = executor
        self._xid = xid
        self._levels: dict[int, set[int]] = {}  #: by the subtransaction of a savepoint all those with changes since
        self._aborted: set[int] = set()

    def enter(self, subxid: int) -> None:
        """Set a savepoint before the first change of a subtransaction.

        :raises ReplayFromFile: there are too many.
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
        """Note a rollback on the publisher; :meth:`take_back` comes later, for a subtree is aborted one by one."""
        self._aborted.add(subxid)

    def take_back(self) -> None:
        """Roll back what was aborted since the last change; of a whole subtree the inner ones came first.

        :raises ReplayFromFile: something that was not aborted would go with it.
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
