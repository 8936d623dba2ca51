"""The limit in time of the pause: statements that hang are canceled, and a session that does not answer is cut.

NOTES
A lock that a session outside the fence holds, a synchronous standby that is gone, a server that vanished: each keeps a
statement of the pause from ending while no client can write. A COMMIT that waits for a standby is done when it is
canceled (SyncRepWaitForLSN), so what the journal says decides afterwards, as after any other fault.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import psycopg

from pgsub.common.errors import TimeoutExpired
from pgsub.common.threads import SupervisedThread
from pgsub.target.session import cancellation


class PauseLimit:
    """A limit in time for whatever runs on some sessions.

    :ivar deadline: of ``time.monotonic()``; it may be changed.
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

        :raises TimeoutExpired: what failed was canceled.
        """
        self._over.set()
        self._thread.join()
        if self._canceled and isinstance(error, Exception) and not isinstance(error, TimeoutExpired):
            raise TimeoutExpired(
                "timeout of the switchover", detail=f"It ran out, and what ran then was canceled: {error}"
            ) from None

    def check(self) -> None:
        """Check that there is time left, and that somebody watches it."""
        if (death := self._thread.fatal_error) is not None:
            raise death
        if time.monotonic() > self.deadline:
            raise TimeoutExpired("timeout of the switchover", detail="It ran out before the right could be given.")

    def _watch(self) -> None:
        while (left := self.deadline - time.monotonic()) > 0:
            if self._over.wait(min(left, 0.1)):
                return
        self._canceled = True
        # a statement that begins behind the deadline is canceled, too
        while not self._over.is_set():
            for session in self._sessions:
                cancellation.cancel(session)
            self._over.wait(cancellation.AGAIN_SECONDS)
