"""The obstacles to a switchover, and functions that their searches share."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import psycopg

from pgsub.commands.preflight.findings import Caution
from pgsub.common.errors import PgsubError
from pgsub.common.plural import about
from pgsub.common.query import shown
from pgsub.common.subscription import Subscription
from pgsub.publisher.tables import Name

GIVING, TAKING, BOTH = "giving", "taking", "both"
ERROR, WARNING = "error", "warning"
#: Names of the servers in messages, from the ending subscription's point of view.
SPOKEN = {GIVING: "publisher", TAKING: "target"}
#: The required publication parameter.
PUBLISH = "publish = 'insert, update, delete, truncate'"
_NAMED, _STATEMENTS = 10, 100  #: maximum numbers in one obstacle
_OTHER = {"publisher": "target", "target": "publisher", "subscriber": "publisher"}
#: Text in which words are not exchanged: commands, which may contain a subscription's name. They begin a line or follow
#: a colon or each other, and have no full stop.
_SERVERS = re.compile(
    r'(?:^ *|(?<=: )|(?<=&& ))(?:pgsub|psql|pg_dump) .*(?<!\.)$|"[^"]*"'
    r"|logical replication target|(?<!-)\b(?:publisher|target|subscriber)\b"
)


@dataclass(frozen=True, slots=True)
class Way:
    """The reverse subscription that the switchover will create.

    :ivar publications: its publications on the taking side.
    :ivar connection: its connection to the taking side.
    :ivar fence: how clients are prevented from writing: read-only, connect or command.
    """

    name: str
    publications: tuple[str, ...]
    connection: str
    fence: str = "read-only"
    run_as_owner: bool = False
    origin: str = "none"


@dataclass(frozen=True, slots=True)
class Obstacle:
    """An obstacle, or a difference after the switchover.

    :ivar server: giving, taking or both.
    :ivar severity: error, which prevents the switchover, or warning.
    :ivar hint: the remedy, with complete lines to paste.
    """

    server: str
    severity: str
    message: str
    detail: str | None = None
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class Sides:
    """Both servers and the subscribed tables.

    :ivar tables: the tables' names on the taking side, by their names on the giving side.
    :ivar relids: OIDs of the tables on the taking side.
    """

    giving: psycopg.Connection
    taking: psycopg.Connection
    sub: Subscription
    back: Way
    tables: Mapping[Name, Name]
    relids: Sequence[int]

    def session(self, server: str) -> psycopg.Connection:
        """Return the session on a server."""
        return self.giving if server == GIVING else self.taking


#: Returns the rows of a constant query: what the whole server shares, such as roles, may have another encoding.
rows = shown


def dotted(name: Iterable[str]) -> str:
    """Return schema, name and perhaps a column, unquoted, as in the server's messages."""
    return ".".join(name)


def paste(server: str, statements: Sequence[str], before: str = "") -> str:
    """Return a hint with statements to run on a server.

    :param before: text before the statements.
    """
    first = list(statements[:_STATEMENTS])
    many = "" if len(first) == len(statements) else f" (the first {len(first)} of {len(statements)})"
    return "\n".join([f"{before} Run this on the {SPOKEN[server]}{many}:".strip(), *first])


def several(
    names: Sequence[str],
    nouns: tuple[str, str],
    message: str,
    detail: str = "",
    hint: str | None = None,
    *,
    server: str,
    severity: str = WARNING,
) -> Iterator[Obstacle]:
    """Yield one obstacle for all of these objects, none if there are no objects.

    The parameters are those of :func:`~pgsub.common.plural.about`.
    """
    if names:
        text, named = about(names, nouns, message, detail, most=_NAMED)
        yield Obstacle(server, severity, text, named or None, hint)


def of_error(error: PgsubError, server: str) -> Obstacle:
    """Return an obstacle for an error of a check of the reverse subscription."""
    return Obstacle(server, ERROR, *in_their_words(error.message, error.detail, error.hint))


def of_caution(caution: Caution, server: str) -> Obstacle:
    """Return an obstacle for a warning about the reverse subscription, an error if it stops replication."""
    severity = ERROR if caution.stops else WARNING
    return Obstacle(server, severity, *in_their_words(caution.message, caution.detail, caution.hint))


def in_their_words(message: str, detail: str | None, hint: str | None) -> tuple[str, str | None, str | None]:
    """Exchange publisher and target in a message about the reverse subscription.

    Names in quotation marks, the server's own words, statements and commands are not changed.
    """
    return _swap(message), None if detail is None else _swap(detail), None if hint is None else _swap(hint)


@contextlib.contextmanager
def seen_backward() -> Iterator[None]:
    """Exchange publisher and target in errors of the block, which concerns the reverse subscription."""
    try:
        yield
    except PgsubError as error:
        error.message, error.detail, error.hint = in_their_words(error.message, error.detail, error.hint)
        error.args = (error.message,)
        raise


def _swap(text: str) -> str:
    return "\n".join(
        line if line.endswith(";") else _SERVERS.sub(lambda word: _OTHER.get(word[0], word[0]), line)
        for line in text.split("\n")
    )
