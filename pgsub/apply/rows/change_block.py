"""A block of row messages that are executed together, with their transactions."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from pgsub.apply.stream.transaction_batch import Item, TransactionRun
from pgsub.apply.stream.transactions import RemoteTransaction
from pgsub.protocol.columnar import PAD, Messages, Offsets
from pgsub.protocol.frames import ENVELOPE, Segment
from pgsub.protocol.parse_changes import RELID_AT, ROW_CHANGES

_IS_ROW = np.zeros(256, np.bool_)
_IS_ROW[list(ROW_CHANGES)] = True

#: Maximum rows and bytes of a block; they bound memory and the cost of replaying a block row by row.
BLOCK_ROWS, BLOCK_BYTES = 50_000, 8 << 20


class ChangeBlock:
    """The row messages of one or several transactions, in order.

    :ivar size: approximate size in bytes.
    :ivar in_stream: the messages carry xids.
    """

    def __init__(self, *, in_stream: bool) -> None:
        self.in_stream = in_stream
        self.size = 0
        self._count = 0
        self._starts: list[int] = []
        self._owners: list[tuple[Item, Segment, Offsets]] = []
        self._messages: Messages | None = None

    def __len__(self) -> int:
        return self._count

    @property
    def full(self) -> bool:
        """Whether it must be executed before more is added."""
        return self._count >= BLOCK_ROWS or self.size >= BLOCK_BYTES

    def add(self, item: Item, segment: Segment) -> Offsets:
        """Add the row messages of a transaction or a run.

        :return: their frame numbers.
        """
        numbers = np.flatnonzero(_IS_ROW[np.frombuffer(segment.codes, np.uint8)])
        self._own(item, segment, numbers)
        self.size += segment.size
        self._messages = None
        return numbers + segment.start

    def _own(self, item: Item, segment: Segment, numbers: Offsets) -> None:
        self._starts.append(self._count)
        self._owners.append((item, segment, numbers))
        self._count += len(numbers)

    @property
    def messages(self) -> Messages:
        """The messages, in one buffer with everything between them."""
        if self._messages is None:
            starts, ends, size = [], [], 0
            for _, segment, numbers in self._owners:
                edges = segment.frames.places[segment.start : segment.end + 1]
                edges = edges + (size - int(edges[0]))
                starts.append(edges[numbers] + ENVELOPE)
                ends.append(edges[numbers + 1])
                size += segment.size
            buffer = b"".join([*(segment.wire for _, segment, _ in self._owners), PAD])
            self._messages = Messages(buffer, np.concatenate(starts), np.concatenate(ends))
        return self._messages

    def relids(self) -> list[int]:
        """Return the remote relations of the messages."""
        return [int(relid) for relid in np.unique(self._relids())] if self._count else []

    def _relids(self) -> Offsets:
        buffer, starts, _ = self.messages
        data, at = np.frombuffer(buffer, np.uint8), starts + RELID_AT[self.in_stream]
        found = np.zeros(len(at), np.int64)
        for byte in range(4):
            found = found << 8 | data[at + byte]
        return found

    def split(self, relids: Sequence[int]) -> tuple[ChangeBlock, ChangeBlock]:
        """Split the block into the messages of some relations and the others."""
        chosen = np.isin(self._relids(), relids)
        return self._some(chosen), self._some(~chosen)

    def _some(self, chosen: NDArray[np.bool_]) -> ChangeBlock:
        some = ChangeBlock(in_stream=self.in_stream)
        for start, (item, segment, numbers) in zip(self._starts, self._owners, strict=True):
            numbers = numbers[chosen[start : start + len(numbers)]]
            if len(numbers):
                some._own(item, segment, numbers)
        some.size = self.size
        buffer, starts, ends = self.messages
        some._messages = Messages(buffer, starts[chosen], ends[chosen])
        return some

    def transaction_of(self, position: int) -> RemoteTransaction:
        """Return the transaction of a message."""
        number = bisect.bisect_right(self._starts, position) - 1
        item, segment, numbers = self._owners[number]
        if not isinstance(item, TransactionRun):
            return item
        return item.transaction_of(segment.start + int(numbers[position - self._starts[number]]))

    def rows(self, positions: Sequence[int] | None = None) -> Iterator[tuple[RemoteTransaction, bytes]]:
        """Yield messages with their transactions.

        :param positions: positions of the messages, None for all.
        """
        if not self._count:
            return
        buffer, starts, ends = self.messages
        if positions is not None:
            chosen = np.array(positions, np.int64)
            starts, ends = starts[chosen], ends[chosen]
        numbers = range(self._count) if positions is None else positions
        for number, start, end in zip(numbers, starts.tolist(), ends.tolist(), strict=True):
            yield self.transaction_of(number), buffer[start:end]
