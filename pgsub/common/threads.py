"""Threads that do not end unnoticed: every thread of launcher and workers is one of these.

What ends a thread is kept, and its owner, who waits for what the thread does, asks for it instead of waiting for ever.
A thread that is to live as long as its owner is started again by him.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from pgsub.common import failpoints
from pgsub.common.errors import PgsubError, ThreadDied

Result = TypeVar("Result")


class SupervisedThread(threading.Thread):
    """A daemon thread that keeps what ended it.

    :param kind: names the failpoint ``thread.<kind>``, at which a test ends it.
    :param name: as debuggers show it.
    :param body: what it does; a subclass overrides :meth:`work` instead.
    :param on_death: called in the thread where it ends by an exception: to wake who waits for what will not come.
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

    def run(self) -> None:
        """Thread body."""
        try:
            self.checkpoint()
            self.work()
        except BaseException as error:
            self._death = error
            self._on_death()

    def work(self) -> None:
        """What the thread does."""
        if self._body is not None:
            self._body()

    def checkpoint(self) -> None:
        """Marks a place where a test may end the thread: its start, and each turn of its loop."""
        failpoints.point(f"thread.{self.kind}")

    @property
    def fatal_error(self) -> PgsubError | None:
        """What ended it; None while it runs and where it ended by itself."""
        if self._death is None or isinstance(self._death, PgsubError):
            return self._death
        return ThreadDied(f'thread "{self.name}" was ended by {type(self._death).__name__}: {self._death}')


class CallTimedOut(Exception):
    """What was asked of a clerk is not done yet, or something before it is not."""


class _Order(Generic[Result]):
    """Something to be done, and what came of it."""

    def __init__(self, work: Callable[[], Result]) -> None:
        self._work = work
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._begun = self._dropped = False
        self._result: Result | None = None
        self._error: Exception | None = None

    def carry_out(self) -> None:
        """Do it, unless nobody waits for it any more."""
        with self._lock:
            if self._dropped:
                return
            self._begun = True
        try:
            self._result = self._work()
        except Exception as error:
            self._error = error
        self._ended.set()

    def wait(self, patience: float) -> bool:
        """Whether it was done in time."""
        return self._ended.wait(patience)

    def drop(self) -> bool:
        """Leave it undone; whether it had not begun."""
        with self._lock:
            self._dropped = True
            return not self._begun

    def result(self) -> Result:
        """What came of it."""
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]


class TimedExecutor:
    """Does for others what may hang, one after the other in a thread of its own: they wait for a while only.

    :param kind: see :class:`SupervisedThread`.
    """

    def __init__(self, kind: str, patience: float) -> None:
        self._kind = kind
        self._patience = patience
        self._orders: queue.SimpleQueue[_Order[Any] | None] = queue.SimpleQueue()
        self._late: _Order[Any] | None = None  #: somebody has stopped to wait for it
        self._thread: SupervisedThread | None = None
        self._lock = threading.Lock()

    def do(self, work: Callable[[], Result]) -> Result:
        """Have it done, and give what came of it.

        :raises CallTimedOut: not within the patience: it is left undone, or comes to its end unheard if it had begun.
            As long as it has not, whoever else asks is told at once.
        """
        late = self._late
        if late is not None and not late.wait(0):
            raise CallTimedOut
        order = _Order(work)
        thread = self._employed()
        self._orders.put(order)
        deadline = time.monotonic() + self._patience
        while not order.wait(min(0.1, self._patience)):
            if time.monotonic() >= deadline or not thread.is_alive():
                if not order.drop() and thread.is_alive():
                    self._late = order
                raise CallTimedOut
        return order.result()

    def _employed(self) -> SupervisedThread:
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = SupervisedThread(self._kind, self._kind, self._work)
                self._thread.start()
            return self._thread

    def _work(self) -> None:
        thread = self._thread
        while (order := self._orders.get()) is not None:
            if thread is not None:
                thread.checkpoint()
            order.carry_out()

    def close(self) -> None:
        """End the thread once everything is done; nothing may be asked any more."""
        self._orders.put(None)
