"""Unique indexes of a target table, and how SQL says that a row has one's key already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from psycopg import sql

#: Of one table by its oid: rows for :meth:`UniqueIndex.of`.
INDEXES = """
SELECT c.relname::text, i.indimmediate, coalesce((pg_catalog.to_jsonb(i) ->> 'indnullsnotdistinct')::boolean, false),
       pg_catalog.pg_get_expr(i.indpred, i.indrelid),
       ARRAY(SELECT pg_catalog.pg_get_indexdef(i.indexrelid, k, false)
               FROM pg_catalog.generate_series(1, i.indnkeyatts) k ORDER BY k),
       ARRAY(SELECT pg_catalog.quote_ident(n.nspname) || '.' || o.oprname
               FROM pg_catalog.unnest(i.indclass::oid[]) WITH ORDINALITY AS u (opclass, k)
               JOIN pg_catalog.pg_opclass p ON p.oid = u.opclass
               JOIN pg_catalog.pg_amop m ON m.amopfamily = p.opcfamily AND m.amopstrategy = 3
                AND m.amoplefttype = p.opcintype AND m.amoprighttype = p.opcintype
               JOIN pg_catalog.pg_operator o ON o.oid = m.amopopr
               JOIN pg_catalog.pg_namespace n ON n.oid = o.oprnamespace ORDER BY u.k),
       ARRAY(SELECT a.attname::text FROM pg_catalog.unnest(i.indkey::smallint[]) WITH ORDINALITY AS u (attnum, k)
               JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = u.attnum
              WHERE u.k <= i.indnkeyatts ORDER BY u.k)
  FROM pg_catalog.pg_index i JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid
  JOIN pg_catalog.pg_am m ON m.oid = c.relam AND m.amname = 'btree'
 WHERE i.indrelid = %s::oid AND i.indisunique AND i.indisvalid ORDER BY NOT i.indisprimary, c.relname
"""


@dataclass(frozen=True, slots=True)
class UniqueIndex:
    """A unique index of a target table.

    :ivar keys: its key columns and expressions as SQL; ``operators`` the equality of each.
    :ivar columns: names of its key columns, fewer than ``keys`` where there are expressions.
    """

    name: str
    immediate: bool
    nulls_not_distinct: bool
    predicate: str | None
    keys: tuple[str, ...]
    operators: tuple[str, ...]
    columns: tuple[str, ...]

    @classmethod
    def of(cls, row: Sequence[Any]) -> UniqueIndex:
        """From a row of :data:`INDEXES`."""
        name, immediate, nulls, predicate, keys, operators, columns = row
        return cls(name, immediate, nulls, predicate, tuple(keys), tuple(operators), tuple(columns))

    @property
    def plain(self) -> bool:
        """Whether the values of columns alone say what is equal."""
        return self.predicate is None and len(self.columns) == len(self.keys)

    def wanted(self, row: sql.Composed) -> sql.Composed:
        """The key of a row, as a subquery; empty where the index leaves the row out.

        :param row: a subquery with the columns of the table.
        """
        keys = [sql.SQL("({}) AS {}").format(sql.SQL(k), _key(i)) for i, k in enumerate(self.keys)]
        return sql.SQL("(SELECT {} FROM {}{})").format(sql.SQL(", ").join(keys), row, self._predicate(" WHERE"))

    def same(self) -> sql.Composed:
        """Whether a row of the table has the key that ``wanted`` has."""
        equal = sql.SQL(" AND ").join(self._equal(i) for i in range(len(self.keys)))
        return sql.Composed([equal, self._predicate(" AND")])

    def _predicate(self, word: str) -> sql.Composed:
        return sql.Composed([sql.SQL(f"{word} ({self.predicate})" if self.predicate else "")])

    def _equal(self, number: int) -> sql.Composed:
        equal = sql.SQL(f"OPERATOR({self.operators[number]})")
        key, wanted = sql.SQL(f"({self.keys[number]})"), sql.Identifier("wanted", f"pgsub_key_{number}")
        same = sql.SQL("{} {} {}").format(key, equal, wanted)
        if not self.nulls_not_distinct:
            return same
        return sql.SQL("({} OR {} IS NULL AND {} IS NULL)").format(same, key, wanted)


def _key(number: int) -> sql.Identifier:
    return sql.Identifier(f"pgsub_key_{number}")
