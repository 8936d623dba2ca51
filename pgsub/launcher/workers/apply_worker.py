"""The launcher's view of the apply worker: starts it under a new epoch, and restarts it after it ended."""

from __future__ import annotations

import contextlib

import psycopg

from pgsub.apply.worker import worker
from pgsub.apply.worker.loop import WorkerResult
from pgsub.apply.worker.start import WorkerSpec
from pgsub.common.errors import Directive, Fenced, PgsubError, WorkerDied, log_text
from pgsub.common.plural import counted
from pgsub.common.threads import SupervisedThread
from pgsub.launcher.error_handling import APPLY, ErrorReporter
from pgsub.launcher.heartbeat_receiver import HeartbeatReceiver
from pgsub.launcher.mirror.mirror import Mirror
from pgsub.launcher.retry import Retry
from pgsub.launcher.spark.driver import Engine
from pgsub.launcher.workers.worker_watch import WorkerWatch
from pgsub.tablesync.context import Job, SyncContext
from pgsub.target.ledger import subscriptions, worker_takeover
from pgsub.target.ledger.worker_takeover import Claim


class ApplyWorkerHandle:
    """The handle of one apply worker, which keeps the worker running.

    :param context: shared by the subscription's workers. Its ``stopping`` event ends them.
    :param until_lsn: apply nothing beyond this position, 0 for no limit.
    :ivar reached: whether the worker ended at ``until_lsn``.
    """

    def __init__(
        self,
        context: SyncContext,
        engine: Engine,
        heartbeats: HeartbeatReceiver,
        errors: ErrorReporter,
        *,
        until_lsn: int,
        interval: float,
    ) -> None:
        self._context = context
        self._sub = context.subscription
        self._engine = engine
        self._heartbeats = heartbeats
        self._errors = errors
        self._until = until_lsn
        self._opening: SupervisedThread | None = None  #: opens Spark
        self._claim: Claim | None = None
        self._job: Job | None = None
        self._retry = Retry(interval=interval)
        self._stopped_at: int | None = None  #: apply's position when the worker last ended with an error
        self._sessions = 1  #: number of sessions of the target, as logged last
        self.reached = False
        self.watch = WorkerWatch(
            *(context.subscription, heartbeats, context.log, lambda: engine.slots(self._job), lambda: engine.ui),
            lambda: engine.watch.hang,
        )

    @property
    def alive(self) -> bool:
        """Whether the worker's job runs."""
        return self._job is not None and not self._job.done()

    @property
    def failed(self) -> PgsubError | None:
        """The error of the worker's last end, None once it has recovered."""
        return self._retry.error

    @property
    def applied(self) -> int:
        """The position before which the worker has applied everything, by its heartbeat; 0 if there is none."""
        beat = self._heartbeats.newest(self._sub.subid, worker_takeover.APPLY)
        return 0 if beat is None else beat.position

    def tick(self, session: psycopg.Connection) -> None:
        """Handle the worker's end, or start it if it is due."""
        if self._job is not None:
            if self._job.done():
                self._ended(self._job, session)
                self._job = None
                self.watch.ended()
            else:
                self.watch.look(session)
                self._say_sessions()
                self._take_over_if_silent(session)
        elif self._retry.due() and not self.reached:
            self._start(session)

    def _say_sessions(self) -> None:
        """Log when the worker uses a different number of sessions of the target."""
        found = self._heartbeats.newest(self._sub.subid, worker_takeover.APPLY)
        if found is None or not found.sessions_why or found.sessions == self._sessions:
            return
        self._sessions = found.sessions
        text = f'{counted(found.sessions, "session")} of the target apply subscription "{self._sub.name}" now'
        self._context.log("LOG", log_text(text, detail=found.sessions_why))

    def _take_over_if_silent(self, session: psycopg.Connection) -> None:
        """Abandon a hanging worker. The next worker ends its sessions and continues from the ledger."""
        why = self.watch.overdue
        if why is None:
            return
        self.watch.taken_over()
        self.cancel()
        self._failed(WorkerDied(why, detail="It is taken over."), session)

    def _start(self, session: psycopg.Connection) -> None:
        """Start a worker if Spark has started. Return at once if not, so that a stop takes effect."""
        opening, self._opening = self._opening or self._engine.start(), None
        if opening.is_alive():
            self._opening = opening
            self.watch.look(session)
            return
        if opening.fatal_error is not None:
            raise opening.fatal_error
        sub = self._sub
        assert sub.slot_name is not None
        claim = self._claim = worker_takeover.take_over(session, sub.subid, worker_takeover.APPLY)
        context = self._context
        spec = WorkerSpec(sub, claim, sub.slot_name, sub.name, context.heartbeat, self._until, context.spool_dir)
        self._job = context.submit(f"apply {sub.name}", worker.run, [spec])
        self.watch.submitted(claim)
        if self._retry.failures == 0:
            text = f'logical replication apply worker for subscription "{sub.name}" has started'
            context.log("LOG", log_text(text))

    def _ended(self, job: Job, session: psycopg.Connection) -> None:
        self._heartbeats.forget(self._sub.subid, worker_takeover.APPLY)
        self._sessions = 1
        try:
            result: WorkerResult = job.result(0)[0]
        except PgsubError as error:
            self._failed(error, session)
            return
        self._retry.succeeded()
        self.reached = result.outcome == "reached"

    def _failed(self, error: PgsubError, session: psycopg.Connection) -> None:
        error = self._unless_fenced(error, session)
        self._retry.failed(error)
        position = None
        with contextlib.suppress(psycopg.Error):  # a lost session is noticed immediately anyway
            position = subscriptions.apply_position(session, self._sub.subid)
        self._stopped_at = position
        self._errors.report(APPLY, error, "apply_error_count", position)

    def _unless_fenced(self, error: PgsubError, session: psycopg.Connection) -> PgsubError:
        """Return the error to report. An error caused by a command that replaces the slot meanwhile is only a fence."""
        with contextlib.suppress(psycopg.Error):
            claims = [self._claim] if self._claim is not None and error.directive is Directive.STOP else []
            if claims and worker_takeover.taken_over(session, claims):
                return Fenced("another worker took over")
        return error

    def clear_if_past(self, mirror: Mirror) -> None:
        """Clear an error from which the worker has recovered. Restart it at once if a command has moved apply."""
        if self._job is None and self._stopped_at not in (None, mirror.remote_lsn):
            self._stopped_at, self._retry.not_before = None, 0.0
        place = self._errors.place(APPLY)
        position = mirror.position()
        # an error with a place is over once apply is past it, any other once the publisher streams again
        works = self.watch.alive if place else self.watch.streams
        if self.alive and works and position > place and not (place and mirror.held.is_next(place)):
            if self._retry.error is not None:
                self._retry.succeeded()
            self._errors.clear(APPLY, position)

    def withdraw(self, session: psycopg.Connection) -> None:
        """Cancel a worker whose task has not started: it could see the stop only after its process is up."""
        if self.alive and self._claim is not None and worker_takeover.withdraw(session, self._claim):
            self.cancel()

    def cancel(self) -> None:
        """Abandon the worker. Its uncommitted changes are rolled back and sent again."""
        if self._job is not None and not self._job.done():
            self._job.cancel()
        self._job = None
        self.watch.ended()
