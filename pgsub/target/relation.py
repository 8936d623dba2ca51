"""Tables of the target as apply sees them, and how a remote relation maps to one. Mirrors relation.c."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import psycopg

from pgsub.errors import SchemaFault
from pgsub.protocol.messages import Relation

_RELKINDS = ("r", "p")

_TABLE = """
SELECT c.oid::bigint, c.relkind::text, pg_catalog.pg_table_size(c.oid),
       EXISTS (SELECT FROM pg_catalog.pg_trigger t WHERE t.tgrelid = ANY (tree.members) AND t.tgenabled = ANY (%s)
               AND NOT t.tgisinternal) AS fires,
       EXISTS (SELECT FROM pg_catalog.pg_rewrite r WHERE r.ev_class = c.oid AND r.ev_enabled::text = ANY (%s)) AS rules,
       EXISTS (SELECT FROM pg_catalog.pg_constraint k WHERE k.confrelid = ANY (tree.members) AND k.contype = 'f'
               AND k.conrelid <> ALL (tree.members)) AS referenced,
       c.relrowsecurity
  FROM pg_catalog.pg_class c
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 CROSS JOIN LATERAL (SELECT array_agg(m) AS members FROM (
        SELECT c.oid UNION SELECT relid FROM pg_catalog.pg_partition_tree(c.oid)) AS t(m)) AS tree
 WHERE n.nspname = %s AND c.relname = %s
"""

# a type outside pg_catalog (citext, hstore) has its = outside too, and search_path is empty
_COLUMNS = """
SELECT a.attname, a.atttypid::bigint, a.atttypmod, a.attgenerated::text, a.attidentity::text, a.attnum,
       CASE WHEN t.typnamespace <> 'pg_catalog'::regnamespace AND t.typtype = 'b' THEN (
            SELECT pg_catalog.quote_ident(s.nspname) || '.' || o.oprname
              FROM pg_catalog.pg_opclass k
              JOIN pg_catalog.pg_am m ON m.oid = k.opcmethod AND m.amname IN ('btree', 'hash')
              JOIN pg_catalog.pg_amop p ON p.amopfamily = k.opcfamily AND p.amoplefttype = t.oid
               AND p.amoprighttype = t.oid AND p.amopstrategy = CASE m.amname WHEN 'btree' THEN 3 ELSE 1 END
              JOIN pg_catalog.pg_operator o ON o.oid = p.amopopr
              JOIN pg_catalog.pg_namespace s ON s.oid = o.oprnamespace
             WHERE k.opcintype = t.oid AND k.opcdefault ORDER BY m.amname LIMIT 1) END,
       a.attnotnull, a.atthasdef
  FROM pg_catalog.pg_attribute a
  JOIN pg_catalog.pg_type t0 ON t0.oid = a.atttypid
  JOIN pg_catalog.pg_type t ON t.oid = CASE WHEN t0.typtype = 'd' THEN t0.typbasetype ELSE t0.oid END
 WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped
 ORDER BY a.attnum
"""

_IDENTITY = """
SELECT a.attname
  FROM pg_catalog.pg_index i
 CROSS JOIN LATERAL pg_catalog.unnest(i.indkey::smallint[]) WITH ORDINALITY AS k(attnum, position)
  JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
 WHERE k.position <= i.indnkeyatts AND i.indexrelid = (
       SELECT x.indexrelid FROM pg_catalog.pg_index x JOIN pg_catalog.pg_class c ON c.oid = x.indrelid
        WHERE x.indrelid = %s AND x.indislive AND x.indisvalid
          AND ((x.indisreplident AND c.relreplident = 'i') OR x.indisprimary)
        ORDER BY x.indisreplident AND c.relreplident = 'i' DESC LIMIT 1)
 ORDER BY k.position
