"""The apply worker at a barrier: which transactions it may still commit, and how long it waits there.

The server has no counterpart. :mod:`pgsub.target.ledger.maintenance.barrier` is the ledger's side.
"""

from __future__ import annotations

import time

from pgsub.apply.rows.worker_sessions import TargetSession
from pgsub.apply.stream.transaction_batch import Batch
from pgsub.common import failpoints
from pgsub.protocol.lsn import covered
from pgsub.target.ledger.maintenance import barrier
from pgsub.target.ledger.maintenance.barrier import Barrier
from pgsub.target.ledger.worker_takeover import Claim


class ApplyBarrier:
    """The barrier of one apply worker, as of the last read of the table states."""

    def __init__(self, session: TargetSession, claim: Claim) -> None:
        self._connection, self._claim = session.connection, claim
        self._barrier: Barrier | None = None
        self._since: float | None = None  #: start of the wait, None while it is not reached
        self._stood = 0.0  #: seconds waited at earlier positions of the same barrier

    def __bool__(self) -> bool:
        return self._barrier is not None

    def read(self) -> None:
        """Read the barrier. A barrier that was moved gets its full time again."""
        before, self._barrier = self._barrier, barrier.read(self._connection, self._claim.subid)
        if before is None or self._barrier is None or before.token != self._barrier.token:
            self._since, self._stood = None, 0.0
        elif before.lsn != self._barrier.lsn and self._since is not None:
            self._stood += time.monotonic() - self._since
            self._since = None

    def admit(self, batch: Batch) -> int:
        """Return how many of these transactions the barrier lets pass."""
        if self._barrier is None or self.covers(batch.last.finish_lsn):
            return len(batch)
        return next((n for n, one in enumerate(batch.transactions()) if not self.covers(one.finish_lsn)), len(batch))

    def covers(self, finish_lsn: int) -> bool:
        """Return whether the barrier lets a transaction pass."""
        return self._barrier is None or covered(finish_lsn, self._barrier.lsn)

    def stand(self) -> None:
        """Wait at the barrier. The first call records that, and the barrier is removed once its time is over."""
        if self._barrier is None:
            return
        clock = time.monotonic()
        if self._since is None:
            self._since = clock
            failpoints.point("apply.before_barrier_reached")
            barrier.stands(self._connection, self._claim, self._barrier, self._stood)
        # guard: apply does not wait at a barrier forever
        if clock - self._since > self._barrier.seconds:
            barrier.give_up(self._connection, self._claim, self._barrier)
            self._barrier = None

    def stand_at(self, position: int) -> None:
        """Wait at the barrier if it is reached and no transaction beyond it has come yet.

        :param position: everything before it is applied.
        """
        if self._barrier is not None and position >= self._barrier.lsn:
            self.stand()
