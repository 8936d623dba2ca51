"""Conflicts and faults in the server's words. Mirrors conflict.c and the error context of worker.c."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias, TypeVar

import psycopg

from pgsub.apply.conflicts import conflict_record, conflict_text, schema_fault
from pgsub.apply.conflicts.conflict_record import ConflictRecord
from pgsub.apply.conflicts.logical_messages import LoggedMessage
from pgsub.apply.stream.transactions import RemoteTransaction
from pgsub.common.conflict_rules import Rule
from pgsub.common.errors import ApplyError, PermissionMissing, PgsubError
from pgsub.protocol.lsn import format_lsn
from pgsub.protocol.messages import Message, Relation, Tuple
from pgsub.target.catalog.mapping import RelationMap
from pgsub.target.session.connect import translate
from pgsub.target.sql import partitions
from pgsub.target.sql.conflict_search import ConflictingRow
from pgsub.target.sql.statements import Statement


class Place(NamedTuple):
    """Which change of which transaction: what a statement of the pipeline is tagged with."""

    transaction: RemoteTransaction
    message_type: str  #: INSERT, UPDATE, DELETE, TRUNCATE, COMMIT, PREPARE, COMMIT PREPARED, ROLLBACK PREPARED
    relation: RelationMap | None = None
    new: Tuple | None = None
    old: Tuple | None = None

    def name(self) -> str:
        """schema.table of the target, as messages show it."""
        return f"{self.relation.target.schema}.{self.relation.target.name}" if self.relation else ""


class MissingRow(NamedTuple):
    """update_missing or delete_missing: the change is skipped. Of a transaction whose finish LSN may not be known yet.

    The message itself is not kept: there may be a million of these in one transaction.
    """

    transaction: RemoteTransaction
    place: Place  #: without its rows
    key: str
    remote: dict[str, str | None] | None
    identity: dict[str, str | None]
    detail: str
    leaf: tuple[str, str] | None = None  #: of a partitioned table the partition, once somebody has asked

    def body(self, subid: int) -> dict[str, object]:
        """As JSON for the ledger, once the transaction's end is known."""
        return self.record(subid).body()

    def record(self, subid: int) -> ConflictRecord:
        """The record, once the transaction's end is known."""
        record = new_record(self.place, f"{self.place.message_type.lower()}_missing", *(self.leaf or ()))
        record.key, record.detail = self.key, self.detail
        record.remote_tuple, record.replica_identity = self.remote, self.identity
        record.context = context(subid, self.place)
        return record

    def worded(self, names: Sequence[str]) -> MissingRow:
        """With rows in the order of the partition's columns."""
        version, remote, identity = _ordered(self, names)
        return self._replace(detail=conflict_text.missing(version, self.place.message_type, remote, identity))


class OriginDiffers(NamedTuple):
    """update_origin_differs or delete_origin_differs: somebody else wrote the row last. The change is applied."""

    transaction: RemoteTransaction
    place: Place  #: without its rows
    key: str
    remote: dict[str, str | None] | None
    identity: dict[str, str | None]
    detail: str
    leaf: tuple[str, str]
    local: ConflictingRow

    def body(self, subid: int) -> dict[str, object]:
        """As JSON for the ledger, once the transaction's end is known."""
        return self.record(subid).body()

    def record(self, subid: int) -> ConflictRecord:
        """The record, once the transaction's end is known."""
        record = new_record(self.place, f"{self.place.message_type.lower()}_origin_differs", *self.leaf)
        record.key, record.detail = self.key, self.detail
        record.remote_tuple, record.replica_identity = self.remote, self.identity
        record.local_conflicts = [self.local.told()]
        record.context = context(subid, self.place)
        return record

    def worded(self, names: Sequence[str]) -> OriginDiffers:
        """As of :class:`MissingRow`."""
        version, remote, identity = _ordered(self, names)
        there = self.local.row or {}
        hit = replace(self.local, row={name: there.get(name) for name in names})
        return self._replace(
            detail=conflict_text.origin_differs(version, self.place.message_type, hit, remote, identity)
        )


def _ordered(one: MissingRow | OriginDiffers, names: Sequence[str]) -> tuple[int, conflict_text.Row | None, str]:
    """Version of the target, remote row, and how the row was searched."""
    relation = one.place.relation
    assert relation is not None
    remote = None if one.remote is None else conflict_text.ordered(relation, one.remote, names)
    identity = f"replica identity {one.key}"
    if conflict_text.full(relation):
        identity = f"replica identity full {conflict_text.row(conflict_text.ordered(relation, one.identity, names))}"
    return relation.target.server_version, remote, identity


