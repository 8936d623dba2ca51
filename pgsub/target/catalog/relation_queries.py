"""The queries by which :mod:`~pgsub.target.catalog.relation` reads tables, their columns and their keys."""

from pgsub.common import table_lock
from pgsub.common.query import NAMED

# "member" has one row for the table itself and one for each of its partitions. pg_partition_tree() is not used: it
# locks the partitions (see ddl_watch.py). Columns are named as the fields of TargetRelation. The last two are for a
# partitioned table without a key: its partitions with rows, and the columns of all partition keys in its tree, which
# depend on their tables.
TABLES = f"""
WITH RECURSIVE wanted AS MATERIALIZED (
     SELECT c.oid, n.nspname, c.relnamespace, c.relname, c.relkind, c.relowner, c.relispartition,
            c.relrowsecurity AND c.relforcerowsecurity AS forced
       FROM {NAMED}),
member AS MATERIALIZED (
     SELECT oid AS root, oid FROM wanted
      UNION
     SELECT m.root, c.oid
       FROM member m JOIN pg_catalog.pg_inherits i ON i.inhparent = m.oid
       JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid AND c.relispartition),
firing AS (
     SELECT m.root, t.tgtype & 4 <> 0 AS on_insert, t.tgtype & 11 = 11 AS before_delete
       FROM member m JOIN pg_catalog.pg_trigger t ON t.tgrelid = m.oid
      WHERE t.tgenabled::text = ANY (%(firing)s::text[]) AND NOT t.tgisinternal),
ruled AS (
     SELECT w.oid AS root FROM wanted w JOIN pg_catalog.pg_rewrite r ON r.ev_class = w.oid
      WHERE r.ev_enabled::text = ANY (%(firing)s::text[])),
late AS (
     SELECT m.root FROM member m JOIN pg_catalog.pg_index x ON x.indrelid = m.oid
      WHERE x.indisexclusion OR (x.indisunique AND NOT x.indimmediate)),
referring AS (
     SELECT m.root FROM member m JOIN pg_catalog.pg_trigger t ON t.tgrelid = m.oid
      WHERE t.tgenabled::text = ANY (%(firing)s::text[]) AND t.tgisinternal),
away AS (
     SELECT m.root FROM member m JOIN pg_catalog.pg_class c ON c.oid = m.oid AND c.relkind = 'f'),
several AS (
     SELECT m.root FROM member m JOIN pg_catalog.pg_index x ON x.indrelid = m.oid AND x.indisunique
      GROUP BY m.root, m.oid HAVING pg_catalog.count(*) > 1),
unkeyed AS (
     SELECT w.oid AS root FROM wanted w WHERE w.relkind = 'p' AND NOT EXISTS (
            SELECT FROM pg_catalog.pg_index x
             WHERE x.indrelid = w.oid AND x.indisvalid AND (x.indisprimary OR x.indisreplident))),
leaf AS (
     SELECT m.root, pg_catalog.array_agg(m.oid::bigint ORDER BY m.oid) AS oids
       FROM unkeyed u JOIN member m ON m.root = u.root JOIN pg_catalog.pg_class c ON c.oid = m.oid AND c.relkind = 'r'
      GROUP BY m.root),
split AS (
     SELECT m.root, pg_catalog.array_agg(DISTINCT a.attname::text) AS names
       FROM unkeyed u JOIN member m ON m.root = u.root
       JOIN pg_catalog.pg_partitioned_table p ON p.partrelid = m.oid
       JOIN pg_catalog.pg_depend d ON d.objid = m.oid
        AND d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.deptype = 'i'
        AND d.refclassid = d.classid AND d.refobjid = d.objid AND d.refobjsubid = 0
       JOIN pg_catalog.pg_attribute a ON a.attrelid = d.objid AND a.attnum = d.objsubid
      GROUP BY m.root)
SELECT w.oid::bigint, w.nspname::text AS schema, w.relname::text AS name, w.relkind::text,
       w.oid IN (SELECT root FROM firing) AS fires,
       w.oid IN (SELECT root FROM firing WHERE on_insert) AS fires_on_insert,
       w.oid IN (SELECT root FROM firing WHERE before_delete) AS fires_before_delete,
       w.oid IN (SELECT root FROM ruled) AS rules,
       w.relispartition AS partition,
       w.oid IN (SELECT root FROM late UNION ALL SELECT root FROM referring) AS checked_late,
       w.oid IN (SELECT root FROM referring) AS foreign_keys_fire,
       w.oid IN (SELECT root FROM several) AS several_unique,
       w.oid IN (SELECT root FROM away) AS foreign_partitions,
       pg_catalog.row_security_active(w.oid) AS row_security, current_user::text AS user, o.rolname::text AS owner,
       CASE WHEN o.rolname = current_user THEN 'own'
            WHEN pg_catalog.pg_has_role(session_user, o.oid, %(may_set)s) THEN 'set'
            WHEN pg_catalog.pg_has_role(session_user, o.oid, 'MEMBER') THEN 'refused'
            WHEN o.rolsuper THEN 'trusted' ELSE 'none' END AS access,
       pg_catalog.has_table_privilege(w.oid, %(locking)s)
           OR NOT pg_catalog.has_schema_privilege(w.relnamespace, 'USAGE') AS user_locks,
       pg_catalog.has_table_privilege(o.oid, w.oid, %(locking)s)
           OR NOT pg_catalog.has_schema_privilege(o.oid, w.relnamespace, 'USAGE') AS owner_locks,
       pg_catalog.has_any_column_privilege(w.oid, 'UPDATE') AS user_locks_rows,
       pg_catalog.has_any_column_privilege(o.oid, w.oid, 'UPDATE') AS owner_locks_rows,
       w.forced AND NOT o.rolsuper AND NOT o.rolbypassrls AS owner_row_security,
       {table_lock.DEFINITION.format(oid="w.oid")} AS definition,
       coalesce(f.oids, '{{}}') AS leaves, coalesce(s.names, '{{}}') AS split_by
  FROM wanted w JOIN pg_catalog.pg_roles o ON o.oid = w.relowner
  LEFT JOIN leaf f ON f.root = w.oid LEFT JOIN split s ON s.root = w.oid
"""

