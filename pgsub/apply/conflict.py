"""Conflicts and faults in the server's words. Mirrors conflict.c and the error context of worker.c."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import NamedTuple

import psycopg

from pgsub.apply import unfit
from pgsub.apply.transactions import RemoteTransaction
from pgsub.errors import ApplyError, PgsubError
from pgsub.protocol.lsn import format_lsn
from pgsub.protocol.messages import Tuple
from pgsub.target.connect import translate
from pgsub.target.mapping import RelationMap
from pgsub.target.statements import Statement

_SHOWN = 64  #: bytes of a value in a message, as the server truncates them


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

    The row itself is not kept: there may be a million of these in one transaction.
    """

    transaction: RemoteTransaction
    place: Place  #: without its rows
    key: str
    remote_tuple: str | None
    detail: str

    def body(self, subid: int) -> dict[str, object]:
        """As JSON for the ledger, once the transaction's end is known."""
        return {"kind": "conflict", **asdict(self.record(subid))}

    def record(self, subid: int) -> ConflictRecord:
        """The record, once the transaction's end is known."""
        place, transaction = self.place, self.transaction
        assert place.relation is not None
        kind = f"{place.message_type.lower()}_missing"
        return ConflictRecord(
            kind,
            place.relation.target.schema,
            place.relation.target.name,
            self.key,
            self.remote_tuple,
            transaction.xid,
            format_lsn(transaction.finish_lsn),
            transaction.commit_ts,
            f'conflict detected on relation "{place.name()}": conflict={kind}',
            self.detail,
            context(subid, place),
        )


@dataclass(frozen=True, slots=True)
class ConflictRecord:
    """A conflict that did not stop apply: travels through the ledger's event table to the launcher."""

    conflict_type: str
    schemaname: str
    relname: str
    key: str
    remote_tuple: str | None
    remote_xid: int
    finish_lsn: str
    remote_commit_ts: int
    message: str
    detail: str
    context: str


def context(subid: int, place: Place, column: str | None = None) -> str:
    """The server's apply_error_callback line.

    :param column: of the publisher, which is to blame.
    """
    text = f'processing remote data for replication origin "pgsub_{subid}" during message type "{place.message_type}"'
    if place.relation is not None:
        text += f' for replication target relation "{place.name()}"'
        if column is not None:
            text += f' column "{column}"'
    transaction = place.transaction
    return f"{text} in transaction {transaction.xid}, finished at {format_lsn(transaction.finish_lsn)}"


def missing_row(place: Place) -> MissingRow:
    """The row that an update or delete was to change is not there (apply_handle_*_internal)."""
    assert place.relation is not None
    key = _key(place)
    full = "" if place.relation.by_identity else " full"
    remote = _row(place.relation, place.new) if place.new is not None else None
    if place.message_type == "UPDATE":
        detail = f"Could not find the row to be updated: remote row {remote}, replica identity{full} {key}."
    else:
        detail = f"Could not find the row to be deleted: replica identity{full} {key}."
    return MissingRow(place.transaction, place._replace(new=None, old=None), key, remote, detail)


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
            raised = unfit.explained(raised, error, place.relation, place.new, statement)
    located(raised, subid, place)
    return raised


def located(error: PgsubError, subid: int, place: Place) -> None:
    """Add the place to an error: relation, transaction, finish LSN."""
    error.context = context(subid, place, error.column if isinstance(error, ApplyError) else None)
    if isinstance(error, ApplyError):
        error.relation = place.name() or error.relation
        error.finish_lsn = format_lsn(place.transaction.finish_lsn)
        error.xid = place.transaction.xid


def _unique(error: psycopg.Error, place: Place) -> ApplyError:
    assert place.relation is not None
    kind = "insert_exists" if place.message_type == "INSERT" else "update_exists"
    parts = [f"remote row {_row(place.relation, place.new)}"] if place.new is not None else []
    if place.old is not None:
        parts.append(f"replica identity {_key(place)}")
    index, existing = error.diag.constraint_name, error.diag.message_detail or ""
    raised = ApplyError(
        f'conflict detected on relation "{place.name()}": conflict={kind}',
        detail=f"Could not apply remote change: {', '.join(parts)}.\n"
        f'Key already exists in unique index "{index}": {existing}',
        hint="Change or remove the target row; apply retries by itself.",
        sqlstate=error.sqlstate,
    )
    raised.conflict = kind
    return raised


def _key(place: Place) -> str:
    relation = place.relation
    assert relation is not None
    values = place.old or place.new
    assert values is not None
    names = [relation.columns[i].name for i in relation.lookup]
    shown = [_value(values, i) for i in relation.lookup]
    return f"({', '.join(names)})=({', '.join(shown)})"


def _row(relation: RelationMap, values: Tuple | None) -> str:
    if values is None:
        return "()"
    return f"({', '.join(_value(values, i) for i in range(len(relation.columns)))})"


def _value(values: Tuple, position: int) -> str:
    raw = values.values[position]
    if raw is None:
        return "null"
    if values.kinds[position : position + 1] == b"b":
        return "\\x" + raw[:_SHOWN].hex()
    text = raw.decode("utf-8", "replace")
    return text if len(raw) <= _SHOWN else raw[:_SHOWN].decode("utf-8", "ignore") + "..."
