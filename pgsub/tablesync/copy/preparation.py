"""From tables to pieces of copy work: both sides described, how each table is copied, what its chunks are."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import psycopg

from pgsub.common.errors import PermissionMissing, PgsubError, SchemaFault, StateForbids
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.protocol.messages import Column, TypeName
from pgsub.publisher import connect as publisher
from pgsub.publisher import publication
from pgsub.publisher.tables import RemoteTable, describe_tables
from pgsub.reconcile.expressions import compared, not_comparable
from pgsub.reconcile.rows import MISSING, left_by
from pgsub.tablesync.copy import plan, row_by_row
from pgsub.tablesync.copy.adoption import Adoption
from pgsub.tablesync.copy.plan import Chunk
from pgsub.tablesync.copy.row_by_row import CopiedTable
from pgsub.tablesync.copy.task import Piece
from pgsub.target.catalog.ddl_hints import column_types
from pgsub.target.catalog.mapping import check_replicable, column_faults, missing
from pgsub.target.catalog.relation import TargetRelation, describe_many
from pgsub.target.ledger import chunks, worker_takeover
from pgsub.target.ledger.chunks import ChunkKey
from pgsub.target.ledger.subscriptions import RelationState
from pgsub.target.ledger.worker_takeover import Claim
from pgsub.target.session import connect as target
from pgsub.target.session import roles
from pgsub.target.session.connect import must_use_password
from pgsub.target.session.transactions import durable
from pgsub.target.sql import resync_truncate


@dataclass(slots=True)
class Prepared:
    """The pieces to copy; ``errors`` are of tables that cannot be.

    :ivar chunked: tables that are ``f`` only when all their pieces are done.
    """

    pieces: list[Piece] = field(default_factory=list)
    chunked: list[int] = field(default_factory=list)
    errors: dict[int, PgsubError] = field(default_factory=dict)


def find_targets(
    session: psycopg.Connection, sub: Subscription, rows: Sequence[RelationState]
) -> tuple[dict[int, TargetRelation], dict[int, PgsubError]]:
    """Describe the target tables; errors for those that are gone, were made anew, or may not be written."""
    found, errors = {}, dict[int, PgsubError]()
    names = [(row.schemaname, row.relname) for row in rows]
    described = describe_many(session, names, replica=target.is_replica(session))
    for row in rows:
        relation = described.get((row.schemaname, row.relname))
        if relation is None or relation.oid != row.srrelid:
            hint = "Create the table on the target, then refresh the subscription: the new table is copied then.\n"
            errors[row.srrelid] = missing(row.schemaname, row.relname, f"{hint}pgsub refresh {word(sub.name)}")
            continue
        try:
            check_replicable(relation)
            decided = roles.with_role(relation, sub)
            for change in ("INSERT", "UPDATE", "DELETE") if row.adopt else ("INSERT",):
                roles.check_own(session, relation, sub, change)
            found[row.srrelid] = decided
        except (PermissionMissing, SchemaFault) as error:
            errors[row.srrelid] = error
    return found, errors


def prepare(
    session: psycopg.Connection,
    sub: Subscription,
    targets: Mapping[int, TargetRelation],
    claims: Mapping[int, Claim],
    attempts: Mapping[int, int],
    adopt: Collection[int] = (),
) -> Prepared:
    """Describe the tables on the publisher, decide how each is copied, and write its chunks to the ledger.

    :param targets: by oid; tables in one call share a slot and are copied in this order.
    :param adopt: those whose rows are compared, if they have any.
    """
    prepared = Prepared()
    must = must_use_password(session, sub)
    with contextlib.closing(
        publisher.connect(sub.connection, application_name=sub.name, must_use_password=must)
    ) as source:
        names = [(relation.schema, relation.name) for relation in targets.values()]
        described = describe_tables(source, names, sub.publications)
        version = source.info.server_version
        unpublished = publication.unpublished_operations(source, sub.publications) if adopt else {}
    with durable(session):
        worker_takeover.fence(session, *(claims[relid] for relid in targets))
        for relid, relation in targets.items():
            name = (relation.schema, relation.name)
            if name in described.faults:
                prepared.errors[relid] = described.faults[name]
                continue
            table = Table(described.tables[name], relation, claims[relid], attempts[relid])
            try:
                if relid in adopt and not plan.is_empty(session, relation):
                    prepared.pieces.append(_adopted(session, sub, table, unpublished.get(name, ())))
                    continue
                _prepare(session, sub, table, version, prepared, together=len(targets) > 1)
            except SchemaFault as fault:
                prepared.errors[relid] = fault
        if prepared.pieces:
            rows = [(piece.key, piece.chunk.bytes, piece.chunk.rows) for piece in prepared.pieces]
            chunks.plan(session, rows, "chunked" if prepared.chunked else "atomic")
    return prepared


def _adopted(session: psycopg.Connection, sub: Subscription, table: Table, unpublished: Collection[str]) -> Piece:
    """Make the piece of a table whose rows are compared.

    :param unpublished: operations that are not published.
    :raises SchemaFault: the table has rows of others, or its rows cannot be compared.
    """
    try:
        # guard: rows of another subscription, which may have come since this was decided, are not deleted
        resync_truncate.check_writers(session, sub.subid, resync_truncate.members(session, [table.target.oid]))
    except StateForbids as error:
        raise SchemaFault(error.message, detail=error.detail, hint=error.hint) from None
    _other_types(session, table.remote, table.target)
    both = compared(table.remote, table.target)
    if (reason := not_comparable(both)) is not None:
        raise SchemaFault(f'table "{both.name}" cannot be adopted: {reason}')
    relation, selection = row_by_row.described(table.remote, table.target)
    piece = CopiedTable(relation, selection, table.target.oid, "", True, False, table.target.acts_as, ())
    rows = int(table.remote.reltuples) if table.remote.reltuples >= 0 else None
    left = left_by(unpublished) - {MISSING}  # a copy brings all rows
    return Piece(
        ChunkKey(table.claim, table.attempt, 0),
        Chunk(0, "", table.remote.bytes, rows),
        piece,
        Adoption(both, frozenset(left)),
    )


@dataclass(frozen=True, slots=True)
class Table:
    """Both sides of a table, and which attempt of its copy this is."""

    remote: RemoteTable
    target: TargetRelation
    claim: Claim
    attempt: int


def _other_types(
    session: psycopg.Connection, remote: RemoteTable, target: TargetRelation
) -> tuple[tuple[str, str], ...]:
    """Return the publisher's types, as SQL of the target, of columns that are of other types there.

    :raises SchemaFault: the target lacks a column, or has it as a generated one: logicalrep_rel_open in copy_table,
        which asks before the first row, and where there is none.
    """
    ours = {c.name: (c.type_oid, c.typmod) for c in target.columns if not c.generated}
    other = [c for c in remote.columns if ours.get(c.name) != (c.type_oid, c.typmod)]
    names = {c.type_oid: TypeName(c.type_oid, c.type_schema, c.type_name) for c in other}
    types = column_types(session, [Column(0, c.name, c.type_oid, c.typmod) for c in other], names)
    found = {c.name: text for c, text in zip(other, types, strict=True)}
    for fault in column_faults({name: text for name, text in found.items() if name not in ours}, target):
        raise fault
    shown = {c.name: c.full_type for c in target.columns}
    return tuple((name, text) for name, text in found.items() if text != shown[name])


def _prepare(
    session: psycopg.Connection, sub: Subscription, table: Table, version: int, prepared: Prepared, *, together: bool
) -> None:
    relation = table.target
    types = _other_types(session, table.remote, relation)
    atomic = (
        together
        or plan.atomic_reason(sub, table.remote, relation, replica=target.is_replica(session)) is not None
        or not plan.empty_under_lock(session, relation)
    )
    copy_in, made = plan.make(sub, table.remote, relation, atomic=atomic, publisher_version=version)
    copied = CopiedTable(
        *row_by_row.described(table.remote, relation),
        oid=relation.oid,
        copy_in=copy_in,
        atomic=atomic,
        resolves=bool(plan.rules_of(sub, relation)),
        acts_as=relation.acts_as,
        types=types,
    )
    prepared.pieces += [Piece(ChunkKey(table.claim, table.attempt, one.number), one, copied) for one in made]
    if not atomic:  # then it is the only one
        prepared.chunked.append(relation.oid)
