"""The preparation of a copy: both sides of each table are described, and its pieces of work are determined."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import psycopg

from pgsub.apply import verified_publisher
from pgsub.common.errors import PermissionMissing, PgsubError, SchemaFault, StateForbids
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.protocol.messages import Column, TypeName
from pgsub.publisher import publication
from pgsub.publisher.tables import DescribedTables, RemoteColumn, RemoteTable, describe_tables
from pgsub.reconcile.expressions import compared, not_comparable
from pgsub.reconcile.rows import MISSING, left_by
from pgsub.tablesync.copy import cleanup, plan, row_by_row
from pgsub.tablesync.copy.adoption import Adoption
from pgsub.tablesync.copy.plan import Chunk
from pgsub.tablesync.copy.resume import Resumption
from pgsub.tablesync.copy.row_by_row import CopiedTable
from pgsub.tablesync.copy.task import PATIENCE, Piece
from pgsub.target.catalog.ddl_hints import column_types
from pgsub.target.catalog.relation import TargetRelation, describe_many
from pgsub.target.catalog.relation_map import check_replicable, column_faults, missing
from pgsub.target.ledger import worker_takeover
from pgsub.target.ledger.subscriptions import RelationState
from pgsub.target.ledger.tables import chunks
from pgsub.target.ledger.tables.chunks import ChunkKey, Part
from pgsub.target.ledger.worker_takeover import Claim
from pgsub.target.session import connect as target
from pgsub.target.session import roles
from pgsub.target.session.transactions import durable
from pgsub.target.sql import resync_truncate
from pgsub.target.sql.verified_names import may_lock


@dataclass(slots=True)
class Prepared:
    """The pieces to copy. ``errors`` are those of tables that cannot be copied.

    :ivar chunked: tables that become ``f`` only when all their pieces are done.
    :ivar resumed: the table whose copy goes on. Its other pieces are planned after its existing rows were repaired.
    """

    pieces: list[Piece] = field(default_factory=list)
    chunked: list[int] = field(default_factory=list)
    errors: dict[int, PgsubError] = field(default_factory=dict)
    resumed: Table | None = None


def find_targets(
    session: psycopg.Connection, sub: Subscription, rows: Sequence[RelationState]
) -> tuple[dict[int, TargetRelation], dict[int, PgsubError]]:
    """Describe the target tables; return errors for those that are gone, were re-created, or may not be written."""
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
    resume: Collection[int] = (),
    *,
    application_name: str | None = None,
) -> Prepared:
    """Describe the tables on the publisher, decide how each is copied, and write its chunks to the ledger.

    :param targets: by OID; the tables of one call share a slot and are copied in this order.
    :param adopt: tables whose rows are compared, if they have any.
    :param resume: tables whose copy may go on with its existing rows.
    :param application_name: name of the session on the publisher.
    """
    prepared, together = Prepared(), len(targets) > 1
    with contextlib.closing(verified_publisher.connect(session, sub, application_name)) as source:
        names = [(relation.schema, relation.name) for relation in targets.values()]
        described = describe_tables(source, names, sub.publications)
        version = source.info.server_version
        unpublished = publication.unpublished_operations(source, sub.publications) if adopt else {}
    resume = [relid for relid in resume if _goes_on(session, sub, described, targets[relid], claims[relid])]
    with durable(session):
        worker_takeover.fence(session, *(claims[relid] for relid in targets))
        for relid, relation in targets.items():
            name = (relation.schema, relation.name)
            if name in described.faults:
                prepared.errors[relid] = described.faults[name]
                continue
            table = Table(described.tables[name], relation, claims[relid], attempts[relid], version)
            try:
                if relid in resume:
                    prepared.pieces.append(_resumed(session, sub, table))
                    prepared.chunked.append(relid)
                    prepared.resumed = table
                    continue
                if relid in adopt and not _is_empty(session, relation, together=together):
                    prepared.pieces.append(_adopted(session, sub, table, unpublished.get(name, ())))
                    continue
                _prepare(session, sub, table, prepared, together=together)
            except SchemaFault as fault:
                prepared.errors[relid] = fault
            except psycopg.errors.LockNotAvailable as error:
                prepared.errors[relid] = target.translate(error, f'look for rows in table "{".".join(name)}"')
        if prepared.pieces:
            _plan(session, prepared.pieces, "chunked" if prepared.chunked else "atomic")
    return prepared


def _is_empty(session: psycopg.Connection, relation: TargetRelation, *, together: bool) -> bool:
    """Return whether a table is empty.

    :raises psycopg.errors.LockNotAvailable: it is locked, and must not delay other tables.
    """
    if not together:
        return plan.is_empty(session, relation)
    session.execute(PATIENCE)
    try:
        return plan.is_empty(session, relation)
    finally:
        session.execute("SET LOCAL lock_timeout = 0")  # other sessions hold the ledger's rows for longer


def _plan(session: psycopg.Connection, pieces: Sequence[Piece], mode: str) -> None:
    chunks.plan(session, [(one.key, one.chunk.bytes, one.chunk.rows, one.chunk.part) for one in pieces], mode)


def _goes_on(
    session: psycopg.Connection, sub: Subscription, described: DescribedTables, relation: TargetRelation, claim: Claim
) -> bool:
    """Return whether a table's copy goes on; if not, remove its rows."""
    remote = described.tables.get((relation.schema, relation.name))
    if remote is None:
        return False  # its fault is reported
    parts = [one.part for one in chunks.brought(session, claim) if one.part is not None]
    names = tuple(column.name for column in remote.columns)
    reason = plan.atomic_reason(sub, remote, relation, replica=target.is_replica(session))
    alike = bool(names) and {part.columns for part in parts} == {names}
    # guard: rows copied with other columns are not kept, without " and alike"
    if reason is None and alike:
        return True
    cleanup.remove_rows(session, claim, relation)
    return False


