"""What a command reports while it works: an interface like the server's ``ereport`` below ERROR.

The command line shows the reports on stderr or writes them to a log file. Tests collect them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from pgsub.common.errors import Log, LogText
from pgsub.common.text import line, printable

#: States of a table that is being compared.
WAITING, COMPARING, COMPARED = "waiting", "comparing", "compared"


@dataclass(frozen=True, slots=True)
class TableProgress:
    """The progress of a table's synchronization or comparison. Sizes are bytes, totals None if unknown."""

    schema: str
    name: str
    state: str  #: srsubstate i, d, f, s, r; live also w, c; or waiting, comparing, compared
    bytes_done: int
    bytes_total: int | None
    rows_done: int
    rows_total: int | None
    chunks_done: int
    chunks_total: int
    bytes_per_second: int | None = None  #: over the last seconds
    seconds_left: int | None = None  #: of the copy, estimated from that rate
    adopts: bool = False  #: compares existing rows with the publisher's, and writes only differences
    bytes_behind: int | None = None  #: WAL between it and apply while it catches up (c), if known

    @property
    def compared(self) -> bool:
        """Whether an adopted table's rows were compared, so that only writing what differs is left of its copy."""
        return self.adopts and self.state == "d" and 0 < (self.bytes_total or 0) <= self.bytes_done


class CallbackReporter:
    """The reporter for programs: it passes each kind of report to a function. Reports without a function are dropped.

    :param message: gets ``warning`` or ``notice``, and the text, with detail and hint on separate lines.
    :param progress: gets the present state of all synchronizing tables.
    :param log: gets the level and the text of a log record.

    Control characters in the reports are escaped, because names and values may come from others.
    """

    def __init__(
        self,
        message: Callable[[str, str], None] | None = None,
        progress: Callable[[Sequence[TableProgress]], None] | None = None,
        log: Log | None = None,
    ) -> None:
        self._message = message
        self._progress = progress
        self._log = log

    def warning(self, message: str, detail: str | None = None, hint: str | None = None) -> None:
        """Pass on a warning."""
        self._pass("warning", message, detail, hint)

    def notice(self, message: str, hint: str | None = None) -> None:
        """Pass on a notice."""
        self._pass("notice", message, hint)

    def _pass(self, kind: str, *parts: str | None) -> None:
        if self._message is not None:
            self._message(kind, printable("\n".join(filter(None, parts))))

    def log(self, level: str, text: LogText) -> None:
        """Pass on a log record."""
        if self._log is not None:
            self._log(line(level), LogText(printable(text)))

    def progress(self, rows: Sequence[TableProgress]) -> None:
        """Pass on the progress."""
        if self._progress is not None:
            self._progress([replace(row, schema=line(row.schema), name=line(row.name)) for row in rows])

    def done(self) -> None:
        """Do nothing."""


class Reporter(Protocol):
    """The receiver of a command's reports. It may be called from several threads."""

    def warning(self, message: str, detail: str | None = None, hint: str | None = None) -> None:
        """Report a problem that the user should know. The command continues."""

    def notice(self, message: str, hint: str | None = None) -> None:
        """Report what the server would report as a NOTICE."""

    def log(self, level: str, text: LogText) -> None:
        """Write one log record.

        :param level: LOG, WARNING, ERROR, DEBUG1 and so on.
        """

    def progress(self, rows: Sequence[TableProgress]) -> None:
        """Show the present state of all tables that are synchronized or compared."""

    def done(self) -> None:
        """End the progress, so that its last display stays."""
