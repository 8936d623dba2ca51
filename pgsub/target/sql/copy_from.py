"""COPY FROM STDIN of prepared streams. Serves the same purpose as the server's CopyMultiInsert."""

from __future__ import annotations

import re
from collections.abc import Iterable

import psycopg
from psycopg import sql

_PLACE = re.compile(r" \d+, \w+ ")  #: the line's number, and "column" in any language


def column_of(context: str, columns: Iterable[str]) -> str | None:
    """Find the column in the CONTEXT of a failed COPY: ``COPY t, line 1, column c: "…"``, in any language.

    The value does not follow if it is binary.
    """
    line = context.partition("\n")[0]
    place = _PLACE.search(line)
    rest = line[place.end() :] if place is not None else ""
    ends = (":", " :", "：")
    longest_first = sorted(columns, key=len, reverse=True)
    return next((c for c in longest_first if rest == c or rest.startswith(tuple(c + end for end in ends))), None)


def run(connection: psycopg.Connection, statement: sql.Composed, stream: memoryview) -> None:
    """Send a stream through COPY FROM STDIN in the session's open transaction.

    :raises psycopg.Error: the server's error; the transaction is aborted.
    """
    with connection.cursor() as cursor, cursor.copy(statement) as copy:
        copy.write(stream)
