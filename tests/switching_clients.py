"""Clients that write through switchovers, reconnect as applications do, and keep a record of what was acknowledged."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import psycopg

#: What a table must have: an id that a sequence gives, a client, and the client's own number.
TABLE = "CREATE TABLE writes (id bigserial PRIMARY KEY, client integer NOT NULL, number integer NOT NULL)"
_INSERT = "INSERT INTO public.writes (client, number) VALUES (%s, %s) RETURNING id"


class Write(NamedTuple):
    """A write that was acknowledged."""

    client: int
    number: int
    id: int
    side: int  #: of the connection strings
    began: float
    ended: float


@dataclass
class Clients:
    """Threads that write; where one side refuses, the next is tried.

    :param conninfos: of both sides.
    :ivar acknowledged: in no order; ``faults`` what no application should meet.
    """

    conninfos: tuple[str, str]
    count: int = 3
    pause: float = 0.002
    options: str = ""
    acknowledged: list[Write] = field(default_factory=list)
    faults: list[Exception] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        """Make what each of them passes before it writes."""
        self._gates = [threading.Lock() for _ in range(self.count)]

    def __enter__(self) -> Clients:
        for client in range(self.count):
            self._threads.append(threading.Thread(target=self._work, args=(client,)))
            self._threads[-1].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    @contextlib.contextmanager
    def standing(self) -> Iterator[None]:
        """Let nobody write; every write that was begun is acknowledged, or never will be."""
        with contextlib.ExitStack() as stack:
            for gate in self._gates:
                stack.enter_context(gate)
            yield

    def _work(self, client: int) -> None:
        number, side = 0, 0
        session: psycopg.Connection | None = None
        while not self._stop.is_set():
            try:
                with self._gates[client]:
                    if session is None:
                        session = psycopg.connect(
                            self.conninfos[side], autocommit=True, options=self.options, connect_timeout=5
                        )
                    began, number = time.monotonic(), number + 1
                    id = self._write(session, client, number)
                    self.acknowledged.append(Write(client, number, id, side, began, time.monotonic()))
                self._stop.wait(self.pause)
            except (psycopg.errors.ReadOnlySqlTransaction, psycopg.OperationalError):
                with contextlib.suppress(Exception):
                    if session is not None:
                        session.close()
                session, side = None, 1 - side
                self._stop.wait(0.005)
            except Exception as error:
                self.faults.append(error)
                return
        if session is not None:
            session.close()

    def _write(self, session: psycopg.Connection, client: int, number: int) -> int:
        """Write once; return the id when that is acknowledged."""
        found = session.execute(_INSERT, (client, number)).fetchone()
        assert found is not None
        return int(found[0])

    def longest_gap(self, since: float) -> float:
        """Return the longest time in which nothing was acknowledged, in seconds."""
        times = sorted(one.ended for one in self.acknowledged if one.ended >= since)
        return max((b - a for a, b in itertools.pairwise(times)), default=0.0)

    def wrote_on(self, side: int, since: float) -> bool:
        """Return whether a write that began since then was acknowledged on a side."""
        return any(one.side == side and one.began >= since for one in self.acknowledged)

    def both_wrote(self, since: float, to: int) -> list[Write]:
        """Return writes on the side that was left that began after the other had acknowledged one.

        :param since: a moment before the right went to the side ``to``, and after it went elsewhere.
        """
        rows = [one for one in self.acknowledged if one.began >= since]
        first = min((one.ended for one in rows if one.side == to), default=None)
        return [] if first is None else [one for one in rows if one.side != to and one.began > first]


#: What a table of those that count must have besides, and a row for each of them.
COUNTS = "CREATE TABLE counts (client integer PRIMARY KEY, n bigint NOT NULL)"


@dataclass
class Counting(Clients):
    """Clients whose every transaction counts a row up, so that the next one shows what is lost, and that draw values.

    :ivar drawn: values that the sequence gave to nobody's row; ``counted`` what each client was told, in order.
    """

    drawn: list[int] = field(default_factory=list)
    counted: dict[int, list[int]] = field(default_factory=dict)

    def _write(self, session: psycopg.Connection, client: int, number: int) -> int:
        if number % 3 == 0:
            self.drawn.append(_first(session.execute("SELECT nextval('public.writes_id_seq')")))
        with session.transaction():
            id = super()._write(session, client, number)
            found = session.execute("UPDATE public.counts SET n = n + 1 WHERE client = %s RETURNING n", (client,))
            count = _first(found)
        self.counted.setdefault(client, []).append(count)
        return id

    def wrong(self) -> list[str]:
        """Say what shows in the clients' own records."""
        faults = [
            f"client {one}: {a}, then {b}"
            for one, told in self.counted.items()
            for a, b in itertools.pairwise(told)
            if b <= a
        ]
        given = Counter([*self.drawn, *(one.id for one in self.acknowledged)])
        return [*faults, *(f"{value} was given {times} times" for value, times in given.items() if times > 1)]


def _first(cursor: psycopg.Cursor) -> int:
    row = cursor.fetchone()
    assert row is not None
    return int(row[0])
