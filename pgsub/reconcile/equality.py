"""Equality on the target: of values with different texts, and of keys (tuples_equal, execReplication.c)."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import psycopg
from psycopg import sql

from pgsub.common import table_lock
from pgsub.reconcile.expressions import loose
from pgsub.target.catalog.relation import TargetColumn, TargetRelation

#: Text of each compared column, or of each column of a key.
Values = tuple[str | None, ...]


def unnested(count: int) -> sql.Composed:
    """Compose arrays of texts as columns, for parameters of a RawCursor. Names may contain a percent sign."""
    return sql.SQL(", ").join(sql.SQL(f"pg_catalog.unnest(${n}::pg_catalog.text[])") for n in range(1, count + 1))


class Equality:
    """A session on the target that compares values of a table."""

    def __init__(
        self,
        connection: psycopg.Connection,
        translating: Callable[[str], AbstractContextManager[None]],
        table: TargetRelation,
    ) -> None:
        self._connection = connection
        self._translating = translating
        self._table = table

    @contextmanager
    def _asking(self, doing: str) -> Iterator[None]:
        """Translate errors, and verify the types that a statement names."""
        table = self._table
        with self._translating(doing):
            if table.named_types is None:
                yield
                return
            with self._connection.transaction():
                table_lock.verify_types(self._connection, table.named_types, table.schema, table.name)
                yield

    def of_pairs(self, column: TargetColumn, pairs: Collection[tuple[str, str]]) -> list[bool]:
        """Return for each pair of a column's values whether they are equal.

        :raises TableReplaced: the column's type was renamed.
        """
        one, other = (_typed(column, name) for name in ("a", "b"))
        query = sql.SQL("SELECT {} FROM ROWS FROM ({}) WITH ORDINALITY AS u (a, b, n) ORDER BY n").format(
            column.equal(one, other), unnested(2)
        )
        ones, others = map(list, zip(*pairs, strict=True))
        with self._asking("compare values"):
            return [bool(answer) for (answer,) in psycopg.RawCursor(self._connection).execute(query, (ones, others))]

    def groups(self, columns: Sequence[TargetColumn], keys: Sequence[Values]) -> list[list[int]]:
        """Group the keys that are equal. NULL equals NULL.

        :param columns: columns of the key.
        :return: groups of positions in ``keys``.
        """
        open_to = [position for position, column in enumerate(columns) if loose(column)]
        # columns whose values are equal only if their texts are equal are joined to one value
        fixed = [json.dumps([None if n in open_to else v for n, v in enumerate(key)]) for key in keys]
        names = [f"c{position}" for position in open_to]
        grouped = [_typed(columns[position], name) for position, name in zip(open_to, names, strict=True)]
        query = sql.SQL(
            "SELECT pg_catalog.array_agg(n - 1 ORDER BY n) FROM ROWS FROM ({}) WITH ORDINALITY AS u ({}, n) GROUP BY {}"
        ).format(
            unnested(len(names) + 1),
            sql.SQL(", ").join(map(sql.Identifier, ("f", *names))),
            sql.SQL(", ").join([sql.SQL('u.f COLLATE pg_catalog."C"'), *grouped]),
        )
        values = [fixed, *([key[position] for key in keys] for position in open_to)]
        with self._asking("compare keys"):
            return [found for (found,) in psycopg.RawCursor(self._connection).execute(query, values)]


def _typed(column: TargetColumn, name: str) -> sql.Composed:
    value = sql.SQL("u.{}::{}").format(sql.Identifier(name), sql.SQL(column.uncut or column.full_type))
    return sql.SQL("({})").format(column.collated(value))
