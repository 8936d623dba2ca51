"""Runs of INSERT messages of one relation that are written together, by COPY if they are many."""

from __future__ import annotations

from pgsub.apply.stream.transactions import RemoteTransaction
from pgsub.protocol import columnar, columnar_copy
from pgsub.protocol.columnar_copy import Stream
from pgsub.target.catalog.relation_map import RelationMap

#: Minimum number of inserts for which COPY pays for its two extra round trips.
COPY_FROM = 50
#: Maximum rows and bytes of one COPY; they bound memory.
COPY_ROWS, COPY_BYTES = 20_000, 4 << 20


class InsertRun:
    """A run of inserts, initially empty.

    :ivar first: transaction and relation of the first insert.
    :ivar payloads: INSERT messages, undecoded.
    """

    __slots__ = ("_size", "first", "payloads")

    def __init__(self) -> None:
        self.first: tuple[RemoteTransaction, RelationMap] | None = None
        self.payloads: list[bytes] = []
        self._size = 0

    def takes(self, transaction: RemoteTransaction, relation: RelationMap) -> bool:
        """Return whether an insert of that relation can be the next of the run."""
        first = self.first
        return first is None or (first[1] is relation and first[0].in_stream == transaction.in_stream)

    def add(self, transaction: RemoteTransaction, relation: RelationMap, payload: bytes) -> bool:
        """Add an insert; return whether the run is full."""
        self.first = self.first or (transaction, relation)
        self.payloads.append(payload)
        self._size += len(payload)
        return len(self.payloads) >= COPY_ROWS or self._size >= COPY_BYTES

    def copy_stream(self) -> tuple[Stream, bool] | None:
        """Return the rows for COPY, and whether they are in binary form; None to insert them one by one.

        COPY without a column list would mean all columns of the target. COPY invokes no rule. The rows that a trigger
        sees must not depend on how many were received together.
        """
        assert self.first is not None
        transaction, relation = self.first
        may_copy = relation.columns and not (relation.target.fires_on_insert or relation.target.rules)
        if len(self.payloads) < COPY_FROM or not may_copy:
            return None
        groups, _ = columnar.decode(self.payloads, transaction.in_stream)
        rows = groups[0].new
        if len(groups) != 1 or rows is None or len(rows.kinds) != len(relation.columns):
            return None  # decoding one by one finds the faulty message
        form = columnar_copy.formats(rows)
        if form == "mixed":
            return None
        binary = form == "binary"
        return columnar_copy.copy_stream(groups[0], binary=binary), binary
