"""The map from the columns of a remote relation to a target table's, and its errors. Mirrors ``relation.c``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from psycopg import sql

from pgsub.common.errors import SchemaFault
from pgsub.protocol.messages import Relation
from pgsub.target.catalog import ddl_hints, typmod
from pgsub.target.catalog.relation import TargetColumn, TargetRelation


def missing(schema: str, name: str, hint: str) -> SchemaFault:
    """Make the server's error for a target table that does not exist."""
    fault = SchemaFault(
        f'logical replication target relation "{schema}.{name}" does not exist', hint=hint, sqlstate="55000"
    )
    fault.relation = f"{schema}.{name}"
    return fault


def column_faults(columns: Mapping[str, str | None], target: TargetRelation) -> list[SchemaFault]:
    """Find missing and generated columns, in the words of check_relation (relation.c).

    :param columns: the publisher's column names and types as SQL; a type is None if it was not looked up.
    """
    names = {c.name: c for c in target.columns}
    absent = [c for c in columns if c not in names]
    generated = [c for c in columns if c in names and names[c].generated]
    faults = []
    if absent:
        added = [(c, text) for c in absent if (text := columns[c]) is not None]
        ddl = ddl_hints.add_columns(target.schema, target.name, added) if len(added) == len(absent) else None
        faults.append(_unfit(target, "is missing replicated column", absent, ddl))
    if generated:
        name, text = generated[0], columns[generated[0]]
        virtual = names[name].virtual
        ddl = None
        if text is not None:
            ddl = ddl_hints.ordinary(target.schema, target.name, name, text, virtual=virtual)
        faults.append(_unfit(target, "has incompatible generated column", generated, ddl))
    return faults


def _unfit(target: TargetRelation, what: str, columns: Sequence[str], ddl: sql.Composable | None) -> SchemaFault:
    plural = "s" if len(columns) > 1 else ""
    named = ", ".join(f'"{column}"' for column in columns)
    fault = SchemaFault(
        f'logical replication target relation "{target.schema}.{target.name}" {what}{plural}: {named}',
        hint="Change the target table; apply continues by itself." if ddl is None else ddl_hints.hint(ddl),
        sqlstate="55000",
    )
    fault.relation, fault.column = f"{target.schema}.{target.name}", columns[0]
    return fault


@dataclass(frozen=True, slots=True)
class RelationMap:
    """A remote relation and its target table."""

    remote: Relation
    target: TargetRelation
    columns: tuple[TargetColumn, ...]  #: target column of each remote column, by position
    lookup: tuple[int, ...]  #: remote positions of the columns by which a row is found
    local_only: tuple[TargetColumn, ...] = ()  #: must be NULL in a row that is found by all columns
    always: tuple[int, ...] = ()  #: remote positions of the target's GENERATED ALWAYS identity columns
    types: tuple[str, ...] = ()  #: the publisher's column types as SQL for the target, if they were looked up
    #: Remote positions of columns whose modifier may change the value that was sent.
    modified: frozenset[int] = frozenset()
    read: frozenset[int] = frozenset()  #: those of ``modified`` whose value only the input function can make
    rules: tuple[tuple[str, str], ...] = ()  #: type and resolution of conflicts that are not resolved as by the server

    def rule(self, conflict: str) -> str | None:
        """Return the resolution of a conflict type; None: the server's."""
        return next((resolution for kind, resolution in self.rules if kind == conflict), None)

    @property
    def by_identity(self) -> bool:
        """Whether rows are found by the key of the target or of its partitions, not by all columns."""
        return bool(self.target.identity)


def check_replicable(target: TargetRelation) -> None:
    """Check the relation kind (CheckSubscriptionRelkind), and that the table is neither a catalog nor the ledger's.

    :raises SchemaFault: it is a view, a foreign table, a catalog or a table of the ledger.
    """
    if not target.replicable:
        raise SchemaFault(
            f'cannot use relation "{target.schema}.{target.name}" as logical replication target',
            detail="Only tables and partitioned tables can be, and no system catalogs.",
            sqlstate="42809",
        )


