"""The Spark driver of a launcher: opened once, in the background, and again after its JVM died.

NOTES

A start takes seconds, on a busy machine many, and cannot be interrupted. So it has a thread of its own, and no lock is
held meanwhile: submitters wait for the thread with an eye on their stop, and :meth:`Engine.close` does not wait. A JVM
that comes up after that ends by itself, because its standard input ends with this process; in a process that lives
on, the thread closes it.
"""

from __future__ import annotations

import contextlib
import math
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pgsub.apply.worker import executor_check, worker
from pgsub.common.errors import Log, LogText, PgsubError, SparkUnusable, log_text
from pgsub.common.subscription import Subscription
from pgsub.common.threads import SupervisedThread
from pgsub.common.worker_heartbeat import HeartbeatReceiver
from pgsub.spark import executors, jobs, jvm_process, session, settings
from pgsub.tablesync import sync_worker
from pgsub.tablesync.copy import task

Item = TypeVar("Item")
Result = TypeVar("Result")

#: Modules whose functions are submitted.
_MODULES = tuple(module.__name__ for module in (worker, task, sync_worker))

#: Task slots to spare on a local Spark for subscriptions that come later; there a slot is a thread and costs nothing.
SPARE_SLOTS = 48
_POLL = 0.05  #: seconds between checks of ``stopping`` while Spark starts
#: Seconds for which a failed start is everyone's answer: who asks a moment later must not start a second JVM.
_FAILED_SECONDS = 15.0
#: Seconds in which executors usually come: it takes no word in the log.
_REGISTERING_SECONDS = 5.0
#: Between looks whether a Spark that somebody else started is still there.
_GIVEN_SECONDS = 2.0
#: Seconds for the task that looks at an executor; each of its connections may take ten.
_CHECK_SECONDS = 90.0
#: Seconds that a heartbeat of that task may take beyond its result.
_HEARTBEAT_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Slots:
    """Answer of Spark about a job: whether its task runs, and how many slots there are for all tasks."""

    runs: bool
    registered: int
    master: str


