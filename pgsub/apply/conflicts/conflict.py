"""Conflicts and faults in the server's words. Mirrors conflict.c."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias, TypeVar

import psycopg

from pgsub.apply.conflicts import conflict_record, conflict_text, schema_fault
from pgsub.apply.conflicts.conflict_record import ConflictRecord
from pgsub.apply.conflicts.error_context import Place, context, locate
from pgsub.apply.conflicts.logical_messages import LoggedMessage
from pgsub.apply.conflicts.skipped_publication import SkippedPublication
from pgsub.apply.stream.transactions import RemoteTransaction
from pgsub.common import table_lock
from pgsub.common.conflict_rules import Rule
from pgsub.common.errors import ApplyError, PermissionMissing, PgsubError, TableReplaced
from pgsub.common.quoting import word
from pgsub.protocol.messages import Message, Relation, Tuple
from pgsub.target.catalog.relation_map import RelationMap
from pgsub.target.session.connect import translate
from pgsub.target.sql import partitions
from pgsub.target.sql.conflict_search import ConflictingRow, Search
from pgsub.target.sql.row_queries import read_texts
from pgsub.target.sql.statement_builder import Statement
from pgsub.target.sql.verified_names import VERIFY, VERIFY_TYPES


class RowConflict(NamedTuple):
    """A conflict that does not stop apply; the transaction's finish LSN may not be known yet.

    The row is missing (update_missing, delete_missing: the change is skipped), or another origin wrote it last
    (update_origin_differs, delete_origin_differs: the change is applied). The message itself is not kept, because one
    transaction may have a million of these.
    """

    place: Place  #: without its rows
    key: str
    remote: dict[str, str | None] | None
    identity: dict[str, str | None]  #: the columns that find the row
    leaf: tuple[str, str] | None = None  #: the partition, once it is looked up
    local: ConflictingRow | None = None  #: the row as another origin wrote it, None if missing
    names: Sequence[str] = ()  #: columns in the order of the partition, once it is looked up

    @classmethod
    def of(cls, place: Place, found: Sequence[str | None] | None = None) -> RowConflict:
        """Make the conflict of a change whose row is missing or of another origin (apply_handle_*_internal).

        :param found: result of :func:`~pgsub.target.sql.row_queries.origin_differs`; None if the row is missing.
        """
        relation, leaf, local = place.mapped, None, None
        if found is not None:
            schema, name, xid, at, origin, values, micros = found
            names, leaf = [c.name for c in relation.target.columns], (schema or "", name or "")
            row = conflict_text.kept_row(dict(zip(names, read_texts(values), strict=True)))
            local = ConflictingRow("", None, row, int(xid or 0), at, origin, at=int(micros or 0))
        key, identity = conflict_text.identity_key(relation, place.searched), searched_by(relation, place.searched)
        remote = conflict_text.sent_row(relation, place.new) if place.new is not None else None
        return cls(place._replace(new=None, old=None), key, remote, identity, leaf, local)

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


def searched_by(relation: RelationMap, searched: Tuple) -> dict[str, str | None]:
    """Return the columns by which a row was searched, with their values."""
    columns = {relation.columns[i].name for i in relation.lookup}
    return {name: value for name, value in conflict_text.sent_row(relation, searched).items() if name in columns}


_R = TypeVar("_R")


def with_partitions(connection: psycopg.Connection, records: Sequence[_R]) -> list[_R]:
    """Add the partitions to conflicts of partitioned tables, and order the rows by the partition's columns.

    :param connection: in the transaction that records them.
    """
    conflicts = {n: one for n, one in enumerate(records) if isinstance(one, RowConflict)}
    parts = {n: one for n, one in conflicts.items() if one.place.mapped.target.relkind == "p"}
    unknown = {n: one for n, one in parts.items() if one.leaf is None}
    for relation in {id(one.place.relation): one.place.mapped for one in unknown.values()}.values():
        of_table = {n: one for n, one in unknown.items() if one.place.relation is relation}
        rows = [{**(one.remote or {}), **one.identity} for one in of_table.values()]
        leaves = partitions.leaves(connection, relation.target, rows)
        parts |= {n: one._replace(leaf=leaf) for (n, one), leaf in zip(of_table.items(), leaves, strict=True)}
    found = {one.leaf for one in parts.values()}
    orders: Mapping[Any, Sequence[str]] = {leaf: partitions.columns(connection, leaf) for leaf in found if leaf}
    named: dict[int, Any] = {n: one._replace(names=orders.get(one.leaf, ())) for n, one in parts.items()}
    return [named.get(n, one) for n, one in enumerate(records)]


class ResolvedConflict(NamedTuple):
    """A conflict that was resolved by a rule, or by ``skip-lsn`` for conflicting rows.

    :ivar skipped: a change that a rule skipped, to be kept: its relation as the publisher described it, and the reason.
    """

    transaction: RemoteTransaction
    record: ConflictRecord
    skipped: tuple[Relation, Message, dict[str, Any]] | None = None
    rule: Rule | None = None

    def body(self, subid: int) -> dict[str, object]:
        """Return the record as JSON for the ledger."""
        return self.record.body()


#: Items for the launcher to log: a change that was skipped or resolved, or a message.
Record: TypeAlias = RowConflict | ResolvedConflict | LoggedMessage | SkippedPublication


def stop_error(subid: int, record: ConflictRecord, place: Place) -> ApplyError:
    """Return the error of a conflict at which a rule stops apply."""
    error = ApplyError(record.message, detail=record.detail, sqlstate="P0001")
    error.conflict, error.record = record.conflict_type, record
    locate(error, subid, place)
    return error


def hint(change: str, subname: str) -> str:
    """Return the hint of a conflict that stops apply."""
    return f"{change}: apply continues by itself. For other options, see:\npgsub status {word(subname)} --runbook"


def new_record(place: Place, kind: str, schema: str | None = None, name: str | None = None) -> ConflictRecord:
    """Create a record with the change's rows.

    :param schema: with ``name`` the table if it is not the relation's own, such as a partition.
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
    """Add the conflicting rows to the record of a unique conflict (errdetail_apply_conflict).

    :param found: the search result; None if nothing could be read.
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
    """A violation of a unique index, until :mod:`~pgsub.apply.conflicts.unique_violation` has completed it."""

    place: Place
    key: str | None  #: as the failing statement reported it, like the following
    message: str  #: used if it is not a conflict in the server's sense
    detail: str | None


def fault(subid: int, error: psycopg.Error, place: Place | None, statement: Statement | None = None) -> PgsubError:
    """Translate the error of a failed statement: to a conflict if it is one of the server's types, else to a fault.

    :param place: the change that failed, None if none is known.
    :param statement: the failed statement if it was for a single row.
    """
    if statement in (VERIFY, VERIFY_TYPES) and error.sqlstate == table_lock.CHANGED:
        return _replaced(subid, place, types=statement is VERIFY_TYPES)
    if place is None:
        return translate(error, "apply changes to the target")
    if error.sqlstate == "23505" and place.message_type in ("INSERT", "UPDATE"):
        raised: PgsubError = _unique(error, place)
    else:
        where = f'relation "{place.name}"' if place.relation else "the target"
        raised = translate(error, f"apply remote transaction to {where}")
        if place.relation is not None and isinstance(raised, ApplyError):
            raised = schema_fault.with_column(raised, error, place.relation, place.new, statement)
        elif place.relation is not None and isinstance(raised, PermissionMissing):
            raised.denied = place.relation.target, place.message_type
    locate(raised, subid, place)
    return raised


def _replaced(subid: int, place: Place | None, *, types: bool) -> TableReplaced:
    if place is None or place.relation is None:
        what = "a logical replication target relation"
        return table_lock.types_renamed(what) if types else TableReplaced(f"{what} was replaced by another table")
    if types:
        raised = table_lock.types_renamed(f'logical replication target relation "{place.name}"')
        locate(raised, subid, place)
        return raised
    raised = TableReplaced(
        f'logical replication target relation "{place.name}" was replaced by another table',
        detail=f"The changes were meant for OID {place.relation.target.oid}.",
    )
    locate(raised, subid, place)
    return raised


def _unique(error: psycopg.Error, place: Place) -> ApplyError:
    """Create the conflict from the error alone; :mod:`pgsub.apply.conflicts.unique_violation` completes it."""
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