# Equality is the operator that the type cache of the server finds: that of the type's default btree or hash operator
# class, by its qualified name. (citext's operator is outside pg_catalog, and search_path is empty.) An operator merely
# named = is not enough: that of box compares areas. Outside pg_catalog, whoever may create operators in the schema
# could add one of the same name that fits a domain better. So operands of another type are cast to the operator's type.
# An operator for a pseudo-type such as anyarray has no such type: it is used only if it is in pg_catalog.
# Equality is looked up once for each type. OFFSET 0 and LIMIT 1 make the planner use an index. Otherwise it joins all
# of pg_amop for every type and reads all of pg_type for every domain, which takes 2 ms each.
# An explicit cast from text calls the type's input function if pg_cast has no entry. It does the same if the cast is
# binary-coercible and the input function is that of text (citext). A cast to a domain may truncate a value silently.
# An assignment enforces a modifier by the type's cast to itself. An explicit cast to a length truncates what an
# assignment rejects: so do char, varchar, bit and varbit, their arrays and domains over them.
COLUMNS = """
WITH live AS MATERIALIZED (
     SELECT a.* FROM pg_catalog.pg_attribute a
      WHERE a.attrelid = ANY (%s::oid[]) AND a.attnum > 0 AND NOT a.attisdropped),
class AS MATERIALIZED (
     SELECT k.oid, k.opcfamily, k.opcintype, t.typname, t.typtype, m.amname,
            CASE m.amname WHEN 'btree' THEN 3 ELSE 1 END AS equal
       FROM pg_catalog.pg_opclass k
       JOIN pg_catalog.pg_am m ON m.oid = k.opcmethod AND m.amname IN ('btree', 'hash')
       JOIN pg_catalog.pg_type t ON t.oid = k.opcintype
      WHERE k.opcdefault),
kind AS MATERIALIZED (
     SELECT d.atttypid, eq.operator, eq.operand, own.typarray, (
                SELECT pg_catalog.jsonb_agg(pg_catalog.jsonb_build_array(n.kind, n.oid::bigint, n.name))
                  FROM (VALUES ('type', d.atttypid, CASE WHEN own.typnamespace <> 'pg_catalog'::regnamespace
                                                         THEN pg_catalog.format_type(d.atttypid, NULL) END),
                               ('type', eq.operand_oid, eq.operand),
                               ('operator', eq.oid, eq.signature)) AS n (kind, oid, name)
                 WHERE n.name IS NOT NULL) AS named,
            CASE WHEN t.oid IN (1014, 1015, 1042, 1043, 1560, 1561, 1562, 1563)
                 THEN pg_catalog.format_type(t.oid, -1) END AS uncut,
            own.typtype <> 'd' AND (own.oid IN (25, 1042, 1043) OR NOT EXISTS (
                SELECT FROM pg_catalog.pg_cast c WHERE c.castsource = 25 AND c.casttarget = own.oid
                   AND (c.castmethod <> 'b' OR own.input <> 'textin'))) AS from_text,
            EXISTS (SELECT FROM pg_catalog.pg_cast c WHERE c.castsource = own.base AND c.casttarget = own.base) AS fits
       FROM (SELECT DISTINCT atttypid FROM live) AS d
      CROSS JOIN LATERAL (
            SELECT t.oid, t.typarray, t.typtype, t.typnamespace,
                   CASE p.prolang WHEN 12 THEN p.prosrc ELSE '' END AS input,
                   CASE WHEN t.typlen = -1 AND t.typelem <> 0 THEN t.typelem ELSE t.oid END AS base
              FROM pg_catalog.pg_type t JOIN pg_catalog.pg_proc p ON p.oid = t.typinput
             WHERE t.oid = d.atttypid LIMIT 1) AS own
      CROSS JOIN LATERAL (
            WITH RECURSIVE base AS (
                 SELECT t.oid, t.typtype, t.typcategory, t.typbasetype
                   FROM pg_catalog.pg_type t WHERE t.oid = d.atttypid
                  UNION ALL
                 SELECT t.oid, t.typtype, t.typcategory, t.typbasetype
                   FROM base b CROSS JOIN LATERAL (
                        SELECT * FROM pg_catalog.pg_type d WHERE d.oid = b.typbasetype LIMIT 1) AS t)
            SELECT oid, CASE WHEN typcategory = 'A' THEN 'anyarray' WHEN typtype = 'e' THEN 'anyenum'
                             WHEN typtype = 'r' THEN 'anyrange' WHEN typtype = 'm' THEN 'anymultirange'
                             WHEN typtype = 'c' THEN 'record' END AS family
              FROM base WHERE typtype <> 'd') AS t
       LEFT JOIN LATERAL (
            SELECT pg_catalog.quote_ident(s.nspname) || '.' || o.oprname AS operator,
                   CASE WHEN s.nspname <> 'pg_catalog' AND k.opcintype <> d.atttypid
                        THEN pg_catalog.format_type(k.opcintype, NULL) END AS operand, k.opcintype AS operand_oid,
                   o.oid, CASE WHEN s.nspname <> 'pg_catalog' THEN pg_catalog.format('%%I.%%s(%%s,%%s)', s.nspname,
                       o.oprname, pg_catalog.format_type(o.oprleft, NULL), pg_catalog.format_type(o.oprright, NULL))
                   END AS signature
              FROM class k
             CROSS JOIN LATERAL (
                   SELECT p.amopopr FROM pg_catalog.pg_amop p
                    WHERE p.amopfamily = k.opcfamily AND p.amoplefttype = k.opcintype
                      AND p.amoprighttype = k.opcintype AND p.amopstrategy = k.equal OFFSET 0) AS p
              JOIN pg_catalog.pg_operator o ON o.oid = p.amopopr
              JOIN pg_catalog.pg_namespace s ON s.oid = o.oprnamespace
               AND (s.nspname = 'pg_catalog' OR k.typtype <> 'p')
             WHERE k.opcintype = t.oid OR k.typname = t.family OR EXISTS (
                   SELECT FROM pg_catalog.pg_cast c WHERE c.castsource = t.oid AND c.casttarget = k.opcintype
                      AND c.castmethod = 'b' AND c.castcontext = 'i')
             ORDER BY k.opcintype = t.oid DESC, k.amname, k.oid LIMIT 1) AS eq ON true)
SELECT a.attrelid::bigint, k.named, a.attname::text, a.atttypid::bigint, pg_catalog.format_type(a.atttypid, NULL),
       a.attgenerated <> '', a.attidentity::text, k.operator, a.atttypmod,
       pg_catalog.format_type(a.atttypid, a.atttypmod), a.attgenerated = 'v',
       pg_catalog.format_type(a.atttypid, -1), k.typarray::bigint, k.from_text, a.atttypmod = -1 OR k.fits,
       NOT EXISTS (SELECT FROM pg_catalog.pg_collation l WHERE l.oid = a.attcollation AND NOT l.collisdeterministic),
       pg_catalog.quote_ident(a.attname),
       CASE WHEN a.attcollation NOT IN (0, 100) THEN (
            SELECT pg_catalog.quote_ident(n.nspname) || '.' || pg_catalog.quote_ident(l.collname)
              FROM pg_catalog.pg_collation l JOIN pg_catalog.pg_namespace n ON n.oid = l.collnamespace
             WHERE l.oid = a.attcollation) END,
       (a.atthasdef AND a.attgenerated = '') OR a.attidentity <> '', k.uncut, k.operand, a.attnum
  FROM live a JOIN kind k ON k.atttypid = a.atttypid
 ORDER BY a.attrelid, a.attnum
"""

