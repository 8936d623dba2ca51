"""Row messages of a batch that are executed together, and whose they are."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

import numpy as np

from pgsub.apply.runs import Item, Run
from pgsub.apply.transactions import RemoteTransaction
from pgsub.protocol.frames import Segment

_IS_ROW = np.zeros(256, np.bool_)
_IS_ROW[list(b"IUD")] = True


class Piece:
    """Messages that change rows, in their order, out of one transaction or of many.

    :ivar payloads: the messages.
    :ivar size: bytes of them, roughly.
    :ivar in_stream: they carry xids.
    """

    def __init__(self, *, in_stream: bool) -> None:
        self.in_stream = in_stream
        self.payloads: list[bytes] = []
        self.size = 0
        self._starts: list[int] = []
        self._owners: list[tuple[Item, Sequence[int]]] = []

    def __len__(self) -> int:
        return len(self.payloads)

    def add(self, item: Item, segment: Segment) -> None:
        """Further messages of a transaction, or of a run of them; those that change no row are left out."""
        self._starts.append(len(self.payloads))
        codes = segment.codes
        if not codes.translate(None, b"IUD"):
            self._owners.append((item, range(segment.start, segment.end)))
            self.payloads += segment.payloads()
        else:
            numbers = (np.flatnonzero(_IS_ROW[np.frombuffer(codes, np.uint8)]) + segment.start).tolist()
            self._owners.append((item, numbers))
            self.payloads += segment.frames.chosen(numbers)
        self.size += segment.size

    def transaction_of(self, position: int) -> RemoteTransaction:
        """Whose a message is."""
        number = bisect.bisect_right(self._starts, position) - 1
        item, numbers = self._owners[number]
        return item.transaction_of(numbers[position - self._starts[number]]) if isinstance(item, Run) else item

    def rows(self, positions: Sequence[int] | None = None) -> Iterator[tuple[RemoteTransaction, bytes]]:
        """Messages and whose they are.

        :param positions: of some, None for all.
        """
        for position in range(len(self.payloads)) if positions is None else positions:
            yield self.transaction_of(position), self.payloads[position]
