"""Run functions as Spark jobs from threads, and bring their exceptions home as themselves.

Each item is one job of one task. In a job of many tasks the death of one python worker would abort the whole job and
every result with it, and its end would only be seen when the slowest task had ended.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import subprocess
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkContext
from pyspark.errors import PySparkException

from pgsub.common.errors import Directive, InternalError, PgsubError, SparkUnusable, TimeoutExpired, WorkerDied
from pgsub.common.machine.out_of_resources import out_of_resources
from pgsub.common.threads import SupervisedThread
from pgsub.spark import deployment, settings
from pgsub.spark.contexts import ended, is_guest, present
from pgsub.spark.executors import MasterQuestion, registered_slots
from pgsub.spark.jvm_flags import OUT_OF_MEMORY

Item = TypeVar("Item")
Result = TypeVar("Result")

_numbers = itertools.count(1)

#: In memory or ``spark.local.dir`` of the driver's or an executor's machine: a job that failed by it may succeed later.
_NO_ROOM = ("No space left on device", "OutOfMemoryError", "Failed to create local dir")

_DYING_SECONDS = 2.0  #: that a process without connections may take to end


class JobCancelled(PgsubError):
    """The job was cancelled before it ended."""

    directive = Directive.RETRY


class Job(Generic[Item, Result]):
    """A running job; made by :meth:`Submitter.submit`."""

    def __init__(
        self,
        context: SparkContext,
        name: str,
        function: Callable[[Item], Result],
        items: Sequence[Item],
        guard: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self._guard = guard
        self.group = f"pgsub {next(_numbers)} {name}"
        self._context = context
        self._function = function
        self._items = items
        self._next = iter(range(len(items)))
        self._results: dict[int, Result] = {}
        self._error: BaseException | None = None
        self._cancelled = False
        self._lock = threading.Lock()
        self._threads: list[SupervisedThread] = []

    def start(self, slots: int) -> None:
        """Begin; called once, by the submitter.

        Threads are plain ones: pyspark's InheritableThread calls the JVM before its target, where a dead JVM would
        end it without a word, and there is nothing to inherit.

        :param slots: tasks that run at once.
        """
        self._threads = [
            SupervisedThread("job", f"{self.group} {number}", self._work)
            for number in range(min(slots, len(self._items)))
        ]
        for thread in self._threads:
            thread.try_start()

    def _work(self) -> None:
        """Run item after item, until there is none or one has failed."""
        while (number := self._take()) is not None:
            try:
                result = self._run(self._items[number])
            except BaseException as error:
                with self._lock:
                    self._error = self._error or error
                return
            with self._lock:
                self._results[number] = result

    def _take(self) -> int | None:
        with self._lock:
            if self._error is not None:
                return None
            if self._cancelled:
                self._error = JobCancelled(f'job "{self.name}" was cancelled')
                return None
            return next(self._next, None)

    def _run(self, item: Item) -> Result:
        context = self._context
        try:
            context.setJobGroup(self.group, self.name, interruptOnCancel=True)
            # FAIR is between pools, not inside one: a pool for each kind of job, for Spark never frees one
            context.setLocalProperty("spark.scheduler.pool", self.name.partition(" ")[0])
            context.setLocalProperty("callSite.short", self.name)
            context.addJobTag("pgsub")
            # the item goes with the task: parallelize() would write it to a file, for which there may be no room
            # compressed: a copy of 1 TB has thousands of pieces, which are alike
            task = partial(_run_task, self._function, self._guard, zlib.compress(pickle.dumps(item), 1))
            [outcome] = context.parallelize(range(1), 1).mapPartitions(task).collect()
        except (Py4JError, PySparkException, OSError, EOFError, AttributeError, pickle.PicklingError) as error:
            raise self._failure(error) from None  # PySparkException: what a SparkSession makes of the others
        succeeded, value = pickle.loads(outcome)
        if not succeeded:
            raise value
        result: Result = value
        return result

    def _failure(self, error: Exception) -> PgsubError:
        if self._cancelled:
            return JobCancelled(f'job "{self.name}" was cancelled')
        if (how := ended(self._context)) is not None:
            return _ended(self._context, how, f'while job "{self.name}" ran')
        text = str(error.java_exception.getMessage()) if isinstance(error, Py4JJavaError) else str(error)
        detail = deployment.telling_lines(text)
        if any(words in text for words in _NO_ROOM):
            return WorkerDied(f'Spark had no room for job "{self.name}"', detail=detail)
        if "Python worker exited unexpectedly" in text or "ExecutorLostFailure" in text:
            return WorkerDied(f'the worker process of job "{self.name}" died', detail=detail)
        if unusable := deployment.failure(text, self._context.master, settings.is_local(self._context.master)):
            return unusable
        if deployment.passes(text):
            return WorkerDied(f'job "{self.name}" was ended by Spark', detail=detail)
        if isinstance(error, Py4JJavaError) and not deployment.of_python(text):
            return SparkUnusable(f'job "{self.name}" failed in Spark', detail=detail)
        return InternalError(f'job "{self.name}" failed in Spark', detail=detail)

    def runs(self) -> bool:
        """Return whether an executor runs a task of the job; False where they wait for a slot, or Spark is gone."""
        try:
            tracker = self._context.statusTracker()
            infos = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(self.group)]
            stages = [tracker.getStageInfo(stage) for info in infos if info is not None for stage in info.stageIds]
        except (Py4JError, PySparkException, OSError, AttributeError):
            return False
        return any(stage is not None and stage.numActiveTasks > 0 for stage in stages)

    def done(self) -> bool:
        """Return whether nothing of the job runs any more in this process."""
        return not any(thread.is_alive() for thread in self._threads)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the job is done.

        :param timeout: seconds; None for ever.
        :return: whether it is.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return self.done()

    def result(self, timeout: float | None = None) -> list[Result]:
        """Wait for the end: the results in the order of the items, or the first exception that a task raised.

        After a failure no further item starts; those that run are waited for.

        :param timeout: seconds; None for ever.
        :raises TimeoutExpired: where the job still runs then.
        :raises WorkerDied: where a process died under a task.
        :raises JobCancelled: after :meth:`cancel`.
        :raises SparkUnusable: where Spark itself failed in a way that no retry may mend.
        :raises InternalError: if a task raised another exception, with its traceback.
        """
        if not self.wait(timeout):
            raise TimeoutExpired(f'job "{self.name}" still runs')
        death = next((thread.fatal_error for thread in self._threads if thread.fatal_error is not None), None)
        if self._error is not None or death is not None:
            raise self._error or death or AssertionError
        return [self._results[number] for number in range(len(self._items))]

    def cancel(self) -> None:
        """Start no further item and abandon those that run.

        The driver is free at once; Spark kills the python function some seconds later and without running its
        ``finally``, and until then it can still commit: only fencing makes that harmless.
        """
        with self._lock:
            self._cancelled = True
        with contextlib.suppress(RuntimeError):  # no thread to spare; a JVM that hangs holds nobody up
            SupervisedThread("job", f"{self.group} cancel", self._tell_spark).start()

    def _tell_spark(self) -> None:
        with contextlib.suppress(Py4JError, PySparkException, OSError, AttributeError):  # the JVM is gone, and the job
            self._context._jsc.sc().cancelJobGroupAndFutureJobs(self.group)


def ui_of(context: SparkContext) -> str | None:
    """Return where Spark's UI is; None where there is none, or Spark is gone."""
    try:
        return context.uiWebUrl
    except (Py4JError, PySparkException, OSError, AttributeError):
        return None


