"""How long a start takes, and which step takes how much of it: ``--start``.

``pgsub create`` of one small table does everything itself, and ends when the table is synchronized. ``pgsub run`` is
then started while a change waits on the publisher; its start ends when the change is visible on the target.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing

from benchmarks.arena import PUBLICATION, Arena, BenchmarkFailed, Database
from benchmarks.subscribers import START_SECONDS, Pgsub

#: Most seconds that a start may take, on a quiet machine.
GOALS = {"run": 3.0, "create": 5.0}
_TABLE = "CREATE TABLE small (id int PRIMARY KEY, value text)"
_ROWS = "INSERT INTO small SELECT n, n::text FROM generate_series(1, 1000) n"
_POLL = 0.003

Steps = dict[str, float]
Marks = Mapping[str, Callable[[], object]]


def main(facts: Mapping[str, str | int | float], *, rounds: int) -> int:
    """Measure, and print the medians.

    :return: exit status: 1 where something failed.
    """
    print(f"{facts['cpu']}, {facts['cores']} cores, PostgreSQL {facts['postgresql']}; medians of {rounds}")
    try:
        with Arena() as arena, closing(Pgsub(arena)) as pgsub:
            _round(arena, pgsub)  # what has never run is read from the disk
            found = [_round(arena, pgsub) for _ in range(rounds)]
    except BenchmarkFailed as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    for name, goal in GOALS.items():
        _show(name, [one[name] for one in found], goal)
    return 0


def _round(arena: Arena, pgsub: Pgsub) -> dict[str, Steps]:
    """Seconds until each step has ended, by command."""
    source, targets = arena.fresh((pgsub.name,))
    target = targets[pgsub.name]
    source.execute(_TABLE, _ROWS, f"CREATE PUBLICATION {PUBLICATION} FOR ALL TABLES")
    target.execute(_TABLE)
    create = _create(pgsub, source, target)
    source.execute("INSERT INTO small VALUES (0, 'first change')")
    run = _run(pgsub, source, target)
    pgsub.stop()
    pgsub.command("drop", pgsub.name, "--yes")
    return {"create": create, "run": run}


def _create(pgsub: Pgsub, source: Database, target: Database) -> Steps:
    words = ("--connection", source.conninfo, "--target", target.conninfo, "--publication", PUBLICATION)
    process = pgsub.begin_command("create", pgsub.name, *words)
    marks = {
        "slot": lambda: source.value("SELECT true FROM pg_replication_slots"),
        "JVM": pgsub.jvm_started,
        "copy": lambda: target.value("SELECT count(*) = 1000 FROM small"),
        "end": lambda: process.poll() is not None,
    }
    steps = _follow(marks)
    if process.returncode:
        raise BenchmarkFailed(f"pgsub create ended with {process.returncode}")
    return steps


def _run(pgsub: Pgsub, source: Database, target: Database) -> Steps:
    pgsub.begin_run()
    return _follow(
        {
            "JVM": pgsub.jvm_started,
            "stream": lambda: source.value("SELECT active FROM pg_replication_slots"),
            "change": lambda: target.value("SELECT true FROM small WHERE id = 0"),
        }
    )


def _follow(marks: Marks) -> Steps:
    """Seconds from now until each mark is true, in their order."""
    begun, found = time.monotonic(), {}
    for name, reached in marks.items():
        while not reached():
            if time.monotonic() > begun + START_SECONDS:
                raise BenchmarkFailed(f"start: {name} was not reached")
            time.sleep(_POLL)
        found[name] = time.monotonic() - begun
    return found


def _show(name: str, found: list[Steps], goal: float) -> None:
    medians = {step: statistics.median(one[step] for one in found) for step in found[0]}
    last = 0.0
    for step, seconds in medians.items():
        print(f"{name:<8}{step:<8}{seconds:>7.2f} s{seconds - last:>+8.2f} s")
        last = seconds
    print(f"{name:<8}{'in all':<8}{last:>7.2f} s  (goal: at most {goal:g} s)")
