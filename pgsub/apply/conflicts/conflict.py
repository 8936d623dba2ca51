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
from pgsub.protocol.reader import BINARY, UNCHANGED
from pgsub.target.catalog.mapping import RelationMap
from pgsub.target.session.connect import translate
from pgsub.target.sql import partitions
from pgsub.target.sql.conflict_search import ConflictingRow, Search
from pgsub.target.sql.statement_builder import Statement


class Place(NamedTuple):
    """A change and its transaction: the tag of a statement in the pipeline."""

    transaction: RemoteTransaction
    message_type: str  #: INSERT, UPDATE, DELETE, TRUNCATE, COMMIT, PREPARE, COMMIT PREPARED, ROLLBACK PREPARED
    relation: RelationMap | None = None
    new: Tuple | None = None
    old: Tuple | None = None

    @property
    def mapped(self) -> RelationMap:
        """The relation, where the change has one."""
        assert self.relation is not None
        return self.relation

    @property
    def row(self) -> Tuple:
        """The new row of an INSERT or UPDATE."""
        assert self.new is not None
        return self.new

    @property
    def searched(self) -> Tuple:
        """The row that finds the target's row."""
        searched = self.old or self.new
        assert searched is not None
        return searched

    @property
    def name(self) -> str:
        """schema.table of the target, as messages show it."""
        return f"{self.relation.target.schema}.{self.relation.target.name}" if self.relation else ""

    def parameters(self, statement: Statement) -> tuple[list[bytes | None], list[int]]:
        """Return values and formats that a statement takes of the rows."""
        values: list[bytes | None] = []
        formats: list[int] = []
        for source, position in statement.takes:
            row = self.new if source == "n" or self.old is None else self.old
            assert row is not None
            values.append(row.values[position])
            formats.append(row.kinds[position] == BINARY)
        return values, formats

    def columns(self, *, sent: bool) -> list[str]:
        """Return columns of the new row that the publisher sent, or left out as unchanged."""
        kinds = self.row.kinds
        return [c.name for i, c in enumerate(self.mapped.columns) if (kinds[i] != UNCHANGED) == sent]


class _RowConflict(NamedTuple):
    """A conflict that does not stop apply; the transaction's finish LSN may not be known yet.

    The message itself is not kept: there may be a million of these in one transaction.
    """

    place: Place  #: without its rows
    key: str
    remote: dict[str, str | None] | None
    identity: dict[str, str | None]  #: the columns that find the row
    leaf: tuple[str, str] | None = None  #: of a partitioned table the partition, once it was looked up
    local: ConflictingRow | None = None  #: the row as another origin left it
    names: Sequence[str] = ()  #: columns in the order of the partition, once it was looked up

    def body(self, subid: int) -> dict[str, object]:
        """Return the record as JSON for the ledger, once the transaction's end is known."""
        return self.record(subid).body()

    def record(self, subid: int) -> ConflictRecord:
        """Return the record, once the transaction's end is known."""
        kind = f"{self.place.message_type.lower()}_{'missing' if self.local is None else 'origin_differs'}"
        record = new_record(self.place, kind, *(self.leaf or ()))
        record.key, record.detail, record.context = self.key, self._detail(), context(subid, self.place)
        record.remote_tuple, record.replica_identity = self.remote, self.identity
        record.local_conflicts = [] if self.local is None else [self.local.as_record()]
        return record

    def _detail(self) -> str:
        relation, message_type = self.place.mapped, self.place.message_type
        version, names = relation.target.server_version, self.names or [c.name for c in relation.target.columns]
        remote = None if self.remote is None else conflict_text.ordered(relation, self.remote, names)
        identity = f"replica identity {self.key}"
        if conflict_text.full(relation):
            row = conflict_text.ordered(relation, self.identity, names)
            identity = f"replica identity full {conflict_text.row(row)}"
        if self.local is None:
            return conflict_text.missing(version, message_type, remote, identity)
        local = replace(self.local, row={name: (self.local.row or {}).get(name) for name in names})
        return conflict_text.origin_differs(version, message_type, local, remote, identity)


