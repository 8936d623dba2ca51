"""The apply worker as its launcher sees it: started under a new epoch, heard of when it ends, started again."""

from __future__ import annotations

import contextlib
import threading

import psycopg

from pgsub.apply.worker import worker
from pgsub.apply.worker.start import WorkerSpec
from pgsub.apply.worker.worker import WorkerResult
from pgsub.common.errors import Log, PgsubError, log_text
from pgsub.common.subscription import Subscription
from pgsub.common.threads import SupervisedThread
from pgsub.common.worker_heartbeat import HeartbeatReceiver
from pgsub.launcher.engine import Engine
from pgsub.launcher.error_reporting import APPLY, ErrorReporter
from pgsub.launcher.mirror.mirror import Mirror
from pgsub.launcher.retry import Retry
from pgsub.tablesync.context import Job
from pgsub.target.ledger import subscriptions, workers
from pgsub.target.ledger.workers import Claim


class ApplyWorkerHandle:
    """Keeps one apply worker running.

    :param until_lsn: apply nothing beyond; 0 for no end.
    :param interval: see :func:`pgsub.launcher.retry.interval`.
    :param stopping: set when the launcher stops.
    :ivar reached: the worker ended at ``until_lsn``.
    :ivar failed: the error it ended with last, None once it is past that.
    """

    def __init__(
        self,
        sub: Subscription,
        engine: Engine,
        heartbeats: HeartbeatReceiver,
        errors: ErrorReporter,
        log: Log,
        *,
        spool_dir: str,
        until_lsn: int,
        interval: float,
        stopping: threading.Event,
    ) -> None:
        self._sub = sub
        self._engine = engine
        self._heartbeats = heartbeats
        self._errors = errors
        self._log = log
        self._spool_dir = spool_dir
        self._until = until_lsn
        self._stopping = stopping
        self._opening: SupervisedThread | None = None  #: opens Spark, which is waited for
        self._claim: Claim | None = None
        self._job: Job | None = None
        self._retry = Retry(interval=interval)
        self.reached = False

    @property
    def alive(self) -> bool:
        """Whether its job runs."""
        return self._job is not None and not self._job.done()

    @property
    def failed(self) -> PgsubError | None:
        """The error it ended with last, None once it is past that."""
        return self._retry.error

    def tick(self, session: psycopg.Connection) -> None:
        """Hear of its end, or start it if it is due."""
        if self._job is not None:
            if self._job.done():
                self._ended(self._job, session)
                self._job = None
        elif self._retry.due() and not self.reached:
            self._start(session)

    def _start(self, session: psycopg.Connection) -> None:
        """Start a worker, unless Spark still starts: that is looked at again, so that a stop is seen meanwhile."""
        opening, self._opening = self._opening or self._engine.start(), None
        if opening.is_alive():
            self._opening = opening
            return
        if opening.fatal_error is not None:
            raise opening.fatal_error
        sub = self._sub
        assert sub.slot_name is not None
        claim = self._claim = workers.take_over(session, sub.subid, workers.APPLY)
        spec = WorkerSpec(sub, claim, sub.slot_name, sub.name, self._heartbeats.address, self._until, self._spool_dir)
        self._job = self._engine.submit(f"apply {sub.name}", worker.run, [spec], stopping=self._stopping)
        if self._retry.failures == 0:
            self._log("LOG", log_text(f'logical replication apply worker for subscription "{sub.name}" has started'))

    def _ended(self, job: Job, session: psycopg.Connection) -> None:
        self._heartbeats.forget(self._sub.subid, workers.APPLY)
        try:
            result: WorkerResult = job.result(0)[0]
        except PgsubError as error:
            self._retry.failed(error)
            position = None
            with contextlib.suppress(psycopg.Error):  # a lost session is met again at once
                position = subscriptions.apply_position(session, self._sub.subid)
            self._errors.report(APPLY, error, "apply_error_count", position)
            return
        self._retry.succeeded()
        self.reached = result.outcome == "reached"

    def clear_if_past(self, mirror: Mirror) -> None:
        """Forget an error that the running worker got past."""
        heartbeat, place = mirror.apply_heartbeat(), self._errors.place(APPLY)
        if (
            self.alive
            and heartbeat is not None
            and heartbeat.position > place
            and not (place and mirror.held.is_next(place))
        ):
            if self._retry.error is not None:
                self._retry.succeeded()
            self._errors.clear(APPLY, heartbeat.position)

    def withdraw(self, session: psycopg.Connection) -> None:
        """Cancel a worker whose task has not begun: it would read that it is to stop only once its process is up."""
        if self.alive and self._claim is not None and workers.withdraw(session, self._claim):
            self.cancel()

    def cancel(self) -> None:
        """Give it up: what it has not committed is rolled back and sent again."""
        if self._job is not None and not self._job.done():
            self._job.cancel()
        self._job = None
