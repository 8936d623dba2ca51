"""Sessions on both servers that see the two snapshots, and the threads that read pieces of tables with them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any, Self, TypeVar

import psycopg

from pgsub.reconcile.reading.read_rate import RateLimit
from pgsub.reconcile.reading.side import Side
from pgsub.reconcile.reading.source import Piece

Result = TypeVar("Result")
#: A session and its side.
Session = tuple[Side, psycopg.Connection]
#: Receives the number of blocks that were read on both servers, and their total.
Progress = Callable[[int, int], None]


#: Timeout of a request to cancel a statement, in seconds.
_CANCEL_SECONDS = 5.0


class Reading:
    """The blocks of one table that were read, and that are to be read as far as known.

    :ivar over: set when the others are not needed any more.
    """

    def __init__(self, told: Progress) -> None:
        self.over = threading.Event()
        self._told = told
        self._done = self._total = self._expected = 0

    def expect(self, blocks: int) -> None:
        """Set the total number of blocks, before they are added one by one."""
        self._expected = blocks

    def begin(self, blocks: int) -> None:
        """Add blocks that are to be read."""
        self._total += blocks

    def add(self, blocks: int) -> None:
        """Add blocks that were read."""
        self._done += blocks
        self._told(self._done, max(self._total, self._expected))


class Sessions:
    """A pool of sessions on both servers, each used by one thread at a time.

    :param sides: publisher and target.
    :param jobs: number of pieces that are read at the same time, each with a session on one server.
    :param rate: maximum bytes per second read from the tables of each server; None: no limit.
    """

    def __init__(self, sides: tuple[Side, Side], *, jobs: int, rate: int | None = None) -> None:
        self.sides = sides
        self.jobs = jobs
        self._limits = {side.name: RateLimit(rate) for side in sides}
        self._pool = ThreadPoolExecutor(jobs, thread_name_prefix="compare")
        self._free: dict[str, list[psycopg.Connection]] = {side.name: [] for side in sides}
        self._busy: set[psycopg.Connection] = set()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        for free in self._free.values():
            for connection in free:
                connection.close()

    def on(self, side: Side, work: Callable[[psycopg.Connection], Result]) -> Result:
        """Do work with a session that nobody else uses. A session that failed is not used again."""
        with self._lock:
            free = self._free[side.name]
            connection = free.pop() if free else None
        connection = side.connect() if connection is None else connection
        with self._lock:
            self._busy.add(connection)
        failed = True
        try:
            done = work(connection)
            failed = False
        finally:
            with self._lock:
                reusable = connection in self._busy and not failed  # a late cancel request may still hit it
                self._busy.discard(connection)
                if reusable:
                    self._free[side.name].append(connection)
            if not reusable:
                connection.close()
        return done

    def on_both(self, work: Callable[[Session, Session], Result]) -> Result:
        """Do work with a session on each side."""
        publisher, target = self.sides
        return self.on(
            publisher,
            lambda here: self.on(target, lambda there: work((publisher, here), (target, there))),
        )

    def each(self, work: Sequence[Callable[[], None]]) -> None:
        """Do pieces of work, some at a time. The first error or an interrupt ends all others."""
        for _ in self._completed([self._pool.submit(one) for one in work], threading.Event()):
            pass

    def blocks(self, side: Side) -> int:
        """Return the number of a table's blocks that one statement reads."""
        return self._limits[side.name].blocks

    def read(self, work: Sequence[tuple[Side, Piece, Callable[[], None]]], reading: Reading) -> None:
        """Read pieces as :meth:`each` does, within the rate limit."""
        reading.begin(sum(piece.blocks for _, piece, _ in work))
        begun = [self._pool.submit(self._read, *one, reading.over) for one in work]
        for blocks in self._completed(begun, reading.over):
            reading.add(sum(blocks))

    def _read(self, side: Side, piece: Piece, work: Callable[[], None], over: threading.Event) -> int:
        self._limits[side.name].wait(piece.blocks, over)
        if not over.is_set():
            work()
        return piece.blocks

    def _completed(self, work: Sequence[Future[Any]], over: threading.Event) -> Iterator[list[Any]]:
        """Yield results as they arrive. The first error or an interrupt ends all others.

        :param over: set in that case.
        """
        left = set(work)
        try:
            while left:
                done, left = wait(left, return_when=FIRST_EXCEPTION, timeout=0.2)
                yield [one.result() for one in done]
        except BaseException:
            over.set()
            self._cancel()
            raise
        finally:
            for one in left:
                one.cancel()
            wait(left)

    def _cancel(self) -> None:
        """Cancel the running statements. Their sessions are not used again."""
        with self._lock:
            running, self._busy = self._busy, set()
        for connection in running:
            with contextlib.suppress(psycopg.Error):
                connection.cancel_safe(timeout=_CANCEL_SECONDS)
