"""Serves one subscription: its workers, its mirror, its goal. Mirrors ApplyLauncherMain for one row of its list.

NOTES

A stop is seen at once in every phase. While the session connects there are no workers, and the launcher does not wait.
Until the ledger is first read nothing is lost by hanging up, so the session is cut at once. From then on workers
may run: they are asked through the ledger, and a session whose target does not answer is cut after SILENCE_SECONDS.
Spark's start is never awaited in this thread, or a stop would have to wait for it, too
(:mod:`pgsub.launcher.spark_driver`).

The subscription belongs to the session that holds its advisory lock. When that session is lost, the workers are
canceled without a message, and those that still run are fenced off by the next take-over, on whatever host.

Each time events go first: the feedback of the worker waits for them. A fault that disables the subscription keeps
workers from starting before it is recorded, since recording may fail for as long as the state store does.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psycopg

from pgsub.catalog.store import StateStore
from pgsub.catalog.subscriptions import options
from pgsub.common.errors import Directive, Log, PgsubError, StateStoreError
from pgsub.common.subscription import Subscription
from pgsub.common.threads import SupervisedThread
from pgsub.common.worker_heartbeat import HeartbeatReceiver
from pgsub.launcher import error_counters, retry
from pgsub.launcher.apply_worker import ApplyWorkerHandle
from pgsub.launcher.error_reporting import APPLY, ErrorReporter
from pgsub.launcher.mirror.backlog import Backlog
from pgsub.launcher.mirror.events import Events
from pgsub.launcher.mirror.mirror import Mirror
from pgsub.launcher.mirror.slot_watch import SlotWatch
from pgsub.launcher.recorder import Recorder
from pgsub.launcher.retry import Retry
from pgsub.launcher.sequence_worker import SequenceWorker
from pgsub.launcher.spark_driver import Engine
from pgsub.launcher.sync_workers import SyncWorkers
from pgsub.publisher.position import committed_position
from pgsub.tablesync import order
from pgsub.tablesync.context import SyncContext
from pgsub.target.ledger import definitions, schema, subscriptions, two_phase, worker_takeover
from pgsub.target.session import advisory_locks, ledger_privileges
from pgsub.target.session import connect as target
from pgsub.target.session.connect import SessionName, must_use_password

#: Seconds to wait for the lock, which the session of a killed launcher may still hold.
_LOCK_SECONDS = 3.0
TICK = 0.1
MIRROR_SECONDS = 0.25
#: How long workers may take to reach a transaction boundary when the launcher stops.
STOP_SECONDS = 30.0
ASK_SECONDS = 0.5
#: Seconds without an answer of the target after which a launcher that stops hangs up.
SILENCE_SECONDS = 5.0
NEVER = -math.inf


@dataclass(slots=True)
class Goal:
    """The bound of a run: of ``create``, and of ``run --until-…``.

    :ivar caught_up: end when every table is ``r``, a pending two_phase is enabled and apply has reached the publisher's
        position of that moment.
    :ivar until_lsn: apply nothing beyond this position.
    :ivar sequences: with ``caught_up``: and every sequence that is to follow has the publisher's value or is ahead.
    """

    caught_up: bool = False
    until_lsn: int = 0
    sequences: bool = False

    @property
    def bounded(self) -> bool:
        """Whether there is an end."""
        return self.caught_up or bool(self.until_lsn)


@dataclass(slots=True)
class _Serving:
    """The objects that live as long as the launcher's session on the target."""

    session: psycopg.Connection
    mirror: Mirror
    events: Events
    apply: ApplyWorkerHandle
    sync: SyncWorkers
    sequences: SequenceWorker
    stopping: threading.Event
    options: dict[str, Any] | None = None  #: the definition, as the ledger has it


