"""Rows of the target that an adoption replaces or deletes. A limited number is kept for each table."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import psycopg

from pgsub.apply.stream.transactions import Kind
from pgsub.common.subscription import Subscription
from pgsub.reconcile import expressions, replaced
from pgsub.reconcile.expressions import ComparedTable
from pgsub.reconcile.rows import EXTRA, Difference
from pgsub.target.ledger.tables import states
from pgsub.target.ledger.tables.chunks import ChunkKey


class ReplacedRows:
    """The rows that are replaced, with their old values.

    Generated columns and columns that only the target has are neither compared nor kept.
    """

    def __init__(self, session: psycopg.Connection, sub: Subscription, key: ChunkKey, table: ComparedTable) -> None:
        self._session, self._sub, self._claim, self._table = session, sub, key.claim, table
        self._sent, self._plain = tuple(expressions.rewritten(table)), tuple(expressions.plain(table))
        self._names = [column.name for column in table.columns]
        self._lsn = 0

    def keep(self, brought: Iterable[Difference], count: int) -> None:
        """Keep rows in the open transaction, which replaces them.

        :param count: number of replaced rows.
        """
        if not count or not (may := states.keep_replaced(self._session, self._claim, count)):
            return
        if not self._lsn:
            self._lsn = states.sync_position(self._session, self._claim)
        replaced_rows = itertools.islice((one for one in brought if one.target is not None), may)
        bodies = [self._body(one) for one in replaced_rows]
        replaced.keep(self._session, self._sub.subid, self._table, self._lsn, bodies, "adopting")

    def _body(self, one: Difference) -> dict[str, Any]:
        body: dict[str, Any] = {
            "operation": "DELETE" if one.kind == EXTRA else "UPDATE",
            "commit_ts": 0,
            "kind": Kind.COMMIT.value,
            "replica_identity": "d" if self._table.keyed else "f",
            "identity": [self._names[number] for number in self._table.key],
            "old": self._row(one.target or (), self._plain),
            "old_kind": "K" if self._table.keyed else "O",
        }
        if one.publisher is not None:
            body["new"] = self._row(one.publisher, self._sent)
        return body

    def _row(self, texts: Sequence[str | None], rewritten: Sequence[int]) -> dict[str, str | None]:
        """Return a row with its server's texts: values that were rewritten for the comparison have them at the end."""
        count = len(self._names)
        values = list(texts[:count])
        for position, value in zip(rewritten, texts[count:], strict=True):
            values[position] = value
        return dict(zip(self._names, values, strict=True))
