"""Progress of the synchronization or comparison of tables: bars on a terminal, otherwise lines every few seconds.

Mirrors ``progress_report`` in ``src/bin/pg_basebackup/pg_basebackup.c``, which makes the same choice.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pgsub.catalog.rows import COMPARE
from pgsub.cli.general_options import current
from pgsub.cli.output import console
from pgsub.commands.reporter import COMPARED, COMPARING, WAITING, TableProgress

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_INTERVAL = 5.0  #: seconds between reports without a terminal
_WORDS = {
    "i": "initialize",
    "d": "data copy",
    "f": "finished copy",
    "w": "syncwait",
    "c": "catchup",
    "s": "synchronized",
    "r": "ready",
}
_AT_MOST = 8  #: maximum number of tables shown one by one
_READY = ("s", "r", COMPARED)
_AT_WORK = (COMPARING, "d", "f", "w", "c", "i")
_READ = ("d", COMPARING)  #: states with amounts


def choose() -> Bars | Lines:
    """Return bars for a terminal, otherwise lines. NO_COLOR and ``--color`` only remove the colors."""
    stderr = sys.stderr
    watched = stderr is not None and stderr.isatty() and not os.environ.get("CI") and os.environ.get("TERM") != "dumb"
    return Bars() if watched else Lines()


def size(count: int) -> str:
    """Format a size in bytes like ``pg_size_pretty``."""
    for unit, limit in (("bytes", 1 << 10), ("kB", 1 << 20), ("MB", 1 << 30), ("GB", 1 << 40)):
        if count < limit * 10:
            return f"{count // (limit >> 10)} {unit}"
    return f"{count >> 40} TB"


def duration(seconds: int) -> str:
    """Format a duration: ``42 s``, ``5 min 3 s``, ``2 h 10 min``.

    :param seconds: not negative.
    """
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60} min"


def portion(row: TableProgress) -> float | None:
    """Return the finished fraction of the copy, 0 to 1; None if no total is known."""
    if row.state not in ("i", "d", WAITING, COMPARING) or row.compared:
        return 1.0
    for done, total in ((row.bytes_done, row.bytes_total), (row.rows_done, row.rows_total)):
        if total:
            # Totals are estimates of the catalog, so the copy may be larger.
            return min(done / total, 0.99)
    return None


def copied_share(copy: Mapping[str, Any]) -> str:
    """Format the finished share of a row of pg_stat_progress_copy, empty if no total is known."""
    done, total = copy["bytes_processed"], copy["bytes_total"]
    if not total or copy["command"] != COMPARE:
        return f"{min(done / total, 0.99):.0%}" if total else ""
    return f"{min(done / total, 0.99):.0%} compared" if done < total else "compared, writing what differs"


class Lines:
    """Progress for CI logs and files: a summary and the active tables, every few seconds and at the end."""

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
        text = "\n".join(map(console.line, lines))
        if text != self._said:
            self._said = text
            console.say(text)


def summary(rows: Sequence[TableProgress]) -> str:
    """Format the total: ``synchronized 12 of 40 tables``."""
    done = "compared" if any(row.state in (WAITING, COMPARING, COMPARED) for row in rows) else "synchronized"
    return f"{done} {sum(row.state in _READY for row in rows)} of {len(rows)} tables"


def at_work(rows: Sequence[TableProgress]) -> list[TableProgress]:
    """Return the tables that get their own line, with those being read first."""
    return sorted((row for row in rows if row.state in _AT_WORK), key=lambda row: _AT_WORK.index(row.state))[:_AT_MOST]


def line(row: TableProgress) -> str:
    """Format ``table public.t: data copy, 41% (820 of 2000 MB), 3 of 8 chunks, 12 MB/s, 1 min 38 s left``."""
    done = portion(row)
    parts = [_doing(row)]
    if _reads(row):
        amounts = ", ".join(_amounts(row))
        parts.append(amounts if done is None else f"{done:.0%} ({amounts})")
        if row.chunks_total > 1:
            parts.append(f"{row.chunks_done} of {row.chunks_total} chunks")
        parts += _speed(row)
    return f"table {row.schema}.{row.name}: {', '.join(parts)}"


def _doing(row: TableProgress) -> str:
    """Format the work on a table. An adopted one is compared before the last differences are written."""
    if row.adopts and row.state == "d":
        return f"writing what differs, {size(row.bytes_done)} compared" if row.compared else "comparison"
    behind = "" if row.bytes_behind is None else f", {size(row.bytes_behind)} of WAL behind apply"
    return _WORDS.get(row.state, row.state) + behind


def _reads(row: TableProgress) -> bool:
    """Return whether the table is being read, so that amounts and speed change."""
    return row.state in _READ and not row.compared


def _amounts(row: TableProgress) -> list[str]:
    amounts = [size(row.bytes_done) + (f" of {size(row.bytes_total)}" if row.bytes_total else "")]
    if row.rows_done or row.rows_total:
        amounts.append(f"{row.rows_done}{f' of {row.rows_total}' if row.rows_total else ''} rows")
    return amounts


def _speed(row: TableProgress) -> list[str]:
    speed = [] if row.bytes_per_second is None else [f"{size(row.bytes_per_second)}/s"]
    return speed if row.seconds_left is None else [*speed, f"{duration(row.seconds_left)} left"]


class Bars:
    """Progress for people: a bar for the total and one for each active table, redrawn in place."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
        from rich.table import Column

        self._progress: Progress = Progress(
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, max_width=30)),
            BarColumn(bar_width=None),  # the space left by the text
            TaskProgressColumn(),
            TextColumn("{task.fields[note]}", markup=False, table_column=Column(no_wrap=True)),
            console=Console(stderr=True, no_color=not current.coloured(), highlight=False),
            refresh_per_second=4,
            expand=True,
        )
        self._began = time.monotonic()
        self._whole = self._progress.add_task("tables", total=None, note="")
        self._tasks: dict[tuple[str, str], TaskID] = {}
        self._progress.start()

    def show(self, rows: Sequence[TableProgress]) -> None:
        """Move the bars."""
        ready = sum(row.state in _READY for row in rows)
        note = f"{ready} of {len(rows)}, {duration(int(time.monotonic() - self._began))}"
        self._progress.update(self._whole, total=len(rows) or None, completed=ready, note=note)
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
            name = console.line(f"{row.schema}.{row.name}")
            self._tasks[key] = self._progress.add_task(name, total=None, note="")
        done = portion(row)
        busy = [*([_doing(row)] if row.adopts else []), _amounts(row)[0], *_speed(row)]
        note = ", ".join(busy) if _reads(row) else _doing(row)
        self._progress.update(self._tasks[key], total=None if done is None else 1.0, completed=done or 0.0, note=note)
