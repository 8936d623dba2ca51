"""One case: prepare both sides, run one after the other, compare both targets with the source."""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import psycopg

from benchmarks.arena import Arena, BenchmarkFailed, Database
from benchmarks.cases import Case, Latency, StreamedTransaction
from benchmarks.floor import Floor
from benchmarks.sampling import Sampler, Usage
from benchmarks.subscribers import Options, Subscriber

#: Seconds after which a side counts as stuck.
LIMIT = 600.0
_POLL = 0.003
_POLL_COPY = 0.02  #: the state of a thousand tables costs the target something
_INSERT = "INSERT INTO items VALUES (%s, 1, 'one', now(), 1.5)"
_NEWEST = "SELECT max(id) FROM items"


@dataclass(slots=True)
class SideResult:
    """How one side did.

    :ivar launched: seconds until its program, with its JVM, could be given work, once for many cases; not part of the
        figures.
    :ivar startup: seconds from being enabled to the beginning of the work, not part of ``time``.
    :ivar figures: seconds by name: ``time``, or ``p50``, ``p95``, ``p99`` and ``lag at the end``; ``per table`` is the
        share of one, with ``startup`` in it. Names that end in ``memory`` are bytes.
    """

    launched: float | None = None
    startup: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)
    usage: dict[str, Usage] = field(default_factory=dict)


@dataclass(slots=True)
class CaseResult:
    """Both sides of one case.

    :ivar floor: seconds that the walsender alone needs to send the backlog, None without one.
    :ivar failure: why the figures are worth nothing.
    """

    case: Case
    size: int
    options: Options
    order: tuple[str, ...]
    round: int = 0
    floor: float | None = None
    sides: dict[str, SideResult] = field(default_factory=dict)
    failure: str | None = None

    @property
    def floors(self) -> dict[str, float]:
        """What no subscriber of this kind can be faster than, in seconds by name; empty where that is not known.

        Target and Python work at it one process each: the CPU time of the run is what each would take if it never
        waited for the others. The walsender alone was measured by itself.
        """
        usage = self.sides.get("pgsub", SideResult()).usage
        if self.floor is None or self.failure or not {"target", "python workers"} <= usage.keys():
            return {}
        return {"walsender": self.floor, "target": usage["target"].cpu, "Python": usage["python workers"].cpu}

    def floor_ratio(self) -> float | None:
        """pgsub's time as a multiple of the slowest of its :attr:`floors`."""
        floors, time_taken = self.floors, self.sides.get("pgsub", SideResult()).figures.get("time")
        return time_taken / max(floors.values()) if floors and time_taken is not None else None

    def ratio(self, figure: str, to: str | None = None) -> float | None:
        """pgsub's time as a multiple of another side's.

        :param to: its name; None for what the case compares it with.
        """
        names = (to or self.case.baseline, "pgsub")
        native, pgsub = (self.sides.get(name, SideResult()).figures.get(figure) for name in names)
        return None if native is None or pgsub is None or not native else pgsub / native


def measure(
    arena: Arena, case: Case, size: int, options: Options, order: Sequence[Subscriber], *, floor: bool = True
) -> CaseResult:
    """Run one case on both sides, in the given order.

    :param floor: measure the walsender alone too, where there is a backlog.
    """
    result = CaseResult(case, size, options, tuple(side.name for side in order))
    try:
        source, targets = _create(arena, case, size, options, order)
        result.floor = _write_backlog(case, size, source, options, floor=floor)
        with arena.target_settings(case.target_settings):
            for side in order:
                arena.checkpoint()
                with _written(case, size, source):
                    result.sides[side.name] = _run(arena, case, size, side, source, targets[side.name])
            if case.writes:
                source.execute("INSERT INTO marker VALUES (1)")
                for target in targets.values():
                    _until(partial(_has_marker, target), "end")
        result.failure = _difference(case.tables(size), source, targets)
        for side in order:
            side.drop()
    except (BenchmarkFailed, psycopg.Error) as error:
        result.failure = str(error).strip()
    return result


def _create(
    arena: Arena, case: Case, size: int, options: Options, order: Sequence[Subscriber]
) -> tuple[Database, dict[str, Database]]:
    source, targets = arena.fresh([side.name for side in order])
    for database in (source, *targets.values()):
        case.schema(database, size)
    for database in targets.values():
        case.target(database, size)
    case.source(source, size)
    connection = arena.address(source, case.link)
    for side in order:
        side.create(connection, targets[side.name], case, options)
    return source, targets


def _write_backlog(case: Case, size: int, source: Database, options: Options, *, floor: bool) -> float | None:
    """Write what is to be caught up with, and measure how long the walsender alone needs for it."""
    if case.copy:
        return None
    measured = floor and not isinstance(case, Latency)
    walsender = Floor(source, binary=options.binary, streaming=options.streaming) if measured else None
    case.backlog(source, size)
    position = source.value("SELECT pg_current_wal_insert_lsn()")
    source.execute("INSERT INTO marker VALUES (1)")
    return walsender.drain(position, LIMIT) if walsender is not None else None