class Engine:
    """Submits jobs from any thread.

    :param state_dir: where Spark's log and pid file go.
    :param master: a Spark master, None for a local one.
    :param conf: Spark settings of the user, which win over pgsub's own.
    :param subscriptions: that will be served: a long task pins a slot, and with too few a copy would wait for ever.
    :param patient: wait for executors of a cluster for ever.
    :ivar heartbeats: what executors send heartbeats to, for the task that looks at one.
    """

    def __init__(
        self,
        state_dir: Path,
        master: str | None,
        conf: Mapping[str, str],
        subscriptions: Sequence[Subscription],
        log: Log = lambda level, text: None,
        *,
        patient: bool = False,
    ) -> None:
        self._log = log
        self._patient = patient
        self._subscriptions = tuple(subscriptions)
        self.heartbeats: HeartbeatReceiver | None = None
        self._checks = 0
        self._failed_at = -_FAILED_SECONDS
        self._settings: dict[str, str] | None = None
        self.ui: str | None = None  #: address of Spark's pages
        self._state_dir = state_dir
        self._master = master
        self._conf = dict(conf)
        self._slots = sum(slots_of(sub) for sub in subscriptions)
        self._total: int | None = None  #: slots of the open context
        self._lock = threading.Lock()
        self._opening: SupervisedThread | None = None
        self._closed = False
        self._context: Any = None
        self._submitter: jobs.Submitter | None = None
        self._asked: set[Any] = set()  #: jobs that Spark is to be asked about
        self._answers: dict[Any, Slots] = {}
        self._registering: float | None = None  #: since when executors are awaited; infinity once that is logged
        self._next_check = 0.0
        self.lost: SparkUnusable | None = None  #: why no worker can run any more, whatever is tried

    def heartbeat_place(self) -> tuple[str, str, int]:
        """Return where workers reach this process, the address to bind, and the UDP port (0 for any).

        Loopback for a local Spark; else as Spark has it for its own driver: spark.driver.host and
        spark.driver.bindAddress, or this machine's address on the way to the master.
        """
        chosen = self._user_settings()
        port = settings.heartbeat_port(chosen.get("spark.pgsub.heartbeat.port", "0"))
        if self.local:
            return "127.0.0.1", "127.0.0.1", port
        host = chosen.get("spark.driver.host") or settings.own_address(chosen.get("spark.master", ""))
        return host, chosen.get("spark.driver.bindAddress") or host, port

    @property
    def local(self) -> bool:
        """Whether tasks run on this machine, as this user."""
        return settings.is_local(self._user_settings().get("spark.master", "local"))

    def spool_dir(self, own: Path) -> str | None:
        """Return where workers keep transactions in progress: on executors what the user names, else Spark's scratch.

        :param own: the folder on this machine.
        """
        named = self._user_settings().get("spark.pgsub.spool.dir")
        return named or (str(own) if self.local else None)

    def _user_settings(self) -> dict[str, str]:
        """Read the settings before Spark runs; later it has pgsub's own, too."""
        if self._settings is None:
            submitted = {**self._conf, **({"spark.master": self._master} if self._master else {})}
            given = session.given_settings()
            self._settings = settings.user_settings(submitted, jvm_process.spark_home()) if given is None else given
        return self._settings

    def start(self) -> SupervisedThread:
        """Open the context in the background, unless it is open or being opened.

        :return: the thread that opens it; once it has ended, ``fatal_error`` is why Spark did not start.
        """
        with self._lock:
            before = self._opening
            failed = before is not None and before.fatal_error is not None
            waits = failed and time.monotonic() < self._failed_at + _FAILED_SECONDS
            if before is not None and (waits or before.is_alive()):
                return before
        is_open = self._is_open()  # asks the JVM, which may hang: not under the lock that close() takes
        with self._lock:
            opening = self._opening
            if opening is None or (opening is before and not is_open):
                opening = self._opening = SupervisedThread("spark_start", "spark start", self._open_or_fail)
                opening.start()
            return opening

    def _open_or_fail(self) -> None:
        try:
            self._open()
        except PgsubError:
            self._failed_at = time.monotonic()
            raise

    def _is_open(self) -> bool:
        return self._submitter is not None and session.alive(self._context)

    def _open(self) -> None:
        """Start Spark, in a thread, without the lock that :meth:`close` takes: it takes seconds."""
        self._check_given()
        if self._submitter is not None:
            session.close_context(self._context)  # its JVM died
            self._submitter = None
        # of a master that the user chose only the slots needed now are required: apply pins its slot, copies can queue
        named = "spark.master" in self._user_settings()
        slots = least_slots(self._subscriptions) if named else self._slots + SPARE_SLOTS
        # what ran once is waited for, as for any executor that Spark has lost
        patient = self._patient or self._total is not None
        awaiting = executors.Awaiting(patient, self._registered, lambda: self._closed)
        context = session.open_context(self._master, slots, self._state_dir, self._conf, _MODULES, awaiting)
        submitter = jobs.Submitter(context)
        try:
            if not self.local:
                self._check(submitter)
        except PgsubError:
            session.close_context(context)
            raise
        with self._lock:
            if not self._closed:
                self._answers.pop(None, None)
                self._registering = None
                self._total = max(submitter.slots(), slots) if named else slots
                self._context, self._submitter, self.ui = context, submitter, context.uiWebUrl
                return
        session.close_context(context)

    def _check_given(self) -> None:
        """Give up with the Spark that this process was given: whoever started both has to start both again.

        :raises SparkUnusable: it is gone.
        """
        if session.lost(self._context):
            self.lost = SparkUnusable(
                "the Spark that this launcher was started in has ended",
                detail="The Java process of spark-submit died or was stopped, or the program stopped its context.",
                hint="Start both again; replication goes on where the ledger is.",
            )
            raise self.lost

    def _registered(self, slots: int, master: str) -> None:
        """Log once that executors are awaited, and let whoever asks know how many there are."""
        self._answers = {None: Slots(False, slots, master)}
        clock = time.monotonic()
        self._registering = self._registering or clock
        if clock < self._registering + _REGISTERING_SECONDS:
            return
        self._registering = math.inf
        text = (
            f"waiting for executors: {least_slots(self._subscriptions)} task slots are needed, {slots} are there so far"
        )
        self._log("WARNING", log_text(text, hint=self._executors_hint(master)))

    def _executors_hint(self, master: str) -> str:
        if not self._patient:
            return f"Let the command wait longer.\n{executors.WAIT_LONGER}"
        if master.startswith("spark://"):
            return f"Start a worker, or end other applications that have its cores.\n{start_worker(master)}"
        log = shlex.quote(str(self._state_dir / "log" / "spark.log"))
        return f"The cluster has no room for them, or they do not start.\ntail -n 20 {log}"

    def _check(self, submitter: jobs.Submitter) -> None:
        """Look at one executor before any worker runs there.

        :raises SparkUnusable: nothing of pgsub can run there. A server that cannot be reached from there is logged:
            each worker reports it again, and tries again.
        """
        there = self._ask(submitter, executor_check.installed, None)
        if there is not None:
            _check_build(*there)
        place = self._state_dir / "spool"
        self._checks += 1
        address = None if self.heartbeats is None else self.heartbeats.address
        spec = executor_check.CheckSpec(self._checks, self._subscriptions, address, self.spool_dir(place))
        found = self._ask(submitter, executor_check.run, spec)
        if found is None:
            return
        for name, error in found.errors:
            if isinstance(error, SparkUnusable):
                raise error
            message = f'subscription "{name}": {error.message}'
            self._log("ERROR", log_text(message, detail=error.detail, context=error.context, hint=error.hint))
        self._check_heartbeat(found.host)

    def _ask(self, submitter: jobs.Submitter, function: Callable[[Item], Result], item: Item) -> Result | None:
        """Run a task that looks at an executor; None where it does not begin or end, which is shown as waiting."""
        job = submitter.submit("check executor", function, [item])
        end = time.monotonic() + _CHECK_SECONDS
        while not job.wait(_POLL) and not self._closed and time.monotonic() < end:
            pass
        if not job.done():
            job.cancel()
            return None
        [found] = job.result(0)
        return found

    def _check_heartbeat(self, host: str) -> None:
        """Say where no heartbeat arrives: what status shows is late then, for a reason that nothing else would name."""
        receiver, nobody = self.heartbeats, executor_check.NOBODY
        end = time.monotonic() + _HEARTBEAT_SECONDS
        while receiver is not None and receiver.seconds_since(nobody, nobody, self._checks) == math.inf:
            if self._closed:
                return
            if time.monotonic() >= end:
                self._log("WARNING", _deaf(host, receiver.address.host, receiver.address.port))
                return
            time.sleep(_POLL)

    def missing(self, served: Sequence[Subscription]) -> int:
        """Return how many task slots these subscriptions may want beyond those that Spark was opened with."""
        if self._total is None:
            return 0
        named = "spark.master" in self._user_settings()
        wanted = least_slots(served) if named else sum(map(slots_of, served))
        return max(0, wanted - self._total)

    def submit(
        self, name: str, function: Callable[[Any], Any], items: Sequence[Any], *, stopping: threading.Event
    ) -> jobs.Job[Any, Any]:
        """Run ``function`` on each item as a task of one job, as soon as Spark has started.

        :param stopping: ends the wait for Spark.
        :raises JobCancelled: ``stopping`` was set first.
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
        return submitter.submit(name, function, items, len(items))

    def slots(self, job: Any) -> Slots | None:
        """Return Spark's last answer about a job, None where there is none yet; the next :meth:`look` asks again."""
        self._asked.add(job)
        return self._answers.get(job)

    def look(self) -> None:
        """Ask Spark about the jobs that somebody wants to know of; this may hang with its JVM."""
        if time.monotonic() >= self._next_check:
            self._next_check = time.monotonic() + _GIVEN_SECONDS
            with contextlib.suppress(SparkUnusable):
                self._check_given()
        asked, submitter = self._asked, self._submitter
        if asked and submitter is not None:
            self._asked = set()
            master, registered = submitter.master, submitter.slots()
            self._answers = {job: Slots(job is not None and job.runs(), registered, master) for job in asked}
            if not registered and submitter.forgotten():
                self._leave(master)

    def _leave(self, master: str) -> None:
        """Close a context whose master does not know it any more; the next job opens another."""
        self._log(
            "WARNING",
            log_text(executors.forgotten_by(master), detail=f"{executors.WITHOUT_STATE} Spark is started again."),
        )
        session.close_context(self._context)

    def rotate_log(self) -> None:
        """Keep Spark's log below its limit."""
        jvm_process.rotate(self._state_dir)

    def close(self) -> None:
        """Stop Spark. A start under way is not waited for: the JVM ends with this process, or as soon as it is up."""
        with self._lock:
            self._closed = True
            submitter, self._submitter = self._submitter, None
        if submitter is not None:
            session.close_context(self._context)


