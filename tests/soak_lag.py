"""How far two subscribers are behind, ten times a second: the age of the oldest commit that a target does not show."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import psycopg
from fix_servers import Database

INTERVAL = 0.1
TABLE = "CREATE TABLE beat (n bigint PRIMARY KEY)"
#: Seconds without work after a drained burst in which lag must not come back.
QUIET = 2.0


@dataclass
class Side:
    """One target: beats that it does not show yet, as number and moment of their commit."""

    database: Database
    connection: psycopg.Connection | None = None
    waiting: deque[tuple[int, float]] = field(default_factory=deque)
    seen: int = 0

    def lag(self, clock: float) -> float:
        """Seconds."""
        return clock - self.waiting[0][1] if self.waiting else 0.0


class Lag(threading.Thread):
    """Commits a row every :data:`INTERVAL` seconds and looks which of them the targets show.

    :param targets: by the name of their subscriber.
    :ivar series: ``(seconds since the start, lag by subscriber)``; a target that is away has the lag of its last look.
    """

    def __init__(self, publisher: Database, targets: Mapping[str, Database]) -> None:
        super().__init__(name="lag", daemon=True)
        self._publisher = publisher
        self._source: psycopg.Connection | None = None
        self._sides = {name: Side(database) for name, database in targets.items()}
        self._number = 0
        self._stopping = threading.Event()
        self._begun = time.monotonic()
        self.series: list[tuple[float, dict[str, float]]] = []

    def now(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._begun

    def run(self) -> None:
        """Thread body."""
        due = time.monotonic()
        while not self._stopping.wait(max(0.0, due - time.monotonic())):
            due = max(due + INTERVAL, time.monotonic())
            self._beat()
            for side in self._sides.values():
                self._look(side)
            clock = time.monotonic()
            lags = {name: round(side.lag(clock), 3) for name, side in self._sides.items()}
            self.series.append((round(clock - self._begun, 3), lags))
        for connection in (self._source, *(side.connection for side in self._sides.values())):
            if connection is not None:
                connection.close()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        self.join()

    def _beat(self) -> None:
        self._number += 1  # of one that failed nobody knows whether it is there; it is not waited for
        try:
            self._source = _open(self._source, self._publisher)
            self._source.execute("INSERT INTO beat VALUES (%s)", (self._number,))
        except psycopg.OperationalError:
            self._source = _closed(self._source)
            return
        for side in self._sides.values():
            side.waiting.append((self._number, time.monotonic()))

    def _look(self, side: Side) -> None:
        try:
            side.connection = _open(side.connection, side.database)
            row = side.connection.execute("SELECT coalesce(max(n), 0) FROM beat").fetchone()
        except psycopg.OperationalError:
            side.connection = _closed(side.connection)
            return
        side.seen = row[0] if row else 0
        while side.waiting and side.waiting[0][0] <= side.seen:
            side.waiting.popleft()

    # what is asked of it

    def vanish(self, check: Callable[[], None], limit: float) -> dict[str, float]:
        """Wait until all that is committed now is visible everywhere.

        :param check: called again and again; raises where waiting is useless.
        :param limit: seconds.
        :return: seconds until each side was there.
        """
        begun, last = time.monotonic(), self._number + 1  # one that is sent after this moment
        found: dict[str, float] = {}
        while len(found) < len(self._sides):
            assert time.monotonic() < begun + limit, f"lag does not vanish: {self.series[-1]}, there: {found}"
            check()
            for name, side in self._sides.items():
                if side.seen > last:
                    found.setdefault(name, round(time.monotonic() - begun, 3))
            time.sleep(INTERVAL / 2)
        return found

    def behaviour(self, begun: float, drained: Mapping[str, float], ended: float) -> dict[str, dict[str, float]]:
        """What became of the lag of a burst.

        :param begun: when it began, as :meth:`now`; ``ended`` when its last transaction was committed.
        :param drained: from :meth:`vanish`.
        :return: for each side seconds: the highest lag, the time until it vanished, the highest rise over what it had
            fallen to while nobody wrote, and that after all of the burst was there.
        """
        found = {}
        for name, seconds in drained.items():
            during = [lags[name] for at, lags in self.series if begun <= at <= ended + seconds]
            falling = [lags[name] for at, lags in self.series if ended <= at <= ended + seconds]
            after = [lags[name] for at, lags in self.series if at > ended + seconds + INTERVAL]
            figures = (max(during, default=0.0), seconds, _rise(falling), _rise(after))
            found[name] = dict(zip(("highest", "vanished", "rise", "afterwards"), figures))
        return found


def _rise(series: list[float]) -> float:
    """The most that it stands above what it was before."""
    lowest, highest = float("inf"), 0.0
    for value in series:
        lowest = min(lowest, value)
        highest = max(highest, value - lowest)
    return round(highest, 3)


def _open(connection: psycopg.Connection | None, database: Database) -> psycopg.Connection:
    return connection if connection is not None else database.connect(connect_timeout="5")


def _closed(connection: Any) -> None:
    if connection is not None:
        connection.close()
