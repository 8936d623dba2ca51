"""Watches a command's session on the target: reports what it waits for, and ends the wait at the deadline.

A lock of the ledger or a missing synchronous standby can block a statement. No setting of the server limits the wait of
COMMIT for a standby. Mirrors :mod:`pgsub.publisher.slot_creation`, which does the same on the publisher.
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
from pgsub.target.session import connect as target
from pgsub.target.session import transactions

#: Seconds that a statement may take before the first look, and seconds between looks.
AFTER, EVERY = 5.0, 1.0
#: Seconds after the deadline. Steps that limit their own waits report more, and should end first.
GRACE = 3.0
_POLL, _LATE, _JOIN = 0.1, 0.5, 2.0


class TargetWait:
    """A watch for the duration of a ``with`` block.

    :param session: the command's session on the target.
    :param reporter: gets one report of what a statement waits for.
    :param deadline: in time of ``time.monotonic()``, None for no limit.
    :raises TimeoutExpired: at the block's end, if a statement was canceled because of the deadline.
    """

    def __init__(
        self, session: psycopg.Connection, sub: Subscription, reporter: Reporter | None, deadline: float | None
    ) -> None:
        self._session, self._sub, self._reporter = session, sub, reporter
        self._end = None if deadline is None else deadline + GRACE
        self._pid = session.info.backend_pid
        self._over = threading.Event()
        self._waits: str | None = None  #: as last seen
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
            hint=f"See its state:\npgsub status {word(self._sub.name)}",
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
                    look = clock + (transactions.AGAIN_SECONDS if late else EVERY)
                    with contextlib.suppress(PgsubError, psycopg.Error):
                        self._look(stack)
                        # Cancel only waiting statements. A slow command continues to a point where it can end properly.
                        if late and self._waits is not None:
                            self._cancel()

    def _look(self, stack: contextlib.ExitStack) -> None:
        """Find out what the session waits for. Report it if it is the same as before."""
        if self._second is None:
            opened = target.connect(self._sub.target, "pgsub", replica=False)
            self._second = stack.enter_context(contextlib.closing(opened))
        before, self._waits = self._waits, lock_waits.of_session(self._second, self._pid)
        if self._waits is not None and self._waits == before != self._told and self._reporter is not None:
            self._told = self._waits
            self._reporter.warning(f'the command for subscription "{self._sub.name}" waits for {self._waits}')

    def _cancel(self) -> None:
        self._canceled = True
        transactions.cancel(self._session)
