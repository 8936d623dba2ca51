"""Texts and SQLSTATEs of server errors, as far as they are kept; no other module takes texts out of errors.

The server does not limit the fields of an error, and pgsub keeps them in memory, log and state store. Mirrors
``pqGetErrorNotice3`` (fe-protocol3.c), which reads these fields.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

from pgsub.common.errors import one_line

if TYPE_CHECKING:
    from psycopg import Error
    from psycopg.errors import Diagnostic

#: Maximum characters of a message, detail, hint or context.
KEPT_OF_SERVER = 8192
_Text = TypeVar("_Text", str, str | None)
#: SQLSTATE deadlock_detected.
DEADLOCK = "40P01"
_SERIALIZATION = "40001"
#: All reasons of a server to end or refuse a session (57P01 to 57P05, 25P03, 25P04): none is a fault of a change.
_SESSION_END = frozenset({"57P01", "57P02", "57P03", "57P04", "57P05", "25P03", "25P04"})
_TRANSIENT = _SESSION_END | {"25006", _SERIALIZATION, DEADLOCK, "55P03"}
#: Class 54 is "wired-in limits, not resource exhaustion" (errcodes.txt): those of a row, a statement or a table, which
#: fail again. The server reports with the same SQLSTATE that it has no transaction IDs or multixacts left, until a
#: vacuum has made room. Only the file that reports it tells them apart; texts may be translated.
_LIMIT_EXCEEDED = "54000"
_WRAPAROUND_FILES = frozenset({"varsup.c", "multixact.c"})


#: Hint for a missing privilege that code of a table's owner has reported, which could name any object.
SAID_BY_CODE = (
    "A function of the table's owner lacks the privilege, or says so: see in the server's log, with"
    " log_error_verbosity = verbose, which one it is. Grant nothing that you do not know to be harmless."
)


class ServerWords(NamedTuple):
    """The fields of a server's error, each truncated; ``hint`` is one line."""

    message: str
    detail: str | None = None
    hint: str | None = None
    context: str | None = None


def fields(diag: Diagnostic) -> ServerWords:
    """Return the fields of a server's error; the message is empty if no server sent one."""
    return ServerWords(
        shortened(diag.message_primary or ""),
        shortened(diag.message_detail),
        server_hint(diag.message_hint),
        shortened(diag.context),
    )


def said(error: Error) -> ServerWords:
    """Return the fields of an error. For an error of libpq or psycopg, the message is the first line of its text."""
    words = fields(error.diag)
    return words if words.message else words._replace(message=(lines(error) or [type(error).__name__])[0])


def lines(error: BaseException) -> list[str]:
    """Return the text of an error as psycopg formats it, without empty lines."""
    return [line.strip() for line in shortened(str(error)).splitlines() if line.strip()]


def server_hint(text: str | None) -> str | None:
    """Put a server's HINT on one line: further lines are commands to paste, and no server may add one."""
    return None if text is None else one_line(shortened(text))


def shortened(text: _Text) -> _Text:
    """Truncate a field from a server to :data:`KEPT_OF_SERVER` characters."""
    return text if text is None or len(text) <= KEPT_OF_SERVER else text[:KEPT_OF_SERVER] + "…"


def is_transient(sqlstate: str | None, file: str | None = None) -> bool:
    """Return whether a retry helps after an SQLSTATE: the closed list of design section 6.

    :param sqlstate: five characters, or None if the connection was lost without a message, which is transient.
    :param file: the server's source file that reported the error, if known.
    """
    if sqlstate is None:
        return True
    if sqlstate == "08P01":
        return False
    wraparound = sqlstate == _LIMIT_EXCEEDED and file in _WRAPAROUND_FILES
    return wraparound or sqlstate in _TRANSIENT or sqlstate[:2] in ("08", "53")


def is_moved_row(error: Error) -> bool:
    """Return whether a statement failed because its row was moved to another partition while it waited for the row.

    The server has no SQLSTATE of its own for this (heapam_tuple_lock, heapam_handler.c), and searches the row again
    where its own subscriber finds it (RelationFindReplTupleByIndex, execReplication.c).
    """
    return error.sqlstate == _SERIALIZATION and error.diag.source_file == "heapam_handler.c"


def is_unreachable(sqlstate: str | None) -> bool:
    """Return whether a transient error means that a server cannot be reached, so that no transaction caused it."""
    return sqlstate is None or sqlstate[:2] in ("08", "57")
