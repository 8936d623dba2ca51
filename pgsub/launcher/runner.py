"""Serves one subscription: starts its workers, hears of their ends, retries, disables. Mirrors ApplyLauncherMain."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import psycopg

from pgsub.apply import worker as apply_worker
from pgsub.apply.start import WorkerSpec
from pgsub.apply.worker import WorkerResult
from pgsub.catalog.rows import ErrorRow
from pgsub.catalog.store import StateStore
from pgsub.errors import Directive, LockHeld, PgsubError
from pgsub.launcher import faults
from pgsub.launcher.engine import Engine
from pgsub.launcher.mirror import Mirror
from pgsub.launcher.retry import Retry, worth_reporting
from pgsub.launcher.slot_watch import SlotWatch
from pgsub.publisher.position import flush_position
from pgsub.pulse import PulseReceiver
from pgsub.subscription import Subscription
from pgsub.tablesync.coordinator import Job, SyncContext, TableSync
from pgsub.target import connect as target
from pgsub.target import ledger, ledger_schema
from pgsub.target.connect import SessionName
from pgsub.target.ledger import RelationState

Log = Callable[[str, str], None]

_APPLY = "apply"  #: the apply worker in the record of errors
_LOCK_CLASS = 0x70677375  #: "pgsu"
TICK = 0.1
MIRROR_SECONDS = 0.25


@dataclass(slots=True)
class Goal:
    """When a subscription is served enough: for ``create`` and bounded runs.

    :ivar caught_up: end when every table is ``r`` and apply has reached the publisher's position of that moment.
    :ivar until_lsn: apply nothing beyond.
    """

    caught_up: bool = False
    until_lsn: int = 0


@dataclass(slots=True)
class _Sync:
    thread: threading.Thread
    error: PgsubError | None = None
    ended: bool = False


@dataclass(slots=True)
class _Workers:
    job: Job | None = None
    apply: Retry = field(default_factory=Retry)
    syncs: dict[int, _Sync] = field(default_factory=dict)
    retries: dict[int, Retry] = field(default_factory=dict)


class Runner(threading.Thread):
    """A thread for one subscription; ends when stopped, when its goal is reached, or when it can never succeed.

    :param sub: as of its start; a changed one is served by a new runner.
    :ivar outcome: ``reached``, ``stopped``, ``disabled`` or ``failed`` once the thread has ended.
    :ivar error: the error to exit with, if there is one.
    """

    def __init__(
        self, sub: Subscription, store: StateStore, engine: Engine, pulses: PulseReceiver, log: Log, goal: Goal
    ) -> None:
        super().__init__(name=f"subscription {sub.name}", daemon=True)
        self.sub = sub
        self._store = store
        self._engine = engine
        self._pulses = pulses
        self._log = log
        self._goal = goal
        self._stop_event = threading.Event()
        self._workers = _Workers()
        self._target_position = 0
        self._next_mirror = 0.0
        #: finish LSN (0: none to blame) of the errors that the store shows, those of earlier launchers included
        self._shown = {row.worker: row.finish_lsn or 0 for row in store.errors(sub.subid)}
        self.outcome: str | None = None
        self.error: PgsubError | None = None

    def stop(self) -> None:
        """Ask to stop at the next transaction boundary; returns at once."""
        self._stop_event.set()

    def run(self) -> None:
        """Thread body."""
        lost = Retry()
        while not self._stop_event.is_set() and self.outcome is None:
            try:
                self._connected()
            except PgsubError as error:
                self._problem(_APPLY, error)
                if error.directive is Directive.RETRY:
                    lost.failed(error)
                    self._stop_event.wait(max(0.0, lost.not_before - time.monotonic()))
                else:
                    self.error, self.outcome = error, "failed"
            except Exception as error:
                self.error, self.outcome = faults.bug(error), "failed"
                self._problem(_APPLY, self.error)
        self.outcome = self.outcome or "stopped"

    def _connected(self) -> None:
        name = SessionName(self.sub.subid, "launcher", 0)
        with contextlib.closing(target.connect(self.sub.target, name, replica=False)) as session:
            try:
                ledger_schema.install(session)
                self._lock(session)
                self._serve(session)
            except psycopg.Error as error:
                raise target.translate(error, "read the ledger") from None

    def _lock(self, session: psycopg.Connection) -> None:
        """One launcher a subscription, whatever host and state store it runs on."""
        row = session.execute(
            "SELECT pg_catalog.pg_try_advisory_lock(%s, %s)", (_LOCK_CLASS, self.sub.subid)
        ).fetchone()
        if not row or not row[0]:
            raise LockHeld(
                f'subscription "{self.sub.name}" is served by another launcher',
                detail="It holds the subscription's advisory lock on the target database.",
            )

    def _serve(self, session: psycopg.Connection) -> None:
        ledger.identity(session, self.sub.subid)
        mirror = Mirror(session, self._store, self.sub, self._pulses, self._log)
        watch = SlotWatch(self.sub, self._store)
        context = self._sync_context(session)
        self._store.put_server(self.sub.subid, os.getpid(), socket.gethostname())
        try:
            while not self._stop_event.is_set() and self.outcome is None:
                self._tick(session, mirror, context)
                watch.tick()
                self._stop_event.wait(TICK)
        finally:
            self._wind_down(session, mirror, context)
            watch.close()

    def _sync_context(self, session: psycopg.Connection) -> SyncContext:
        row = session.execute("SELECT system_identifier::text FROM pg_catalog.pg_control_system()").fetchone()
        return SyncContext(
            self.sub,
            row[0] if row else "0",
            self._engine.submit,
            threading.Event(),
            self._pulses.address,
            self._spool_dir,
            self._log,
        )

    @property
    def _spool_dir(self) -> str:
        return str(Path(self._store.path).parent / "spool")

    def _tick(self, session: psycopg.Connection, mirror: Mirror, context: SyncContext) -> None:
        mirror.events()
        self._apply(session, mirror)
        clock = time.monotonic()
        if clock >= self._next_mirror:
            self._next_mirror = clock + MIRROR_SECONDS
            alive = {r for r, s in self._workers.syncs.items() if not s.ended}
            mirror.refresh(apply_alive=self._workers.job is not None, syncing=alive)
            self._clear_overcome(mirror)
            self._syncs(mirror, context)
            self._check_goal(mirror)

    # apply

    def _apply(self, session: psycopg.Connection, mirror: Mirror) -> None:
        workers = self._workers
        if workers.job is None:
            if self.outcome is None and workers.apply.due():
                self._start_apply(session)
            return
        if not workers.job.done():
            return
        job, workers.job = workers.job, None
        self._pulses.forget(self.sub.subid, ledger.APPLY)
        try:
            result: WorkerResult = job.result(0)[0]
        except PgsubError as error:
            self._apply_failed(error)
            return
        workers.apply.succeeded()
        if result.outcome == "reached" and self._goal.until_lsn:
            self.outcome = "reached"

    def _start_apply(self, session: psycopg.Connection) -> None:
        assert self.sub.slot_name is not None
        claim = ledger.take_over(session, self.sub.subid, ledger.APPLY)
        spec = WorkerSpec(
            self.sub,
            claim,
            self.sub.slot_name,
            self.sub.name,
            self._pulses.address,
            self._goal.until_lsn,
            self._spool_dir,
        )
        self._workers.job = self._engine.submit(f"apply {self.sub.name}", apply_worker.run, [spec])
        if self._workers.apply.failures == 0:
            self._log("LOG", f'logical replication apply worker for subscription "{self.sub.name}" has started')

    def _apply_failed(self, error: PgsubError) -> None:
        self._workers.apply.failed(error)
        if not worth_reporting(error):
            return
        self._problem(_APPLY, error)
        if error.directive is Directive.FAULT:
            faults.count(self._store, self.sub, error, "apply_error_count")
            self._disable_if_asked()
        self._end_if_hopeless(error)

    def _clear_overcome(self, mirror: Mirror) -> None:
        """Forget errors that a worker got past, whichever launcher met them."""
        workers, pulse = self._workers, mirror.apply_pulse()
        if workers.job is not None and pulse is not None and pulse.position > self._shown.get(_APPLY, 0):
            if workers.apply.error is not None:
                workers.apply.succeeded()
            self._clear(_APPLY)
        unfinished = {_sync_name(r.srrelid) for r in mirror.relations if _unfinished(r)}
        for worker in self._shown.keys() - unfinished - {_APPLY}:
            self._clear(worker)

    def _clear(self, worker: str) -> None:
        if self._shown.pop(worker, None) is not None:
            self._store.clear_error(self.sub.subid, worker)

    # table synchronization

    def _syncs(self, mirror: Mirror, context: SyncContext) -> None:
        workers = self._workers
        for relid, sync in list(workers.syncs.items()):
            if sync.ended:
                self._sync_ended(relid, sync)
        for rel in mirror.relations:
            if not _unfinished(rel) or rel.srrelid in workers.syncs or self.outcome is not None:
                continue
            if len(workers.syncs) >= self.sub.max_sync_workers:
                return
            if workers.retries.setdefault(rel.srrelid, Retry()).due():
                self._start_sync(rel.srrelid, context)

    def _start_sync(self, relid: int, context: SyncContext) -> None:
        def body() -> None:
            try:
                TableSync(context, relid).run()
            except PgsubError as error:
                sync.error = error
            except Exception as error:
                sync.error = faults.bug(error)
            sync.ended = True

        sync = _Sync(threading.Thread(target=body, name=f"sync {relid}", daemon=True))
        self._workers.syncs[relid] = sync
        sync.thread.start()

    def _sync_ended(self, relid: int, sync: _Sync) -> None:
        del self._workers.syncs[relid]
        self._pulses.forget(self.sub.subid, relid)
        retry = self._workers.retries[relid]
        if sync.error is None:
            retry.succeeded()
            return
        retry.failed(sync.error, growing=True)
        if not worth_reporting(sync.error) or self._stop_event.is_set():
            return
        self._problem(_sync_name(relid), sync.error)
        if sync.error.directive is Directive.FAULT:
            faults.count(self._store, self.sub, sync.error, "sync_table_error_count")
            self._disable_if_asked()

    # ends

    def _problem(self, worker: str, error: PgsubError) -> None:
        """Log first, then the state store, then whatever follows from it."""
        self._log("ERROR", "\n".join([error.message, *error.lines()]))
        if self._store.subscription_by_id(self.sub.subid) is not None:
            self._store.record_error(self.sub.subid, ErrorRow.of(error, worker))
            self._shown[worker] = faults.place(error)

    def _disable_if_asked(self) -> None:
        current = self._store.subscription_by_id(self.sub.subid)
        if current is None or not current.disable_on_error:
            return
        self._log("LOG", f'subscription "{self.sub.name}" has been disabled because of an error')
        self._store.set_enabled(self.sub.subid, False)
        self._store.journal("disable", self.sub.subid, self.sub.name, {"because": "error"})
        self.error = self._workers.apply.error or self._first_sync_error()
        self.outcome = "disabled"

    def _end_if_hopeless(self, error: PgsubError) -> None:
        """A bounded run ends with what it cannot get past; an unbounded one keeps trying, as the server does."""
        bounded = self._goal.caught_up or self._goal.until_lsn
        if bounded and error.directive is not Directive.RETRY:
            self.error, self.outcome = error, "failed"

    def _first_sync_error(self) -> PgsubError | None:
        return next((r.error for r in self._workers.retries.values() if r.error is not None), None)

    def _check_goal(self, mirror: Mirror) -> None:
        if not self._goal.caught_up or self.outcome is not None:
            return
        workers = self._workers
        open_tables = [r for r in mirror.relations if r.srsubstate != "r" or r.sync_slot is not None]
        failed = [r for r in open_tables if self._failing(r.srrelid)]
        if open_tables and len(failed) < len(open_tables):
            return
        if not self._target_position:
            self._target_position = flush_position(self.sub.connection, self.sub.name)
        pulse = mirror.apply_pulse()
        if workers.job is not None and pulse is not None and pulse.position >= self._target_position:
            self.error = self._first_sync_error() if failed else None
            self.outcome = "failed" if failed else "reached"

    def _failing(self, relid: int) -> bool:
        retry = self._workers.retries.get(relid)
        return retry is not None and retry.error is not None and retry.error.directive is not Directive.RETRY

    def _wind_down(self, session: psycopg.Connection, mirror: Mirror, context: SyncContext) -> None:
        """Ask every worker to stop at a boundary, wait, mirror the last state."""
        context.stopping.set()
        workers = self._workers
        with contextlib.suppress(psycopg.Error, PgsubError):
            ledger.ask_to_stop(session, self.sub.subid)
        deadline = time.monotonic() + 30
        running = [sync for sync in workers.syncs.values() if not sync.ended]
        while ((workers.job and not workers.job.done()) or any(not s.ended for s in running)) and (
            time.monotonic() < deadline
        ):
            with contextlib.suppress(psycopg.Error, PgsubError):
                mirror.events()
            time.sleep(0.02)
        if workers.job is not None and not workers.job.done():
            workers.job.cancel()
        workers.job = None
        with contextlib.suppress(psycopg.Error, PgsubError):
            mirror.events()
            mirror.refresh(apply_alive=False, syncing=set())
            self._store.clear_server(self.sub.subid)


def same_service(before: Subscription, after: Subscription) -> bool:
    """Whether a running worker need not restart: what the server re-reads without a restart may differ."""
    fields = ("disable_on_error", "skip_lsn")
    return replace(before, **{f: getattr(after, f) for f in fields}) == after


def _unfinished(rel: RelationState) -> bool:
    """Whether a table still needs its tablesync worker."""
    return rel.srsubstate in "idf" or rel.sync_slot is not None


def _sync_name(relid: int) -> str:
    """How the record of errors calls a tablesync worker."""
    return f"table synchronization {relid}"
