"""A conflict as it travels to the launcher: through the ledger's event table, or with the error that stops apply.

Mirrors what ReportApplyConflict (conflict.c) writes into the log.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Any

import psycopg

from pgsub.apply.stream.transactions import RemoteTransaction
from pgsub.common import server_words
from pgsub.protocol.lsn import format_lsn
from pgsub.protocol.messages import Relation

#: `Key (a)=(1) already exists.`, in any language
_KEY = re.compile(r"\S+ (\(.*\)=\(.*\)) \S", re.DOTALL)


@dataclass(slots=True)
class ConflictRecord:
    """One conflict. Rows are by column, values as text; a column that did not come is not in them."""

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
    index_name: str | None = None  #: all of them, where there are several
    remote_tuple: dict[str, str | None] | None = None
    replica_identity: dict[str, str | None] | None = None
    #: what stands in the way, one an index: fields of ConflictingRow
    local_conflicts: list[dict[str, Any]] = field(default_factory=list)
    identical: bool = False  #: what is there is what was to be written
    action: str = ""  #: what a rule did: applied, kept or skipped; '' what the server does
    skipped_ref: str | None = None  #: names what is kept of the change, where it was skipped
    quiet: bool = False  #: the log is found of many of them at once

    def body(self) -> dict[str, object]:
        """Return it as JSON for the ledger."""
        return {"kind": "conflict", **{name: getattr(self, name) for name in _FIELDS}}


_FIELDS = tuple(one.name for one in fields(ConflictRecord))


def new_record(kind: str, transaction: RemoteTransaction, schema: str, name: str) -> ConflictRecord:
    """Begin a record.

    :param schema: with ``name`` the table, of a partitioned one the partition.
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
    """Format the detail that a unique violation names by itself, in the server's words for conflicts."""
    key = server_words.fields(diag).detail or ""
    return f'Key already exists in unique index "{diag.constraint_name}".\n{key}'.rstrip()


def violated_key(diag: psycopg.errors.Diagnostic) -> str | None:
    """Return the key that a unique violation names."""
    found = _KEY.match(server_words.fields(diag).detail or "")
    return found[1] if found else None


def copy_context(name: str) -> str:
    """Format the context of a copied row.

    :param name: schema.table of the target.
    """
    return f'processing a copied row for replication target relation "{name}"'


def copy_conflict(relation: Relation, diag: psycopg.errors.Diagnostic) -> ConflictRecord:
    """Record the conflict of a plain copy, as far as its error names it.

    :param relation: that is copied, by its name on the target.
    """
    record = new_record("insert_exists", RemoteTransaction(0, 0), diag.schema_name or "", diag.table_name or "")
    record.detail, record.context = first_detail(diag), copy_context(f"{relation.namespace}.{relation.name}")
    record.key, record.index_name = violated_key(diag) or "", diag.constraint_name
    return record
