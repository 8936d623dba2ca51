"""The Spark driver of a launcher. It is opened once, in the background, and again after its JVM died.

NOTES

A start takes seconds, longer on a busy machine, and cannot be interrupted. Therefore it has its own thread and holds no
lock. Submitters wait for that thread while they check for a stop. :meth:`Engine.close` does not wait: a JVM that comes
up later exits when this process ends, because that closes its standard input. If the process continues, the thread
closes the JVM. The check of an open context runs in that thread, too, because a hanging JVM does not answer.
"""

from __future__ import annotations

import contextlib
import math
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pgsub.apply.worker import executor_requirements, worker
from pgsub.common.errors import Log, PgsubError, SparkUnusable, log_text
from pgsub.common.plural import counted
from pgsub.common.subscription import Subscription
from pgsub.common.threads import SupervisedThread
from pgsub.launcher.spark.driver_settings import SparkSettings
from pgsub.launcher.spark.driver_watch import SparkWatch
from pgsub.launcher.spark.executor_check import ExecutorCheck
from pgsub.launcher.spark.task_slots import SPARE_SLOTS, Slots, least_slots, more_slots, slots_of, start_worker
from pgsub.spark import contexts, executors, jobs, session
from pgsub.spark.jvm import process as jvm_process
from pgsub.tablesync import sync_worker
from pgsub.tablesync.copy import task

#: Modules whose functions are submitted.
_MODULES = tuple(module.__name__ for module in (worker, task, sync_worker))

_POLL = 0.05  #: seconds between checks of ``stopping`` while Spark starts
#: Seconds during which a failed start is the answer for all callers, so that none starts a second JVM.
_FAILED_SECONDS = 15.0
#: Seconds in which executors usually register. A longer wait is logged.
_REGISTERING_SECONDS = 5.0
#: Seconds between checks of a Spark context that was started by others.
_GIVEN_SECONDS = 2.0


