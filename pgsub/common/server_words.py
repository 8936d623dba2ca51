"""What a server said, as much of it as is kept: the one place where texts are taken out of psycopg's errors.

The server sets no limit to the fields of an error, and pgsub keeps them in memory, log and state store. Mirrors
``pqGetErrorNotice3`` (fe-protocol3.c), which reads these fields.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pgsub.common.errors import server_hint, shortened

if TYPE_CHECKING:
    from psycopg import Error
    from psycopg.errors import Diagnostic


class ServerWords(NamedTuple):
    """The fields of a server's error, each shortened; ``hint`` in one line."""

    message: str
    detail: str | None = None
    hint: str | None = None
    context: str | None = None


def fields(diag: Diagnostic) -> ServerWords:
    """Take the fields of a server's error; the message is empty where no server said one."""
    return ServerWords(
        shortened(diag.message_primary or ""),
        shortened(diag.message_detail),
        server_hint(diag.message_hint),
        shortened(diag.context),
    )


def said(error: Error) -> ServerWords:
    """Take the fields of an error; one of libpq or psycopg has a text only, of which the first line is the message."""
    words = fields(error.diag)
    return words if words.message else words._replace(message=(lines(error) or [type(error).__name__])[0])


def lines(error: BaseException) -> list[str]:
    """Return the text of an error as psycopg puts it together, without empty lines."""
    return [line.strip() for line in shortened(str(error)).splitlines() if line.strip()]