def map_relation(remote: Relation, target: TargetRelation, types: tuple[str, ...] = ()) -> RelationMap:
    """Pair columns by name and decide how rows are found (FindReplTupleInLocalRel, worker.c).

    :param types: types of the remote columns as SQL for the target, used in hints.
    :raises SchemaFault: the target is not a table, or its columns are missing or generated.
    """
    check_replicable(target)
    sent = {c.name: types[i] if types else None for i, c in enumerate(remote.columns)}
    for fault in column_faults(sent, target):
        raise fault
    names = {c.name: c for c in target.columns}
    target = _identified(remote, target)
    lookup, local_only = _lookup(remote, target)
    columns = tuple(names[c.name] for c in remote.columns)
    always = tuple(i for i, c in enumerate(columns) if c.identity == "a")
    pairs = list(enumerate(zip(remote.columns, columns, strict=True)))
    modified = frozenset(i for i, (sent, column) in pairs if typmod.changes(sent, column))
    read = frozenset(i for i in modified if typmod.is_read_by(columns[i]))
    return RelationMap(remote, target, columns, lookup, local_only, always, types, modified, read)


def _identified(remote: Relation, target: TargetRelation) -> TargetRelation:
    """Return the target with the key by which rows are found (FindLogicalRepLocalIndex, relation.c)."""
    if target.deferrable and remote.replica_identity == "f":
        return replace(target, identity=())
    leaf, sent = target.leaf_key, {column.name for column in remote.columns if column.is_key}
    if leaf is None or not sent.issuperset((*leaf.columns, *leaf.split_by)):
        return replace(target, leaf_key=None)
    # guard: a row is found by the key of the partitions in its own partition, without " + leaf.split_by"
    return replace(target, identity=leaf.columns + leaf.split_by, key_equality=leaf.equality)


def _lookup(remote: Relation, target: TargetRelation) -> tuple[tuple[int, ...], tuple[TargetColumn, ...]]:
    """Return the remote positions of the lookup columns, and the target columns that must be NULL in the row."""
    positions = {c.name: i for i, c in enumerate(remote.columns)}
    if target.identity:
        return tuple(positions[n] for n in target.identity if n in positions), ()
    if target.relkind == "p" and remote.replica_identity != "f":
        return tuple(i for i, c in enumerate(remote.columns) if c.is_key), ()  # the partitions may have the key
    return tuple(positions.values()), tuple(c for c in target.columns if c.name not in positions and not c.generated)


def is_updatable(relation: RelationMap) -> bool:
    """Return whether updates and deletes can find their rows (check_relation_updatable)."""
    remote, target = relation.remote, relation.target
    key = {c.name for c in remote.columns if c.is_key}
    if set(target.identity) <= key if target.identity else remote.replica_identity == "f":
        return True
    return target.relkind == "p" and not target.identity and bool(relation.lookup)


def check_updatable(relation: RelationMap) -> None:
    """Check that updates and deletes can find their rows (check_relation_updatable).

    :raises SchemaFault: they cannot.
    """
    if is_updatable(relation):
        return
    remote, target = relation.remote, relation.target
    where = f'relation "{target.schema}.{target.name}"'
    help_ = ddl_hints.identify if target.identity else ddl_hints.add_primary_key
    sent = ddl_hints.published_key(remote)
    if target.identity:
        text = f"publisher did not send replica identity column expected by the logical replication target {where}"
    else:
        text = (
            f"logical replication target {where} has neither REPLICA IDENTITY index nor PRIMARY KEY"
            " and published relation does not have REPLICA IDENTITY FULL"
        )
    hint = ddl_hints.hint(help_(target.schema, target.name, sent)) if sent else None
    raise SchemaFault(text, hint=hint, sqlstate="55000")
