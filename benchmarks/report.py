"""The results as a table and as a JSON document."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.cases import Case
from benchmarks.goals import FLOORS, GOALS
from benchmarks.measure import CaseResult, SideResult

Rows = list[list[str]]
Facts = dict[str, str | int | float]

_COSTS = ("case", "format", "side", "group", "CPU s", "peak MB", "largest MB")
_FLOORS = ("case", "format", "walsender alone", "target's CPU", "Python's CPU", "pgsub", "to the slowest", "goal")
_RUNS = ("case", "format", "first", "pgsub start", "launcher", "result")


def show(facts: Facts, results: Sequence[CaseResult]) -> None:
    """Print the machine and the tables, with lines and colours on a terminal only."""
    print(
        f"{facts['cpu']}, {facts['cores']} cores, load {facts['load_before']}; PostgreSQL {facts['postgresql']},"
        f" Python {facts['python']}, pgsub {facts['pgsub']}; {facts['date']}\n"
    )
    runs = [_run_row(result) for result in results]
    costs = [row for result in results for row in _cost_rows(result)]
    floors = [_floor_row(result) for result in results if result.floors]
    shown = (_figure_table(results), *([(_FLOORS, floors)] if floors else []), (_RUNS, runs), (_COSTS, costs))
    for columns, rows in shown:
        if sys.stdout.isatty():
            _rich(columns, rows)
        else:
            _plain(columns, rows)
        print()
    for result in results:
        if result.failure:
            print(f"FAILED {result.case.name}: {result.failure}")


def document(facts: Facts, results: Sequence[CaseResult]) -> dict[str, Any]:
    """All figures; seconds and bytes."""
    return {
        "schema_version": 2,
        "machine": facts,
        "results": [
            {
                "case": result.case.name,
                "size": result.size,
                "unit": result.case.unit,
                "options": asdict(result.options),
                "round": result.round,
                "order": result.order,
                "walsender": result.floor,
                "floors": result.floors,
                "floor_ratio": result.floor_ratio(),
                "failure": result.failure,
                "sides": {name: asdict(side) for name, side in result.sides.items()},
                "ratio": {figure: result.ratio(figure) for figure in _figures(result)},
                "verdict": {figure: said for figure in _figures(result) if (said := verdict(result, figure))},
            }
            for result in results
        ],
    }


def write(path: Path, made: dict[str, Any]) -> None:
    """Write the document to a file."""
    path.write_text(json.dumps(made, indent=2) + "\n")


def _figures(result: CaseResult) -> list[str]:
    return list(dict.fromkeys(figure for side in result.sides.values() for figure in side.figures))


def verdict(result: CaseResult, figure: str) -> str | None:
    """``goal``, ``ceiling`` or ``above``; None where nothing is asked for, or nothing was measured."""
    goal = GOALS.get((result.case.name, figure))
    if goal is None or result.failure or "pgsub" not in result.sides:
        return None
    value = result.sides["pgsub"].figures.get(figure) if goal.absolute else result.ratio(figure)
    return None if value is None else goal.verdict(value)


def _figure_table(results: Sequence[CaseResult]) -> tuple[tuple[str, ...], Rows]:
    """A row for each figure of a case; text and binary beside each other where both were measured."""
    formats = [binary for binary in (False, True) if any(result.options.binary is binary for result in results)]
    columns = ["case", "size"]
    for binary in formats:
        mark = " (binary)" if binary else ""
        columns += [f"{name}{mark}" for name in ("walsender", "native", "pgsub", "ratio")]
    pairs: dict[tuple[str, int], dict[bool, CaseResult]] = {}
    for result in results:
        pairs.setdefault((result.case.name, result.round), {})[result.options.binary] = result
    rows = [row for pair in pairs.values() for row in _figure_rows(pair, formats)]
    return (*columns, "goal / ceiling"), rows


def _figure_rows(pair: Mapping[bool, CaseResult], formats: Sequence[bool]) -> Iterator[list[str]]:
    any_result = next(iter(pair.values()))
    case = any_result.case
    for figure in dict.fromkeys(figure for result in pair.values() for figure in _figures(result) or ["time"]):
        title = case.title if figure == "time" else f"{case.title}, {figure}"
        row = [title, f"{any_result.size:,} {case.unit}"]
        for binary in formats:
            row += _cells(pair.get(binary), figure)
        yield [*row, _limits(case, figure)]
        for name in case.beside:
            row = [f"{title}, beside {name}", f"{any_result.size:,} {case.unit}"]
            for binary in formats:
                row += _cells_beside(pair.get(binary), figure, name)
            yield [*row, "-"]


def _cells(result: CaseResult | None, figure: str) -> list[str]:
    if result is None:
        return ["-"] * 4
    names = (result.case.baseline, "pgsub")
    native, pgsub = (result.sides.get(name, SideResult()).figures.get(figure) for name in names)
    ratio, said = result.ratio(figure), verdict(result, figure)
    cells = [_quantity(figure, value) for value in (result.floor if figure == "time" else None, native, pgsub)]
    if result.failure:
        return [*cells, "FAILED"]
    cells.append("-" if ratio is None else f"{ratio:.2f}")
    if said is not None:
        absolute = GOALS[result.case.name, figure].absolute
        cells[2 if absolute else 3] += f" {said}"
    return cells


def _cells_beside(result: CaseResult | None, figure: str, name: str) -> list[str]:
    """A side that is only shown, in the place of the one that the case is judged by."""
    if result is None:
        return ["-"] * 4
    values = [result.sides.get(one, SideResult()).figures.get(figure) for one in (name, "pgsub")]
    ratio = result.ratio(figure, name)
    return ["-", *(_quantity(figure, value) for value in values), "-" if ratio is None else f"{ratio:.2f}"]


def _limits(case: Case, figure: str) -> str:
    goal = GOALS.get((case.name, figure))
    if goal is None:
        return "-"
    if not goal.absolute:
        return f"{goal.goal:.2f} / {goal.ceiling:.2f}"
    return f"{_quantity(figure, goal.goal)} / {_quantity(figure, goal.ceiling)}"


def _floor_row(result: CaseResult) -> list[str]:
    """What the slowest part alone would take, and how close pgsub comes to that."""
    ratio, goal = result.floor_ratio(), FLOORS.get(result.case.name)
    said = "-" if ratio is None else f"{ratio:.2f}" + (f" {goal.verdict(ratio)}" if goal is not None else "")
    figures = [*result.floors.values(), result.sides["pgsub"].figures.get("time")]
    wanted = "-" if goal is None else f"{goal.goal:.2f}"
    return [result.case.name, _format(result), *map(_duration, figures), said, wanted]


def _run_row(result: CaseResult) -> list[str]:
    pgsub = result.sides.get("pgsub", SideResult())
    starts = [_duration(pgsub.startup or None), _duration(pgsub.launched)]
    return [result.case.name, _format(result), result.order[0], *starts, "FAILED" if result.failure else "equal"]


def _format(result: CaseResult) -> str:
    return "binary" if result.options.binary else "text"


def _quantity(figure: str, value: float | None) -> str:
    if figure.endswith("memory"):
        return "-" if value is None else f"{value / 1e6:.0f} MB"
    return _duration(value)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 0.2 else f"{seconds * 1000:.1f} ms"


def _cost_rows(result: CaseResult) -> Iterator[list[str]]:
    for name in sorted(result.sides):
        for group, usage in result.sides[name].usage.items():
            memory = [f"{size / 1e6:.0f}" if size else "-" for size in (usage.peak, usage.largest)]
            yield [result.case.name, _format(result), name, group, f"{usage.cpu:.2f}", *memory]


def _plain(columns: Sequence[str], rows: Rows) -> None:
    widths = [max(len(row[i]) for row in [list(columns), *rows]) for i in range(len(columns))]
    for row in [list(columns), *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def _rich(columns: Sequence[str], rows: Rows) -> None:
    table = Table(*columns)
    for row in rows:
        table.add_row(*row, style="red" if any(cell == "FAILED" or cell.endswith(" above") for cell in row) else None)
    Console().print(table)
