"""Sessions on both servers that see the two snapshots, and threads that read pieces of tables with them."""

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
#: A session, and on which side it is.
Session = tuple[Side, psycopg.Connection]
#: Told blocks of a table that are read on both servers, and how many there are to be read.
Progress = Callable[[int, int], None]


#: Seconds in which a statement that nobody wants any more is cancelled.
_CANCEL_SECONDS = 5.0


class Reading:
    """The blocks of one table that are read, and that are to be read as far as that is known.

    :ivar over: set when nobody wants the others any more.
    """

    def __init__(self, told: Progress) -> None:
        self.over = threading.Event()
        self._told = told
        self._done = self._total = self._expected = 0

    def expect(self, blocks: int) -> None:
        """Tell how many blocks are to be read in all, before each of them is added."""
        self._expected = blocks

    def begin(self, blocks: int) -> None:
        """Add blocks that are to be read."""
        self._total += blocks

    def add(self, blocks: int) -> None:
        """Add blocks that are read."""
        self._done += blocks
        self._told(self._done, max(self._total, self._expected))


class Sessions:
    """Sessions on both servers, each used by one thread at a time.

    :param sides: publisher and target.
    :param jobs: pieces that are read at the same time, each with a session on one server.
    :param rate: bytes a second that are read of the tables of each server; None for no limit.
    """

    def __init__(self, sides: tuple[Side, Side], *, jobs: int, rate: int | None = None) -> None:
        self._sides = sides
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

    @property
    def sides(self) -> tuple[Side, Side]:
        """Publisher and target."""
        return self._sides

    def on(self, side: Side, work: Callable[[psycopg.Connection], Result]) -> Result:
        """Work with a session that nobody else has; one that failed is not used again."""
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
                reusable = connection in self._busy and not failed  # what was cancelled may meet that later
                self._busy.discard(connection)
                if reusable:
                    self._free[side.name].append(connection)
            if not reusable:
                connection.close()
        return done

    def on_both(self, work: Callable[[Session, Session], Result]) -> Result:
        """Work with a session on each side."""
        publisher, target = self._sides
        return self.on(
            publisher,
            lambda here: self.on(target, lambda there: work((publisher, here), (target, there))),
        )

    def each(self, work: Sequence[Callable[[], None]]) -> None:
        """Do pieces of work, some at a time; the first error, or an interrupt, ends all others."""
        for _ in self._completed([self._pool.submit(one) for one in work], threading.Event()):
            pass

    def blocks(self, side: Side) -> int:
        """Return how many blocks of a table one statement is to read."""
        return self._limits[side.name].blocks

    def read(self, work: Sequence[tuple[Side, Piece, Callable[[], None]]], reading: Reading) -> None:
        """Read pieces as :meth:`each` works, no faster than is wanted."""
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
        """Yield results as they come; the first error, or an interrupt, ends all others.

        :param over: set then.
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
        """End the statements that run; their sessions are not used again."""
        with self._lock:
            running, self._busy = self._busy, set()
        for connection in running:
            with contextlib.suppress(psycopg.Error):
                connection.cancel_safe(timeout=_CANCEL_SECONDS)
