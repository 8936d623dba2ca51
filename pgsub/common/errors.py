"""The whole exception tree; the exit codes of the program are made from it.

Every class carries its exit code and, where apply or synchronization can meet it, what the launcher does about it.
Texts follow the server's Error Message Style Guide: the message is one line without a full stop, detail and hint
are sentences. Exceptions travel between processes (Spark pickles them), so they pickle with all their fields.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from typing import Any, ClassVar, NewType

_LIKE_A_FIELD = re.compile(r"\n(?=[A-Z][A-Za-z0-9]*: |pgsub: )")

#: A record of the log as :func:`log_text` makes it: a line with the message, and lines with its fields.
LogText = NewType("LogText", str)
#: Writes a record of a level to the log.
Log = Callable[[str, LogText], None]


class Directive(enum.Enum):
    """The launcher's reaction to an error that ended a worker."""

    RETRY = "retry"  #: transient: try again, never disables, never counts
    FAULT = "fault"  #: data or schema: counted, retried, disables with disable_on_error
    STOP = "stop"  #: nothing that a retry could mend


class PgsubError(Exception):
    """Root of everything that pgsub raises on purpose.

    :param message: one line, lower-case start, no full stop.
    :param detail: facts, full sentences.
    :param hint: what to do, full sentences; the last line is a command to paste.
    :param context: where it happened, lower-case, no full stop.
    :param sqlstate: the server's SQLSTATE where a server said it.

    ``relation``, ``finish_lsn`` (text) and ``xid`` name the change and the transaction that are to blame.
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
    """Format one field of a record; lines that could be taken for the beginning of another field are indented.

    :param text: may hold names and values that others chose.
    """
    return f"{name}:  {_LIKE_A_FIELD.sub(chr(10) + chr(9), text)}"


def log_text(
    message: str, *, detail: str | None = None, context: str | None = None, hint: str | None = None
) -> LogText:
    """Put a record of the log together: the message in one line, then its fields.

    :param message: may, as what follows, hold names and values that others chose: they begin no line of their own.
    """
    return LogText("\n".join([one_line(message), *_fields(detail, context, hint)]))


def _fields(detail: str | None, context: str | None, hint: str | None) -> list[str]:
    parts = (("DETAIL", detail), ("CONTEXT", context), ("HINT", hint))
    return [field(name, text) for name, text in parts if text]


def one_line(text: str) -> str:
    """Write out the line breaks of a text: names that others chose may hold them."""
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
    """A publication of the subscription is not there: the publisher leaves its changes out and goes on."""

    directive = Directive.RETRY


class TablesBehind(StateForbids):
    """Tables that are to follow changed publications and do not yet."""

    directive = Directive.RETRY


class TableRewritten(StateForbids):
    """A table that was truncated, rewritten or renamed while it was compared: a snapshot does not show it any more."""

    directive = Directive.RETRY


class SubscriptionNotFound(StateForbids):
    """A subscription's name that does not exist."""


class SubscriptionExists(StateForbids):
    """A subscription of that name is there already."""


class TargetSchemaError(StateForbids):
    """The target lacks what the subscription needs; seen before anything was created."""


class TargetReplaced(StateForbids):
    """The target's database is not the one that the subscription was created for; it may have its name for a while."""

    directive = Directive.RETRY


class PublisherUnavailable(PgsubError):
    """The publisher cannot be reached, refuses, or is shutting down."""

    exit_code = 4
    meaning = "publisher unreachable"
    directive = Directive.RETRY


class TargetUnavailable(PgsubError):
    """The target cannot be reached, refuses, or is shutting down; also deadlocks and full disks: retry helps."""

    exit_code = 5
    meaning = "target unreachable"
    directive = Directive.RETRY


class ApplyError(PgsubError):
    """A conflict, data or schema fault stopped apply or synchronization.

    ``column`` names the place, too; ``conflict`` is the server's conflict type or None. Then ``record`` is what is
    kept of it, and ``unique_failure`` what it takes to complete the report (pgsub.apply).
    """

    exit_code = 6
    meaning = "conflict or data error stopped apply"
    directive = Directive.FAULT

    column: str | None = None
    conflict: str | None = None
    record: Any = None
    unique_failure: Any = None


class SchemaFault(ApplyError):
    """Target table or column missing, or unfit.

    ``absent`` is the publisher's description of a table that the target lacks, for the diagnosis (pgsub.apply).
    """

    absent: Any = None


class TableReplaced(SchemaFault):
    """A name of a table, or of a type of it, that is another one's, or nobody's, where a statement was to name it."""


class ReplicationBroken(PgsubError):
    """Slot lost, wrong system, or a peer that breaks the protocol."""

    exit_code = 7
    meaning = "slot lost, wrong system, protocol violation"


class SlotLost(ReplicationBroken):
    """The slot is gone or invalidated."""


class WrongSystem(ReplicationBroken):
    """The publisher is not the one this subscription was created for, or it went back in time.

    ``diverged``: it is that system and database, but has lost changes that the target has. ``elsewhere``: moreover its
    timeline does not continue the one that was followed, so that another server may be the publisher by now.
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
    """Fault of a deployment: Spark, or what its executors lack, keeps workers from running."""

    exit_code = 13
    meaning = "Spark cannot run the workers"


class Fenced(PgsubError):
    """Another attempt took over: this one ends without a message, unless that goes on and on at one position."""

    directive = Directive.RETRY


class StreamsMustRestart(PgsubError):
    """The ledger is not where this worker thought: publisher stream and target session restart from it.

    Raised by a failed compare-and-set of the progress row and by a lost target session (design 1, rule 1), and where a
    connection has been told of so many tables that another one is to begin with none.
    """

    directive = Directive.RETRY


class ThreadDied(InternalError):
    """A thread of pgsub ended that should not have; what it did is begun anew."""

    directive = Directive.RETRY


class WorkerDied(SparkUnusable):
    """A task ended without a result: its python worker, its executor or Spark's JVM was killed."""

    directive = Directive.RETRY


class SpoolFailed(PgsubError):
    """A transaction could not be kept until its commit."""

    directive = Directive.RETRY


class OutOfResources(PgsubError):
    """The machine, or a limit of the process, has no more descriptors, memory, processes or room."""

    directive = Directive.RETRY


def exit_code_table() -> list[tuple[int, str]]:
    """Return exit codes and their meanings, from the classes: the source of README and pgsub(1)."""
    table = {0: "done, or asked to stop"}
    pending: list[type[PgsubError]] = [PgsubError]
    while pending:
        cls = pending.pop()
        table.setdefault(cls.exit_code, cls.meaning)
        pending.extend(cls.__subclasses__())
    return sorted(table.items())
