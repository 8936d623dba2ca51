"""The Spark driver of a launcher: opened once, in the background, and again after its JVM died.

NOTES

A start takes seconds, on a busy machine many, and cannot be interrupted. So it has a thread of its own, and no lock is
held meanwhile: submitters wait for the thread with an eye on their stop, and :meth:`Engine.close` does not wait. A JVM
that comes up after that ends by itself, because its standard input ends with this process; in a process that lives
on, the thread closes it.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pgsub.apply.worker import worker
from pgsub.common.subscription import Subscription
from pgsub.common.threads import SupervisedThread
from pgsub.spark import gateway, jobs, session, settings
from pgsub.tablesync import sync_worker
from pgsub.tablesync.copy import task

#: Modules whose functions are submitted.
_MODULES = tuple(module.__name__ for module in (worker, task, sync_worker))

#: Task slots to spare on a local Spark for subscriptions that come later; there a slot is a thread and costs nothing.
SPARE_SLOTS = 48
_POLL = 0.05  #: seconds between looks at ``stopping`` while Spark starts


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
    """

    def __init__(
        self, state_dir: Path, master: str | None, conf: Mapping[str, str], subscriptions: Sequence[Subscription]
    ) -> None:
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

    def driver_host(self) -> str:
        """Return where executors reach this process: loopback for a local Spark, else Spark's own setting."""
        chosen = self._user_settings()
        if settings.is_local(chosen.get("spark.master", "local")) and "PYSPARK_GATEWAY_PORT" not in os.environ:
            return "127.0.0.1"
        return chosen.get("spark.driver.host") or socket.gethostbyname(socket.gethostname())

    def _user_settings(self) -> dict[str, str]:
        submitted = {**self._conf, **({"spark.master": self._master} if self._master else {})}
        return settings.user_settings(submitted, gateway.spark_home())

    def start(self) -> SupervisedThread:
        """Open the context in the background, unless it is open or being opened.

        :return: the thread that opens it; once it has ended, ``fatal_error`` is why Spark did not start.
        """
        with self._lock:
            opening = self._opening
            if opening is None or not (opening.is_alive() or self._is_open()):
                opening = self._opening = SupervisedThread("spark_start", "spark start", self._open)
                opening.start()
            return opening

    def _is_open(self) -> bool:
        return self._submitter is not None and session.alive(self._context)

    def _open(self) -> None:
        """Start Spark, in a thread, without the lock that :meth:`close` takes: it takes seconds."""
        if self._submitter is not None:
            session.close_context(self._context)  # its JVM died
            self._submitter = None
        # of a master that the user chose only the slots needed now are required
        slots = self._slots + (0 if "spark.master" in self._user_settings() else SPARE_SLOTS)
        context = session.open_context(self._master, slots, self._state_dir, self._conf, _MODULES)
        with self._lock:
            if not self._closed:
                self._context, self._total, self._submitter = context, slots, jobs.Submitter(context)
                return
        session.close_context(context)

    def missing(self, served: Sequence[Subscription]) -> int:
        """Return how many task slots these subscriptions may want beyond those that Spark was opened with."""
        return 0 if self._total is None else max(0, sum(map(slots_of, served)) - self._total)

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
        asked, submitter = self._asked, self._submitter
        if asked and submitter is not None:
            self._asked = set()
            master, registered = submitter.master, submitter.slots()
            self._answers = {job: Slots(job is not None and job.runs(), registered, master) for job in asked}

    def rotate_log(self) -> None:
        """Keep Spark's log below its limit."""
        gateway.rotate(self._state_dir)

    def close(self) -> None:
        """Stop Spark. A start under way is not waited for: the JVM ends with this process, or as soon as it is up."""
        with self._lock:
            self._closed = True
            submitter, self._submitter = self._submitter, None
        if submitter is not None:
            session.close_context(self._context)


def slots_of(sub: Subscription) -> int:
    """Count the tasks that one subscription runs at once at most: apply, and chunks of each table that synchronizes."""
    return 1 + sub.max_sync_workers * sub.copy_workers
