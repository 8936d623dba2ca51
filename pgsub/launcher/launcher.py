"""All subscriptions of one state store: starts and stops their runners as definitions come, change and go."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pgsub.catalog.locks import Lock, lock_held, subscription_lock
from pgsub.catalog.store import StateStore
from pgsub.common import failpoints
from pgsub.common.errors import Log, PgsubError, StateStoreError, TimeoutExpired, log_text
from pgsub.common.machine.out_of_resources import out_of_resources
from pgsub.common.plural import counted
from pgsub.common.subscription import Subscription, same_definition, same_service
from pgsub.launcher.heartbeat_receiver import HeartbeatReceiver
from pgsub.launcher.housekeeping import Housekeeping
from pgsub.launcher.recorder import Recorder, Run, failed
from pgsub.launcher.run_until import Goal
from pgsub.launcher.runner import Runner
from pgsub.launcher.served import Served
from pgsub.launcher.service import Shared
from pgsub.launcher.spark.driver import Engine
from pgsub.launcher.systemd import ServiceManager

TICK = 0.1
#: Seconds after which an unbounded run restarts a runner that failed permanently.
AGAIN_SECONDS = 30.0
#: Seconds within which all runners must stop. Each gives its workers half a minute.
JOIN_SECONDS = 45.0
#: Seconds between the signs of life of served subscriptions.
SIGN_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of the service of one subscription in a bounded run."""

    name: str
    outcome: str
    error: PgsubError | None


