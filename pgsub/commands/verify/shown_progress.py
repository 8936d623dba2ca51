"""The progress of ``pgsub verify``, for a reporter."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from pgsub.commands.reporter import COMPARED, COMPARING, WAITING, Reporter, TableProgress
from pgsub.reconcile.reading.read_rate import BLOCK
from pgsub.target.ledger.subscriptions import RelationState

#: Seconds before the first report, and between reports.
_FIRST, _INTERVAL = 1.0, 0.2


class ShownProgress:
    """The progress of all tables to be compared."""

    def __init__(self, reporter: Reporter, tables: Sequence[RelationState]) -> None:
        self._reporter = reporter
        self._rows = [TableProgress(one.schemaname, one.relname, WAITING, 0, None, 0, None, 0, 0) for one in tables]
        self._began = 0.0
        self._next = time.monotonic() + _FIRST
        self._shown = False

    def begin(self, number: int) -> None:
        """Show that a table's comparison has begun."""
        self._began = time.monotonic()
        self._rows[number] = replace(self._rows[number], state=COMPARING)
        self._report()

    def read(self, number: int, done: int, total: int) -> None:
        """Show how many blocks of the table on both servers are read."""
        speed = int(done * BLOCK / max(time.monotonic() - self._began, 0.001))
        self._rows[number] = replace(
            self._rows[number],
            bytes_done=done * BLOCK,
            bytes_total=total * BLOCK or None,
            bytes_per_second=speed or None,
            seconds_left=-(-(total - done) * BLOCK // speed) if speed else None,
        )
        self._report()

    def end(self, number: int) -> None:
        """Show that the table is compared."""
        self._rows[number] = replace(self._rows[number], state=COMPARED)
        if self._shown and number + 1 == len(self._rows):
            self._next = 0.0
        self._report()

    def _report(self) -> None:
        if time.monotonic() >= self._next:
            self._next, self._shown = time.monotonic() + _INTERVAL, True
            self._reporter.progress(self._rows)
