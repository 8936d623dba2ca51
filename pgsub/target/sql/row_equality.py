"""Fingerprints of rows: two rows have the same one if they are equal on the target.

Equality depends on types and collations: 1.0 and 1.00, "Bob" and "bob". Only the target knows it, so it is queried.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import psycopg
from psycopg import sql

from pgsub.target.catalog.relation import TargetColumn, TargetRelation
from pgsub.target.catalog.unique_indexes import UniqueIndex

#: The fingerprint of a row in some columns: the same for rows that are equal in them.
Fingerprint = tuple[str | None, ...]

#: Queries the target. Arguments: purpose, columns of a row, composer of the query, values of the columns as text.
Ask = Callable[[str, Sequence[TargetColumn], Callable[[], sql.Composed], Sequence[str | None]], list[tuple[Any, ...]]]

# The type's own 64-bit hash. It is the same for two values that the type or collation treats as equal.
_HASHED = "pg_catalog.hash_record_extended({}, 0)::pg_catalog.text"
_AS_TEXT = "({})::pg_catalog.text"  #: for types without a hash function, such as money
_REMEMBERED = 10000
#: Types whose values are equal exactly if their texts are: bool, bytea, name, int8, int2, int4, text, oid, varchar,
#: date, timestamp, timestamptz, uuid.
_BY_TEXT = frozenset({16, 17, 19, 20, 21, 23, 25, 26, 1043, 1082, 1114, 1184, 2950})
_BY_BYTES = frozenset({None, 'pg_catalog."default"', 'pg_catalog."C"'})  #: collations with bytewise equality


class Fingerprints:
    """Fingerprints of the rows of one target table.

    :param as_row: composes a row with all columns of the table from parameters for some of them.
    """

    def __init__(
        self,
        target: TargetRelation,
        indexes: Sequence[UniqueIndex],
        ask: Ask,
        as_row: Callable[[Sequence[TargetColumn]], sql.Composed],
    ) -> None:
        self._columns = target.columns
        plain = {index.name: self._plain_columns(index) for index in indexes}
        self._plain = [(name, columns) for name, columns in plain.items() if columns]
        self._others = [index for index in indexes if not plain[index.name]]
        self._ask = ask
        self._as_row = as_row
        self._known: dict[tuple[str | None, ...], Fingerprint] = {}
        self._unhashed: set[str] = set()  #: purposes for which a type has no hash function

    def unique(self, row: Mapping[str, str | None]) -> list[tuple[str, Fingerprint]]:
        """Return the row's unique keys as fingerprints, with the name of the index. No other row may have them."""
        found: list[tuple[str, Fingerprint]] = []
        for name, columns in self._plain:
            values = tuple(row.get(column) for column in columns)
            if None not in values:
                found.append((name, values))
        if self._others:
            prints = self._made("indexes", row, [index.fingerprint for index in self._others])
            found += [(index.name, (one,)) for index, one in zip(self._others, prints, strict=True) if one is not None]
        return found

    def of(self, row: Mapping[str, str | None], names: Sequence[str]) -> Fingerprint:
        """Return the fingerprint of a row in these columns. NULLs are equal."""
        columns = [c for c in self._columns if c.name in names]
        known = {c.name: row.get(c.name) for c in columns}
        if self.are_texts(names):
            return tuple(known.values())
        values = sql.SQL("ROW({})").format(sql.SQL(", ").join(c.collated(sql.Identifier(c.name)) for c in columns))
        return self._made("key", known, [lambda text: sql.SQL(text).format(values)])

    def are_texts(self, names: Collection[str]) -> bool:
        """Return whether values of these columns are equal exactly if their texts are, so that no query is needed."""
        return all(c.type_oid in _BY_TEXT and c.deterministic for c in self._columns if c.name in names)

    def _plain_columns(self, index: UniqueIndex) -> list[str]:
        """Return the columns of an index whose values are equal exactly if their texts are; none for another index."""
        by_text = {c.quoted: c.name for c in self._columns if c.type_oid in _BY_TEXT}
        if index.predicate or index.nulls_equal or not set(index.collations) <= _BY_BYTES:
            return []
        return [by_text[key] for key in index.keys] if by_text.keys() >= set(index.keys) else []

    def _made(
        self, what: str, row: Mapping[str, str | None], prints: Sequence[Callable[[str], sql.Composed]]
    ) -> Fingerprint:
        columns = [c for c in self._columns if c.name in row]
        values = [row[c.name] for c in columns]
        key = (what, *(c.name for c in columns), *values)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            found = self._known[key] = self._asked(what, columns, values, prints)
        return found

    def _asked(
        self,
        what: str,
        columns: Sequence[TargetColumn],
        values: Sequence[str | None],
        prints: Sequence[Callable[[str], sql.Composed]],
    ) -> Fingerprint:
        as_text = what in self._unhashed

        def build() -> sql.Composed:
            texts = sql.SQL(", ").join(one(_AS_TEXT if as_text else _HASHED) for one in prints)
            return sql.SQL("SELECT {} FROM {}").format(texts, self._as_row(columns))

        try:
            [found] = self._ask(f"{what} as text" if as_text else what, columns, build, values)
        except psycopg.errors.UndefinedFunction:
            if as_text:
                raise
            self._unhashed.add(what)
            return self._asked(what, columns, values, prints)
        return tuple(found)
