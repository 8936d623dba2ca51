"""Recorded rows: those of skipped and held changes in the ledger, as reasons for differences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import psycopg

from pgsub.protocol import encoder
from pgsub.protocol.decoder import decode_change
from pgsub.protocol.messages import Delete, Insert, Relation, Tuple, Update
from pgsub.protocol.reader import BINARY, NULL, TEXT
from pgsub.target.ledger.skipped_changes import UTC_TEXT, Covered

SKIPPED, HELD, CONFLICT = "skipped_change", "held_change", "conflict"
#: What a recorded row is: the publisher's after the change, the publisher's before it, or the target's.
NEW, OLD, LOCAL = "new", "old", "local"

#: Values of a row by column: texts, bytes for binary values. Others are unknown, except None.
Values = Mapping[str, Any]
_SKIPPED = f"""
SELECT id, (finish_lsn - '0/0'::pg_lsn)::bigint, {UTC_TEXT.format("skipped_at")}, body->'new', body->'old'
  FROM pgsub.skipped_change
 WHERE subid = %s AND replayed_at IS NULL
   AND (schemaname, relname) IN (SELECT * FROM ROWS FROM (unnest(%s::text[]), unnest(%s::text[])) AS n)
 ORDER BY finish_lsn DESC, id DESC
"""


class Recorded(NamedTuple):
    """One of the rows of a recorded change.

    :ivar reason: what the record says about a difference; None: nothing, because the change was made.
    :ivar of: :data:`NEW`, :data:`OLD` or :data:`LOCAL`.
    :ivar lsn: finish LSN of its transaction; 0: it has none.
    :ivar at: time of the target as text, known only of skipped changes and of repairs.
    """

    reason: str | None
    of: str
    values: Values
    lsn: int = 0
    at: str | None = None

    def follows(self, other: Recorded) -> bool:
        """Return whether this is a later record than the other."""
        if self.at is not None and other.at is not None:  # a repair has no finish LSN
            return self.at > other.at
        return self.lsn > other.lsn


def skipped(
    connection: psycopg.Connection, subid: int, names: Sequence[tuple[str, str]], covered: Covered
) -> Iterator[Recorded]:
    """Yield rows of skipped changes that were neither replayed nor copied, the last first.

    :param names: schemas and names under which they may be recorded.
    :param covered: what the table's copy has.
    """
    schemas, tables = map(list, zip(*names, strict=True))
    for change, lsn, at, *rows in connection.execute(_SKIPPED.encode(), (subid, schemas, tables)):
        # guard: what was left out before the copy of a table explains no difference
        if covered.has_skip(change):
            continue
        of_rows = zip((NEW, OLD), rows, strict=True)
        yield from (Recorded(SKIPPED, of, _with_bytes(one), lsn, at) for of, one in of_rows if one)


def _with_bytes(row: Values) -> Values:
    return {
        name: bytes.fromhex(one["binary"]) if isinstance(one, dict) and "binary" in one else one
        for name, one in row.items()
    }


def held(connection: psycopg.Connection, subid: int, relid: int) -> Iterator[Recorded]:
    """Yield rows of a table's held changes, the last first."""
    rows = connection.execute(
        "SELECT relation, messages FROM pgsub.held_change WHERE subid = %s AND srrelid = %s ORDER BY id DESC",
        (subid, relid),
    )
    for described, messages in rows:
        relation = decode_change(bytes(described), False)
        assert isinstance(relation, Relation)
        for payload in reversed(list(encoder.split(bytes(messages)))):
            message = decode_change(payload, False)
            if isinstance(message, Insert | Update):
                yield Recorded(HELD, NEW, _texts(relation, message.new))
            if isinstance(message, Update | Delete) and message.old is not None:
                yield Recorded(HELD, OLD, _texts(relation, message.old))


def _texts(relation: Relation, row: Tuple) -> Values:
    named = zip(relation.columns, row.kinds, row.values, strict=True)
    return {
        c.name: value if value is None or kind == BINARY else value.decode(errors="replace")
        for c, kind, value in named
        if kind in (TEXT, NULL, BINARY)
    }
