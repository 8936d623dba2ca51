"""How far the synchronization of tables is: bars on a terminal, else a few lines every few seconds.

Mirrors ``progress_report`` in ``src/bin/pg_basebackup/pg_basebackup.c``, which makes the same choice.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from pgsub.cli import console
from pgsub.cli.settings import current
from pgsub.commands.reporter import TableProgress

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_INTERVAL = 5.0  #: seconds between reports off a terminal
_WORDS = {
    "i": "initialize",
    "d": "data copy",
    "f": "finished copy",
    "w": "syncwait",
    "c": "catchup",
    "s": "synchronized",
    "r": "ready",
}
_AT_MOST = 8  #: tables that are shown one by one


class ProgressView(Protocol):
    """Draws the present state."""

    def show(self, rows: Sequence[TableProgress]) -> None:
        """Draw it, or leave it if it is too early."""

    def close(self) -> None:
        """Draw the last state for good."""


def choose() -> ProgressView:
    """Bars where somebody looks on; NO_COLOR and ``--color`` only take away the colours."""
    stderr = sys.stderr
    watched = stderr is not None and stderr.isatty() and not os.environ.get("CI") and os.environ.get("TERM") != "dumb"
    return Bars() if watched else Lines()


def size(count: int) -> str:
    """A size as ``pg_size_pretty`` writes it.

    :param count: bytes.
    """
    for unit, limit in (("bytes", 1 << 10), ("kB", 1 << 20), ("MB", 1 << 30), ("GB", 1 << 40)):
        if count < limit * 10:
            return f"{count // (limit >> 10)} {unit}"
    return f"{count >> 40} TB"


def portion(row: TableProgress) -> float | None:
    """How much of the copy is done, 0 to 1; None where no total is known."""
    if row.state not in "id":
        return 1.0
    for done, total in ((row.bytes_done, row.bytes_total), (row.rows_done, row.rows_total)):
        if total:
            # totals are estimates of the catalog; the copy may be larger
            return min(done / total, 0.99)
    return None


class Lines:
    """For logs of CI and files: a summary and the tables at work, every few seconds and at the end."""

    def __init__(self) -> None:
        self._last: Sequence[TableProgress] = ()
        self._next = 0.0
        self._said = ""

    def show(self, rows: Sequence[TableProgress]) -> None:
        """Write a report if the last one is old enough."""
        self._last = list(rows)
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _INTERVAL
            self._say([summary(rows), *map(line, at_work(rows))])

    def close(self) -> None:
        """Write the summary of the last state."""
        if self._last:
            self._say([summary(self._last)])

    def _say(self, lines: list[str]) -> None:
        text = "\n".join(lines)
        if text != self._said:
            self._said = text
            console.say(console.printable(text))


def summary(rows: Sequence[TableProgress]) -> str:
    """``synchronized 12 of 40 tables``."""
    return f"synchronized {sum(row.state in 'sr' for row in rows)} of {len(rows)} tables"


def at_work(rows: Sequence[TableProgress]) -> list[TableProgress]:
    """The tables worth a line of their own, those that copy first."""
    order = "dfwci"
    return sorted((row for row in rows if row.state in order), key=lambda row: order.index(row.state))[:_AT_MOST]


def line(row: TableProgress) -> str:
    """``table public.t: data copy, 41% (820 of 2000 MB), chunk 3 of 8``."""
    done = portion(row)
    parts = [_WORDS.get(row.state, row.state)]
    if row.state == "d":
        percent = "" if done is None else f"{done:.0%} "
        parts.append(f"{percent}({_amount(row)})")
        if row.chunks_total > 1:
            parts.append(f"{row.chunks_done} of {row.chunks_total} chunks")
    return f"table {row.schema}.{row.name}: {', '.join(parts)}"


def _amount(row: TableProgress) -> str:
    return size(row.bytes_done) + (f" of {size(row.bytes_total)}" if row.bytes_total else "")


class Bars:
    """For people: a bar for the whole and one for each table at work, redrawn in place."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        self._progress: Progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            TaskProgressColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            TimeElapsedColumn(),
            console=Console(stderr=True, no_color=not current.coloured(), highlight=False),
            refresh_per_second=4,
        )
        self._whole = self._progress.add_task("tables", total=None, note="")
        self._tasks: dict[tuple[str, str], TaskID] = {}
        self._progress.start()

    def show(self, rows: Sequence[TableProgress]) -> None:
        """Move the bars."""
        ready = sum(row.state in "sr" for row in rows)
        self._progress.update(self._whole, total=len(rows) or None, completed=ready, note=f"{ready} of {len(rows)}")
        busy = {(row.schema, row.name): row for row in at_work(rows)}
        for key in [key for key in self._tasks if key not in busy]:
            self._progress.remove_task(self._tasks.pop(key))
        for key, row in busy.items():
            self._draw(key, row)

    def close(self) -> None:
        """Stop redrawing."""
        self._progress.stop()

    def _draw(self, key: tuple[str, str], row: TableProgress) -> None:
        if key not in self._tasks:
            name = console.printable(f"{row.schema}.{row.name}")
            self._tasks[key] = self._progress.add_task(name, total=None, note="")
        done = portion(row)
        note = _amount(row) if row.state == "d" else _WORDS.get(row.state, row.state)
        self._progress.update(self._tasks[key], total=None if done is None else 1.0, completed=done or 0.0, note=note)