class Engine:
    """A submitter of jobs. Any thread may use it.

    :param state_dir: the folder of Spark's log and PID file.
    :param master: a Spark master, None for a local one.
    :param conf: the user's Spark settings, which override pgsub's own.
    :param subscriptions: returns the subscriptions to serve, whose number determines the task slots. With too few
        slots, a copy would wait forever. Called by the thread that opens Spark.
    :param patient: whether to wait for a cluster's executors without limit.
    :ivar settings: the user's settings and what follows from them.
    :ivar watch: sees whether Spark's Java process answers.
    :ivar check: checks one executor of a cluster before any worker runs there.
    """

    def __init__(
        self,
        state_dir: Path,
        master: str | None,
        conf: Mapping[str, str],
        subscriptions: Callable[[], Sequence[Subscription]],
        log: Log = lambda level, text: None,
        *,
        patient: bool = False,
    ) -> None:
        self._log = log
        self._patient = patient
        self._subscriptions = subscriptions
        self.check = ExecutorCheck(log, lambda: self._closed)
        self.watch = SparkWatch(state_dir, log)
        self._failed_at = -_FAILED_SECONDS
        self.settings = SparkSettings(master, conf)
        self.ui: str | None = None  #: address of Spark's web pages
        self._state_dir = state_dir
        self._total: int | None = None  #: task slots of the open context
        self._lock = threading.Lock()
        self._opening: SupervisedThread | None = None
        self._closed = False
        self._context: Any = None
        self._submitter: jobs.Submitter | None = None
        self._asked: set[Any] = set()  #: jobs whose state Spark must be asked for
        self._answers: dict[Any, Slots] = {}
        self._registering: float | None = None  #: when the wait for executors began; infinity once it is logged
        self._next_check = 0.0
        self.lost: SparkUnusable | None = None  #: why no worker can ever run again

    def start(self) -> SupervisedThread:
        """Open the context in the background, unless it is open or being opened.

        :return: the thread that does so. It has already ended if Spark was open and answers. After its end,
            ``fatal_error`` tells why Spark did not start.
        """
        with self._lock:
            opening = self._opening
            if opening is not None:
                waits = opening.fatal_error is not None and time.monotonic() < self._failed_at + _FAILED_SECONDS
                if waits or opening.is_alive():
                    return opening
            opening = self._opening = SupervisedThread("spark_start", "spark start", self._open_or_fail)
            opening.start()
        if self._submitter is not None:
            opening.join(_POLL)
        return opening

    def _open_or_fail(self) -> None:
        try:
            if self._submitter is None or not contexts.alive(self._context):
                self._open()
        except PgsubError:
            self._failed_at = time.monotonic()
            raise

    def _open(self) -> None:
        """Start Spark in a thread. This takes seconds, so it does not hold the lock that :meth:`close` takes."""
        self._check_given()
        if self._submitter is not None:
            session.close_context(self._context)  # the JVM died
            self._submitter = None
        # Of a master that the user chose, only the slots needed now are required: apply keeps its slot, copies can take
        # turns.
        named = self.settings.names_master
        served = self._subscriptions()
        slots = least_slots(served) if named else sum(map(slots_of, served)) + SPARE_SLOTS
        # Executors that do not register in time, or are lost, are waited for; the others are used meanwhile.
        lasts = self._patient or self._total is not None
        awaiting = executors.Awaiting(
            lasts,
            self._too_few if lasts else None,
            self._registered,
            lambda: self._closed,
            (lambda: least_slots(self._subscriptions())) if named else None,
        )
        context = session.open_context(slots, self._state_dir, self.settings.submitted, _MODULES, awaiting)
        try:  # pyspark allows one context at a time, so an abandoned one would block all others
            submitter = jobs.Submitter(context, self._guard())
            if not self.settings.local:
                self.check.run(submitter, served, self.settings.spool_dir(self._state_dir / "spool"))
            there, ui = submitter.slots(), jobs.ui_of(context)  # asks the JVM, which may hang, so without the lock
        except BaseException:
            session.close_context(context)
            raise
        with self._lock:
            if not self._closed:
                self._answers.pop(None, None)
                self._registering = None
                self._total = max(there, slots) if named else slots
                self._context, self._submitter, self.ui = context, submitter, ui
                return
        session.close_context(context)

    def _guard(self) -> Callable[[], None] | None:
        """Return a check that refuses tasks on executors with another pgsub version, None for a local Spark."""
        if self.settings.local:
            return None
        return partial(executor_requirements.refuse_other, *executor_requirements.installed())

    def _check_given(self) -> None:
        """Raise an error if the Spark context in which this process was started has ended.

        :raises SparkUnusable: the context has ended, and both must be started again.
        """
        if contexts.lost(self._context):
            self.lost = SparkUnusable(
                "the Spark that this launcher was started in has ended",
                detail="The Java process of spark-submit died or was stopped, or the program stopped its context.",
                hint="Start both again; replication continues where the ledger is.",
            )
            raise self.lost

    def _registered(self, slots: int, master: str) -> None:
        """Log once that executors are awaited, and record their number for callers of :meth:`slots`."""
        self._answers = {None: self._slots(False, slots)}
        clock = time.monotonic()
        self._registering = self._registering or clock
        if clock < self._registering + _REGISTERING_SECONDS:
            return
        self._registering = math.inf
        needed = least_slots(self._subscriptions())
        wanted = counted(needed, "task slot", ("is", "are"))
        text = f"waiting for executors: {wanted} needed, {slots} so far"
        self._log("WARNING", log_text(text, hint=self._executors_hint(master)))

    def _too_few(self, slots: int, needed: int) -> None:
        text = f"Spark has only {slots} of the {needed} task slots that are needed"
        more = more_slots(self.settings.chosen, needed)
        hint = None if more is None else f"Give Spark more of them.\n{more}"
        detail = "A subscription keeps one, and copies need one more. What has none waits; more are used as they come."
        self._log("WARNING", log_text(text, detail=detail, hint=hint))

    def _executors_hint(self, master: str) -> str:
        if not self._patient:
            return f"Let the command wait longer.\n{executors.WAIT_LONGER}"
        if master.startswith("spark://"):
            return f"Start a worker, or end other applications that have its cores.\n{start_worker(master)}"
        log = shlex.quote(str(self._state_dir / "log" / "spark.log"))
        return f"The cluster has no room for them, or they do not start.\ntail -n 20 {log}"

    def missing(self, served: Sequence[Subscription]) -> int:
        """Return how many task slots these subscriptions may need beyond those with which Spark was opened."""
        if self._total is None:
            return 0
        named = self.settings.names_master
        wanted = least_slots(served) if named else sum(map(slots_of, served))
        return max(0, wanted - self._total)

    def submit(
        self, name: str, function: Callable[[Any], Any], items: Sequence[Any], *, stopping: threading.Event
    ) -> jobs.Job[Any, Any]:
        """Run ``function`` on each item as a task of one job, as soon as Spark has started.

        :param stopping: ends the wait for Spark.
        :raises JobCancelled: ``stopping`` was set before Spark started.
        :raises PgsubError: Spark could not be started.
        """
        opening = self.start()
        while opening.is_alive() and not stopping.is_set():
            opening.join(_POLL)
        if not opening.is_alive() and opening.fatal_error is not None:
            raise opening.fatal_error
        submitter = self._submitter
        if opening.is_alive() or submitter is None:
            raise jobs.JobCancelled(f'job "{name}" was cancelled')
        if not self.settings.local:
            function = partial(executor_requirements.explained, function)
        return submitter.submit(name, function, items)

    def slots(self, job: Any) -> Slots | None:
        """Return Spark's last answer about a job, None before the first. The next :meth:`look` asks again."""
        self._asked.add(job)
        return self._answers.get(job)

    def look(self) -> None:
        """Ask Spark about the jobs in which callers are interested. This call hangs if the JVM does."""
        if time.monotonic() >= self._next_check:
            self._next_check = time.monotonic() + _GIVEN_SECONDS
            with contextlib.suppress(SparkUnusable):
                self._check_given()
        asked, submitter = self._asked, self._submitter
        if asked and submitter is not None:
            self._asked = set()
            registered = submitter.slots()
            self._answers = {job: self._slots(job is not None and job.runs(), registered) for job in asked}
            if not registered and submitter.forgotten():
                self._leave(submitter.master)

    def _slots(self, runs: bool, registered: int) -> Slots:
        needed = least_slots(self._subscriptions())
        gone = self.settings.local and not registered  # a local Spark that must be restarted
        return Slots(runs, registered, needed, None if gone else more_slots(self.settings.chosen, needed))

    def _leave(self, master: str) -> None:
        """Close a context that its master no longer knows. The next job opens another."""
        self._log(
            "WARNING",
            log_text(executors.forgotten_by(master), detail=f"{executors.WITHOUT_STATE} Spark is started again."),
        )
        session.close_context(self._context)

    def rotate_log(self) -> None:
        """Limit the size of Spark's log."""
        jvm_process.rotate(self._state_dir)

    def close(self) -> None:
        """Stop Spark without waiting for a start: that JVM ends with this process, or as soon as it is up."""
        with self._lock:
            self._closed = True
            submitter, self._submitter = self._submitter, None
        if submitter is not None:
            session.close_context(self._context)
        self.watch.close()
