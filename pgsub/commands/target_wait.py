"""The watch on a command's session with the target: it names what is waited for, and ends the wait in time.

A lock of the ledger, or a synchronous standby that is gone, keeps a statement from ending, and no setting of the server
limits the wait of a COMMIT for a standby. Mirrors :mod:`pgsub.publisher.slot_creation`, which does so on the publisher.
"""

from __future__ import annotations

import contextlib
import threading
import time

import psycopg
from psycopg.pq import TransactionStatus

from pgsub.commands.reporter import Reporter
from pgsub.common.errors import PgsubError, TimeoutExpired
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.common.threads import SupervisedThread
from pgsub.launcher.mirror import lock_waits
from pgsub.target.session import cancellation
from pgsub.target.session import connect as target

#: Seconds that a statement may take before it is looked at, and between two looks.
AFTER, EVERY = 5.0, 1.0
#: Seconds beyond the deadline: what limits its own waits has more to say, and goes first.
GRACE = 3.0
_POLL, _LATE, _JOIN = 0.1, 0.5, 2.0


class TargetWait:
    """A watch for the length of a ``with`` block.

    :param session: of the command, with the target.
    :param reporter: told once what a statement waits for.
    :param deadline: of ``time.monotonic()``; None for no limit.
    :raises TimeoutExpired: from the block's end, where a statement was canceled because of the deadline.
    """

    def __init__(
        self, session: psycopg.Connection, sub: Subscription, reporter: Reporter | None, deadline: float | None
    ) -> None:
        self._session, self._sub, self._reporter = session, sub, reporter
        self._end = None if deadline is None else deadline + GRACE
        self._pid = session.info.backend_pid
        self._over = threading.Event()
        self._waits: str | None = None  #: as it was seen last
        self._told: str | None = None
        self._canceled = False
        self._second: psycopg.Connection | None = None
        self._thread = SupervisedThread("target_wait", "wait for the target", self._watch, on_death=self._cancel)

    def __enter__(self) -> TargetWait:
        if self._reporter is not None or self._end is not None:
            self._thread.try_start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN)
        if not self._canceled or not isinstance(error, PgsubError | psycopg.Error) or isinstance(error, TimeoutExpired):
            return
        if self._thread.fatal_error is not None:
            raise self._thread.fatal_error from None
        raise TimeoutExpired(
            f'timeout while changing subscription "{self._sub.name}" on the target',
            detail=f"It waited for {self._waits}. What was not done yet was canceled.",
            hint=f"See what is there:\npgsub status {word(self._sub.name)}",
        ) from None

    def _watch(self) -> None:
        busy_since, look = time.monotonic(), 0.0
        with contextlib.ExitStack() as stack:
            while not self._over.wait(_POLL):
                self._thread.checkpoint()
                clock = time.monotonic()
                late = self._end is not None and clock >= self._end
                if self._session.pgconn.transaction_status != TransactionStatus.ACTIVE:
                    busy_since = clock
                elif clock >= max(busy_since + (_LATE if late else AFTER), look):
                    look = clock + (cancellation.AGAIN_SECONDS if late else EVERY)
                    with contextlib.suppress(PgsubError, psycopg.Error):
                        self._look(stack)
                        # only what waits: a command that is slow goes on to where it can be ended
                        if late and self._waits is not None:
                            self._cancel()

    def _look(self, stack: contextlib.ExitStack) -> None:
        """Look what is waited for; report it if it was that before."""
        if self._second is None:
            opened = target.connect(self._sub.target, "pgsub", replica=False)
            self._second = stack.enter_context(contextlib.closing(opened))
        before, self._waits = self._waits, lock_waits.of_session(self._second, self._pid)
        if self._waits is not None and self._waits == before != self._told and self._reporter is not None:
            self._told = self._waits
            self._reporter.warning(f'the command for subscription "{self._sub.name}" waits for {self._waits}')

    def _cancel(self) -> None:
        self._canceled = True
        cancellation.cancel(self._session)
