"""Unique indexes of a target table: their parts as SQL from the catalogs. Mirrors InitConflictIndexes (conflict.c)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import psycopg
from psycopg import sql

from pgsub.target.catalog.relation import describe, equal

#: Unique indexes of a table (by OID), in the order in which the server searches them: fields of :class:`UniqueIndex`.
#: indkey has the plain columns; pg_depend has those of expressions and predicates. An index that is not valid rejects
#: rows too, as soon as it is ready.
INDEXES = """
SELECT c.relname::text, x.indimmediate,
       ARRAY(SELECT pg_catalog.pg_get_indexdef(x.indexrelid, k, true)
               FROM pg_catalog.generate_series(1, x.indnkeyatts::int) k ORDER BY k),
       e.operators, e.operands,
       ARRAY(SELECT pg_catalog.quote_ident(n.nspname) || '.' || pg_catalog.quote_ident(l.collname)
               FROM pg_catalog.generate_series(1, x.indnkeyatts::int) k
               LEFT JOIN pg_catalog.pg_collation l ON l.oid = x.indcollation[k - 1]
               LEFT JOIN pg_catalog.pg_namespace n ON n.oid = l.collnamespace ORDER BY k),
       pg_catalog.pg_get_expr(x.indpred, x.indrelid),
       coalesce((pg_catalog.to_jsonb(x) ->> 'indnullsnotdistinct')::bool, false),
       ARRAY(SELECT t.attname::text FROM pg_catalog.pg_attribute t WHERE t.attrelid = x.indrelid
                AND (t.attnum = ANY (x.indkey::smallint[]) OR EXISTS (
                    SELECT FROM pg_catalog.pg_depend d WHERE d.classid = 'pg_catalog.pg_class'::regclass
                       AND d.objid = x.indexrelid AND d.refclassid = d.classid AND d.refobjid = x.indrelid
                       AND d.refobjsubid = t.attnum)))
  FROM pg_catalog.pg_index x
  JOIN pg_catalog.pg_class c ON c.oid = x.indexrelid
  JOIN pg_catalog.pg_am m ON m.oid = c.relam AND m.amname = 'btree'
 CROSS JOIN LATERAL (
       SELECT pg_catalog.array_agg(pg_catalog.quote_ident(n.nspname) || '.' || o.oprname ORDER BY k) AS operators,
              pg_catalog.array_agg(CASE WHEN n.nspname <> 'pg_catalog'
                                        THEN pg_catalog.format_type(p.opcintype, NULL) END ORDER BY k) AS operands
         FROM pg_catalog.generate_series(1, x.indnkeyatts::int) k
         JOIN pg_catalog.pg_opclass p ON p.oid = x.indclass[k - 1]
         JOIN pg_catalog.pg_amop a ON a.amopfamily = p.opcfamily AND a.amoplefttype = p.opcintype
          AND a.amoprighttype = p.opcintype AND a.amopstrategy = 3
         JOIN pg_catalog.pg_operator o ON o.oid = a.amopopr
         JOIN pg_catalog.pg_namespace n ON n.oid = o.oprnamespace) AS e
 WHERE x.indrelid = %s::oid AND x.indisunique AND x.indisready AND NOT x.indisexclusion
 ORDER BY x.indexrelid
"""


@dataclass(frozen=True, slots=True)
class UniqueIndex:
    """A unique B-tree index.

    :ivar immediate: checked at once, not at the end of the transaction.
    :ivar keys: columns and expressions as SQL.
    :ivar operators: schema-qualified equality operator of each key.
    :ivar operands: operand type of each operator, as SQL, if the operator is outside pg_catalog; else None.
    :ivar collations: collation of each key.
    :ivar columns: every column that keys and predicate depend on.
    """

    name: str
    immediate: bool
    keys: list[str]
    operators: list[str]
    operands: list[str | None]
    collations: list[str | None]
    predicate: str | None
    nulls_equal: bool
    columns: list[str]

    @property
    def where(self) -> sql.SQL:
        """The condition on rows that are in the index."""
        return sql.SQL(f"({self.predicate or 'true'})")

    def named_keys(self) -> sql.Composed:
        """Compose the key values of a row as a select list, named for :meth:`equal`."""
        names = [sql.Identifier(f"pgsub_key{n}") for n in range(len(self.keys))]
        return _listed(sql.SQL("({}) AS {}").format(sql.SQL(k), name) for k, name in zip(self.keys, names, strict=True))

    def equal(self, other: str) -> sql.Composed:
        """Compose the condition that a row has the same key as a subquery that selects :meth:`named_keys`.

        :param other: alias of the subquery.
        """
        return sql.SQL(" AND ").join(self._equal(n, other) for n in range(len(self.keys)))

    def _equal(self, n: int, other: str) -> sql.Composed:
        mine, theirs = self._collated(n, sql.SQL(f"({self.keys[n]})")), sql.Identifier(other, f"pgsub_key{n}")
        same = equal(self.operators[n], self.operands[n], mine, self._collated(n, theirs))
        if not self.nulls_equal:
            return same
        return sql.SQL("({} OR ({} IS NULL AND {} IS NULL))").format(same, mine, theirs)

    def fingerprint(self, equal_values: str) -> sql.Composed:
        """Compose a text that is equal for two rows that cannot both be in the table; NULL for a row without conflicts.

        :param equal_values: format that makes a text of a row value, given as ``{}``.
        """
        keys = [sql.SQL(f"({key})") for key in self.keys]
        collated = _listed(self._collated(n, key) for n, key in enumerate(keys))
        nulls = sql.SQL("true") if self.nulls_equal else sql.SQL("pg_catalog.num_nulls({}) = 0").format(_listed(keys))
        values = sql.SQL(equal_values).format(sql.SQL("ROW({})").format(collated))
        return sql.SQL("CASE WHEN {} AND {} THEN {} END").format(self.where, nulls, values)

    def _collated(self, n: int, value: sql.Composable) -> sql.Composed:
        collation = self.collations[n]
        return sql.Composed([value, sql.SQL(f" COLLATE {collation}" if collation else "")])


def _listed(parts: Iterable[sql.Composable]) -> sql.Composed:
    return sql.SQL(", ").join(parts)


def immediate(connection: psycopg.Connection, oid: int) -> list[UniqueIndex]:
    """Read the indexes that are checked at once, in the order in which the server searches them."""
    found = [UniqueIndex(*row) for row in connection.execute(INDEXES.encode(), (oid,))]
    return [index for index in found if index.immediate]


def keys_of(connection: psycopg.Connection, oid: int, schema: str, name: str, index: str) -> list[str] | None:
    """Read the columns and expressions of a unique index as SQL.

    :param oid: a table. ``schema`` and ``name`` are those of the same table or of one of its partitions.
    :return: None if there is no such index, or if it is deferrable.
    """
    table = describe(connection, schema, name)
    family = "SELECT relid::oid FROM pg_catalog.pg_partition_tree(%s::oid) UNION SELECT %s::oid"
    if table is None or (table.oid,) not in connection.execute(family, (oid, oid)).fetchall():
        return None
    return next((one.keys for one in immediate(connection, table.oid) if one.name == index), None)