class MissingRow(_RowConflict):
    """update_missing or delete_missing: the change is skipped."""

    __slots__ = ()


class OriginDiffers(_RowConflict):
    """update_origin_differs or delete_origin_differs: the change is applied."""

    __slots__ = ()


def missing_row(place: Place) -> MissingRow:
    """Make the conflict of a row that is not there for an update or delete (apply_handle_*_internal)."""
    return MissingRow(*_row_conflict(place))


def origin_differs(place: Place, found: Sequence[str | None]) -> OriginDiffers:
    """Make the conflict of a row that another origin wrote last (apply_handle_*_internal).

    :param found: as :func:`~pgsub.target.sql.row_queries.origin_differs` gives it.
    """
    schema, name, xid, at, origin, values, micros = found
    names = [c.name for c in place.mapped.target.columns]
    row = conflict_text.kept_row(dict(zip(names, json.loads(values or "[]"), strict=True)))
    hit = ConflictingRow("", None, row, int(xid or 0), at, origin, at=int(micros or 0))
    return OriginDiffers(*_row_conflict(place), (schema or "", name or ""), hit)


def _row_conflict(place: Place) -> tuple[Place, str, dict[str, str | None] | None, dict[str, str | None]]:
    relation = place.mapped
    return (
        place._replace(new=None, old=None),
        conflict_text.identity_key(relation, place.searched),
        conflict_text.sent_row(relation, place.new) if place.new is not None else None,
        searched_by(relation, place.searched),
    )


def searched_by(relation: RelationMap, searched: Tuple) -> dict[str, str | None]:
    """Return the columns that a row was searched by, and their values."""
    columns = {relation.columns[i].name for i in relation.lookup}
    return {name: value for name, value in conflict_text.sent_row(relation, searched).items() if name in columns}


_R = TypeVar("_R")


def with_partitions(connection: psycopg.Connection, records: Sequence[_R]) -> list[_R]:
    """Complete records of rows of partitioned tables: with the partition, and the rows as that has its columns.

    :param connection: in the transaction that records them.
    """
    named: list[Any] = list(records)
    tables: dict[int, list[int]] = {}
    parts = [n for n, one in enumerate(named) if isinstance(one, _RowConflict) and _partitioned(one.place)]
    for number in parts:
        if named[number].leaf is None:
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
            named[number] = named[number]._replace(names=order)
    return named


def _partitioned(place: Place) -> bool:
    return place.relation is not None and place.relation.target.relkind == "p"


class ResolvedConflict(NamedTuple):
    """A conflict that was resolved: by a rule, or by ``skip-lsn`` of conflicting rows.

    :ivar skipped: a change that a rule skips, to be kept: its relation as the publisher described it, and why.
    :ivar rule: that decided.
    """

    transaction: RemoteTransaction
    record: ConflictRecord
    skipped: tuple[Relation, Message, dict[str, Any]] | None = None
    rule: Rule | None = None

    def body(self, subid: int) -> dict[str, object]:
        """Return the record as JSON for the ledger."""
        return self.record.body()


#: What the launcher is to log: a change that was skipped or resolved, or a message.
Record: TypeAlias = MissingRow | OriginDiffers | ResolvedConflict | LoggedMessage


def stop_error(subid: int, record: ConflictRecord, place: Place) -> ApplyError:
    """Make the error of a conflict that a rule makes stop apply."""
    error = ApplyError(record.message, detail=record.detail, sqlstate="P0001")
    error.conflict, error.record = record.conflict_type, record
    locate(error, subid, place)
    return error


def other_options(subname: str) -> str:
    """Format the end of a hint."""
    return f"For other options, see:\npgsub status {subname} --runbook"


