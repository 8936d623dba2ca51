"""The work on one subscription during one session of the launcher on its target: workers, mirror, sequences, goal.

Events are moved first in each round, because the worker's feedback waits for them. A fault that disables the
subscription prevents worker starts even before it is recorded, because recording may fail for a long time.
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
from pgsub.common.errors import Log, PgsubError, StateStoreError
from pgsub.common.subscription import Subscription, same_service
from pgsub.launcher.error_handling import APPLY, ErrorReporter
from pgsub.launcher.heartbeat_receiver import HeartbeatReceiver
from pgsub.launcher.mirror.backlog import Backlog
from pgsub.launcher.mirror.event_log import Events
from pgsub.launcher.mirror.mirror import Mirror
from pgsub.launcher.mirror.slot_watch import SlotWatch
from pgsub.launcher.recorder import Recorder
from pgsub.launcher.retry import take_over_seconds
from pgsub.launcher.run_until import GoalCheck, Outcome
from pgsub.launcher.spark.driver import Engine
from pgsub.launcher.workers.apply_worker import ApplyWorkerHandle
from pgsub.launcher.workers.sequence_worker import SequenceWorker
from pgsub.launcher.workers.sync_workers import SyncWorkers
from pgsub.launcher.workers.task_slot_wait import TaskSlotWait
from pgsub.tablesync.context import SyncContext
from pgsub.target.ledger import definitions, worker_takeover

MIRROR_SECONDS = 0.25
#: Seconds that workers may take to reach a transaction boundary when the launcher stops.
STOP_SECONDS = 30.0
ASK_SECONDS = 0.5
NEVER = -math.inf


@dataclass(frozen=True, slots=True)
class Shared:
    """The parts that all subscriptions of one launcher share."""

    store: StateStore
    recorder: Recorder
    engine: Engine
    heartbeats: HeartbeatReceiver
    log: Log

    def serves(self, subid: int) -> None:
        """Record this process as the launcher of a subscription that has no workers yet."""
        self.store.put_server(subid, os.getpid(), socket.gethostname())

    def announce(self, subid: int) -> None:
        """Call :meth:`serves` if the state store can be written. Nothing depends on the entry."""
        with contextlib.suppress(PgsubError):
            self.recorder.run(lambda: self.serves(subid))

    def is_current(self, sub: Subscription) -> bool:
        """Return whether a definition still matches the state store, as of its last successful read.

        The launcher notices a change a little later. No worker may copy an added table by the old definition.
        """
        now = self.now(sub.subid)
        return now is not None and same_service(sub, now)

    def now(self, subid: int) -> Subscription | None:
        """Read a definition in the state store. If that fails, return it as of the last successful read."""
        self.recorder.subscriptions()
        return self.recorder.current(subid)

    def note_recorded(self, subid: int, number: int, table_set: int) -> None:
        """Note the number of the ledger's next copy of a definition in the state store, and that of its tables."""
        self.recorder.run(lambda: self.store.note_recorded(subid, number, table_set))