class Submitter:
    """A submitter of functions in a Spark context.

    :param context: of :func:`pgsub.spark.session.open_context`.
    :param guard: called in every task before its item is read; what it raises is the task's.
    """

    def __init__(self, context: SparkContext, guard: Callable[[], None] | None = None) -> None:
        self._context = context
        self._guard = guard
        self._question = MasterQuestion(context, own=not is_guest(context))

    @property
    def master(self) -> str:
        """The master that the context was opened with."""
        return str(self._context.master)

    def slots(self) -> int:
        """Return how many tasks the executors that are registered run at once; 0 where Spark is gone."""
        try:
            return registered_slots(self._context)
        except (Py4JError, PySparkException, OSError, AttributeError):
            return 0

    def forgotten(self) -> bool:
        """Return whether the master has forgotten the application (:class:`pgsub.spark.executors.MasterQuestion`)."""
        with contextlib.suppress(Py4JError, PySparkException, OSError, AttributeError):
            return self._question.forgotten()
        return False

    def submit(
        self, name: str, function: Callable[[Item], Result], items: Sequence[Item], slots: int | None = None
    ) -> Job[Item, Result]:
        """Run a function on each item, each in a task of its own.

        :param name: for logs and Spark's pages; it must not hold anything secret.
        :param function: of a module that executors can import.
        :param items: what it is called with; they are pickled.
        :param slots: how many run at once, all unless given.
        :raises WorkerDied: where the context has ended already.
        """
        if not present(self._context):
            how = ended(self._context) or "the Spark context was stopped"
            raise _ended(self._context, how, f'before job "{name}" began')
        job = Job(self._context, name, function, items, self._guard)
        job.start(len(items) if slots is None else max(1, slots))
        return job


def _ended(context: SparkContext, how: str, when: str) -> WorkerDied:
    """Return the error of a job whose context has ended, as :func:`pgsub.spark.contexts.ended` has it."""
    message = f"{how} {when}"
    process, code = context._gateway.proc, None
    if process is not None and how.endswith(" died"):
        with contextlib.suppress(subprocess.TimeoutExpired):  # its connections end before it does
            code = process.wait(_DYING_SECONDS)
    if code != OUT_OF_MEMORY:
        return WorkerDied(message)
    hint = "It starts again by itself; if that repeats itself, give it more memory.\n--conf spark.driver.memory=1g"
    return WorkerDied(message, detail="It ran out of memory.", hint=hint)


def _run_task(
    function: Callable[[Any], Any], guard: Callable[[], None] | None, item: bytes, _: Iterable[Any]
) -> list[bytes]:
    """Run an item in the python worker; an exception is a result, too, or Spark would turn it into text."""
    try:
        if guard is not None:
            guard()
        return [pickle.dumps((True, function(pickle.loads(zlib.decompress(item)))))]
    except PgsubError as error:
        return [pickle.dumps((False, error))]
    except BaseException as error:
        if (lack := out_of_resources(error)) is not None:
            return [pickle.dumps((False, lack))]
        text = "".join(traceback.format_exception(error)).strip()
        message = f"{type(error).__name__} in a task: {error}".partition("\n")[0]
        return [pickle.dumps((False, InternalError(message, detail=text)))]