def _check_build(version: str, build: str) -> None:
    """Refuse executors with another pgsub: what both say to each other and to the ledger is not the same then.

    :raises SparkUnusable: they have.
    """
    own, own_build = executor_check.installed()
    if version == own and (build == own_build or not (build and own_build)):
        return
    if version == own:
        message = f"the executors have another build of pgsub {own} than this launcher"
    else:
        message = f"the executors have pgsub {version}, but this launcher is {own}"
    hint = "Ship what this launcher runs with.\npython -m pgsub.spark.archive pgsub_env.tar.gz"
    raise SparkUnusable(message, hint=hint)


def _deaf(executor: str, host: str, port: int) -> LogText:
    return log_text(
        f'no heartbeat of the executor on "{executor}" arrives at "{host}", UDP port {port}',
        detail="Nothing is lost: positions come from the ledger, and are shown later.",
        hint="Let executors reach the port; give it a number if a firewall has to know it."
        "\n--conf spark.pgsub.heartbeat.port=7079",
    )


def start_worker(master: str) -> str:
    """Return the command that adds a worker to a standalone cluster."""
    return f'"$SPARK_HOME"/sbin/start-worker.sh {master}'


def slots_of(sub: Subscription) -> int:
    """Count the tasks that one subscription runs at once at most: apply, and chunks of each table that synchronizes."""
    return 1 + sub.max_sync_workers * sub.copy_workers


def least_slots(subscriptions: Sequence[Subscription]) -> int:
    """Return how many slots a cluster needs: one for each apply worker, and one in which copies take turns."""
    return len(subscriptions) + 1 if subscriptions else 0