def new_record(place: Place, kind: str, schema: str | None = None, name: str | None = None) -> ConflictRecord:
    """Begin a record, with the change's rows.

    :param schema: with ``name`` the table where it is not the relation's own: of a partitioned one the partition.
    """
    relation = place.mapped
    target = relation.target
    record = conflict_record.new_record(kind, place.transaction, schema or target.schema, name or target.name)
    if place.new is not None:
        record.key = conflict_text.identity_key(relation, place.searched)
        record.remote_tuple = conflict_text.sent_row(relation, place.new)
        if place.message_type == "UPDATE":
            record.replica_identity = searched_by(relation, place.searched)
    return record


def add_rows_in_the_way(
    record: ConflictRecord, place: Place, rows: Sequence[ConflictingRow], found: Search | None
) -> None:
    """Complete the record of a unique conflict (errdetail_apply_conflict).

    :param found: what was found; None where nothing could be read.
    """
    relation = place.mapped
    updates = place.message_type == "UPDATE" and not (found is not None and found.moved)
    remote = (found.remote if found is not None else None) or conflict_text.remote_row(relation, place.row)
    identity = conflict_text.identity(relation, place.searched) if updates else None
    record.detail = conflict_text.unique(relation.target.server_version, rows, remote, identity)
    record.index_name = ", ".join(row.index for row in rows)
    record.local_conflicts = conflict_text.local_conflicts(rows)
    record.identical = any(row.identical for row in rows)


@dataclass(frozen=True, slots=True)
class UniqueFailure:
    """A change that a unique index refused, until :mod:`pgsub.apply.conflicts.report` has read the rows in the way."""

    place: Place
    key: str | None  #: as the failing statement named it, as what follows
    message: str  #: where it is no conflict in the server's sense
    detail: str | None


def context(subid: int, place: Place, column: str | None = None) -> str:
    """Format the server's apply_error_callback line.

    :param column: of the publisher, which is to blame.
    """
    transaction = place.transaction
    if not transaction.xid:
        return conflict_record.copy_context(place.name)
    text = f'processing remote data for replication origin "pgsub_{subid}" during message type "{place.message_type}"'
    version = 0
    if place.relation is not None:
        version = place.relation.target.server_version
        text += f' for replication target relation "{place.name}"'
        if column is not None:
            text += f' column "{column}"'
    return f"{text} in transaction {transaction.xid}, finished at {conflict_text.lsn(transaction.finish_lsn, version)}"


def fault(subid: int, error: psycopg.Error, place: Place | None, statement: Statement | None = None) -> PgsubError:
    """Translate the error of a failed statement: a conflict of the server's types where it is one, else a fault.

    :param place: the change that failed, None where none is to blame.
    :param statement: what failed, where it was a single-row statement.
    """
    if place is None:
        return translate(error, "apply changes to the target")
    if error.sqlstate == "23505" and place.message_type in ("INSERT", "UPDATE"):
        raised: PgsubError = _unique(error, place)
    else:
        where = f'relation "{place.name}"' if place.relation else "the target"
        raised = translate(error, f"apply remote transaction to {where}")
        raised.detail = error.diag.message_detail or raised.detail
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
        error.relation = place.name or error.relation
        if place.transaction.xid:  # a copied row is of none
            error.finish_lsn = format_lsn(place.transaction.finish_lsn)
            error.xid = place.transaction.xid


def _unique(error: psycopg.Error, place: Place) -> ApplyError:
    """Make the conflict as far as the error itself names it; :mod:`pgsub.apply.conflicts.report` completes it."""
    diag = error.diag
    kind = "insert_exists" if place.message_type == "INSERT" else "update_exists"
    record = new_record(place, kind, diag.schema_name, diag.table_name)
    record.index_name = diag.constraint_name
    record.detail = conflict_record.first_detail(diag)
    raised = ApplyError(record.message, detail=record.detail, sqlstate=error.sqlstate)
    raised.conflict, raised.record = kind, record
    if place.new is not None:
        plain = translate(error, f'apply remote transaction to relation "{place.name}"')
        raised.unique_failure = UniqueFailure(place, conflict_record.violated_key(diag), plain.message, plain.detail)
    return raised
