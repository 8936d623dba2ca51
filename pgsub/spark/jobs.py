"""Runs functions as Spark jobs from threads, and raises their exceptions unchanged.

Each item is a job with one task. In a job with many tasks, the death of one python worker would abort the job and lose
every result. Moreover, its end would be noticed only after the slowest task.
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
from pgsub.common.machine.out_of_resources import no_thread_in, out_of_resources
from pgsub.common.threads import SupervisedThread
from pgsub.spark import contexts, deployment, settings
from pgsub.spark.contexts import ended, is_guest, present
from pgsub.spark.executors import MasterQuestion, registered_slots
from pgsub.spark.jvm.flags import OUT_OF_MEMORY

Item = TypeVar("Item")
Result = TypeVar("Result")

_numbers = itertools.count(1)

#: Texts of a lack of memory, or of space in ``spark.local.dir``, on any machine. Such a job may succeed later.
_NO_ROOM = ("No space left on device", "OutOfMemoryError", "Failed to create local dir")

#: Texts of a driver whose ``spark.local.dir`` was removed. DiskBlockManager makes folders in its own, but not its own.
_HOMELESS = ("Task serialization failed", "NoSuchFileException", "blockmgr-")

_DYING_SECONDS = 2.0  #: seconds that a process may take to end after its connections


class JobCancelled(PgsubError):
    """The job was cancelled before it ended."""

    directive = Directive.RETRY


class Job(Generic[Item, Result]):
    """A running job, made by :meth:`Submitter.submit`."""

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
        self._results: dict[int, Result] = {}
        self._error: BaseException | None = None
        self._cancelled = False
        self._lock = threading.Lock()
        self._threads = [
            SupervisedThread("job", f"{self.group} {number}", partial(self._work, number))
            for number in range(len(items))
        ]

    def start(self) -> None:
        """Start the job. The submitter calls this once.

        Plain threads are used, because pyspark's InheritableThread calls the JVM before its target. A dead JVM would
        end it silently, and there is nothing to inherit.
        """
        for thread in self._threads:
            thread.try_start()

    def _work(self, number: int) -> None:
        try:
            self._results[number] = self._run(self._items[number])
        except BaseException as error:
            with self._lock:
                self._error = self._error or error

    def _run(self, item: Item) -> Result:
        context = self._context
        if self._cancelled:
            raise JobCancelled(f'job "{self.name}" was cancelled')
        try:
            context.setJobGroup(self.group, self.name, interruptOnCancel=True)
            # FAIR applies between pools. There is one pool for each kind of job, because Spark never frees pools.
            context.setLocalProperty("spark.scheduler.pool", self.name.partition(" ")[0])
            context.setLocalProperty("callSite.short", self.name)
            context.addJobTag("pgsub")
            # The item is part of the task, because parallelize() would write it to a file, for which there may be no
            # space. It is compressed, because a copy of 1 TB has thousands of similar items.
            task = partial(_run_task, self._function, self._guard, zlib.compress(pickle.dumps(item), 1))
            # guard: a job is submitted though somebody has removed old files from Spark's local folder
            contexts.have_folder(context)
            [outcome] = context.parallelize(range(1), 1).mapPartitions(task).collect()
        except (Py4JError, PySparkException, OSError, EOFError, AttributeError, pickle.PicklingError) as error:
            raise self._failure(error) from None  # PySparkException: a SparkSession converts the others to it
        succeeded, value = pickle.loads(outcome)
        if not succeeded:
            raise value
        result: Result = value
        return result

    def _failure(self, error: Exception) -> PgsubError:
        if self._cancelled:
            return JobCancelled(f'job "{self.name}" was cancelled')
        text = str(error.java_exception.getMessage()) if isinstance(error, Py4JJavaError) else str(error)
        if self._context in contexts.own and all(words in text for words in _HOMELESS):
            contexts.homeless.add(self._context)
        if (how := ended(self._context)) is not None:
            return _ended(self._context, how, f'while job "{self.name}" ran')
        detail = deployment.telling_lines(text)
        if any(words in text for words in _NO_ROOM):
            return WorkerDied(f'Spark had no room for job "{self.name}"', detail=detail)
        local = settings.is_local(self._context.master)
        if local and no_thread_in(text):  # limits of other machines are not known
            return deployment.not_started(f'job "{self.name}" failed in Spark', detail)
        if "Python worker exited unexpectedly" in text or "ExecutorLostFailure" in text:
            return WorkerDied(f'the worker process of job "{self.name}" died', detail=detail)
        if unusable := deployment.failure(text, self._context.master, local):
            return unusable
        if deployment.passes(text):
            return WorkerDied(f'job "{self.name}" was ended by Spark', detail=detail)
        if isinstance(error, Py4JJavaError) and not deployment.of_python(text):
            return SparkUnusable(f'job "{self.name}" failed in Spark', detail=detail)
        return InternalError(f'job "{self.name}" failed in Spark', detail=detail)

    def runs(self) -> bool:
        """Return whether an executor runs a task of the job. False if tasks wait for a slot, or Spark is gone."""
        try:
            tracker = self._context.statusTracker()
            infos = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(self.group)]
            stages = [tracker.getStageInfo(stage) for info in infos if info is not None for stage in info.stageIds]
        except (Py4JError, PySparkException, OSError, AttributeError):
            return False
        return any(stage is not None and stage.numActiveTasks > 0 for stage in stages)

    def done(self) -> bool:
        """Return whether nothing of the job runs in this process any more."""
        return not any(thread.is_alive() for thread in self._threads)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the job is done.

        :param timeout: seconds, None for no limit.
        :return: whether it is done.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return self.done()

    def result(self, timeout: float | None = None) -> list[Result]:
        """Wait for the end. Return the results in the order of the items, or raise the first exception of a task.

        After a failure the other items are waited for.

        :param timeout: seconds, None for no limit.
        :raises TimeoutExpired: the job still runs.
        :raises WorkerDied: a process died during a task.
        :raises JobCancelled: :meth:`cancel` was called.
        :raises SparkUnusable: Spark failed in a way that retries may not fix.
        :raises InternalError: a task raised another exception, whose traceback it contains.
        """
        if not self.wait(timeout):
            raise TimeoutExpired(f'job "{self.name}" still runs')
        death = next((thread.fatal_error for thread in self._threads if thread.fatal_error is not None), None)
        if self._error is not None or death is not None:
            raise self._error or death or AssertionError
        return [self._results[number] for number in range(len(self._items))]

    def cancel(self) -> None:
        """Abandon the items.

        The driver is free at once. Spark kills the python function some seconds later, without running its ``finally``
        blocks. Until then it may still commit, which only fencing makes harmless.
        """
        self._cancelled = True
        with contextlib.suppress(RuntimeError):  # no thread to spare; a thread, because the JVM may hang
            SupervisedThread("job", f"{self.group} cancel", self._tell_spark).start()

    def _tell_spark(self) -> None:
        # the JVM has ended, and so has the job
        with contextlib.suppress(Py4JError, PySparkException, OSError, AttributeError):
            self._context._jsc.sc().cancelJobGroupAndFutureJobs(self.group)


def ui_of(context: SparkContext) -> str | None:
    """Return the address of Spark's UI, None if there is none, or Spark is gone."""
    try:
        return context.uiWebUrl
    except (Py4JError, PySparkException, OSError, AttributeError):
        return None


