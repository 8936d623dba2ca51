"""The results as a table and as a JSON document."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measure import CaseResult, SideResult
from benchmarks.subscribers import Options

Rows = list[list[str]]
Facts = dict[str, str | int | float]

_TIMES = ("case", "size", "native", "pgsub", "ratio", "pgsub start", "launcher", "first", "result")
_COSTS = ("case", "side", "group", "CPU s", "peak MB", "largest MB")


def show(facts: Facts, results: Sequence[CaseResult]) -> None:
    """Print the machine and both tables, with lines and colours on a terminal only."""
    print(
        f"{facts['cpu']}, {facts['cores']} cores, load {facts['load_before']}; PostgreSQL {facts['postgresql']},"
        f" Python {facts['python']}, pgsub {facts['pgsub']}; {facts['date']}\n"
    )
    times = [row for result in results for row in _time_rows(result)]
    costs = [row for result in results for row in _cost_rows(result)]
    for columns, rows in ((_TIMES, times), (_COSTS, costs)):
        if sys.stdout.isatty():
            _rich(columns, rows)
        else:
            _plain(columns, rows)
        print()
    for result in results:
        if result.failure:
            print(f"FAILED {result.case.name}: {result.failure}")


def document(facts: Facts, options: Options, results: Sequence[CaseResult]) -> dict[str, Any]:
    """All figures; seconds and bytes."""
    return {
        "schema_version": 1,
        "machine": facts,
        "options": asdict(options),
        "results": [
            {
                "case": result.case.name,
                "size": result.size,
                "unit": result.case.unit,
                "order": result.order,
                "failure": result.failure,
                "sides": {name: asdict(side) for name, side in result.sides.items()},
                "ratio": {figure: result.ratio(figure) for figure in _figures(result)},
            }
            for result in results
        ],
    }


def write(path: Path, made: dict[str, Any]) -> None:
    """Write the document to a file."""
    path.write_text(json.dumps(made, indent=2) + "\n")


def _figures(result: CaseResult) -> list[str]:
    return list(dict.fromkeys(figure for side in result.sides.values() for figure in side.figures))


def _time_rows(result: CaseResult) -> Iterator[list[str]]:
    native, pgsub = (result.sides.get(name, SideResult()) for name in ("native", "pgsub"))
    verdict = "FAILED" if result.failure else "equal"
    for figure in _figures(result) or ["time"]:
        ratio = result.ratio(figure)
        yield [
            result.case.title if figure == "time" else f"{result.case.title}, {figure}",
            f"{result.size:,} {result.case.unit}",
            _duration(native.figures.get(figure)),
            _duration(pgsub.figures.get(figure)),
            "-" if ratio is None or result.failure else f"{ratio:.2f}",
            _duration(pgsub.startup or None),
            _duration(pgsub.launched),
            result.order[0],
            verdict,
        ]


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 0.2 else f"{seconds * 1000:.1f} ms"


def _cost_rows(result: CaseResult) -> Iterator[list[str]]:
    for name in sorted(result.sides):
        for group, usage in result.sides[name].usage.items():
            memory = [f"{size / 1e6:.0f}" if size else "-" for size in (usage.peak, usage.largest)]
            yield [result.case.name, name, group, f"{usage.cpu:.2f}", *memory]


def _plain(columns: Sequence[str], rows: Rows) -> None:
    widths = [max(len(row[i]) for row in [list(columns), *rows]) for i in range(len(columns))]
    for row in [list(columns), *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def _rich(columns: Sequence[str], rows: Rows) -> None:
    table = Table(*columns)
    for row in rows:
        table.add_row(*row, style="red" if "FAILED" in row else None)
    Console().print(table)
