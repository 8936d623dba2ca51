"""``streaming = parallel``: which transactions in progress are applied while they arrive, and by whom.

Mirrors the leader's half of applyparallelworker.c (pa_allocate_worker, pa_can_start). Where no applier is free, a
transaction waits in its file for its end, as with ``streaming = on``.
"""

from __future__ import annotations

from collections.abc import Callable

from pgsub.apply.parallel.worker import Applier
from pgsub.apply.rows.change_filter import Filter
from pgsub.apply.rows.session import TargetSession
from pgsub.apply.stream.spool import SpooledTransaction


class ParallelApply:
    """The appliers of one worker; hears of stream blocks from its assembler (:class:`StreamWatch`).

    :param limit: further target sessions at most (max_parallel_apply_workers_per_subscription), 0 for none.
    :param open_session: opens one, under the worker's claim.
    :param subid: the subscription.
    :param admits: the filter with the states_version it decides by; None while a table is not ready.
    :param before_block: commits what the worker has received before the block: its changes may depend on it.
    """

    def __init__(
        self,
        limit: int,
        open_session: Callable[[], TargetSession],
        subid: int,
        *,
        admits: Callable[[], tuple[int, Filter] | None],
        before_block: Callable[[], None],
        set_based: bool = True,
    ) -> None:
        self._limit = limit
        self._open_session = open_session
        self._subid = subid
        self._admits = admits
        self._before_block = before_block
        self._set_based = set_based
        self._appliers: list[Applier] = []
        self._busy: dict[int, Applier] = {}
        self._spooling: set[int] = set()  #: in progress, and waiting for their end in a file only

    @property
    def busy(self) -> list[Applier]:
        """Appliers with a transaction."""
        return list(self._busy.values())

    def started(self, xid: int, spooled: SpooledTransaction) -> None:
        """A stream block begins: with the first one it is decided who applies the transaction."""
        if xid in self._spooling:
            return
        applier = self._busy.get(xid)
        if applier is None:
            applier = self._assign(xid, spooled)
        if applier is None:
            self._spooling.add(xid)
        else:
            self._before_block()

    def _assign(self, xid: int, spooled: SpooledTransaction) -> Applier | None:
        for dead in [one for one in self._appliers if not one.is_alive() and one not in self._busy.values()]:
            dead.close()
            self._appliers.remove(dead)
        applier = next((one for one in self._appliers if one.free), None)
        admits = self._admits() if applier is not None or len(self._appliers) < self._limit else None
        if admits is None:
            return None
        if applier is None:
            applier = Applier(len(self._appliers) + 1, self._open_session, self._subid, set_based=self._set_based)
            applier.start()
            self._appliers.append(applier)
        self._busy[xid] = applier
        spooled.follow()
        applier.assign(xid, spooled, *admits)
        return applier

    def grown(self, xid: int, spooled: SpooledTransaction) -> None:
        """More of the open block came in."""
        applier = self._busy.get(xid)
        if applier is None or applier.reason is not None:
            spooled.unfollow()
        else:
            spooled.publish()
            applier.grown(spooled.end)

    def stopped(self, xid: int, spooled: SpooledTransaction) -> None:
        """The block ended."""
        applier = self._busy.get(xid)
        if applier is not None:
            applier.grown(spooled.end)

    def aborted(self, xid: int, subxid: int) -> None:
        """A subtransaction was rolled back, or the whole transaction."""
        if xid == subxid:
            self._spooling.discard(xid)
            applier = self._busy.pop(xid, None)
            if applier is not None:
                applier.release()
        elif xid in self._busy:
            self._busy[xid].aborted(subxid)

    def take(self, xid: int) -> Applier | None:
        """Whoever applied the transaction, which has ended now; to be released by the caller."""
        self._spooling.discard(xid)
        return self._busy.pop(xid, None)

    def give_way(self) -> bool:
        """Every applier rolls back: one of them was part of a deadlock with the worker itself.

        :return: whether there was any.
        """
        busy = self.busy
        self._spooling.update(self._busy)
        self._busy.clear()
        for applier in busy:
            applier.release()
        return bool(busy)

    def close(self) -> None:
        """End them all; what they have open is rolled back."""
        for applier in self._appliers:
            applier.stop()
        for applier in self._appliers:
            applier.close()
