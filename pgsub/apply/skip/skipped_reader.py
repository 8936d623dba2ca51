"""Reads skipped changes that :mod:`pgsub.apply.commit.skipped_writer` wrote.

A row of ``pgsub.skipped_change`` has the names of columns, but neither their types nor their positions on the
publisher. The target's types are used instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import psycopg

from pgsub.apply.commit.skipped_writer import CUT
from pgsub.apply.stream.transactions import Kind, RemoteTransaction
from pgsub.common.errors import StateForbids
from pgsub.protocol.encoder import RowMessage
from pgsub.protocol.messages import Column, Delete, Insert, Relation, Truncate, Tuple, Update
from pgsub.target.ledger.skipped_changes import SkippedChange, SkippedTransaction

_TEXT = 25
_TYPES = """
SELECT a.attname::text, a.atttypid::bigint FROM pg_catalog.pg_attribute a
  JOIN pg_catalog.pg_class c ON c.oid = a.attrelid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = %s AND c.relname = %s AND a.attnum > 0 AND NOT a.attisdropped
"""


class SkippedReader:
    """A reader of the skipped changes of one transaction.

    :param connection: a target session; queried for all tables at once, because it may be in a pipeline later.
    """

    def __init__(self, connection: psycopg.Connection, finish_lsn: int, kept: SkippedTransaction) -> None:
        self._relations: dict[object, Relation] = {}
        self._types: dict[tuple[str, str], dict[str, int]] = {}
        for schema, name, _ in kept.totals:
            rows = connection.execute(_TYPES, (schema, name)).fetchall()
            self._types[schema, name] = dict(rows)
        self.transaction = RemoteTransaction(kept.xid, finish_lsn, finish_lsn)

    def changes(self, rows: Iterable[SkippedChange]) -> Iterator[tuple[SkippedChange, list[Relation], RowMessage]]:
        """Yield each change with its relations; consecutive TRUNCATEs become one, of all their tables.

        They were one on the publisher if foreign keys connect the tables; otherwise the result is the same.
        """
        for _, group in groupby(rows, _statement):
            first, *others = group
            self.transaction.commit_ts = first.body["commit_ts"]
            self.transaction.kind = Kind(first.body["kind"])
            relations = list({one.relid: one for one in map(self._relation, [first, *others])}.values())
            yield first, relations, _message(first, relations)

    def _relation(self, row: SkippedChange) -> Relation:
        """Return the publisher's table as the row describes it; different columns make another relation."""
        body = row.body
        names: dict[str, None] = dict.fromkeys(body.get("new") or {})
        names |= dict.fromkeys([*body.get("unchanged", ()), *(body.get("old") or {})])
        table = row.schemaname, row.relname
        key = (*table, tuple(names), tuple(body["identity"]), body["replica_identity"])
        known = self._relations.get(key)
        if known is None:
            types, identity = self._types[table], set(body["identity"])
            # the target's modifiers may differ from those of the values
            columns = tuple(Column(int(n in identity), n, types.get(n, _TEXT), -1) for n in names)
            known = Relation(len(self._relations) + 1, *table, body["replica_identity"], columns)
            self._relations[key] = known
        return known


def _statement(row: SkippedChange) -> object:
    """Return a value that is shared by TRUNCATEs to be merged, and unique for other changes."""
    return (row.body.get("restart_identity"),) if row.body["operation"] == "TRUNCATE" else row.id


def _message(row: SkippedChange, relations: Sequence[Relation]) -> RowMessage:
    body, relation = row.body, relations[0]
    old = _tuple(relation, body["old"]) if "old" in body else None
    match body["operation"]:
        case "INSERT":
            return Insert(relation.relid, _tuple(relation, body["new"]))
        case "UPDATE":
            return Update(relation.relid, body.get("old_kind", ""), old, _tuple(relation, body["new"]))
        case "DELETE" if old is not None:
            return Delete(relation.relid, body["old_kind"], old)
        case "TRUNCATE":
            relids = tuple(one.relid for one in relations)
            return Truncate(relids, cascade=False, restart_identity=bool(body.get("restart_identity")))
    raise StateForbids(f"row {row.id} of pgsub.skipped_change on the target cannot be read")


def _tuple(relation: Relation, row: dict[str, Any]) -> Tuple:
    fields = [_field(row, column.name) for column in relation.columns]
    return Tuple("".join(kind for kind, _ in fields).encode(), tuple(value for _, value in fields))


def _field(row: dict[str, Any], name: str) -> tuple[str, bytes | None]:
    """Return kind and value from the form of :meth:`SkippedChanges._value`."""
    if name not in row:
        return "u", None
    value = row[name]
    if value is None:
        return "n", None
    if isinstance(value, str):
        return "t", value.encode()
    [(form, digits)] = value.items()
    if form == CUT:
        raise StateForbids(
            f'the value of column "{name}" was too large to be kept',
            detail=f"It had {digits} bytes, and pgsub.skipped_change keeps no row of so many.",
            hint="Copy the row from the publisher by hand.",
        )
    return ("b" if form == "binary" else "t"), bytes.fromhex(digits)
