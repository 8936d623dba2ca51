"""Serves one subscription, from session to session on its target. Mirrors ApplyLauncherMain for one row of its list.

NOTES

A stop takes effect at once in every phase. While the session connects there are no workers, and the launcher does not
wait. Before the first read of the ledger nothing is lost by disconnecting, so the session is closed at once. After that
workers may run. They are asked to stop through the ledger. A session whose target does not answer is closed after
SILENCE_SECONDS. This thread never waits for Spark (:mod:`pgsub.launcher.spark.driver`), because a stop would wait, too.

The subscription belongs to the session that holds its advisory lock. If that session is lost, the workers are canceled
without a message. Workers that still run are fenced off by the next take-over, on whatever host. The work during a
session is in :mod:`pgsub.launcher.service`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from functools import partial

import psycopg

from pgsub.common.errors import Directive, PgsubError, TablesBehind
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.common.threads import SupervisedThread
from pgsub.launcher import error_rows, retry
from pgsub.launcher.error_handling import APPLY, ErrorReporter
from pgsub.launcher.mirror.backlog import Backlog
from pgsub.launcher.retry import Retry
from pgsub.launcher.run_until import Goal, GoalCheck, Outcome
from pgsub.launcher.service import NEVER, Service, Shared
from pgsub.target.ledger import definitions, subscriptions, worker_takeover
from pgsub.target.ledger.schema import installation
from pgsub.target.session import advisory_locks, ledger_guard, ledger_privileges
from pgsub.target.session import connect as target
from pgsub.target.session.connect import SessionName, must_use_password

#: Seconds to wait for the lock, which the session of a killed launcher may still hold.
_LOCK_SECONDS = 3.0
TICK = 0.1
#: Seconds that a command may take to change the tables before that is reported as an error.
BEHIND_SECONDS = 15.0
#: Seconds without an answer of the target after which a stopping launcher closes its session.
SILENCE_SECONDS = 5.0


class Runner(SupervisedThread):
    """A thread for one subscription. It ends when stopped, when its goal is reached, or after a permanent failure.

    :param sub: the subscription as of the start. A changed one gets a new runner.
    :ivar outcome: ``reached``, ``stopped``, ``disabled`` or ``failed`` after the thread has ended.
    :ivar error: the error to exit with, None if there is none.
    """

    def __init__(self, sub: Subscription, shared: Shared, goal: Goal) -> None:
        super().__init__("runner", f"subscription {sub.name}")
        self.sub = sub
        self._shared = shared
        self._goal = GoalCheck(goal, sub)
        self._stop_event = threading.Event()
        self._errors = ErrorReporter(shared.store, sub, shared.log, shared.recorder)
        self._target_retry = Retry()  #: of the connection to the target
        self._progressed = shared.heartbeats.news(sub.subid)
        self._socket: socket.socket | None = None  #: of the session, to close it from another thread
        self._service: Service | None = None  #: None while there are no workers to stop
        self._connecting = self._hung_up = False
        self._went_on = time.monotonic()
        self.outcome: str | None = None
        self.error: PgsubError | None = None

    def stop(self) -> None:
        """Ask the thread to stop at the next transaction boundary. Returns at once.

        Call it repeatedly until the thread has ended, because it also disconnects from a target that does not answer.
        """
        self._stop_event.set()
        self._progressed.set()
        line, service = self._socket, self._service
        last_answer = NEVER if service is None else service.last_answer
        if line is not None and time.monotonic() - last_answer > SILENCE_SECONDS:
            self._hung_up = True
            with contextlib.suppress(OSError):  # it is down already
                line.shutdown(socket.SHUT_RDWR)

    @property
    def stopping(self) -> bool:
        """Whether a stop was requested."""
        return self._stop_event.is_set()

    @property
    def at_work(self) -> bool:
        """Whether there may be workers to stop. There are none while the thread connects to the target."""
        return self.is_alive() and not self._connecting

    @property
    def serves(self) -> bool:
        """Whether its session on the target lasts, so that workers may run."""
        return self.is_alive() and self._service is not None

    @property
    def silence(self) -> float:
        """Seconds since the thread last made progress. Its waits for answers of the target have no limit."""
        service = self._service
        return time.monotonic() - max(self._went_on, NEVER if service is None else service.last_answer)

    def work(self) -> None:
        """Serve until stopped or finished."""
        self._shared.announce(self.sub.subid)
        while not self._stop_event.is_set() and self.outcome is None:
            self._went_on = time.monotonic()
            try:
                self._connected()
            except PgsubError as error:
                if not self._hung_up:
                    self._failed(error)
            except Exception as error:
                self._failed(error_rows.internal_error(error))
        self.outcome = self.outcome or "stopped"

    def _failed(self, error: PgsubError) -> None:
        if error.directive is not Directive.RETRY:
            self._end(Outcome("failed", error))  # first, because the report may raise an exception
        self._errors.report(APPLY, error)
        if error.directive is Directive.RETRY:
            self._target_retry.failed(error)
            while not self._stop_event.wait(TICK) and time.monotonic() < self._target_retry.not_before:
                self._went_on = time.monotonic()

    def _end(self, outcome: Outcome) -> None:
        self.outcome, self.error = outcome.name, outcome.error

    def _connected(self) -> None:
        self._connecting = True
        try:
            session = target.open_session(self.sub, SessionName(self.sub.subid, "launcher", 0), replica=False)
        finally:
            self._connecting = False
        with (
            contextlib.closing(session),
            socket.socket(fileno=os.dup(session.fileno())) as line,  # closed only by this block
        ):
            self._socket = line
            try:
                if self._lock(session):
                    self._serve(session)
            except psycopg.Error as error:
                raise subscriptions.unreadable(error) from None
            finally:
                self._socket = self._service = None

    def _lock(self, session: psycopg.Connection) -> bool:
        """Take the lock that allows one launcher per subscription, across hosts and state stores.

        :return: False if the thread must stop.
        """
        key = (advisory_locks.LAUNCHER, self.sub.subid)
        taken = advisory_locks.take(session, key, seconds=_LOCK_SECONDS, pause=self._stop_event.wait)
        if not taken and not self._stop_event.is_set():
            raise advisory_locks.held(session, key, f'subscription "{self.sub.name}" is served by another pgsub run')
        return not self._stop_event.is_set()

    def _serve(self, session: psycopg.Connection) -> None:
        sub = self.sub
        ledger_guard.guard(session)
        ledger_privileges.check(session)
        # No launcher serves the subscription now, and the locks of orphaned workers would block the installation.
        installation.install(session, lambda: worker_takeover.evict(session, sub.subid))
        definitions.check_newest(session, sub, partial(self._shared.now, sub.subid))
        known = subscriptions.identity(session, sub.subid)
        if not self._tables_follow(session):
            return
        backlog = Backlog(sub, self._shared.recorder.current, known, must_use_password=must_use_password(session, sub))
        interval = self._target_retry.interval = retry.interval(session)
        self._service = Service(session, sub, self._shared, self._errors, self._goal, backlog, interval)
        outcome = self._service.serve(self._over, self._rest)
        if outcome is not None:
            self._end(outcome)

    def _tables_follow(self, session: psycopg.Connection) -> bool:
        """Wait until the tables match the publications, because ALTER may be about to change them.

        :return: False if the thread must stop.
        :raises TablesBehind: the tables do not match in time.
        """
        since = time.monotonic()
        # guard: nothing is streamed by publications that the tables do not follow yet
        while definitions.tables_are_behind(session, self._shared.now(self.sub.subid) or self.sub):
            if self._over():
                return False
            if time.monotonic() > since + BEHIND_SECONDS:
                raise TablesBehind(
                    f'the tables of subscription "{self.sub.name}" are still those of its publications before',
                    detail="A command that changed the publications is still running, or was interrupted. Or the target"
                    " was restored, or is a standby that lagged, and lacks a change of the tables. Nothing is applied"
                    " until the tables follow, because changes would be passed over.",
                    hint=f"If no such command runs, let them follow:\npgsub refresh {word(self.sub.name)}",
                )
            self._stop_event.wait(TICK)
        return True

    def _over(self) -> bool:
        self._went_on = time.monotonic()
        self.checkpoint()
        return self.stopping

    def _rest(self) -> bool:
        news = self._progressed.wait(TICK)
        self._progressed.clear()
        return news