# Only btree numbers its strategies in one way for all operator classes. In GiST, which WITHOUT OVERLAPS uses, the same
# number is && for ranges. There the operator is that of the column's type, which is what COMPARE_EQ is translated to.
IDENTITY = """
WITH key AS MATERIALIZED (
     SELECT DISTINCT ON (x.indrelid) x.*
       FROM pg_catalog.pg_index x JOIN pg_catalog.pg_class c ON c.oid = x.indrelid
      WHERE x.indrelid = ANY (%s::oid[]) AND x.indislive AND x.indisvalid
        AND ((x.indisreplident AND c.relreplident = 'i') OR x.indisprimary)
      ORDER BY x.indrelid, x.indisreplident AND c.relreplident = 'i' DESC)
SELECT i.indrelid::bigint,
       CASE WHEN s.nspname <> 'pg_catalog' THEN pg_catalog.jsonb_build_array(
            pg_catalog.jsonb_build_array('type', y.oid::bigint, pg_catalog.format_type(y.oid, NULL)),
            pg_catalog.jsonb_build_array('operator', e.oid::bigint, pg_catalog.format('%%I.%%s(%%s,%%s)', s.nspname,
                e.oprname, pg_catalog.format_type(e.oprleft, NULL), pg_catalog.format_type(e.oprright, NULL)))) END,
       a.attname::text, i.indimmediate,
       CASE WHEN l.oid <> a.attcollation
            THEN pg_catalog.quote_ident(n.nspname) || '.' || pg_catalog.quote_ident(l.collname) END,
       pg_catalog.quote_ident(s.nspname) || '.' || e.oprname,
       CASE WHEN y.oid <> a.atttypid THEN pg_catalog.format_type(y.oid, NULL) END
  FROM key i
 CROSS JOIN LATERAL pg_catalog.unnest(i.indkey::smallint[]) WITH ORDINALITY AS k(attnum, position)
  JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
  LEFT JOIN pg_catalog.pg_collation l ON l.oid = (i.indcollation::oid[])[k.position::int - 1]
  LEFT JOIN pg_catalog.pg_namespace n ON n.oid = l.collnamespace
  JOIN pg_catalog.pg_opclass o ON o.oid = (i.indclass::oid[])[k.position::int - 1]
  JOIN pg_catalog.pg_type y ON y.oid = o.opcintype
  LEFT JOIN pg_catalog.pg_amop p ON p.amopfamily = o.opcfamily AND p.amoplefttype = o.opcintype
   AND p.amoprighttype = o.opcintype AND p.amopstrategy = 3
   AND o.opcmethod = (SELECT m.oid FROM pg_catalog.pg_am m WHERE m.amname = 'btree')
  LEFT JOIN pg_catalog.pg_operator e ON e.oid = p.amopopr
   AND (e.oprnamespace = 'pg_catalog'::regnamespace OR y.typtype <> 'p')
  LEFT JOIN pg_catalog.pg_namespace s ON s.oid = e.oprnamespace
 WHERE k.position <= i.indnkeyatts
 ORDER BY i.indrelid, k.position
"""