class SkippedRow(NamedTuple):
    """A conflict whose change is left out by a skip, where it would stop apply.

    :ivar letter: what names the row of ``pgsub.skipped_change``; None where nothing is lost, for an identical row.
    """

    found: ConflictRecord
    letter: str | None

    def body(self, subid: int) -> dict[str, object]:
        """As JSON for the ledger."""
        return {**self.found.body(), "action": "skipped", "letter": self.letter}


def origin_differs(place: Place, found: Sequence[str | None]) -> OriginDiffers:
    """A row that is about to be changed was last written by somebody else (apply_handle_*_internal).

    :param found: as :func:`~pgsub.target.sql.statements.written_elsewhere` gives it.
    """
    relation, searched = place.relation, place.old or place.new
    assert relation is not None and searched is not None
    schema, name, xid, at, origin, values, micros = found
    names = [c.name for c in relation.target.columns]
    local: dict[str, str | None] = dict(zip(names, json.loads(values or "[]"), strict=True))
    remote = conflict_text.remote_row(relation, place.new) if place.new is not None else None
    hit = ConflictingRow("", None, local, int(xid or 0), at, origin, at=int(micros or 0))
    version, identity = relation.target.server_version, conflict_text.identity(relation, searched)
    return OriginDiffers(
        place.transaction,
        place._replace(new=None, old=None),
        conflict_text.identity_key(relation, searched),
        conflict_text.sent_row(relation, place.new) if place.new is not None else None,
        searched_by(relation, searched),
        conflict_text.origin_differs(version, place.message_type, hit, remote, identity),
        (schema or "", name or ""),
        replace(hit, row=conflict_text.kept_row(local)),
    )


_R = TypeVar("_R")


def with_partitions(connection: psycopg.Connection, records: Sequence[_R]) -> list[_R]:
    """Records of rows of partitioned tables with the partition, and the rows as that has its columns.

    :param connection: in the transaction that records them.
    """
    named: list[Any] = list(records)
    tables: dict[int, list[int]] = {}
    parts = [n for n, one in enumerate(named) if isinstance(one, MissingRow | OriginDiffers) and _in_parts(one)]
    for number in parts:
        if isinstance(named[number], MissingRow):
            tables.setdefault(id(named[number].place.relation), []).append(number)
    for numbers in tables.values():
        relation = named[numbers[0]].place.relation
        rows = [{**(named[number].remote or {}), **named[number].identity} for number in numbers]
        for number, leaf in zip(numbers, partitions.leaves(connection, relation.target, rows), strict=True):
            named[number] = named[number]._replace(leaf=leaf)
    orders: dict[tuple[str, str], list[str]] = {}
    for number in parts:
        leaf = named[number].leaf
        if leaf is not None:
            order = orders[leaf] = orders.get(leaf) or partitions.columns(connection, leaf)
            named[number] = named[number].worded(order)
    return named


def _in_parts(one: MissingRow | OriginDiffers) -> bool:
    return one.place.relation is not None and one.place.relation.target.relkind == "p"


class ResolvedConflict(NamedTuple):
    """A conflict that a rule resolved.

    :ivar letter: what is kept of a change that is skipped: as the publisher described its relation, and why.
    """

    transaction: RemoteTransaction
    record: ConflictRecord
    letter: tuple[Relation, Message, dict[str, Any]] | None = None
    rule: Rule | None = None  #: that decided

    def body(self, subid: int) -> dict[str, object]:
        """As JSON for the ledger."""
        return self.record.body()


#: What the launcher is to log: a change that was skipped or resolved, or a message.
Record: TypeAlias = MissingRow | OriginDiffers | SkippedRow | ResolvedConflict | LoggedMessage


def stop_error(subid: int, record: ConflictRecord, place: Place) -> ApplyError:
    """The error of a conflict that a rule makes stop apply."""
    error = ApplyError(record.message, detail=record.detail, sqlstate="P0001")
    error.conflict, error.record = record.conflict_type, record
    locate(error, subid, place)
    return error


def new_record(place: Place, kind: str, schema: str | None = None, name: str | None = None) -> ConflictRecord:
    """The beginning of a record.

    :param schema: with ``name`` the table where it is not the relation's own: of a partitioned one the partition.
    """
    assert place.relation is not None
    target = place.relation.target
    return conflict_record.new_record(kind, place.transaction, schema or target.schema, name or target.name)


