"""Runs of INSERT messages: rows of one relation that wait to be written together, as COPY where they are many."""

from __future__ import annotations

from pgsub.apply.stream.transactions import RemoteTransaction
from pgsub.protocol import columnar, columnar_copy
from pgsub.protocol.columnar_copy import Stream
from pgsub.target.catalog.relation_map import RelationMap

#: Inserts in a row from which COPY pays for its two extra round trips.
COPY_FROM = 50
#: Rows and bytes of one COPY: bounds memory.
COPY_ROWS, COPY_BYTES = 20_000, 4 << 20


class InsertRun:
    """A run of inserts, none at first.

    :ivar first: what the first is of.
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
        """Add an insert; return whether the run is as long as one may be."""
        self.first = self.first or (transaction, relation)
        self.payloads.append(payload)
        self._size += len(payload)
        return len(self.payloads) >= COPY_ROWS or self._size >= COPY_BYTES

    def copy_stream(self) -> tuple[Stream, bool] | None:
        """Return the rows for COPY, and whether in binary form; None where they are to be inserted one by one.

        COPY without a column list means all columns of the target, not none. It invokes no rule, and what a trigger
        sees of other rows must not depend on how many came together.
        """
        assert self.first is not None
        transaction, relation = self.first
        may_copy = relation.columns and not (relation.target.fires_on_insert or relation.target.rules)
        if len(self.payloads) < COPY_FROM or not may_copy:
            return None
        groups, _ = columnar.decode(self.payloads, transaction.in_stream)
        rows = groups[0].new
        if len(groups) != 1 or rows is None or len(rows.kinds) != len(relation.columns):
            return None  # and which message is to blame is found where each is decoded by itself
        form = columnar_copy.formats(rows)
        if form == "mixed":
            return None
        binary = form == "binary"
        return columnar_copy.copy_stream(groups[0], binary=binary), binary
