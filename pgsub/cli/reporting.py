"""Where a command's words go: stderr of a command, or the log of ``pgsub run`` in the server's form.

Mirrors ``send_message_to_server_log`` in ``utils/error/elog.c``: every record is one write.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from pgsub.cli import console
from pgsub.cli.progress import ProgressView, choose
from pgsub.cli.settings import current
from pgsub.commands.reporter import TableProgress
from pgsub.errors import PgsubError

_FIELD = re.compile(r"(DETAIL|HINT|CONTEXT|QUERY|STATEMENT|LOCATION|BACKTRACE):  ")
#: lowest verbosity at which a level is shown; what is not named is always shown
_NEEDS = {
    "WARNING": 0,
    "LOG": 0,
    "INFO": 0,
    "NOTICE": 0,
    "DEBUG1": 1,
    "DEBUG2": 2,
    "DEBUG3": 2,
    "DEBUG4": 2,
    "DEBUG5": 2,
}


def record(level: str, text: str, now: datetime | None = None) -> str:
    """A record of the log as the server writes it with ``log_line_prefix = '%m [%p] '``.

    :param text: message, then lines that start with ``DETAIL:  `` and its like; other lines are continuations.
    :return: with a line break at its end.
    """
    moment = (now or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    prefix = f"{moment} UTC [{os.getpid()}] "
    first, *rest = console.printable(text).split("\n")
    lines = [f"{prefix}{level}:  {first}"]
    # append_with_tabs in elog.c: a tab tells a reader that the line belongs to the one before
    lines += [prefix + line if _FIELD.match(line) else "\t" + line for line in rest]
    return "\n".join(lines) + "\n"


class LogFile:
    """A log that is appended to, 0600; a file that was moved away is opened anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = self._open()

    def write(self, text: str) -> None:
        """Append one record in one write."""
        try:
            if os.stat(self._path).st_ino != os.fstat(self._descriptor).st_ino:
                self._reopen()
        except FileNotFoundError:
            self._reopen()
        os.write(self._descriptor, text.encode("utf-8", "backslashreplace"))

    def _reopen(self) -> None:
        os.close(self._descriptor)
        self._descriptor = self._open()

    def _open(self) -> int:
        try:
            return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise PgsubError(f'could not open log file "{self._path}": {error.strerror}') from None


class ConsoleReporter:
    """For commands that end: warnings and notices as client programs say them, progress while tables synchronize.

    :param log_from: verbosity at which records of the log are shown too, if their level allows it.
    """

    def __init__(self, log_from: int = 1) -> None:
        self._log_from = log_from
        self._lock = threading.RLock()
        self._view: ProgressView | None = None

    def warning(self, message: str, detail: str | None = None, hint: str | None = None) -> None:
        """Show a warning on stderr."""
        with self._lock:
            console.warning(message, detail, hint)

    def notice(self, message: str) -> None:
        """Show a notice on stderr."""
        with self._lock:
            console.notice(message)

    def log(self, level: str, text: str) -> None:
        """Show a record of the log, warnings and errors always, the rest if asked for."""
        threshold = _NEEDS.get(level, -1)
        if level not in ("WARNING", "ERROR", "FATAL", "PANIC"):
            threshold = max(threshold, self._log_from)
        if current.verbosity >= threshold:
            with self._lock:
                console.say(record(level, text).rstrip("\n"))

    def progress(self, rows: Sequence[TableProgress]) -> None:
        """Show how far the tables are."""
        if current.verbosity < 0:
            return
        with self._lock:
            self._view = self._view or choose()
            self._view.show(rows)

    def done(self) -> None:
        """Leave the last state standing."""
        with self._lock:
            if self._view is not None:
                self._view.close()
                self._view = None


class LogReporter:
    """For ``pgsub run``: everything is a record of the log, on stderr or in a file."""

    def __init__(self, path: Path | None = None) -> None:
        self._file = LogFile(path) if path else None
        self._lock = threading.RLock()

    def warning(self, message: str, detail: str | None = None, hint: str | None = None) -> None:
        """Log a warning with its fields."""
        fields = [f"{name}:  {text}" for name, text in (("DETAIL", detail), ("HINT", hint)) if text]
        self.log("WARNING", "\n".join([message, *fields]))

    def notice(self, message: str) -> None:
        """Log a notice."""
        self.log("NOTICE", message)

    def log(self, level: str, text: str) -> None:
        """Log one record in one write."""
        if current.verbosity < _NEEDS.get(level, -1):
            return
        with self._lock:
            if self._file is not None:
                self._file.write(record(level, text))
            elif sys.stderr is not None:
                _write_whole(record(level, text))

    def progress(self, rows: Sequence[TableProgress]) -> None:
        """Not logged: ``pgsub status`` shows it at any time."""

    def done(self) -> None:
        """Nothing is drawn here."""


def _write_whole(text: str) -> None:
    try:
        os.write(2, text.encode("utf-8", "backslashreplace"))
    except OSError:
        return  # nobody reads the log any more; the work goes on
