"""Runs of inserts as COPY streams, in the text or the binary format. Mirrors CopyMultiInsert's reason to be."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable

import psycopg
from psycopg import sql

from pgsub.protocol.messages import Tuple

_SPECIAL = re.compile(rb"[\\\n\r\t]")
_PLACE = re.compile(r" \d+, \w+ ")  #: the line's number and the word for column
_ESCAPES = {b"\\": b"\\\\", b"\n": b"\\n", b"\r": b"\\r", b"\t": b"\\t"}
_SIGNATURE = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_NULL = struct.pack(">i", -1)
_BLOCK = 1 << 18


def format_of(rows: Iterable[Tuple]) -> str | None:
    """``text`` or ``binary`` where all rows can go into such a stream, None where values of both kinds occur."""
    kinds = b"".join([row.kinds for row in rows])
    if b"b" not in kinds:
        return "text"
    return None if b"t" in kinds else "binary"


def column_of(context: str, columns: Iterable[str]) -> str | None:
    """Which of these columns the CONTEXT of a failed COPY names: ``COPY t, line 1, column c: "…"``, in any language.

    A binary value is not shown after it.
    """
    line = context.partition("\n")[0]
    place = _PLACE.search(line)
    rest = line[place.end() :] if place is not None else ""
    ends = (":", " :", "：")
    longest_first = sorted(columns, key=len, reverse=True)
    return next((c for c in longest_first if rest == c or rest.startswith(tuple(c + end for end in ends))), None)


def run(connection: psycopg.Connection, statement: sql.Composed, rows: Iterable[Tuple], *, binary: bool) -> None:
    """Send rows through COPY FROM STDIN inside the session's open transaction.

    :raises psycopg.Error: as the server says it; the transaction is aborted.
    """
    encode = _binary_row if binary else _text_row
    with connection.cursor() as cursor, cursor.copy(statement) as copy:
        block = bytearray(_SIGNATURE if binary else b"")
        for row in rows:
            block += encode(row)
            if len(block) >= _BLOCK:
                copy.write(bytes(block))
                block.clear()
        if binary:
            block += b"\xff\xff"
        copy.write(bytes(block))


def _text_row(row: Tuple) -> bytes:
    # most rows need no escape: one search over the joined values tells, with a joint that is no special byte
    plain = b"\0".join([v for v in row.values if v is not None])
    if _SPECIAL.search(plain):
        values = [b"\\N" if v is None else _SPECIAL.sub(lambda m: _ESCAPES[m[0]], v) for v in row.values]
    else:
        values = [b"\\N" if v is None else v for v in row.values]
    return b"\t".join(values) + b"\n"


def _binary_row(row: Tuple) -> bytes:
    parts = [struct.pack(">h", len(row.values))]
    for value in row.values:
        parts.append(_NULL if value is None else struct.pack(">i", len(value)) + value)
    return b"".join(parts)