@contextlib.contextmanager
def _written(case: Case, size: int, source: Database) -> Iterator[None]:
    """Insert rows into random tables meanwhile, at the rate of the case."""
    if not case.writes:
        yield
        return
    ended, first, pause = threading.Event(), int(time.time() * 1000) << 16, 1 / case.writes
    tables = random.Random(1)

    def write() -> None:
        with source.server.connect(source.name) as connection:
            for number in itertools.count(first):
                if ended.wait(pause):
                    break
                insert = _INSERT.replace("items", f"items_{tables.randint(1, size)}")
                connection.execute(insert.encode(), (number,))

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _run(arena: Arena, case: Case, size: int, side: Subscriber, source: Database, target: Database) -> SideResult:
    asked = time.monotonic()
    side.start_up(source, target, copy=case.copy)
    begun = time.monotonic()
    result = SideResult(side.launched, begun - asked)
    if isinstance(case, Latency):
        side.begin()
        _until(lambda: _has_marker(target), "sign of the first row")
        with Sampler(side.groups, interval=5) as sampler:  # each sample holds the clock of the delays up
            result.figures = _percentiles(_delays(source, target, size, case.rate), case.rate)
    else:
        with Sampler(side.groups) as sampler:
            side.begin()
            _end(case, size, side, target)
            result.figures = _times(case, size, begun - asked, time.monotonic() - begun)
    result.usage = sampler.usage()
    if isinstance(case, StreamedTransaction):
        result.figures.update(_memory(result.usage))
    return result


def _memory(usage: Mapping[str, Usage]) -> dict[str, float]:
    """Peak bytes of pgsub's programs, each group at its largest; nothing for the server's own side."""
    if "JVM" not in usage:
        return {}
    python = usage["launcher"].peak + usage["python workers"].peak
    return {"python memory": float(python), "JVM memory": float(usage["JVM"].peak)}


def _end(case: Case, size: int, side: Subscriber, target: Database) -> None:
    if case.copy:
        tables = len(case.tables(size))
        _until(lambda: side.synchronized(target, tables), "end of the synchronization", _POLL_COPY)
    else:
        _until(lambda: _has_marker(target), "end")


def _times(case: Case, size: int, startup: float, seconds: float) -> dict[str, float]:
    if case.each is None:
        return {"time": seconds}
    return {"time": seconds, f"per {case.each}": (startup + seconds) / size}


def _has_marker(target: Database) -> bool:
    return target.value("SELECT true FROM marker") is True


def _until(condition: Callable[[], bool], what: str, poll: float = _POLL) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        if time.monotonic() > deadline:
            raise BenchmarkFailed(f"no {what} within {LIMIT:g} s")
        time.sleep(poll)


def _delays(source: Database, target: Database, size: int, rate: int) -> list[float]:
    """Commit a row every ``1 / rate`` seconds and look until it is visible; one thread, idle while nothing is due.

    :return: seconds from the publisher's answer to the commit until the target showed the row.
    """
    first = _next_id(source)
    committed: list[float] = []
    delays: list[float] = []
    begun = time.perf_counter()
    while len(delays) < size:
        due = begun + len(committed) / rate
        if len(committed) < size and time.perf_counter() >= due:
            source.connection.execute(_INSERT, (first + len(committed),), prepare=True)
            committed.append(time.perf_counter())
        if len(delays) < len(committed):
            row = target.connection.execute(_NEWEST, prepare=True).fetchone()
            seen, clock = row[0] if row else None, time.perf_counter()
            while seen is not None and len(delays) < min(len(committed), seen - first + 1):
                delays.append(clock - committed[len(delays)])
            if clock - committed[len(delays) - 1] > LIMIT:
                raise BenchmarkFailed(f"a row is not visible after {LIMIT:g} s")
        elif len(committed) < size:
            time.sleep(max(0.0, due - time.perf_counter()))
    return delays


def _next_id(source: Database) -> int:
    newest = source.value("SELECT max(id) FROM items")
    return newest + 1 if isinstance(newest, int) else 1


def _percentiles(delays: Sequence[float], rate: int) -> dict[str, float]:
    """Of all delays; the lag at the end is the longest delay among the last second's."""
    cuts = statistics.quantiles(delays, n=100, method="inclusive")
    return {**{f"p{n}": cuts[n - 1] for n in (50, 95, 99)}, "lag at the end": max(delays[-rate:])}


def _difference(tables: Sequence[str], source: Database, targets: Mapping[str, Database]) -> str | None:
    """Which target is not equal to the source, and where."""
    wanted = source.digest(tables)
    for name, target in targets.items():
        found = target.digest(tables)
        unequal = [
            f"{table}: {found[table][0]} rows for {wanted[table][0]}"
            for table in tables
            if found[table] != wanted[table]
        ]
        if unequal:
            return f"{name} is not equal to the source ({', '.join(unequal)})"
    return None
