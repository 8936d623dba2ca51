"""The time limit of the pause: cancels statements, and closes a session that does not answer.

A lock of a session outside of the fence, a missing synchronous standby, or a lost server can block a statement of the
pause while no client can write. A COMMIT that waits for a standby is done when it is canceled (SyncRepWaitForLSN). So
the journal decides afterwards, as after any other failure.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import psycopg

from pgsub.common.errors import TimeoutExpired
from pgsub.common.threads import SupervisedThread
from pgsub.target.session import transactions


class PauseLimit:
    """A time limit for statements on some sessions.

    :ivar deadline: in time of ``time.monotonic()``. It may be changed.
    """

    def __init__(self, sessions: Sequence[psycopg.Connection], deadline: float) -> None:
        self.deadline = deadline
        self._sessions = sessions
        self._over = threading.Event()
        self._canceled = False
        self._thread = SupervisedThread("pause_limit", "limit of the pause", self._watch)

    def __enter__(self) -> PauseLimit:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """End the watch.

        :raises TimeoutExpired: the failed statement was canceled.
        """
        self._over.set()
        self._thread.join()
        if self._canceled and isinstance(error, Exception) and not isinstance(error, TimeoutExpired):
            raise TimeoutExpired(
                "timeout of the switchover", detail=f"It ran out, and what ran then was canceled: {error}"
            ) from None

    def check(self) -> None:
        """Check that there is time left, and that the watching thread is alive."""
        if (death := self._thread.fatal_error) is not None:
            raise death
        if time.monotonic() > self.deadline:
            raise TimeoutExpired("timeout of the switchover", detail="It ran out before the right could be given.")

    def _watch(self) -> None:
        while (left := self.deadline - time.monotonic()) > 0:
            if self._over.wait(min(left, 0.1)):
                return
        self._canceled = True
        # Statements that begin after the deadline are canceled, too.
        while not self._over.is_set():
            for session in self._sessions:
                transactions.cancel(session)
            self._over.wait(transactions.AGAIN_SECONDS)
