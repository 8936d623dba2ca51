"""Threads whose end is noticed: every thread of launcher and workers is one of these.

A thread keeps the exception that ended it. Its owner checks for that instead of waiting for ever, and restarts a
thread that must live as long as the owner.
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

#: Seconds in which a thread must begin: one that finds no memory to begin with never says so.
BEGIN_SECONDS = 30.0


class _Begun(threading.Event):
    """The event that ``Thread.start`` waits for without a limit (python/cpython, ``Lib/threading.py``)."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the event, but not for ever.

        :return: whether it was set.
        """
        return super().wait(BEGIN_SECONDS if timeout is None else timeout)


class SupervisedThread(threading.Thread):
    """A daemon thread that keeps what ended it.

    :param kind: names the failpoint ``thread.<kind>``, at which a test ends it.
    :param name: as debuggers show it.
    :param body: what it does; a subclass overrides :meth:`work` instead.
    :param on_death: called in the thread when an exception ends it, to wake those who wait for it.
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
        self._claim = threading.Lock()  #: taken by the thread when it runs, or by who has given it up

    def start(self) -> None:
        """Start the thread.

        :raises RuntimeError: it cannot be started, in the interpreter's words: or it has not begun for want of memory.
        """
        super().start()
        # guard: the wait for a thread to start is limited
        if not self._begun.is_set() and self._claim.acquire(blocking=False):
            raise RuntimeError(NO_THREAD)

    def try_start(self) -> bool:
        """Start the thread if the machine has one to spare; if not, it counts as ended by what is lacking.

        :return: whether it was started.
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
        """Wait for the end, as of :class:`threading.Thread`; one that could not be started has ended."""
        if self._death is None or self._begun.is_set():
            super().join(timeout)

    def run(self) -> None:
        """Run the thread, unless it was given up."""
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
    """An event that the handler of a signal may set.

    A handler runs between two instructions of the main thread, which may be inside a wait for this very event and hold
    its lock: the lock of a plain event would never come free. A signal that comes just before the main thread falls
    asleep does not wake it, so it waits for moments only.
    """

    def __init__(self) -> None:
        super().__init__()
        self._cond = threading.Condition(threading.RLock())


class CallTimedOut(Exception):
    """The call has not ended in time, or one before it has not."""


class TimedExecutor:
    """A thread for calls that may hang, one after the other; a caller waits for a while only.

    :class:`concurrent.futures.ThreadPoolExecutor` would keep the process from ending while a call hangs.

    :param patience: seconds that a caller waits.
    """

    def __init__(self, kind: str, patience: float) -> None:
        self._kind = kind
        self._patience = patience
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._late: Future[Any] | None = None  #: of a call that a caller gave up on
        self._thread: SupervisedThread | None = None
        self._lock = threading.Lock()

    def run(self, work: Callable[[], Result]) -> Result:
        """Run a call in the thread and return its result.

        :raises CallTimedOut: not within the patience. A call that has not begun is canceled, one that has ends
            unnoticed; until then every other call is refused at once.
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
        """End the thread once every call has ended; nothing may be called any more."""
        self._calls.put(None)
