"""``status --watch`` on a terminal: a screen that is redrawn, for 80 columns or more.

Mirrors ``pg_autoctl watch`` and top(1).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pgsub.catalog.times import readable
from pgsub.cli.output import console
from pgsub.cli.output.progress import copied_share, duration, size
from pgsub.common.plural import counted
from pgsub.protocol.lsn import parse_lsn

if TYPE_CHECKING:
    from pgsub.commands.status.subscription_status import SubscriptionStatus

_TICKS = "▁▂▃▄▅▆▇█"
_SHOWN = 24  #: number of looks in the sparkline of the lag
#: Seconds over which the throughput is measured.
_WINDOW = 10.0
_AT_MOST = 5  #: maximum number of copies shown for each subscription
_COLOURS = {"running": "green", "waiting": "yellow", "stopped": "yellow", "disabled": "yellow"}


def _text(text: str, **look: Any) -> Text:
    """Return a line of the screen, made printable because it may contain servers' texts."""
    return Text(console.line(text), **look)


class Screen:
    """The screen, a context manager that restores the terminal."""

    def __init__(self, coloured: bool) -> None:
        self._live = Live(console=Console(no_color=not coloured, highlight=False), screen=True, auto_refresh=False)
        self._looks: dict[int, deque[tuple[float, int, float | None]]] = {}

    def __enter__(self) -> Screen:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def show(self, found: Sequence[SubscriptionStatus], unwritten: Sequence[str] = ()) -> None:
        """Draw the present state."""
        head = _text(f"pgsub status    {time.strftime('%Y-%m-%d %H:%M:%S %Z')}    Ctrl-C ends", style="bold")
        warnings = [_text(text, style="bold red", overflow="ellipsis") for text in unwritten]
        parts = [part for one in found for part in self._subscription(one)]
        self._live.update(Group(head, *warnings, *(parts or [_text("no subscription exists")])), refresh=True)

    def _subscription(self, one: SubscriptionStatus) -> Iterator[Any]:
        applied = parse_lsn(one.applied_lsn) if one.applied_lsn else 0
        looks = self._looks.setdefault(one.definition.subid, deque(maxlen=1000))
        looks.append((time.monotonic(), applied, one.lag))
        line = Text("\n")
        line.append(_text(one.definition.name, style="bold")).append("  ")
        line.append(_text(one.state, style=f"bold {_COLOURS.get(one.state, 'red')}"))
        line.append(_text(f"  applied {one.applied_lsn or 'nothing'}, {size(_rate(looks))}/s"))
        yield line
        lag = "unknown" if one.lag is None else f"{one.lag:.1f} s"
        yield _text(f"  lag {lag:<10} {sparkline([lag for _, _, lag in looks])}", no_wrap=True)
        yield _text(f"  {', '.join(_facts(one))}", overflow="ellipsis", no_wrap=True)
        if one.copies:
            yield _copies(one.copies)
        if one.waits_for:
            yield _text(f"  waits for {one.waits_for}", style="yellow", overflow="ellipsis", no_wrap=True)
        if one.errors:
            yield _text(f"  {one.errors[0].message}", style="red", overflow="ellipsis", no_wrap=True)
        if one.next:
            yield _text(f"  next: {console.pasted(one.next)}", style="bold")


def _facts(one: SubscriptionStatus) -> Iterator[str]:
    ready = sum(row["srsubstate"] == "r" for row in one.relations)
    yield f"{ready} of {counted(len(one.relations), 'table')} ready"
    slot, stats = one.slot or {}, one.stats or {}
    if slot.get("wal_status"):
        when = f" at {readable(one.slot_as_of)}" if one.slot_as_of else ""
        yield f"slot {slot['wal_status']}, {size(slot['retained_bytes'] or 0)} kept{when}"
    yield counted(sum(number for name, number in stats.items() if name.startswith("confl_")), "conflict")
    if one.held:
        yield f"{counted(len(one.held), 'table')} held"


def _rate(looks: Sequence[tuple[float, int, float | None]]) -> int:
    """Return the bytes of WAL applied per second."""
    now, applied, _ = looks[-1]
    before = next((look for look in looks if now - look[0] <= _WINDOW), looks[-1])
    return int(max(applied - before[1], 0) / (now - before[0])) if now > before[0] else 0


def sparkline(values: Sequence[float | None]) -> str:
    """Draw the last values as one line. Unknown values are blanks.

    :param values: not negative.
    """
    shown = list(values)[-_SHOWN:]
    top = max((value for value in shown if value is not None), default=0.0)
    if top < 1:
        top = 1.0  # a lag below one second is shown as low
    return "".join(" " if value is None else _TICKS[round(value / top * (len(_TICKS) - 1))] for value in shown)


def _copies(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table.grid(padding=(0, 1))
    for options in ({"max_width": 30}, {"width": 20}, {"justify": "right"}, {}):
        table.add_column(no_wrap=True, overflow="ellipsis", **options)
    for row in rows[:_AT_MOST]:
        total, done = row["bytes_total"], row["bytes_processed"]
        left = "" if row["seconds_left"] is None else f", {duration(row['seconds_left'])} left"
        rate = "" if row["bytes_per_second"] is None else f"{size(row['bytes_per_second'])}/s{left}"
        bar = ProgressBar(total=total or None, completed=min(done, total * 0.99), width=20, pulse=False)
        name = f"  {row['schemaname']}.{row['relname']}"
        table.add_row(_text(name), bar, copied_share(row), _text(rate))
    return table
