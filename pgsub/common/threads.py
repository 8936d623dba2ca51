"""Threads whose end is noticed; every thread of launcher and workers is one of these.

A thread keeps the exception that ended it. Its owner checks for it instead of waiting forever, and restarts a thread
that must live as long as the owner.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from pgsub.common import failpoints
from pgsub.common.errors import PgsubError, ThreadDied
from pgsub.common.machine.out_of_resources import NO_THREAD, out_of_resources

Result = TypeVar("Result")

#: Seconds for a thread to begin; one that lacks the memory to begin never says so.
BEGIN_SECONDS = 30.0


class _Begun(threading.Event):
    """The event that ``Thread.start`` waits for without a limit (python/cpython, ``Lib/threading.py``)."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the event, but not forever; return whether it was set."""
        return super().wait(BEGIN_SECONDS if timeout is None else timeout)


class SupervisedThread(threading.Thread):
    """A daemon thread that keeps the exception that ended it.

    :param kind: name of the failpoint ``thread.<kind>``, at which a test ends it.
    :param name: name shown by debuggers.
    :param body: the work; a subclass overrides :meth:`work` instead.
    :param on_death: called in the thread when an exception ends it, to wake up those who wait for it.
    """

    def __init__(
        self,
        kind: str,
        name: str,
        body: Callable[[], object] | None = None,
        *,
        on_death: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.kind = kind
        self._body = body
        self._on_death = on_death
        self._death: BaseException | None = None
        self._begun = vars(self)["_started"] = _Begun()
        self._claim = threading.Lock()  #: taken by the thread when it runs, or by the caller that gave it up

    def start(self) -> None:
        """Start the thread.

        :raises RuntimeError: it cannot be started, in the interpreter's words, or has not begun for lack of memory.
        """
        super().start()
        # guard: the wait for a thread to start is limited
        if not self._begun.is_set() and self._claim.acquire(blocking=False):
            raise RuntimeError(NO_THREAD)

    def try_start(self) -> bool:
        """Start the thread if the machine has the resources; return whether it was started.

        If not, it counts as ended by that lack.
        """
        try:
            self.start()
        except (RuntimeError, MemoryError) as error:
            self._death = out_of_resources(error)
            if self._death is None:
                raise
            return False
        return True

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end, as in :class:`threading.Thread`; a thread that could not be started has ended."""
        if self._death is None or self._begun.is_set():
            super().join(timeout)

    def run(self) -> None:
        """Run the thread unless it was given up."""
        if not self._claim.acquire(blocking=False):
            return
        try:
            self.checkpoint()
            self.work()
        except BaseException as error:
            self._death = error
            self._on_death()

    def work(self) -> None:
        """Do the thread's work."""
        if self._body is not None:
            self._body()

    def checkpoint(self) -> None:
        """Mark a place where a test may end the thread: its start, and each turn of its loop."""
        failpoints.point(f"thread.{self.kind}")

    @property
    def fatal_error(self) -> PgsubError | None:
        """The error that ended the thread; None while it runs, and if it returned."""
        if self._death is None or isinstance(self._death, PgsubError):
            return self._death
        return ThreadDied(f'thread "{self.name}" was ended by {type(self._death).__name__}: {self._death}')


class SignalEvent(threading.Event):
    """An event that a signal handler may set.

    A handler runs between two instructions of the main thread, which may be inside a wait for this event and hold its
    lock: a plain event would deadlock. A signal just before the main thread sleeps does not wake it up, so it must wait
    only briefly.
    """

    def __init__(self) -> None:
        super().__init__()
        self._cond = threading.Condition(threading.RLock())


class CallTimedOut(Exception):
    """A call that has not ended in time, or that is refused because an earlier one has not."""


class TimedExecutor:
    """A thread for calls that may hang, one after another; callers wait for a limited time.

    With :class:`concurrent.futures.ThreadPoolExecutor`, a hanging call would keep the process from ending.

    :param patience: maximum wait of a caller, in seconds.
    """

    def __init__(self, kind: str, patience: float) -> None:
        self._kind = kind
        self._patience = patience
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._late: Future[Any] | None = None  #: a call that its caller gave up
        self._thread: SupervisedThread | None = None
        self._lock = threading.Lock()

    def run(self, work: Callable[[], Result]) -> Result:
        """Run a call in the thread and return its result.

        :raises CallTimedOut: not within the patience. A call that has not begun is canceled. One that has begun ends
            unnoticed, and until then every other call is refused.
        """
        if self._late is not None and not self._late.done():
            raise CallTimedOut
        future: Future[Result] = Future()
        thread = self._started()
        self._calls.put((future, work))
        deadline = time.monotonic() + self._patience
        while not wait([future], min(0.1, self._patience)).done:
            if time.monotonic() >= deadline or not thread.is_alive():
                if not future.cancel() and thread.is_alive():
                    self._late = future
                raise CallTimedOut
        return future.result()

    def _started(self) -> SupervisedThread:
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = SupervisedThread(self._kind, self._kind, self._work)
                self._thread.start()
            return self._thread

    def _work(self) -> None:
        """Run the thread."""
        thread = self._thread
        while (call := self._calls.get()) is not None:
            if thread is not None:
                thread.checkpoint()
            future, work = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

    def close(self) -> None:
        """End the thread after all calls; it must not be used any more."""
        self._calls.put(None)
