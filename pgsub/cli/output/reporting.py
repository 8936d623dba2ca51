"""Destinations of a command's messages: stderr, or the log of ``pgsub run`` in the server's format.

Mirrors ``send_message_to_server_log`` in ``utils/error/elog.c``: every record is one write.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from pgsub.catalog.locks import UNLOGGED, TroubleFlag
from pgsub.cli.general_options import current
from pgsub.cli.output import console
from pgsub.cli.output.progress import Bars, Lines, choose
from pgsub.commands.reporter import TableProgress
from pgsub.common.errors import LogText, PgsubError, StateStoreError, log_text
from pgsub.common.plural import counted
from pgsub.common.threads import CallTimedOut, TimedExecutor

#: Seconds to wait for a log record to be written.
PATIENCE = 3.0
_FIELD = re.compile(r"(DETAIL|HINT|CONTEXT|QUERY|STATEMENT|LOCATION|BACKTRACE):  ")
#: Minimum verbosity for each level. Other levels are always shown.
_NEEDS = {
    **dict.fromkeys(("WARNING", "LOG", "INFO", "NOTICE"), 0),
    **{"DEBUG1": 1, "DEBUG2": 2, "DEBUG3": 2, "DEBUG4": 2, "DEBUG5": 2},
}


def record(level: str, text: LogText, now: datetime | None = None) -> str:
    """Format a log record like the server with ``log_line_prefix = '%m [%p] '``.

    :param text: the message, then its fields. Lines that do not begin a field are continuations.
    :return: the record with a final line break.
    """
    moment = (now or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    prefix = f"{moment} UTC [{os.getpid()}] "
    first, *rest = console.pasted(console.printable(text)).split("\n")
    lines = [f"{prefix}{console.line(level)}:  {first}"]
    # append_with_tabs in elog.c: a tab marks a continuation line.
    lines += [prefix + line if _FIELD.match(line) else "\t" + line for line in rest]
    return "\n".join(lines) + "\n"


class LogFile:
    """A log file with mode 0600, to which records are appended. A file that was moved away is reopened.

    Records that cannot be written go to stderr, because the log must not stop the work.

    :param trouble: called with the reason when writing fails, and with None when it works again.
    """

    def __init__(self, path: Path, trouble: Callable[[str | None], None] = lambda text: None) -> None:
        self._path = path
        self._trouble = trouble
        self._lost = 0  #: number of records that went to stderr
        self._cut = False  #: whether the file ends with an incomplete record
        self._descriptor: int | None = None
        try:
            self._descriptor = self._open()
        except OSError as error:
            raise PgsubError(f'could not open log file "{path}": {error.strerror}') from None

    def write(self, text: str) -> None:
        """Append one record in one write."""
        try:
            descriptor = self._current()
            if self._lost:
                lost = counted(self._lost, "record")
                missing = f"{lost} before this could not be written here, only to standard error"
                self._append(descriptor, record("WARNING", log_text(missing)))
                self._lost = 0
                self._trouble(None)
            self._append(descriptor, text)
        except OSError as error:
            if not self._lost:
                problem = f'could not write to log file "{self._path}": {error.strerror}'
                self._trouble(problem)
                detail = "Records go to standard error until the file can be written."
                _write_whole(record("WARNING", log_text(problem, detail=detail)))
            self._lost += 1
            _write_whole(text)

    def _append(self, descriptor: int, text: str) -> None:
        data = (b"\n" if self._cut else b"") + text.encode("utf-8", "backslashreplace")
        written = os.write(descriptor, data)
        self._cut = written < len(data) and (self._cut or written > 0)
        if written < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _current(self) -> int:
        """Return the descriptor of the file that has the name now."""
        try:
            if self._descriptor is not None and os.path.samestat(os.stat(self._path), os.fstat(self._descriptor)):
                return self._descriptor
        except FileNotFoundError:
            pass
        before, self._descriptor = self._descriptor, None
        if before is not None:
            os.close(before)
        self._descriptor = self._open()
        return self._descriptor

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


class ConsoleReporter:
    """The reporter of commands that end: warnings and notices in the format of client programs, and progress.

    :param log_from: minimum verbosity at which log records are shown, too, if their level allows it.
    """

    def __init__(self, log_from: int = 1) -> None:
        self._log_from = log_from
        self._lock = threading.RLock()
        self._view: Bars | Lines | None = None

    def __enter__(self) -> ConsoleReporter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.done()

    def warning(self, message: str, detail: str | None = None, hint: str | None = None) -> None:
        """Show a warning on stderr."""
        with self._lock:
            console.warning(message, detail, hint)

    def notice(self, message: str, hint: str | None = None) -> None:
        """Show a notice on stderr."""
        with self._lock:
            console.notice(message, hint)

    def log(self, level: str, text: LogText) -> None:
        """Show a log record. Warnings and errors are always shown, others on request."""
        threshold = _NEEDS.get(level, -1)
        if level not in ("WARNING", "ERROR", "FATAL", "PANIC"):
            threshold = max(threshold, self._log_from)
        if current.verbosity >= threshold:
            with self._lock:
                console.say(record(level, text).rstrip("\n"))

    def progress(self, rows: Sequence[TableProgress]) -> None:
        """Show the progress of the tables."""
        if current.verbosity < 0:
            return
        with self._lock:
            self._view = self._view or choose()
            self._view.show(rows)

    def done(self) -> None:
        """Keep the last state on the screen."""
        with self._lock:
            if self._view is not None:
                self._view.close()
                self._view = None


class LogReporter:
    """The reporter of ``pgsub run``: everything becomes a log record, on stderr or in a file.

    :param state_dir: the folder in which ``status`` finds out that the log cannot be written, None for none.
    """

    def __init__(self, path: Path | None = None, state_dir: Path | None = None) -> None:
        self._flag: TroubleFlag | None = None
        self._state_dir = state_dir
        self._file = LogFile(path, self._report) if path else None
        self._executor = TimedExecutor("log", PATIENCE)
        self._dropped = 0  #: records given up: a held terminal, an unread pipe, or a dead disk

    def warning(self, message: str, detail: str | None = None, hint: str | None = None) -> None:
        """Log a warning with its fields."""
        self.log("WARNING", log_text(message, detail=detail, hint=hint))

    def notice(self, message: str, hint: str | None = None) -> None:
        """Log a notice."""
        self.log("NOTICE", log_text(message, hint=hint))

    def log(self, level: str, text: LogText) -> None:
        """Log one record in one write."""
        if current.verbosity < _NEEDS.get(level, -1):
            return
        written = record(level, text)
        try:
            dropped = self._dropped
            self._executor.run(lambda: self._write(written, dropped))
            self._dropped -= dropped
        except CallTimedOut:
            self._dropped += 1

    def _write(self, written: str, dropped: int) -> None:
        if dropped:
            lost = log_text(f"{counted(dropped, 'record', ('is', 'are'))} lost, because nobody read the log in time")
            written = record("WARNING", lost) + written
        if self._file is not None:
            self._file.write(written)
        else:
            _write_whole(written)

    def _report(self, trouble: str | None) -> None:
        """Report it to ``status`` if the state folder can be written."""
        if self._state_dir is None:
            return
        with contextlib.suppress(StateStoreError):
            self._flag = self._flag or TroubleFlag(self._state_dir / UNLOGGED)
            if trouble is None:
                self._flag.clear()
            else:
                self._flag.set(trouble)

    def progress(self, rows: Sequence[TableProgress]) -> None:
        """Do nothing, because ``pgsub status`` shows the progress."""

    def done(self) -> None:
        """Do nothing."""


def _write_whole(text: str) -> None:
    if sys.stderr is None:  # its number may now belong to another file
        return
    try:
        os.write(2, text.encode("utf-8", "backslashreplace"))
    except OSError:
        return  # nobody reads the log any more; the work continues
