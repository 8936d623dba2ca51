"""Tables of the target as apply sees them, read from the catalogs for any number of them at once."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from pgsub.common import table_lock

LEDGER = "pgsub"  #: schema that is never subscribed
FIRST_NORMAL = 16384  #: FirstNormalObjectId; is_publishable_class (pg_publication.c) draws this line on the other side

# One row of each member that a table has: itself and, of a partitioned one, all of its partitions; found without
# pg_partition_tree(), which locks them, as ddl_watch.py says. What it returns is named as the fields of
# TargetRelation are.
_TABLES = """
WITH RECURSIVE wanted AS MATERIALIZED (
     SELECT c.oid, n.nspname, c.relnamespace, c.relname, c.relkind, c.relowner, c.relispartition,
            c.relrowsecurity AND c.relforcerowsecurity AS forced
       FROM unnest(%(schemas)s::text[], %(names)s::text[]) AS w (nspname, relname)
       JOIN pg_catalog.pg_namespace n ON n.nspname = w.nspname
       JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = w.relname),
member AS MATERIALIZED (
     SELECT oid AS root, oid FROM wanted
      UNION
     SELECT m.root, c.oid
       FROM member m JOIN pg_catalog.pg_inherits i ON i.inhparent = m.oid
       JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid AND c.relispartition),
firing AS (
     SELECT m.root, t.tgtype & 4 <> 0 AS on_insert FROM member m JOIN pg_catalog.pg_trigger t ON t.tgrelid = m.oid
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
      GROUP BY m.root, m.oid HAVING pg_catalog.count(*) > 1)
SELECT w.oid::bigint, w.nspname::text AS schema, w.relname::text AS name, w.relkind::text,
       w.oid IN (SELECT root FROM firing) AS fires,
       w.oid IN (SELECT root FROM firing WHERE on_insert) AS fires_on_insert,
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
       w.forced AND NOT o.rolsuper AND NOT o.rolbypassrls AS owner_row_security
  FROM wanted w JOIN pg_catalog.pg_roles o ON o.oid = w.relowner
"""

# Equality is what the type cache of the server would find: that of the type's default btree or hash operator class, by
# its qualified name (citext's is outside pg_catalog, and search_path is empty). An operator merely named = is not it:
# that of box compares areas. Outside pg_catalog, whoever may create operators in its schema could make one of the same
# name that fits a domain better: so operands that are not of the operator's type are cast to it. An operator for any
# array, say, has no such type: outside pg_catalog it is not used.
# It is looked up once for each type. Where there is OFFSET 0 or LIMIT 1 the index is meant
# to be used: otherwise all of pg_amop is joined for every type and all of pg_type read for every domain, 2 ms each.
# An explicit cast from text is the type's input function where pg_cast has none, or where the bytes stay and input is
# that of text (citext); but not for domains: theirs shortens silently what is too long. What has a modifier is brought
# to it on assignment by the type's cast to itself. An explicit cast to a length of char, varchar, bit and varbit, their
# arrays and domains of them cuts what an assignment refuses.
_COLUMNS = """
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
       (a.atthasdef AND a.attgenerated = '') OR a.attidentity <> '', k.uncut, k.operand
  FROM live a JOIN kind k ON k.atttypid = a.atttypid
 ORDER BY a.attrelid, a.attnum
"""

_IDENTITY = """
WITH key AS MATERIALIZED (
     SELECT DISTINCT ON (x.indrelid) x.*
       FROM pg_catalog.pg_index x JOIN pg_catalog.pg_class c ON c.oid = x.indrelid
      WHERE x.indrelid = ANY (%s::oid[]) AND x.indislive AND x.indisvalid
        AND ((x.indisreplident AND c.relreplident = 'i') OR x.indisprimary)
      ORDER BY x.indrelid, x.indisreplident AND c.relreplident = 'i' DESC)
SELECT i.indrelid::bigint, a.attname::text, i.indimmediate,
       (i.indcollation::oid[])[k.position::int - 1] = a.attcollation
  FROM key i
 CROSS JOIN LATERAL pg_catalog.unnest(i.indkey::smallint[]) WITH ORDINALITY AS k(attnum, position)
  JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
 WHERE k.position <= i.indnkeyatts
 ORDER BY i.indrelid, k.position
"""


@dataclass(frozen=True, slots=True)
class TargetColumn:
    """A live column of a target table."""

    name: str
    type_oid: int
    type_name: str
    generated: bool
    identity: str  #: '' no, 'a' ALWAYS, 'd' BY DEFAULT
    equality: str | None  #: schema-qualified operator, None for a type without equality
    typmod: int = -1
    full_type: str = ""  #: with the modifier, as SQL
    virtual: bool = False  #: generated, and not stored
    cast_type: str = ""  #: as SQL, for casts that change no value: without a modifier, and none implied
    array_oid: int = 0  #: of the array type, 0 where there is none
    from_text: bool = False  #: a cast of text to cast_type is what the input function does
    fits: bool = True  #: an assignment checks what the modifier demands
    deterministic: bool = True  #: equal values have equal bytes, as far as the collation is concerned
    quoted: str = ""  #: its name as SQL, as messages of the server have it
    collation: str | None = None  #: as SQL, where it is not the database's
    defaulted: bool = False  #: it has a default, or an identity
    uncut: str | None = None  #: as SQL, the type without length whose values it has, where a cast to the length cuts
    operand: str | None = None  #: as SQL, the type of equality's operands, where it is outside pg_catalog and another

    def collated(self, value: sql.Composable) -> sql.Composed:
        """Compose a value that constraints and indexes compare as they compare the column's."""
        return sql.Composed([value, sql.SQL(f" COLLATE {self.collation}" if self.collation else "")])

    def equal(self, one: sql.Composable, other: sql.Composable) -> sql.Composed:
        """Compose whether two values of it are equal, by ``equality``."""
        return equal(self.equality or "pg_catalog.=", self.operand, one, other)


