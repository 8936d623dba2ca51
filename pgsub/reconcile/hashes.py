"""Hashes of keys and rows as SQL for either server. Equal values have the same hash on both.

NOTES
The functions are those of hash partitioning (hashtextextended and others). They return the same in all versions from 11
on, because pg_upgrade relies on it. The hash of each column is the seed for the next. So an exchange of values between
columns or rows changes the hash, and all 64 bits count.

A value is hashed by its text, unless its type has a cheaper hash function that distinguishes all values. Some do not:
hashint8extended folds its value to 32 bits, hash_numeric_extended ignores the sign, and hashfloat8extended returns the
seed for zero. Servers with different encodings hash the bytes of UTF-8. Processors with different byte orders compute
different hashes, so the results of both servers for the same values are compared first.

The functions are not cryptographic. The initial seeds are random in each process, so that nobody can choose values of a
row that have the same hash as others.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from psycopg import sql

#: Hash functions by type. Arguments: the value, the seed, and 1 if the value is null, else 0.
_BY_TYPE = {
    16: "pg_catalog.hashint4extended(coalesce({0}::pg_catalog.int4, 0), {1} # {2})",
    20: "pg_catalog.hashint4extended({2}, {1} # coalesce({0}, 0))",
    21: "pg_catalog.hashint4extended(coalesce({0}, 0), {1} # {2})",
    23: "pg_catalog.hashint4extended(coalesce({0}, 0), {1} # {2})",
    26: "pg_catalog.hashoidextended(coalesce({0}, 0), {1} # {2})",
    2950: "pg_catalog.uuid_hash_extended("
    "coalesce({0}, '00000000-0000-0000-0000-000000000000'::pg_catalog.uuid), {1} # {2})",
}
_BPCHAR = 1042
_BLANKS = sql.SQL(
    """pg_catalog.hashbpcharextended(coalesce({0}, ''::pg_catalog.bpchar) COLLATE pg_catalog."C", {1} # {2})"""
)
_TEXT = sql.SQL("""pg_catalog.hashtextextended(coalesce({0}, '') COLLATE pg_catalog."C", {1} # {2})""")
_IN_UTF8 = sql.SQL("pg_catalog.encode(pg_catalog.convert_to({}, 'UTF8'), 'hex')")
#: Results of the functions for some values. Bytes are hashed as words of the processor.
PROBE = sql.SQL(
    "SELECT pg_catalog.hashint4extended(7, 1), pg_catalog.hashoidextended(7::pg_catalog.oid, 1),"
    " pg_catalog.uuid_hash_extended('00000000-0000-0000-0000-000000000007'::pg_catalog.uuid, 1),"
    """ pg_catalog.hashbpcharextended('seven'::pg_catalog.bpchar COLLATE pg_catalog."C", 1),"""
    """ pg_catalog.hashtextextended('seven' COLLATE pg_catalog."C", 1)"""
)
_NULL = sql.SQL("CASE WHEN {} THEN 1 ELSE 0 END")
_MIXED = sql.SQL("pg_catalog.hashint4extended({}, {})")
#: Maximum number of columns whose hashes are nested, because the server's parser has a limited stack.
_NESTED = 32
_ROW, _KEY = (sql.SQL(f"{secrets.randbits(63)}::pg_catalog.int8") for _ in range(2))


@dataclass(frozen=True, slots=True)
class Value:
    """A column's value, as SQL.

    :ivar text: its canonical text.
    :ivar null: whether it is null.
    :ivar typed: the value in the target's type; None if only the text is the same on both sides.
    """

    text: sql.Composable
    null: sql.Composable
    typed: sql.Composable | None = None
    type_oid: int = 0

    def hashed(self, seed: sql.Composable, *, in_utf8: bool) -> sql.Composed:
        """Compose its hash."""
        null = _NULL.format(self.null)
        if self.typed is not None and self.type_oid in _BY_TYPE:
            return sql.SQL(_BY_TYPE[self.type_oid]).format(self.typed, seed, null)
        if self.typed is not None and self.type_oid == _BPCHAR and not in_utf8:
            return _BLANKS.format(self.typed, seed, null)
        return _TEXT.format(_IN_UTF8.format(self.text) if in_utf8 else self.text, seed, null)


def hashes(values: Sequence[Value], key: Sequence[int], *, in_utf8: bool) -> tuple[sql.Composed, sql.Composed]:
    """Compose the hash of a row's key and the hash of the row.

    :param in_utf8: whether the other server has another encoding.
    """
    return _chained([values[n] for n in key], _KEY, in_utf8), _chained(values, _ROW, in_utf8)


def _chained(values: Sequence[Value], seed: sql.SQL, in_utf8: bool) -> sql.Composed:
    starts = range(0, max(len(values), 1), _NESTED)
    several = [_nested(values[at : at + _NESTED], seed, in_utf8) for at in starts]
    if len(several) == 1:
        return several[0]
    numbered = [_MIXED.format(sql.Literal(number), one) for number, one in enumerate(several, 1)]
    return _MIXED.format(sql.Literal(0), sql.SQL(" # ").join(numbered))


def _nested(values: Sequence[Value], seed: sql.SQL, in_utf8: bool) -> sql.Composed:
    found = sql.Composed([seed])
    for value in values:
        found = value.hashed(found, in_utf8=in_utf8)
    return found