@dataclass(frozen=True, slots=True)
class UniqueFailure:
    """A change that a unique index refused, until :mod:`pgsub.apply.conflicts.report` has looked at what is there."""

    relation: RelationMap
    message_type: str
    new: Tuple
    old: Tuple | None
    key: str | None  #: as the failing statement told it, as what follows
    message: str  #: where it is no conflict in the server's sense
    detail: str | None


def context(subid: int, place: Place, column: str | None = None) -> str:
    """The server's apply_error_callback line.

    :param column: of the publisher, which is to blame.
    """
    if not place.transaction.xid:
        return conflict_record.copy_context(place.name())
    text = f'processing remote data for replication origin "pgsub_{subid}" during message type "{place.message_type}"'
    if place.relation is not None:
        text += f' for replication target relation "{place.name()}"'
        if column is not None:
            text += f' column "{column}"'
    transaction = place.transaction
    version = place.relation.target.server_version if place.relation is not None else 0
    return f"{text} in transaction {transaction.xid}, finished at {conflict_text.lsn(transaction.finish_lsn, version)}"


def missing_row(place: Place) -> MissingRow:
    """The row that an update or delete was to change is not there (apply_handle_*_internal)."""
    relation, searched = place.relation, place.old or place.new
    assert relation is not None and searched is not None
    remote = conflict_text.remote_row(relation, place.new) if place.new is not None else None
    version = relation.target.server_version
    return MissingRow(
        place.transaction,
        place._replace(new=None, old=None),
        conflict_text.identity_key(relation, searched),
        conflict_text.sent_row(relation, place.new) if place.new is not None else None,
        searched_by(relation, searched),
        conflict_text.missing(version, place.message_type, remote, conflict_text.identity(relation, searched)),
    )


def searched_by(relation: RelationMap, searched: Tuple) -> dict[str, str | None]:
    """What a row was searched by."""
    columns = {relation.columns[i].name for i in relation.lookup}
    return {name: value for name, value in conflict_text.sent_row(relation, searched).items() if name in columns}


def fault(subid: int, error: psycopg.Error, place: Place | None, statement: Statement | None = None) -> PgsubError:
    """What a failed statement becomes: a conflict of the server's types where it is one, else a fault with place.

    :param place: the change that failed, None where none is to blame.
    :param statement: what failed, where it was a single-row statement.
    """
    diag = error.diag
    if place is None:
        return translate(error, "apply changes to the target")
    if error.sqlstate == "23505" and place.message_type in ("INSERT", "UPDATE"):
        raised: PgsubError = _unique(error, place)
    else:
        where = f'relation "{place.name()}"' if place.relation else "the target"
        raised = translate(error, f"apply remote transaction to {where}")
        raised.detail = diag.message_detail or raised.detail
        if place.relation is not None and isinstance(raised, ApplyError):
            raised = schema_fault.with_column(raised, error, place.relation, place.new, statement)
        elif place.relation is not None and isinstance(raised, PermissionMissing):
            raised.denied = place.relation.target, place.message_type
    locate(raised, subid, place)
    return raised


def locate(error: PgsubError, subid: int, place: Place) -> None:
    """Add the place to an error: relation, transaction, finish LSN."""
    error.context = context(subid, place, error.column if isinstance(error, ApplyError) else None)
    if isinstance(error, ApplyError):
        if error.record is not None:
            error.record.context = error.context
        error.relation = place.name() or error.relation
        if place.transaction.xid:  # a copied row is of none
            error.finish_lsn = format_lsn(place.transaction.finish_lsn)
            error.xid = place.transaction.xid


def _unique(error: psycopg.Error, place: Place) -> ApplyError:
    """What can be told without another look; see :mod:`pgsub.apply.conflicts.report` for the rest."""
    relation, diag = place.relation, error.diag
    assert relation is not None
    kind = "insert_exists" if place.message_type == "INSERT" else "update_exists"
    record = new_record(place, kind, diag.schema_name, diag.table_name)
    record.index_name = diag.constraint_name
    key = conflict_record.violated_key(diag)
    record.detail = conflict_record.first_detail(diag)
    raised = ApplyError(record.message, detail=record.detail, sqlstate=error.sqlstate)
    raised.conflict, raised.record = kind, record
    if place.new is not None:
        searched = place.old or place.new
        record.key, record.remote_tuple = (
            conflict_text.identity_key(relation, searched),
            conflict_text.sent_row(relation, place.new),
        )
        if place.message_type == "UPDATE":
            record.replica_identity = searched_by(relation, searched)
        plain = translate(error, f'apply remote transaction to relation "{place.name()}"')
        raised.unique_failure = UniqueFailure(
            relation, place.message_type, place.new, place.old, key, plain.message, plain.detail
        )
    return raised