def equal(operator: str, operand: str | None, one: sql.Composable, other: sql.Composable) -> sql.Composed:
    """Compose whether two values are equal.

    :param operator: with its schema, as the catalog query quoted it.
    :param operand: the type that it takes, as SQL, where it is not theirs or need not be; an index serves as before.
    """
    # guard: an operator that somebody made for the values' own type is not taken for that of the server
    if operand:
        one, other = (sql.Composed([sql.SQL("("), value, sql.SQL(f")::{operand}")]) for value in (one, other))
    return sql.Composed([one, sql.SQL(f" OPERATOR({operator}) "), other])


@dataclass(frozen=True, slots=True)
class TargetRelation:
    """A table of the target. ``fires``: a trigger would fire in the present session_replication_role.

    ``row_security``: a policy applies to the session's role (not to superusers, BYPASSRLS, an owner without FORCE).
    """

    oid: int
    schema: str
    name: str
    relkind: str
    fires: bool
    rules: bool
    row_security: bool
    columns: tuple[TargetColumn, ...]
    identity: tuple[str, ...]  #: columns of the replica identity index, else of the primary key, else ()
    deferrable: bool = False  #: that key is not unique before the end of a transaction
    user: str = ""  #: the session's role
    owner: str = ""
    #: what the user is to the owner: own the same, set may SET ROLE to it, refused a member that may not, none no
    #: member, trusted neither, but the owner is a superuser
    access: str = "own"
    owner_row_security: bool = False  #: a policy applies to the owner
    #: the user may lock it, or not use its schema, which is what is said then; ``owner_locks``: of the owner
    user_locks: bool = True
    owner_locks: bool = True
    acts_as: str | None = None  #: role that changes are made as, None: the user; see roles.py
    partition: bool = False  #: of another table
    #: it has an exclusion constraint, a deferrable unique one, or a foreign key whose checks fire
    checked_late: bool = False
    fires_on_insert: bool = False  #: a trigger on INSERT would fire
    foreign_keys_fire: bool = False  #: checks or actions of a foreign key of it or to it fire
    several_unique: bool = False  #: it has more than one unique index
    foreign_partitions: bool = False  #: it has one that is a foreign table
    key_collated: bool = True  #: the key's index compares by the collations of its columns
    #: types and operators outside pg_catalog that statements about it name, for table_lock.VERIFY_TYPES; None: none
    named_types: str | None = None
    server_version: int = 180000  #: decides how conflicts are worded
    #: the subscription whose origins' rows are its own, where it can be seen who wrote a row; else 0
    origins_of: int = 0

    @property
    def replicable(self) -> bool:
        """Whether rows may be replicated into it: not into catalogs, whatever a publisher publishes, nor the ledger."""
        return self.relkind in ("r", "p") and self.oid >= FIRST_NORMAL and self.schema != LEDGER

    def column(self, name: str) -> TargetColumn | None:
        """Return the column of that name, case-sensitive."""
        return next((c for c in self.columns if c.name == name), None)


def describe(connection: psycopg.Connection, schema: str, name: str, *, replica: bool = True) -> TargetRelation | None:
    """Read a table from the catalogs; None where it does not exist.

    :param replica: whether session_replication_role = replica is in effect (which triggers and rules would fire).
    """
    return describe_many(connection, [(schema, name)], replica=replica).get((schema, name))


def describe_many(
    connection: psycopg.Connection, names: Iterable[tuple[str, str]], *, replica: bool = True
) -> dict[tuple[str, str], TargetRelation]:
    """Read any number of tables, as :func:`describe` does, with the same three round trips.

    :param names: schema and name of each.
    :return: by schema and name, without those that do not exist.
    """
    wanted = list(dict.fromkeys(names))
    if not wanted:
        return {}
    version = connection.info.server_version
    params = {
        "schemas": [schema for schema, _ in wanted],
        "names": [name for _, name in wanted],
        "firing": ["A", "R"] if replica else ["A", "O"],
        "may_set": "SET" if version >= 160000 else "MEMBER",
        "locking": table_lock.WRITING,
    }
    tables = connection.cursor(row_factory=dict_row).execute(_TABLES.encode(), params).fetchall()
    columns: dict[int, list[TargetColumn]] = {table["oid"]: [] for table in tables}
    named: dict[int, set[tuple[str, int, str]]] = {oid: set() for oid in columns}
    for oid, names_of_type, *column in connection.execute(_COLUMNS.encode(), (list(columns),)):
        columns[oid].append(TargetColumn(*column))
        named[oid].update(map(tuple, names_of_type or ()))
    keys: dict[int, list[tuple[str, bool, bool]]] = {oid: [] for oid in columns}
    for oid, *key in connection.execute(_IDENTITY.encode(), (list(columns),)):
        keys[oid].append(tuple(key))
    return {
        (table["schema"], table["name"]): TargetRelation(
            **table,
            columns=tuple(columns[table["oid"]]),
            identity=tuple(name for name, _, _ in keys[table["oid"]]),
            deferrable=any(not immediate for _, immediate, _ in keys[table["oid"]]),
            named_types=json.dumps(sorted(named[table["oid"]]), ensure_ascii=False) if named[table["oid"]] else None,
            key_collated=all(by_column for _, _, by_column in keys[table["oid"]]),
            server_version=version,
        )
        for table in tables
    }