"""


@dataclass(frozen=True, slots=True)
class TargetColumn:
    """A live column of a target table."""

    name: str
    type_oid: int
    typmod: int
    generated: bool
    identity: str  #: '' no, 'a' ALWAYS, 'd' BY DEFAULT
    attnum: int
    equality: str | None  #: schema-qualified = operator where pg_catalog's would not be found
    not_null: bool
    has_default: bool


@dataclass(frozen=True, slots=True)
class TargetRelation:
    """A table of the target. ``fires``: a trigger would fire in the present session_replication_role."""

    oid: int
    schema: str
    name: str
    relkind: str
    bytes: int
    fires: bool
    rules: bool
    referenced: bool
    row_security: bool
    columns: tuple[TargetColumn, ...]
    identity: tuple[str, ...]  #: columns of the replica identity index, else of the primary key, else ()

    def column(self, name: str) -> TargetColumn | None:
        """The column of that name, case-sensitive."""
        return next((c for c in self.columns if c.name == name), None)


def describe(connection: psycopg.Connection, schema: str, name: str, *, replica: bool = True) -> TargetRelation | None:
    """Read a table from the catalogs; None where it does not exist.

    :param replica: whether session_replication_role = replica is in effect (which triggers and rules would fire).
    """
    firing = ["A", "R"] if replica else ["A", "O"]
    row = connection.execute(_TABLE.encode(), (firing, firing, schema, name)).fetchone()
    if row is None:
        return None
    columns = [
        TargetColumn(c[0], c[1], c[2], c[3] != "", c[4], c[5], c[6], c[7], c[8])
        for c in connection.execute(_COLUMNS.encode(), (row[0],))
    ]
    identity = tuple(r[0] for r in connection.execute(_IDENTITY.encode(), (row[0],)))
    oid, relkind, size, fires, rules, referenced, row_security = row
    return TargetRelation(
        oid, schema, name, relkind, size, fires, rules, referenced, row_security, tuple(columns), identity
    )


def missing(schema: str, name: str) -> SchemaFault:
    """The server's error for a target table that does not exist."""
    return SchemaFault(
        f'logical replication target relation "{schema}.{name}" does not exist',
        hint=f"Create the table on the target; apply goes on by itself. Relation: {schema}.{name}",
        sqlstate="55000",
    )


def column_faults(columns: Sequence[str], target: TargetRelation) -> list[str]:
    """What the server's check_relation (relation.c) would refuse: missing and generated columns, in its words."""
    names = {c.name: c for c in target.columns}
    absent = [f'"{c}"' for c in columns if c not in names]
    generated = [f'"{c}"' for c in columns if c in names and names[c].generated]
    where = f'logical replication target relation "{target.schema}.{target.name}"'
    faults = []
    if absent:
        faults.append(f"{where} is missing replicated column{'s' if len(absent) > 1 else ''}: {', '.join(absent)}")
    if generated:
        plural = "s" if len(generated) > 1 else ""
        faults.append(f"{where} has incompatible generated column{plural}: {', '.join(generated)}")
    return faults


@dataclass(frozen=True, slots=True)
class RelationMap:
    """A remote relation and the target table its rows go to."""

    remote: Relation
    target: TargetRelation
    columns: tuple[TargetColumn, ...]  #: target column of each remote column, by position
    lookup: tuple[int, ...]  #: remote positions of the columns that find a row
    local_only: tuple[TargetColumn, ...] = field(default=())  #: must be NULL in a row found by all columns

    @property
    def by_identity(self) -> bool:
        """Whether rows are found by the target's key rather than by all columns."""
        return bool(self.target.identity)


def map_relation(remote: Relation, target: TargetRelation) -> RelationMap:
    """Pair columns by name and decide how rows are found (FindReplTupleInLocalRel, worker.c).

    :raises SchemaFault: missing or generated target columns; a view or foreign table.
    """
    if target.relkind not in _RELKINDS:
        raise SchemaFault(
            f'cannot use relation "{target.schema}.{target.name}" as logical replication target',
            detail="Only tables and partitioned tables can be.",
            sqlstate="42809",
        )
    faults = column_faults([c.name for c in remote.columns], target)
    if faults:
        raise SchemaFault(faults[0], hint="Change the target table; apply goes on by itself.", sqlstate="55000")
    names = {c.name: c for c in target.columns}
    positions = {c.name: i for i, c in enumerate(remote.columns)}
    local_only: tuple[TargetColumn, ...] = ()
    if target.identity:
        lookup = tuple(positions[n] for n in target.identity if n in positions)
    else:
        lookup = tuple(range(len(remote.columns)))
        local_only = tuple(c for c in target.columns if c.name not in positions and not c.generated)
    return RelationMap(remote, target, tuple(names[c.name] for c in remote.columns), lookup, local_only)


def check_updatable(relation: RelationMap) -> None:
    """The server's check_relation_updatable: an update or delete must be able to find its row.

    :raises SchemaFault: with the server's words.
    """
    remote, target = relation.remote, relation.target
    if remote.replica_identity == "f" or (target.relkind == "p" and not target.identity and remote.columns == ()):
        return
    key = {c.name for c in remote.columns if c.flags & 1}
    if target.identity and set(target.identity) <= key:
        return
    where = f'relation "{target.schema}.{target.name}"'
    if target.identity:
        text = f"publisher did not send replica identity column expected by the logical replication target {where}"
    else:
        text = (
            f"logical replication target {where} has neither REPLICA IDENTITY index nor PRIMARY KEY"
            " and published relation does not have REPLICA IDENTITY FULL"
        )
    raise SchemaFault(text, sqlstate="55000")
