"""Whether tables of the target are still what they were read as.

The server's subscriber is told of every change to a relation's definition by an invalidation
(logicalrep_relmap_invalidate_cb, relation.c); a client asks, by numbers that differ after any DDL.
"""

from __future__ import annotations

from collections.abc import Collection

import psycopg

# Each row of these catalogs is written anew by whatever changes it, but for what VACUUM and ANALYZE note in pg_class.
# A partitioned table's partitions count: their triggers and indexes are its own.
_PRINTS = """
WITH member AS MATERIALIZED (
     SELECT w.oid AS root, w.oid FROM pg_catalog.unnest(%s::oid[]) AS w (oid)
      UNION
     SELECT w.oid, t.relid
       FROM pg_catalog.unnest(%s::oid[]) AS w (oid) CROSS JOIN LATERAL pg_catalog.pg_partition_tree(w.oid) t),
written AS (
     SELECT m.root, c.xmin, c.ctid FROM member m JOIN pg_catalog.pg_class c ON c.oid = m.oid
      UNION ALL
     SELECT m.root, a.xmin, a.ctid FROM member m JOIN pg_catalog.pg_attribute a ON a.attrelid = m.oid AND a.attnum > 0
      UNION ALL
     SELECT m.root, x.xmin, x.ctid FROM member m JOIN pg_catalog.pg_index x ON x.indrelid = m.oid
      UNION ALL
     SELECT m.root, t.xmin, t.ctid FROM member m JOIN pg_catalog.pg_trigger t ON t.tgrelid = m.oid
      UNION ALL
     SELECT m.root, r.xmin, r.ctid FROM member m JOIN pg_catalog.pg_rewrite r ON r.ev_class = m.oid)
SELECT root::bigint, pg_catalog.count(*),
       pg_catalog.sum(pg_catalog.hashtextextended(xmin::text || ctid::text, 0))::text
  FROM written GROUP BY root
"""

Print = tuple[int, str]


def prints(connection: psycopg.Connection, oids: Collection[int]) -> dict[int, Print]:
    """What tells a table's definition from what it was before and after, by oid; without tables that are gone."""
    wanted = list(oids)
    rows = connection.execute(_PRINTS.encode(), (wanted, wanted), prepare=False)
    return {oid: (count, number) for oid, count, number in rows}