def _resumed(session: psycopg.Connection, sub: Subscription, table: Table) -> Piece:
    """Make the piece that repairs the existing rows of a copy."""
    types = _other_types(session, table.remote, table.target)
    copied, _ = _copied(sub, table, types, atomic=False)
    binary = plan.binary_copy(sub, table.remote, table.target, table.version)
    resumption = Resumption(compared(table.remote, table.target), binary)
    return Piece(ChunkKey(table.claim, table.attempt, 0), Chunk(0, "", 0, 0), copied, resumption=resumption)


def rest(session: psycopg.Connection, sub: Subscription, table: Table) -> list[Piece]:
    """Plan the rest of a copy that goes on, and write it to the ledger."""
    done = [one.part for one in chunks.brought(session, table.claim) if one.part is not None]
    with durable(session):
        worker_takeover.fence(session, table.claim)
        number = chunks.next_number(session, table.claim, table.attempt)
        types = _other_types(session, table.remote, table.target)
        copied, made = _copied(sub, table, types, atomic=False, done=done, number=number)
        pieces = [Piece(ChunkKey(table.claim, table.attempt, one.number), one, copied) for one in made]
        _plan(session, pieces, "chunked")
    return pieces


def _adopted(session: psycopg.Connection, sub: Subscription, table: Table, unpublished: Collection[str]) -> Piece:
    """Make the piece of a table whose rows are compared.

    :param unpublished: operations that are not published.
    :raises SchemaFault: the table has rows of another subscription, or its rows cannot be compared.
    """
    try:
        # guard: rows of a subscription that came meanwhile are not deleted
        resync_truncate.check_writers(session, sub.subid, resync_truncate.members(session, [table.target.oid]))
    except StateForbids as error:
        raise SchemaFault(error.message, detail=error.detail, hint=error.hint) from None
    _other_types(session, table.remote, table.target)
    both = compared(table.remote, table.target)
    if (reason := not_comparable(both)) is not None:
        raise SchemaFault(f'table "{both.name}" cannot be adopted: {reason}')
    relation, selection = row_by_row.described(table.remote, table.target)
    piece = CopiedTable(relation, selection, table.target.oid, "", True, False, table.target.acts_as, True, ())
    rows = int(table.remote.reltuples) if table.remote.reltuples >= 0 else None
    left = left_by(unpublished) - {MISSING}  # a copy transfers all rows
    key, chunk = ChunkKey(table.claim, table.attempt, 0), Chunk(0, "", table.remote.bytes, rows)
    return Piece(key, chunk, piece, Adoption(both, frozenset(left)))


