"""A conflict on its way to the launcher: in the ledger's event table, or in the error that stops apply.

Mirrors the log entry of ReportApplyConflict (conflict.c).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Any

import psycopg

from pgsub.apply.conflicts import conflict_text
from pgsub.apply.stream.transactions import RemoteTransaction
from pgsub.common import server_words
from pgsub.protocol.lsn import format_lsn
from pgsub.protocol.messages import Relation

#: `Key (a)=(1) already exists.`, in any language
_KEY = re.compile(r"\S+ (\(.*\)=\(.*\)) \S", re.DOTALL)


@dataclass(slots=True)
class ConflictRecord:
    """One conflict. Rows are by column, with values as text; columns that were not sent are left out."""

    conflict_type: str
    schemaname: str
    relname: str
    remote_xid: int
    finish_lsn: str
    remote_commit_ts: int
    message: str
    detail: str = ""
    context: str = ""
    key: str = ""
    index_name: str | None = None  #: the names of all, if there are several
    remote_tuple: dict[str, str | None] | None = None
    replica_identity: dict[str, str | None] | None = None
    #: the conflicting rows, one per index, as fields of ConflictingRow
    local_conflicts: list[dict[str, Any]] = field(default_factory=list)
    identical: bool = False  #: the existing row equals the row to be written
    action: str = ""  #: action of a rule: applied, kept or skipped; '' for the server's behaviour
    skipped_ref: str | None = None  #: links to the kept change if it was skipped
    quiet: bool = False  #: logged together with others, not one by one

    def body(self) -> dict[str, object]:
        """Return the record as JSON for the ledger."""
        return {"kind": "conflict", **{name: getattr(self, name) for name in _FIELDS}}


_FIELDS = tuple(one.name for one in fields(ConflictRecord))


def new_record(kind: str, transaction: RemoteTransaction, schema: str, name: str) -> ConflictRecord:
    """Create a record.

    :param schema: with ``name`` the table, or the partition of a partitioned one.
    """
    return ConflictRecord(
        kind,
        schema,
        name,
        transaction.xid,
        format_lsn(transaction.finish_lsn),
        transaction.commit_ts,
        message(schema, name, kind),
    )


def message(schema: str, name: str, kind: str) -> str:
    """Format the first line (ReportApplyConflict)."""
    return f'conflict detected on relation "{schema}.{name}": conflict={kind}'


def first_detail(diag: psycopg.errors.Diagnostic) -> str:
    """Format the detail that a unique violation itself reports, in the server's words for conflicts."""
    key = server_words.fields(diag).detail or ""
    return f"{conflict_text.key_exists(diag.constraint_name)}.\n{key}".rstrip()


def violated_key(diag: psycopg.errors.Diagnostic) -> str | None:
    """Return the key that a unique violation reports."""
    found = _KEY.match(server_words.fields(diag).detail or "")
    return found[1] if found else None


def copy_context(name: str) -> str:
    """Format the context of a copied row.

    :param name: schema.table of the target.
    """
    return f'processing a copied row for replication target relation "{name}"'


def copy_conflict(relation: Relation, diag: psycopg.errors.Diagnostic) -> ConflictRecord:
    """Create the record for a conflict of a plain copy, from its error alone.

    :param relation: the copied relation, with its name on the target.
    """
    record = new_record("insert_exists", RemoteTransaction(0, 0), diag.schema_name or "", diag.table_name or "")
    record.detail, record.context = first_detail(diag), copy_context(f"{relation.namespace}.{relation.name}")
    record.key, record.index_name = violated_key(diag) or "", diag.constraint_name
    return record