class Submitter:
    """A submitter of functions to a Spark context.

    :param context: from :func:`pgsub.spark.session.open_context`.
    :param guard: called in every task before its item is read. Its exceptions are the task's.
    """

    def __init__(self, context: SparkContext, guard: Callable[[], None] | None = None) -> None:
        self._context = context
        self._guard = guard
        self._question = MasterQuestion(context, own=not is_guest(context))

    @property
    def master(self) -> str:
        """The master with which the context was opened."""
        return str(self._context.master)

    def slots(self) -> int:
        """Return how many tasks the registered executors run at once, 0 if Spark is gone."""
        try:
            return registered_slots(self._context)
        except (Py4JError, PySparkException, OSError, AttributeError):
            return 0

    def forgotten(self) -> bool:
        """Return whether the master has forgotten the application (:class:`pgsub.spark.executors.MasterQuestion`)."""
        with contextlib.suppress(Py4JError, PySparkException, OSError, AttributeError):
            return self._question.forgotten()
        return False

    def submit(self, name: str, function: Callable[[Item], Result], items: Sequence[Item]) -> Job[Item, Result]:
        """Run a function on each item at once, each in its own task.

        :param name: for logs and Spark's web pages. It must not contain secrets.
        :param function: belongs to a module that executors can import.
        :param items: arguments of the function, which are pickled.
        :raises WorkerDied: the context has already ended.
        """
        if not present(self._context):
            how = ended(self._context) or "the Spark context was stopped"
            raise _ended(self._context, how, f'before job "{name}" began')
        job = Job(self._context, name, function, items, self._guard)
        job.start()
        return job


def _ended(context: SparkContext, how: str, when: str) -> WorkerDied:
    """Return the error of a job whose context has ended, see :func:`pgsub.spark.contexts.ended`."""
    message = f"{how} {when}"
    process, code = context._gateway.proc, None
    if process is not None and how.endswith(" died"):
        with contextlib.suppress(subprocess.TimeoutExpired):  # its connections end first
            code = process.wait(_DYING_SECONDS)
    if code != OUT_OF_MEMORY:
        return WorkerDied(message)
    hint = "It starts again by itself; if that repeats itself, give it more memory.\n--conf spark.driver.memory=1g"
    return WorkerDied(message, detail="It ran out of memory.", hint=hint)


def _run_task(
    function: Callable[[Any], Any], guard: Callable[[], None] | None, item: bytes, _: Iterable[Any]
) -> list[bytes]:
    """Run an item in the python worker. Exceptions are returned, because Spark would convert them to text."""
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
