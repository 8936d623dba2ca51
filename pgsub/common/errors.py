"""The complete exception tree, from which the exit codes of the program are made.

Every class has its exit code and, if apply or synchronization can meet it, the launcher's reaction. Texts follow the
server's Error Message Style Guide: the message is one line without a full stop, detail and hint are sentences. Spark
pickles exceptions between processes, so they can be pickled with all their fields.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from typing import Any, ClassVar, NewType

_LIKE_A_FIELD = re.compile(r"\n(?=[A-Z][A-Za-z0-9]*: |pgsub: )")

#: A log record as made by :func:`log_text`: a line with the message, and lines with its fields.
LogText = NewType("LogText", str)
#: Writes a record to the log at a level.
Log = Callable[[str, LogText], None]


class Directive(enum.Enum):
    """The launcher's reaction to an error that ended a worker."""

    RETRY = "retry"  #: transient: try again; never counted, never disables
    FAULT = "fault"  #: data or schema: counted, retried, disables with disable_on_error
    STOP = "stop"  #: a retry cannot help


class PgsubError(Exception):
    """The root of all exceptions that pgsub raises on purpose.

    :param message: one line, lower-case start, no full stop.
    :param detail: facts, full sentences.
    :param hint: what to do, full sentences; the last line is a command to paste.
    :param context: where it happened, lower-case, no full stop.
    :param sqlstate: SQLSTATE from the server, if any.

    ``relation``, ``finish_lsn`` (text) and ``xid`` identify the change and the transaction that caused it.
    """

    exit_code: ClassVar[int] = 1
    meaning: ClassVar[str] = "other failure"
    directive: ClassVar[Directive] = Directive.STOP

    relation: str | None = None
    finish_lsn: str | None = None
    xid: int | None = None

    def __init__(
        self,
        message: str,
        *,
        detail: str | None = None,
        hint: str | None = None,
        context: str | None = None,
        sqlstate: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail
        self.hint = hint
        self.context = context
        self.sqlstate = sqlstate

    def __reduce__(self) -> Any:
        return type(self), (self.message,), self.__dict__

    def lines(self) -> list[str]:
        """Return DETAIL, CONTEXT, and HINT in the server's form."""
        return _fields(self.detail, self.context, self.hint)

    def log_text(self) -> LogText:
        """Format the error as a record of the log."""
        return log_text(self.message, detail=self.detail, context=self.context, hint=self.hint)


def field(name: str, text: str) -> str:
    """Format one field of a record; indent lines that look like the start of another field.

    :param text: may contain names and values that others chose.
    """
    return f"{name}:  {_LIKE_A_FIELD.sub(chr(10) + chr(9), text)}"


def log_text(
    message: str, *, detail: str | None = None, context: str | None = None, hint: str | None = None
) -> LogText:
    """Format a log record: the message in one line, then its fields.

    :param message: may, like the fields, contain names and values that others chose; they cannot start a line.
    """
    return LogText("\n".join([one_line(message), *_fields(detail, context, hint)]))


def _fields(detail: str | None, context: str | None, hint: str | None) -> list[str]:
    parts = (("DETAIL", detail), ("CONTEXT", context), ("HINT", hint))
    return [field(name, text) for name, text in parts if text]


def one_line(text: str) -> str:
    """Escape the line breaks of a text: names that others chose may contain them."""
    return text.replace("\n", "\\n")


class UsageError(PgsubError):
    """The command line is wrong."""

    exit_code = 2
    meaning = "usage"


class StateForbids(PgsubError):
    """The subscription's state or a configuration does not allow it."""

    exit_code = 3
    meaning = "subscription or configuration state forbids it"


class PublicationMissing(StateForbids):
    """A missing publication of the subscription: the publisher omits its changes and continues."""

    directive = Directive.RETRY


class TablesBehind(StateForbids):
    """A state of tables that do not yet match the changed publications."""

    directive = Directive.RETRY


class TableRewritten(StateForbids):
    """A table that was truncated, rewritten or renamed during a comparison, so that a snapshot no longer shows it."""

    directive = Directive.RETRY


class SubscriptionNotFound(StateForbids):
    """A subscription name that does not exist."""


class SubscriptionExists(StateForbids):
    """A subscription name that already exists."""


class TargetSchemaError(StateForbids):
    """The lack of something on the target that the subscription needs; detected before anything is created."""


class TargetReplaced(StateForbids):
    """A target database other than the one that the subscription was created for; it may have the name temporarily."""

    directive = Directive.RETRY


class LedgerLost(StateForbids):
    """A target without a ledger, or with one that does not know the subscription: it was emptied or restored."""


class SwitchedOver(StateForbids):
    """A subscription that a switchover has ended, in a state store that still has it."""


class PublisherUnavailable(PgsubError):
    """The publisher cannot be reached, refuses, or is shutting down.

    ``standby``: a standby that has not been promoted answers in its place, and cannot be used.
    """

    exit_code = 4
    meaning = "publisher unreachable"
    directive = Directive.RETRY

    standby: bool = False


class TargetUnavailable(PgsubError):
    """The target cannot be reached, refuses, or is shutting down; also deadlocks and full disks. A retry helps."""

    exit_code = 5
    meaning = "target unreachable"
    directive = Directive.RETRY


class TableAltered(TargetUnavailable):
    """A change of a table's definition before the lock that keeps others from changing it. A retry reads it anew."""


class ApplyError(PgsubError):
    """A conflict, data or schema fault stopped apply or synchronization.

    ``column`` identifies the place further; ``conflict`` is the server's conflict type or None. For a conflict,
    ``record`` is its record, and ``unique_failure`` has what completes the report (pgsub.apply).
    """

    exit_code = 6
    meaning = "conflict or data error stopped apply"
    directive = Directive.FAULT

    column: str | None = None
    conflict: str | None = None
    record: Any = None
    unique_failure: Any = None


class SchemaFault(ApplyError):
    """A target table or column that is missing or does not match.

    ``absent`` is the publisher's description of a table that the target lacks, for the diagnosis (pgsub.apply).
    """

    absent: Any = None


class TableReplaced(SchemaFault):
    """A name of a table, or of its type, that no longer belongs to the expected object when a statement uses it."""


class ReplicationBroken(PgsubError):
    """Slot lost, wrong system, or a peer that breaks the protocol."""

    exit_code = 7
    meaning = "slot lost, wrong system, protocol violation"


class SlotLost(ReplicationBroken):
    """The slot is gone or invalidated."""


class WrongSystem(ReplicationBroken):
    """The publisher is not the one this subscription was created for, or it went back in time.

    ``diverged``: it is that system and database, but has lost changes that the target has. ``elsewhere``: in addition,
    its timeline does not continue the one that was followed, so another server may now be the publisher.
    """

    diverged: bool = False
    elsewhere: bool = False


class ProtocolViolation(ReplicationBroken):
    """The only exception that decoding of bytes from the publisher may raise."""


class TimeoutExpired(PgsubError):
    """The condition did not hold in time; nothing failed."""

    exit_code = 8
    meaning = "timeout"


class LockHeld(PgsubError):
    """Another applier or maintenance command holds the lock."""

    exit_code = 9
    meaning = "another applier holds the lock"


class StateStoreError(PgsubError):
    """The local state store is corrupt, too new, too open, or cannot be written."""

    exit_code = 10
    meaning = "state store"


class PermissionMissing(PgsubError):
    """A privilege is missing; the hint names the GRANT.

    ``denied`` is the change that was refused, for the diagnosis (pgsub.apply).
    """

    exit_code = 11
    meaning = "permission missing"
    directive = Directive.FAULT

    denied: Any = None


class InternalError(PgsubError):
    """A bug in pgsub."""

    exit_code = 12
    meaning = "bug"


class SparkUnusable(PgsubError):
    """A fault of the deployment: Spark, or something missing on its executors, keeps workers from running."""

    exit_code = 13
    meaning = "Spark cannot run the workers"


class Fenced(PgsubError):
    """A takeover by another attempt: this one ends without a message, unless takeovers repeat forever at a position."""

    directive = Directive.RETRY


class StreamsMustRestart(PgsubError):
    """A ledger that is not where this worker expected it: publisher stream and target session restart from it.

    Raised by a failed compare-and-set of the progress row and by a lost target session (design 1, rule 1). Also raised
    once a connection has received so many relations that a new one must start without them.
    """

    directive = Directive.RETRY


class ThreadDied(InternalError):
    """The unexpected end of a thread of pgsub; its work is restarted."""

    directive = Directive.RETRY


class WorkerDied(SparkUnusable):
    """The end of a task without a result: its Python worker, its executor or Spark's JVM was killed."""

    directive = Directive.RETRY


class SpoolFailed(PgsubError):
    """A failure to keep a transaction until its commit."""

    directive = Directive.RETRY


class OutOfResources(PgsubError):
    """A lack of descriptors, memory, processes or disk space, on the machine or by a limit of the process."""

    directive = Directive.RETRY


def exit_code_table() -> list[tuple[int, str]]:
    """Return exit codes and their meanings from the classes, for README and pgsub(1)."""
    table = {0: "done, or asked to stop"}
    pending: list[type[PgsubError]] = [PgsubError]
    while pending:
        cls = pending.pop()
        table.setdefault(cls.exit_code, cls.meaning)
        pending.extend(cls.__subclasses__())
    return sorted(table.items())
