"""Whether the cost of a change stays the same from ten thousand to ten million changes: ``--plot``."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.arena import Arena, BenchmarkFailed
from benchmarks.cases import Case, InsertTransaction, Singles, UpdateTransaction
from benchmarks.measure import measure
from benchmarks.plot import Line, draw
from benchmarks.subscribers import Native, Options, Pgsub, Subscriber

_NAME = "cost-per-change"
_FULL = (10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000)
_QUICK = (1_000, 3_000, 10_000)
_CASES: tuple[Case, ...] = (InsertTransaction(), UpdateTransaction(), Singles())
#: Measurements of which the median counts: of an empty backlog, and of one of up to _SMALL changes.
_REPEATED, _SMALL = 3, 100_000


@dataclass(frozen=True, slots=True)
class Point:
    """One size of one case on one side.

    :ivar seconds: from the beginning of the work until its last change is visible, each measurement.
    :ivar microseconds: what one change costs beyond the time that an empty backlog takes.
    :ivar at: when the run began, ISO 8601.
    """

    case: str
    side: str
    changes: int
    seconds: list[float]
    microseconds: float
    at: str


#: Names of the cases of the plot.
CASES = tuple(case.name for case in _CASES)


def main(
    facts: Mapping[str, str | int | float], folder: Path, options: Options, only: Collection[str], *, quick: bool
) -> int:
    """Measure, write data and plot, print what was found.

    :param only: names of cases; the points of the others stay as they are in the folder.
    :return: exit status.
    """
    cases = [case for case in _CASES if case.name in only]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        points = _measure(cases, options, _QUICK if quick else _FULL, str(facts["date"]))
    except BenchmarkFailed as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    points = [*_kept(folder / f"{_NAME}.json", only), *points]
    data = {"schema_version": 1, "machine": facts, "points": [asdict(point) for point in points]}
    (folder / f"{_NAME}.json").write_text(json.dumps(data, indent=1) + "\n")
    said = f"{facts['date']}, {facts['cpu']}, {facts['cores']} cores, PostgreSQL {facts['postgresql']}"
    (folder / f"{_NAME}.svg").write_text(draw("cost per change in µs, by changes in the backlog", said, _lines(points)))
    return 0


def _kept(path: Path, only: Collection[str]) -> list[Point]:
    """What an earlier run has written of other cases."""
    if set(CASES) <= set(only) or not path.exists():
        return []
    points = [Point(**one) for one in json.loads(path.read_text())["points"]]
    return [point for point in points if point.case not in only]


def _lines(points: list[Point]) -> list[Line]:
    lines = []
    for case in _CASES:
        for side in ("native", "pgsub"):
            found = [(p.changes, p.microseconds) for p in points if (p.case, p.side) == (case.name, side)]
            lines.append(Line(f"{case.title}, {side}", found, group=case.name, dashed=side == "native"))
    return lines


def _measure(cases: Sequence[Case], options: Options, sizes: tuple[int, ...], at: str) -> list[Point]:
    points = []
    with Arena() as arena, closing(Native(arena)) as native, closing(Pgsub(arena)) as pgsub:
        sides: list[Subscriber] = [native, pgsub]
        for case in cases:
            empty = _times(arena, case, 0, options, sides)
            for size in sizes:
                print(f"{case.name}, {size:,} ...", file=sys.stderr, flush=True)
                for side, seconds in _times(arena, case, size, options, sides).items():
                    cost = (statistics.median(seconds) - statistics.median(empty[side])) / size * 1e6
                    points.append(Point(case.name, side, size, seconds, cost, at))
                    print(f"{case.name:<8}{side:<8}{size:>12,}{cost:>10.2f} µs", flush=True)
    return points


def _times(arena: Arena, case: Case, size: int, options: Options, sides: list[Subscriber]) -> dict[str, list[float]]:
    """Seconds of each measurement by side."""
    found: dict[str, list[float]] = {side.name: [] for side in sides}
    for number in range(_REPEATED if size <= _SMALL else 1):
        result = measure(arena, case, size, options, sides if number % 2 == 0 else sides[::-1], floor=False)
        if result.failure:
            raise BenchmarkFailed(f"{case.name}, {size:,}: {result.failure}")
        for name, side in result.sides.items():
            found[name].append(side.figures["time"])
    return found
