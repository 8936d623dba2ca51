"""What a command says while it works: the server's ``ereport`` below ERROR, as an interface.

The command line shows it on stderr or writes it to a log file; tests collect it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from pgsub.common.errors import Log, LogText
from pgsub.common.text import line, printable

#: States of a table that is compared.
WAITING, COMPARING, COMPARED = "waiting", "comparing", "compared"


@dataclass(frozen=True, slots=True)
class TableProgress:
    """The progress of one table's synchronization or comparison. Sizes in bytes; None where no total is known."""

    schema: str
    name: str
    state: str  #: srsubstate: i, d, f, s, r; live also w, c; where it is compared: waiting, comparing, compared
    bytes_done: int
    bytes_total: int | None
    rows_done: int
    rows_total: int | None
    chunks_done: int
    chunks_total: int
    bytes_per_second: int | None = None  #: over the last seconds
    seconds_left: int | None = None  #: of the copy, by that rate
    adopts: bool = False  #: its rows are compared with the publisher's, and only those that differ are written


class CallbackReporter:
    """Reporter for programs: each kind of report goes to a function, and what has none is dropped.

    :param message: gets ``warning`` or ``notice``, and the text with detail and hint on lines of their own.
    :param progress: gets the present state of all tables that synchronize.
    :param log: gets level and text of records of the log.

    Control characters are written out in what they get: it may hold names and values that others chose.
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
        """Pass a warning on."""
        self._pass("warning", message, detail, hint)

    def notice(self, message: str, hint: str | None = None) -> None:
        """Pass a notice on."""
        self._pass("notice", message, hint)

    def _pass(self, kind: str, *parts: str | None) -> None:
        if self._message is not None:
            self._message(kind, printable("\n".join(filter(None, parts))))

    def log(self, level: str, text: LogText) -> None:
        """Pass a record of the log on."""
        if self._log is not None:
            self._log(line(level), LogText(printable(text)))

    def progress(self, rows: Sequence[TableProgress]) -> None:
        """Pass the progress on."""
        if self._progress is not None:
            self._progress([replace(row, schema=line(row.schema), name=line(row.name)) for row in rows])

    def done(self) -> None:
        """Do nothing."""


class Reporter(Protocol):
    """The receiver of what a command has to say. May be called from several threads."""

    def warning(self, message: str, detail: str | None = None, hint: str | None = None) -> None:
        """Report something that the user should know; the command continues."""

    def notice(self, message: str, hint: str | None = None) -> None:
        """Report what the server would say with NOTICE."""

    def log(self, level: str, text: LogText) -> None:
        """Write one record of the log, whole.

        :param level: LOG, WARNING, ERROR, DEBUG1 and so on.
        """

    def progress(self, rows: Sequence[TableProgress]) -> None:
        """Show the present state of all tables that synchronize, or are compared."""

    def done(self) -> None:
        """End the progress: what was drawn is final."""
