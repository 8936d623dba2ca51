"""Detection of DDL on the target's tables.

The server's subscriber gets an invalidation for every change to a relation's definition
(logicalrep_relmap_invalidate_cb, relation.c). A client gets none, so it compares numbers that change with any DDL.
"""

from __future__ import annotations

from collections.abc import Collection

import psycopg

# DDL writes a new version of rows of these catalogs. VACUUM and ANALYZE update pg_class in place.
# Statements name types that are not built in, so these types, their schemas and their operators named = count too.
# Triggers and indexes of partitions count as the partitioned table's own. pg_partition_tree() is not used: it locks the
# partitions. A prepared transaction that truncated one holds its lock until apply has read the COMMIT PREPARED.
_PRINTS = """
WITH RECURSIVE member AS (
     SELECT w.oid AS root, w.oid FROM pg_catalog.unnest(%s::oid[]) AS w (oid)
      UNION
     SELECT m.root, c.oid
       FROM member m JOIN pg_catalog.pg_inherits i ON i.inhparent = m.oid
       JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid AND c.relispartition),
kind AS (
     SELECT m.root, a.atttypid AS oid
       FROM member m JOIN pg_catalog.pg_attribute a ON a.attrelid = m.oid AND a.attnum > 0 AND a.atttypid >= 16384
      UNION
     SELECT k.root, b.oid
       FROM kind k JOIN pg_catalog.pg_type t ON t.oid = k.oid
      CROSS JOIN LATERAL (VALUES (t.typbasetype), (t.typelem)) AS b (oid)
      WHERE b.oid >= 16384),
named AS (
     SELECT k.root, t.typnamespace AS schema, t.xmin, t.ctid FROM kind k JOIN pg_catalog.pg_type t ON t.oid = k.oid
      UNION ALL
     SELECT k.root, o.oprnamespace, o.xmin, o.ctid
       FROM kind k JOIN pg_catalog.pg_operator o ON o.oprname = '=' AND o.oprleft = k.oid AND o.oprright = k.oid),
written AS (
     SELECT m.root, c.xmin, c.ctid FROM member m JOIN pg_catalog.pg_class c ON c.oid = m.oid
      UNION ALL
     SELECT m.root, a.xmin, a.ctid FROM member m JOIN pg_catalog.pg_attribute a ON a.attrelid = m.oid AND a.attnum > 0
      UNION ALL
     SELECT m.root, x.xmin, x.ctid FROM member m JOIN pg_catalog.pg_index x ON x.indrelid = m.oid
      UNION ALL
     SELECT m.root, t.xmin, t.ctid FROM member m JOIN pg_catalog.pg_trigger t ON t.tgrelid = m.oid
      UNION ALL
     SELECT m.root, r.xmin, r.ctid FROM member m JOIN pg_catalog.pg_rewrite r ON r.ev_class = m.oid
      UNION ALL
     SELECT root, xmin, ctid FROM named
      UNION ALL
     SELECT d.root, n.xmin, n.ctid FROM named d JOIN pg_catalog.pg_namespace n ON n.oid = d.schema)
SELECT root::bigint, pg_catalog.count(*),
       pg_catalog.sum(pg_catalog.hashtextextended(xmin::text || ctid::text, 0))::text
  FROM written GROUP BY root
"""

DefinitionVersion = tuple[int, str]


def definition_versions(connection: psycopg.Connection, oids: Collection[int]) -> dict[int, DefinitionVersion]:
    """Read a version of each table's definition, by OID. DDL changes the version. Dropped tables are left out."""
    rows = connection.execute(_PRINTS.encode(), (list(oids),), prepare=False)
    return {oid: (count, number) for oid, count, number in rows}