@dataclass(frozen=True, slots=True)
class Table:
    """Both sides of a table, the number of the attempt to copy it, and the publisher's version."""

    remote: RemoteTable
    target: TargetRelation
    claim: Claim
    attempt: int
    version: int


def types_here(session: psycopg.Connection, columns: Sequence[RemoteColumn]) -> dict[str, str]:
    """Return the publisher's types of columns by name, as SQL that the target itself formats."""
    names = {c.type_oid: TypeName(c.type_oid, c.type_schema, c.type_name) for c in columns}
    types = column_types(session, [Column(0, c.name, c.type_oid, c.typmod) for c in columns], names)
    return {c.name: text for c, text in zip(columns, types, strict=True)}


def _other_types(
    session: psycopg.Connection, remote: RemoteTable, target: TargetRelation
) -> tuple[tuple[str, str], ...]:
    """Return the publisher's types, as SQL for the target, of columns that have another type there.

    :raises SchemaFault: the target lacks a column, or it is generated. logicalrep_rel_open in copy_table checks this
        too before the first row, even if there is none.
    """
    ours = {c.name: (c.type_oid, c.typmod) for c in target.columns if not c.generated}
    other = [c for c in remote.columns if ours.get(c.name) != (c.type_oid, c.typmod)]
    found = types_here(session, other)
    for fault in column_faults({name: text for name, text in found.items() if name not in ours}, target):
        raise fault
    shown = {c.name: c.full_type for c in target.columns}
    return tuple((name, text) for name, text in found.items() if text != shown[name])


def _prepare(
    session: psycopg.Connection, sub: Subscription, table: Table, prepared: Prepared, *, together: bool
) -> None:
    relation = table.target
    types = _other_types(session, table.remote, relation)
    atomic = (
        together
        or plan.atomic_reason(sub, table.remote, relation, replica=target.is_replica(session)) is not None
        or not plan.empty_under_lock(session, relation)
    )
    copied, made = _copied(sub, table, types, atomic=atomic)
    prepared.pieces += [Piece(ChunkKey(table.claim, table.attempt, one.number), one, copied) for one in made]
    if not atomic:  # then it is the only one
        prepared.chunked.append(relation.oid)


def _copied(
    sub: Subscription,
    table: Table,
    types: tuple[tuple[str, str], ...],
    *,
    atomic: bool,
    done: Collection[Part] = (),
    number: int = 0,
) -> tuple[CopiedTable, list[Chunk]]:
    relation = table.target
    if table.remote.foreign_partitions:
        raise SchemaFault(
            f'table "{relation.schema}.{relation.name}" cannot be copied: a partition of it on the publisher is a'
            " foreign table",
            detail="Its rows are those of another server, which publishes them itself or not at all.",
            hint="Detach the partition on the publisher, or add the table without a copy: --no-copy-data.",
        )
    copy_in, made = plan.make(
        sub, table.remote, relation, atomic=atomic, publisher_version=table.version, done=done, number=number
    )
    copied = CopiedTable(
        *row_by_row.described(table.remote, relation),
        oid=relation.oid,
        copy_in=copy_in,
        atomic=atomic,
        resolves=bool(plan.rules_of(sub, relation)),
        acts_as=relation.acts_as,
        locks=may_lock(relation, relation.acts_as),
        types=types,
        columns=_columns(table),
    )
    return copied, made


def _columns(table: Table) -> dict[str, tuple[int, int, int]]:
    copied = {column.name for column in table.remote.columns}
    return {c.name: (c.attnum, c.type_oid, c.typmod) for c in table.target.columns if c.name in copied}
