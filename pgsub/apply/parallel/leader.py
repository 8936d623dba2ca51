"""``streaming = parallel``: assigns transactions in progress to parallel workers.

Mirrors the leader's half of applyparallelworker.c (pa_allocate_worker, pa_can_start). If no parallel worker is free, a
transaction waits in its file until it ends, as with ``streaming = on``.
"""

from __future__ import annotations

from collections.abc import Callable

from pgsub.apply.parallel.worker import ParallelWorker
from pgsub.apply.rows.table_state_filter import Filter
from pgsub.apply.rows.worker_sessions import TargetSession
from pgsub.apply.stream.assembler import StreamWatch
from pgsub.apply.stream.spool import SpooledTransaction


class ParallelLeader(StreamWatch):
    """The parallel workers of one worker; its assembler reports stream blocks to it (:class:`StreamWatch`).

    :param limit: maximum number of further target sessions (max_parallel_apply_workers_per_subscription).
    :param open_session: opens a session under the worker's claim.
    :param should_apply: returns the filter and its states_version, None while a table is not ready.
    :param before_block: commits what was received before the block, because its changes may depend on it.
    """

    def __init__(
        self,
        limit: int,
        open_session: Callable[[], TargetSession],
        *,
        should_apply: Callable[[], tuple[int, Filter] | None],
        before_block: Callable[[], None],
        set_based: bool = True,
    ) -> None:
        self._limit = limit
        self._open_session = open_session
        self._should_apply = should_apply
        self._before_block = before_block
        self._set_based = set_based
        self._workers: list[ParallelWorker] = []
        self._busy: dict[int, ParallelWorker] = {}
        self._spooling: set[int] = set()  #: in progress, and only written to their files

    @property
    def busy(self) -> list[ParallelWorker]:
        """Parallel workers that have a transaction."""
        return list(self._busy.values())

    def started(self, xid: int, spooled: SpooledTransaction) -> None:
        """Begin a stream block; the first block of a transaction decides who applies it."""
        if xid in self._spooling:
            return
        worker = self._busy.get(xid)
        if worker is None:
            worker = self._assign(xid, spooled)
        if worker is None:
            self._spooling.add(xid)
        else:
            self._before_block()

    def _assign(self, xid: int, spooled: SpooledTransaction) -> ParallelWorker | None:
        for dead in [one for one in self._workers if not one.is_alive() and one not in self.busy]:
            dead.close()
            self._workers.remove(dead)
        worker = next((one for one in self._workers if one.free), None)
        should_apply = self._should_apply() if worker is not None or len(self._workers) < self._limit else None
        if should_apply is None:
            return None
        if worker is None:
            worker = ParallelWorker(len(self._workers) + 1, self._open_session, set_based=self._set_based)
            if not worker.try_start():
                return None
            self._workers.append(worker)
        self._busy[xid] = worker
        spooled.follow()
        worker.assign(xid, spooled, *should_apply)
        return worker

    def grown(self, xid: int, spooled: SpooledTransaction) -> None:
        """Let the parallel worker apply further messages of the open block."""
        worker = self._busy.get(xid)
        if worker is None or worker.reason is not None:
            spooled.unfollow()
        else:
            spooled.publish()
            worker.grown(spooled.end)

    def stopped(self, xid: int, spooled: SpooledTransaction) -> None:
        """End the block."""
        worker = self._busy.get(xid)
        if worker is not None:
            worker.grown(spooled.end)

    def aborted(self, xid: int, subxid: int) -> None:
        """Roll back a subtransaction, or the whole transaction."""
        if xid == subxid:
            self.end(xid)
        elif xid in self._busy:
            self._busy[xid].aborted(subxid)

    def worker_of(self, xid: int) -> ParallelWorker | None:
        """Return the parallel worker of a transaction; None if it only waits in its file."""
        return self._busy.get(xid)

    def end(self, xid: int) -> None:
        """Release the parallel worker of a transaction that has ended and was committed, or is not needed."""
        self._spooling.discard(xid)
        worker = self._busy.pop(xid, None)
        if worker is not None:
            worker.release()

    def stop_streaming(self) -> bool:
        """Roll back all parallel workers, one of which was in a deadlock with the worker itself.

        :return: whether there were any.
        """
        busy, self._busy = self._busy, {}
        self._spooling.update(busy)
        for worker in busy.values():
            worker.release()
        return bool(busy)

    def close(self) -> None:
        """End all parallel workers; their open transactions are rolled back."""
        for worker in self._workers:
            worker.stop()
        for worker in self._workers:
            worker.close()