class Launcher:
    """The server of subscriptions. It runs until it is stopped, or until every subscription has reached its goal.

    :param names: the subscriptions to serve, empty for all, including later ones.
    :param locks: subscription locks that the caller already holds, by subid.
    """

    def __init__(
        self,
        store: StateStore,
        folder: Path,
        log: Log,
        *,
        names: tuple[str, ...] = (),
        goal: Goal | None = None,
        master: str | None = None,
        conf: Mapping[str, str] | None = None,
        locks: Mapping[int, Lock] | None = None,
    ) -> None:
        self._store = store
        self._folder = folder
        self._log = log
        self._names = names
        self._named: set[int] = set()  #: subids of the names, so a renamed subscription is still served
        self._goal = goal or Goal()
        self._bounded = self._goal.bounded
        self._recorder = Recorder(store, log)
        self._ended: dict[int, Ended] = {}
        self._wanted_now = self._wanted()
        self._engine = Engine(folder, master, conf or {}, self._as_of_now, log, patient=not self._bounded)
        self._heartbeats = HeartbeatReceiver(*self._engine.settings.heartbeat_place())
        self._engine.check.heartbeats = self._heartbeats
        self._shared = Shared(store, self._recorder, self._engine, self._heartbeats, log)
        self._locks = dict(locks or {})
        self._served: dict[int, Served] = {}
        self._unusable: dict[int, str] = {}
        self._lack: str | None = None  #: the lack of resources that was logged last
        self._manager = ServiceManager()
        self._housekeeping = Housekeeping(self._engine, self._heartbeats, log)
        self._next_sign = 0.0

    def run(
        self, stop: threading.Event, timeout: float | None = None, tick: Callable[[Run], None] = lambda run: None
    ) -> list[Ended]:
        """Serve until ``stop`` is set, or every goal is reached.

        :param timeout: seconds, None for no limit.
        :param tick: called every :data:`TICK` seconds to show progress, with a function that reads the state store.
        :return: how the service of each subscription ended, empty for an unbounded run.
        :raises TimeoutExpired: the goal was not reached in time. Everything was stopped properly.
        :raises SparkUnusable: the Spark context in which this process was started is gone.
        :raises LockHeld: at the start, another process serves a subscription that this run must serve.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        expired: PgsubError | None = None
        try:
            self._housekeeping.listen()
            self._reconcile(refuse=bool(self._names) or self._bounded)
            self._engine.start()  # last, because a run without a lock needs no JVM
            self._manager.ready()
            while not stop.is_set():
                if self._bounded and not self._served:
                    break
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutExpired(
                        "the subscription did not reach its goal in time",
                        detail=f"Not finished: {', '.join(s.runner.sub.name for s in self._served.values())}.",
                    )
                stop.wait(TICK)
                self._manager.alive()
                self._signs_of_life()
                try:
                    self._turn(tick)
                except Exception as error:
                    self._lacks(error)
                if (lost := self._engine.lost) is not None:
                    self._log("ERROR", lost.log_text())  # standard error may be a pipe whose reader has ended
                    raise lost
        except TimeoutExpired as error:
            expired = error
        finally:
            self._manager.stopping()
            self._stop_all()
        problem = failed(self._recorder, expired) if self._bounded else expired
        if expired is not None:
            raise problem or expired
        return [replace(one, error=one.error or problem) for one in self._ended.values()]

    def _turn(self, tick: Callable[[Run], None]) -> None:
        failpoints.point("launcher.turn")
        self._housekeeping.listen()
        with contextlib.suppress(StateStoreError):  # only the display depends on it
            tick(self._recorder.run)
        self._reap()
        self._reconcile()
        self._housekeeping.look()
        self._lack = None

    def _lacks(self, error: Exception) -> None:
        """Log a lack of resources once. Workers continue, and the next round tries again.

        :raises Exception: ``error`` itself if it is not a lack of resources.
        """
        lack = out_of_resources(error)
        # guard: a lack of resources does not end a launcher, always
        if lack is None:
            raise error
        if self._lack != lack.message:
            self._lack = lack.message
            self._log("WARNING", lack.log_text())

    def _signs_of_life(self) -> None:
        if time.monotonic() >= self._next_sign:
            self._next_sign = time.monotonic() + SIGN_SECONDS
            # guard: a launcher that waits for the target gives no sign of life, without "not one.stalled"
            alive = [one.lock for one in self._served.values() if not one.stalled(self._log)]
            self._recorder.sign(*(lock.touch for lock in alive))

    def _wanted(self) -> dict[int, Subscription]:
        subscriptions = self._recorder.subscriptions()
        self._named |= {s.subid for s in subscriptions if s.name in self._names}
        return {
            s.subid: s
            for s in subscriptions
            if s.enabled and s.slot_name is not None and (not self._names or s.subid in self._named)
        }

    def _as_of_now(self) -> list[Subscription]:
        """Return the subscriptions to serve as of the last look, without ended ones. Any thread may call this."""
        return [sub for subid, sub in self._wanted_now.items() if subid not in self._ended]

    def _reconcile(self, *, refuse: bool = False) -> None:
        wanted = self._wanted_now = self._wanted()
        for subid, served in self._served.items():
            if subid not in wanted or not same_service(served.runner.sub, wanted[subid]):
                self._log_stop(served.runner, subid in wanted)
                served.runner.stop()
        for subid, sub in wanted.items():
            if subid not in self._served and subid not in self._ended:
                self._start(sub, refuse=refuse)

    def _log_stop(self, runner: Runner, restarts: bool) -> None:
        """Log once, in the server's words, that a changed definition stops a worker."""
        if runner.stopping:
            return
        if restarts:
            why = "restart because of a parameter change"
        else:
            why = f"stop because the subscription {self._why_not(runner.sub.subid)}"
        self._log("LOG", log_text(f'logical replication worker for subscription "{runner.sub.name}" will {why}'))

    def _why_not(self, subid: int) -> str:
        """Say why a subscription is no longer served. A drop disables it, too, but does not record that."""
        if self._recorder.current(subid) is None:
            return "was removed"
        with contextlib.suppress(StateStoreError):
            actions = (row.action for row in self._recorder.run(lambda: self._store.journal_rows(subid)))
            if next((one for one in actions if one in ("enable", "disable")), None) != "disable":
                return "is being dropped"
        return "was disabled"

    def _start(self, sub: Subscription, *, refuse: bool) -> None:
        lock = self._locks.pop(sub.subid, None)
        if lock is None:
            try:
                lock = subscription_lock(self._folder, sub.subid)
                taken = lock.acquire()
            except StateStoreError as error:
                if refuse:
                    raise
                self._unlocked(sub, error)
                return
            if not taken:
                if refuse:
                    raise lock_held(lock, f'subscription "{sub.name}"')
                return  # another launcher serves it; this one takes over when that ends
        self._count_slots(sub)
        runner = Runner(sub, self._shared, self._goal)
        try:
            runner.start()
        except BaseException:  # there may be no thread left
            lock.release()
            raise
        self._served[sub.subid] = Served(runner, lock)
        self._log("LOG", log_text(f'serving subscription "{sub.name}"'))

    def _unlocked(self, sub: Subscription, error: StateStoreError) -> None:
        """Log once that the state folder cannot be used. Every round tries again."""
        if self._unusable.get(sub.subid) != error.message:
            self._unusable[sub.subid] = error.message
            self._log("ERROR", error.log_text())

    def _count_slots(self, sub: Subscription) -> None:
        """Warn if Spark has too few task slots: long tasks keep their slots, and other tasks would wait silently."""
        missing = self._engine.missing([*(served.runner.sub for served in self._served.values()), sub])
        if missing:
            self._log(
                "WARNING",
                log_text(
                    f'Spark was started with too few task slots to serve subscription "{sub.name}" as well',
                    detail=f"Up to {counted(missing, 'task')}, of it and of the other subscriptions, may have to wait"
                    " until others end.",
                    hint="Start pgsub run again: it counts the subscriptions when it starts.",
                ),
            )

    def _reap(self) -> None:
        clock = time.monotonic()
        for subid, served in list(self._served.items()):
            runner = served.runner
            if runner.is_alive():
                continue
            if runner.outcome is None:  # its thread died
                runner.outcome, runner.error = "failed", runner.fatal_error
                self._log(
                    "ERROR", log_text(runner.error.message if runner.error else f'thread "{runner.name}" has ended')
                )
            if runner.outcome == "failed" and not self._bounded:
                served.again_at = served.again_at or clock + AGAIN_SECONDS
                if clock < served.again_at and same_definition(runner.sub, self._recorder.current(subid)):
                    continue
            self._let_go(served)
            del self._served[subid]
            if self._bounded and runner.outcome != "stopped":
                self._ended[subid] = Ended(runner.sub.name, runner.outcome, runner.error)

    def _let_go(self, served: Served) -> None:
        """Release a subscription to other launchers, in the state store and by its lock, even after a failure."""
        with contextlib.suppress(PgsubError):
            self._recorder.run(lambda: self._store.clear_server(served.runner.sub.subid))
        served.lock.release()

    def _stop_all(self) -> None:
        for served in self._served.values():
            served.runner.stop()
        deadline = time.monotonic() + JOIN_SECONDS
        for served in self._served.values():
            while served.runner.at_work and time.monotonic() < deadline:
                served.runner.stop()
                served.runner.join(TICK)
                self._signs_of_life()
                with contextlib.suppress(RuntimeError):
                    self._engine.watch.look(stopping=True)
            if not served.runner.at_work:
                self._let_go(served)  # otherwise the end of the process releases the lock
                continue
            message = f'subscription "{served.runner.sub.name}" did not stop in time'
            detail = "A server does not answer. What is not committed on the target is sent again."
            self._log("WARNING", log_text(message, detail=detail))
        self._served.clear()
        self._engine.close()
        self._heartbeats.close()
        self._recorder.close()
        self._housekeeping.close()