class Service:
    """The objects that live as long as the session, and their repeated work.

    :param session: the launcher's session on the target, which holds the lock.
    :param goal: checked once per look at the ledger.
    :ivar last_answer: when the target last answered, in seconds of the monotonic clock.
    """

    def __init__(
        self,
        session: psycopg.Connection,
        sub: Subscription,
        shared: Shared,
        errors: ErrorReporter,
        goal: GoalCheck,
        backlog: Backlog,
        interval: float,
    ) -> None:
        self._session, self._sub, self._shared, self._errors, self._goal = session, sub, shared, errors, goal
        self._stopping = threading.Event()
        self._options: dict[str, Any] | None = None  #: the definition in the ledger
        self._next_mirror = self._next_early = 0.0
        self.last_answer = time.monotonic()
        store, heartbeats, engine = shared.store, shared.heartbeats, shared.engine
        # guard: workers are heard after their target went back in time
        heartbeats.begin(sub.subid)
        context = self._context()
        self._slot_wait = TaskSlotWait(sub, context.submit, engine.slots, shared.log)
        until = goal.goal.until_lsn
        self._apply = ApplyWorkerHandle(context, engine, heartbeats, errors, until_lsn=until, interval=interval)
        self._mirror = Mirror(session, store, sub, heartbeats, self._recorded, shared.log)
        self._events = Events(session, store, sub, shared.log, self._recorded)
        syncing = replace(context, submit=self._slot_wait.submit)
        self._sync = SyncWorkers(syncing, heartbeats, errors, interval, partial(shared.is_current, sub))
        current = partial(shared.recorder.current, sub.subid)
        self._watch = SlotWatch(sub, store, backlog, shared.recorder.run, errors, shared.log)
        self._sequences = SequenceWorker(sub, store, errors, shared.recorder.run, current, self._stopping)

    def _context(self) -> SyncContext:
        shared = self._shared
        row = self._session.execute("SELECT system_identifier::text FROM pg_catalog.pg_control_system()").fetchone()
        spool_dir = shared.engine.settings.spool_dir(Path(shared.store.path).parent / "spool")
        submit = partial(shared.engine.submit, stopping=self._stopping)
        address = shared.heartbeats.address
        return SyncContext(
            self._sub,
            row[0] if row else "0",
            submit,
            self._stopping,
            address,
            spool_dir,
            shared.log,
            take_over_seconds(),
        )

    def serve(self, over: Callable[[], bool], rest: Callable[[], bool]) -> Outcome | None:
        """Serve until the launcher stops or the run ends.

        :param over: returns whether to stop.
        :param rest: waits for the next round and returns whether apply has advanced, for which commands may wait.
        :return: the end of the run, None if it was stopped.
        """
        self.last_answer = time.monotonic()
        outcome = None
        try:
            while not over() and outcome is None:
                outcome = self._tick()
                self.last_answer = time.monotonic()
                self._watch.tick(self._mirror.relations)
                if self._errors.disabling is None:
                    self._sequences.tick()
                self._hurry(rest())
        finally:
            self._wind_down()
            self._watch.close()
            self._sequences.close()
        return outcome

    def _recorded(self, work: Callable[[], None]) -> None:
        """Run a write of the mirror, after recording this process as the launcher if necessary."""
        store, subid = self._shared.store, self._sub.subid

        def both() -> None:
            server = store.server(subid)
            if server is None or server.pid != os.getpid():
                self._shared.serves(subid)
            work()

        self._shared.recorder.run(both)

    def _tick(self) -> Outcome | None:
        self._errors.flush()
        with contextlib.suppress(StateStoreError):  # the recorder logs it, and feedback waits for the events
            self._events.move()
        if self._errors.disabling is None:
            self._apply.tick(self._session)
        caught_up = None
        clock = time.monotonic()
        if clock >= self._next_mirror:
            self._next_mirror = clock + MIRROR_SECONDS
            caught_up = self._look()
        if self._errors.disabled_by is not None:
            return Outcome("disabled", self._errors.disabled_by)
        return self._goal.ended(self._apply) or caught_up

    def _look(self) -> Outcome | None:
        """Copy the ledger's state to the state store, and start what it requires."""
        apply, alive = self._apply, self._sync.alive
        with contextlib.suppress(StateStoreError):
            there = apply.alive and not apply.watch.gone
            shown = self._slot_wait.shown(apply.watch.row)
            self._mirror.refresh(
                apply_alive=there, syncing=alive, task=shown, publisher_waits=self._watch.publisher_waits
            )
        self._copy_definition()
        if self._errors.place(APPLY):  # the outcome of a conflict is recorded before apply counts as past it
            with contextlib.suppress(StateStoreError):
                self._events.move()
        apply.clear_if_past(self._mirror)
        # Until a slot that is created by hand has a position, no copy can be handed over to apply: what is committed
        # between the copy and the slot would be nowhere. The server's apply worker starts its tablesync workers.
        # guard: no table is copied before the slot is there, without " and self._mirror.position()"
        if self._errors.disabling is None and self._mirror.position():
            self._sync.tick(self._mirror.relations, alive)
        unrecorded = self._shared.recorder.lasting
        return self._goal.caught_up(self._session, self._mirror, apply, self._sync, self._sequences, unrecorded)

    def _copy_definition(self) -> None:
        """Update the ledger's copy of the definition, from which a new state store can be made.

        :raises StateForbids: the state store was replaced by an older one.
        """
        shared, subid = self._shared, self._sub.subid
        now = shared.recorder.current(subid)
        if now is None or options(now) == self._options:
            return
        definitions.check_newest(self._session, now, partial(shared.now, subid))
        now = shared.recorder.current(subid)
        with contextlib.suppress(StateStoreError):  # tried again
            if now is not None and definitions.record(
                self._session, now, options(now), partial(shared.note_recorded, subid)
            ):
                self._options = options(now)

    def _hurry(self, news: bool) -> None:
        """Look at the ledger at once when apply has advanced, but not too often."""
        clock = time.monotonic()
        if news:
            with contextlib.suppress(StateStoreError):  # the recorder logs it
                self._mirror.follow()
        if news and clock >= self._next_early:
            self._next_early, self._next_mirror = clock + MIRROR_SECONDS, clock

    def _wind_down(self) -> None:
        """Ask every worker to stop at a transaction boundary, wait, and mirror the last state."""
        self._stopping.set()
        self.last_answer = time.monotonic()
        with contextlib.suppress(psycopg.Error):
            self._apply.withdraw(self._session)
        self._await_workers()
        self._apply.cancel()
        with contextlib.suppress(psycopg.Error, PgsubError):
            self._events.move()
            self._mirror.refresh(apply_alive=False, syncing=set())
            self._shared.recorder.subscriptions()  # the reason of the stop may be a changed definition
            self._copy_definition()
        # Even if the target did not answer: from now on there are no workers.
        self._shared.announce(self._sub.subid)

    def _await_workers(self) -> None:
        deadline = time.monotonic() + STOP_SECONDS
        ask_at = 0.0
        while (self._apply.alive or self._sync.alive) and time.monotonic() < deadline:
            try:
                if time.monotonic() >= ask_at:  # repeatedly, because locked rows are skipped
                    worker_takeover.ask_to_stop(self._session, self._sub.subid)
                    ask_at = time.monotonic() + ASK_SECONDS
            except psycopg.Error:
                return  # the next take-over ends the workers
            with contextlib.suppress(psycopg.Error, PgsubError):
                self._events.move()
            self.last_answer = time.monotonic()
            time.sleep(0.02)
