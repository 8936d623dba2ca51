"""Unique indexes that stop a row at once: what they are of, as SQL of the catalog.

Mirrors InitConflictIndexes (conflict.c).
"""

from __future__ import annotations

from dataclasses import dataclass

import psycopg

from pgsub.target.relation import describe

# In the order in which the server reports them. What they depend on is told by pg_depend for expressions and
# predicates, by indkey for columns.
_INDEXES = """
SELECT c.relname::text,
       ARRAY(SELECT pg_catalog.pg_get_indexdef(x.indexrelid, k, true)
               FROM pg_catalog.generate_series(1, x.indnkeyatts::int) k ORDER BY k),
       ARRAY(SELECT pg_catalog.quote_ident(n.nspname) || '.' || o.oprname
               FROM pg_catalog.generate_series(1, x.indnkeyatts::int) k
               JOIN pg_catalog.pg_opclass p ON p.oid = x.indclass[k - 1]
               JOIN pg_catalog.pg_amop a ON a.amopfamily = p.opcfamily AND a.amoplefttype = p.opcintype
                AND a.amoprighttype = p.opcintype AND a.amopstrategy = 3
               JOIN pg_catalog.pg_operator o ON o.oid = a.amopopr
               JOIN pg_catalog.pg_namespace n ON n.oid = o.oprnamespace ORDER BY k),
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
 WHERE x.indrelid = %s::oid AND x.indisunique AND x.indimmediate AND x.indisready AND NOT x.indisexclusion
 ORDER BY x.indexrelid
"""


@dataclass(frozen=True, slots=True)
class ConflictIndex:
    """A unique B-tree index, checked at once.

    :ivar keys: columns and expressions.
    :ivar operators: of each the equality, with its schema.
    :ivar columns: all that keys and predicate depend on.
    """

    name: str
    keys: list[str]
    operators: list[str]
    collations: list[str | None]
    predicate: str | None
    nulls_equal: bool
    columns: list[str]


def of_table(connection: psycopg.Connection, oid: int) -> list[ConflictIndex]:
    """In the order in which the server looks into them."""
    return [ConflictIndex(*row) for row in connection.execute(_INDEXES.encode(), (oid,))]


def keys_of(connection: psycopg.Connection, oid: int, schema: str, name: str, index: str) -> list[str] | None:
    """What a unique index is of: columns and expressions as SQL.

    :param oid: of a table; with ``schema`` and ``name`` that one itself or a partition of it.
    :return: None where there is no such index, or it does not stop a row at once.
    """
    table = describe(connection, schema, name)
    family = "SELECT relid::oid FROM pg_catalog.pg_partition_tree(%s::oid) UNION SELECT %s::oid"
    if table is None or (table.oid,) not in connection.execute(family, (oid, oid)).fetchall():
        return None
    return next((one.keys for one in of_table(connection, table.oid) if one.name == index), None)