class Runner(SupervisedThread):
    """A thread for one subscription; ends when stopped, when its goal is reached, or when it can never succeed.

    :param sub: as of its start; a changed one is served by a new runner.
    :ivar outcome: ``reached``, ``stopped``, ``disabled`` or ``failed`` once the thread has ended.
    :ivar error: the error to exit with, if there is one.
    """

    def __init__(
        self,
        sub: Subscription,
        store: StateStore,
        recorder: Recorder,
        engine: Engine,
        heartbeats: HeartbeatReceiver,
        log: Log,
        goal: Goal,
    ) -> None:
        super().__init__("runner", f"subscription {sub.name}")
        self.sub = sub
        self._store = store
        self._recorder = recorder
        self._engine = engine
        self._heartbeats = heartbeats
        self._log = log
        self._goal = goal
        self._stop_event = threading.Event()
        self._errors = ErrorReporter(store, sub, log, recorder)
        self._target_retry = Retry()  #: the target
        self._goal_position = 0
        self._progressed = heartbeats.news(sub.subid)
        self._next_mirror = self._next_early = 0.0
        self._socket: socket.socket | None = None  #: the session's, to hang up
        self._last_answer = NEVER  #: when the target answered last, while there are workers to stop
        self._connecting = self._hung_up = False
        self.outcome: str | None = None
        self.error: PgsubError | None = None

    def stop(self) -> None:
        """Ask to stop at the next transaction boundary; returns at once.

        To be called again until it has ended: it hangs up on a target that does not answer meanwhile.
        """
        self._stop_event.set()
        self._progressed.set()
        line = self._socket
        if line is not None and time.monotonic() - self._last_answer > SILENCE_SECONDS:
            self._hung_up = True
            with contextlib.suppress(OSError):  # it is down already
                line.shutdown(socket.SHUT_RDWR)

    @property
    def stopping(self) -> bool:
        """Whether it was asked to stop."""
        return self._stop_event.is_set()

    @property
    def at_work(self) -> bool:
        """Whether there may be workers to stop: there are none while it only connects to the target."""
        return self.is_alive() and not self._connecting

    def work(self) -> None:
        """Serve until stopped or done."""
        self._told(self._serves)
        while not self._stop_event.is_set() and self.outcome is None:
            try:
                self._connected()
            except PgsubError as error:
                if not self._hung_up:
                    self._failed(error)
            except Exception as error:
                self._failed(error_counters.internal_error(error))
        self.outcome = self.outcome or "stopped"

    def _serves(self) -> None:
        """Name this process as the launcher, with no workers yet."""
        self._store.put_server(self.sub.subid, os.getpid(), socket.gethostname())

    def _told(self, work: Callable[[], None]) -> None:
        """Write who serves the subscription, if the state store can be written; what it shows decides nothing."""
        with contextlib.suppress(PgsubError):
            self._recorder.run(work)

    def _failed(self, error: PgsubError) -> None:
        if error.directive is not Directive.RETRY:
            self._end("failed", error)  # before the report: whatever that raises, this was no good end
        self._errors.report(APPLY, error)
        if error.directive is Directive.RETRY:
            self._target_retry.failed(error)
            self._stop_event.wait(max(0.0, self._target_retry.not_before - time.monotonic()))

    def _end(self, outcome: str, error: PgsubError | None = None) -> None:
        self.outcome, self.error = outcome, error

    def _connected(self) -> None:
        self._connecting = True
        try:
            session = target.connect(self.sub.target, SessionName(self.sub.subid, "launcher", 0), replica=False)
        finally:
            self._connecting = False
        with (
            contextlib.closing(session),
            socket.socket(fileno=os.dup(session.fileno())) as line,  # which only this block closes
        ):
            self._last_answer, self._socket = NEVER, line
            try:
                if not self._lock(session):
                    return
                ledger_privileges.check(session)
                # no launcher serves it now: an orphaned worker would keep its locks
                schema.install(session, lambda: worker_takeover.evict_all(session, self.sub.subid))
                known = subscriptions.identity(session, self.sub.subid)
                definitions.check_not_moved(session, self.sub)
                must = must_use_password(session, self.sub)
                backlog = Backlog(self.sub, self._store, known, must_use_password=must)
                self._serve(self._serving(session), backlog)
            except psycopg.Error as error:
                raise target.translate(error, "read the ledger") from None
            finally:
                self._socket = None

    def _lock(self, session: psycopg.Connection) -> bool:
        """Take the lock that makes it one launcher a subscription, whatever host and state store it runs on.

        :return: False if it is to stop.
        """
        key = (advisory_locks.LAUNCHER, self.sub.subid)
        taken = advisory_locks.take(session, key, seconds=_LOCK_SECONDS, pause=self._stop_event.wait)
        if not taken and not self._stop_event.is_set():
            raise advisory_locks.held(session, key, f'subscription "{self.sub.name}" is served by another launcher')
        return not self._stop_event.is_set()

    def _serving(self, session: psycopg.Connection) -> _Serving:
        sub, heartbeats = self.sub, self._heartbeats
        row = session.execute("SELECT system_identifier::text FROM pg_catalog.pg_control_system()").fetchone()
        spool_dir = self._engine.spool_dir(Path(self._store.path).parent / "spool")
        stopping = threading.Event()
        interval = self._target_retry.interval = retry.interval(session)
        submit = partial(self._engine.submit, stopping=stopping)
        context = SyncContext(sub, row[0] if row else "0", submit, stopping, heartbeats.address, spool_dir, self._log)
        until = self._goal.until_lsn
        apply = ApplyWorkerHandle(context, self._engine, heartbeats, self._errors, until_lsn=until, interval=interval)
        mirror = Mirror(session, self._store, sub, heartbeats, self._recorded)
        events = Events(session, self._store, sub, self._log, self._recorded)
        sync = SyncWorkers(context, heartbeats, self._errors, interval, self._is_current)
        sequences = SequenceWorker(sub, self._store, self._errors, self._recorder.run, self._current, stopping)
        return _Serving(session, mirror, events, apply, sync, sequences, stopping)

    def _current(self) -> Subscription | None:
        return self._recorder.current(self.sub.subid)

    def _is_current(self) -> bool:
        """Return whether the definition that is served is still the one of the state store, as far as it can be read.

        The launcher notices a new one a moment later; a table that was added by it must not be copied by this one.
        """
        self._recorder.subscriptions()
        now = self._recorder.current(self.sub.subid)
        return now is not None and same_service(self.sub, now)

    def _serve(self, serving: _Serving, backlog: Backlog) -> None:
        watch = SlotWatch(self.sub, self._store, backlog, self._recorder.run)
        self._last_answer = time.monotonic()
        try:
            while not self._stop_event.is_set() and self.outcome is None:
                self._tick(serving)
                self._last_answer = time.monotonic()
                watch.tick()
                if self._errors.disabling is None:
                    serving.sequences.tick()
                self._rest()
        finally:
            self._wind_down(serving)
            watch.close()
            serving.sequences.close()

    def _recorded(self, work: Callable[[], None]) -> None:
        """Run a write of the mirror, after the one that names this process as the launcher."""

        def both() -> None:
            server = self._store.server(self.sub.subid)
            if server is None or server.pid != os.getpid():
                self._serves()
            work()

        self._recorder.run(both)

    def _tick(self, serving: _Serving) -> None:
        self.checkpoint()
        self._errors.flush()
        with contextlib.suppress(StateStoreError):  # the recorder logs it; feedback waits for the ledger's events
            serving.events.move()
        if self._errors.disabling is None:
            serving.apply.tick(serving.session)
        clock = time.monotonic()
        if clock >= self._next_mirror:
            self._next_mirror = clock + MIRROR_SECONDS
            alive = serving.sync.alive
            with contextlib.suppress(StateStoreError):
                watch = serving.apply.watch
                there = serving.apply.alive and not watch.gone
                serving.mirror.refresh(apply_alive=there, syncing=alive, task=watch.row)
            self._copy_definition(serving)
            serving.apply.clear_if_past(serving.mirror)
            if self._errors.disabling is None:
                serving.sync.tick(serving.mirror.relations, alive)
            self._check_goal(serving)
        self._check_ends(serving)

    def _copy_definition(self, serving: _Serving) -> None:
        """Keep the ledger's copy of the definition, from which another state store can be made, up to date."""
        now = self._recorder.current(self.sub.subid)
        if now is not None and (wanted := options(now)) != serving.options:
            definitions.record(serving.session, self.sub.subid, wanted)
            serving.options = wanted

    def _rest(self) -> None:
        """Wait for the next tick; not for long after progress of apply, which commands may be waiting for."""
        news = self._progressed.wait(TICK)
        self._progressed.clear()
        clock = time.monotonic()
        if news and clock >= self._next_early:
            self._next_early, self._next_mirror = clock + MIRROR_SECONDS, clock

    def _check_ends(self, serving: _Serving) -> None:
        """End if a fault disabled the subscription, or a bounded run cannot go on (an unbounded one keeps trying)."""
        failed = serving.apply.failed
        if self._errors.disabled_by is not None:
            self._end("disabled", self._errors.disabled_by)
        elif serving.apply.reached and self._goal.until_lsn:
            self._end("reached")
        elif self._goal.bounded and failed is not None and failed.directive is not Directive.RETRY:
            self._end("failed", failed)

    def _check_goal(self, serving: _Serving) -> None:
        if not self._goal.caught_up:
            return
        relations = serving.mirror.relations
        error = serving.sync.hopeless(relations)
        if error is None and any(r.srsubstate != "r" or order.unfinished(r) for r in relations):
            return
        if error is None and relations and serving.mirror.two_phase == two_phase.PENDING:
            return  # the worker starts again for it within a moment
        if serving.mirror.held.releasing:
            return
        if not self._goal_position:
            position = committed_position(self.sub.connection, self.sub.name)
            worker_takeover.ask_to_record(serving.session, self.sub.subid, position)
            self._goal_position = position
        well = self._goal.sequences
        there = serving.apply.alive and serving.mirror.reported_lsn >= self._goal_position
        if there and serving.sequences.settled(well=well):
            error = error or (serving.sequences.error if well else None)
            self._end("failed" if error else "reached", error)

    def _wind_down(self, serving: _Serving) -> None:
        """Ask every worker to stop at a boundary, wait, mirror the last state."""
        serving.stopping.set()
        self._last_answer = time.monotonic()
        with contextlib.suppress(psycopg.Error):
            serving.apply.withdraw(serving.session)
        deadline = time.monotonic() + STOP_SECONDS
        ask_at = 0.0
        while (serving.apply.alive or serving.sync.alive) and time.monotonic() < deadline:
            try:
                if time.monotonic() >= ask_at:  # again and again: a row that was locked is passed over
                    worker_takeover.ask_to_stop(serving.session, self.sub.subid)
                    ask_at = time.monotonic() + ASK_SECONDS
            except psycopg.Error:
                break  # the workers cannot be asked; the next take-over ends them
            with contextlib.suppress(psycopg.Error, PgsubError):
                serving.events.move()
            self._last_answer = time.monotonic()
            time.sleep(0.02)
        serving.apply.cancel()
        with contextlib.suppress(psycopg.Error, PgsubError):
            serving.events.move()
            serving.mirror.refresh(apply_alive=False, syncing=set())
            self._recorder.subscriptions()  # it may be that they end because it was disabled or altered
            self._copy_definition(serving)
        self._told(self._serves)  # whether or not the target could still be asked: without workers, until it is again


def same_service(before: Subscription, after: Subscription) -> bool:
    """Return whether a running worker need not restart: what the server re-reads without a restart may differ."""
    fields = ("disable_on_error", "skip_lsn", "skips", "unavailable", "two_phase", "sequences")
    return replace(before, **{f: getattr(after, f) for f in fields}) == after
