"""Many small transactions together, without an object for each.

A run stands for many transactions as :class:`~pgsub.apply.stream.transactions.RemoteTransaction` stands for one. Each
transaction of a run can also be extracted.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pgsub.apply.stream.transactions import RemoteTransaction
from pgsub.protocol import frames
from pgsub.protocol.decoder import decode_change
from pgsub.protocol.frames import Segment
from pgsub.protocol.messages import Origin
from pgsub.protocol.parse_changes import CHANGES

#: Minimum number of transactions whose COMMIT messages are worth parsing together.
RUN_FROM = 16

_BEGIN, _COMMIT, _ORIGIN = b"BCO"
_BEGIN_SIZE = frames.ENVELOPE + 1 + 8 + 8 + 4
_COMMIT_SIZE = frames.ENVELOPE + 1 + 1 + 8 + 8 + 8
_Numbers = NDArray[np.int64]


def _breaks() -> NDArray[np.bool_]:
    """Return a table that is true where a message type cannot follow another one in a run.

    The index is 256 times the first type plus the second. A run has plain transactions only. Keepalives may stand
    between them, and an Origin message after BEGIN.
    """
    table = np.ones((256, 256), np.bool_)
    for first, second in (b"B", b"O" + CHANGES + b"C"), (b"O" + CHANGES, CHANGES + b"C"), (b"C\0", b"B\0"):
        table[np.ix_(list(first), list(second))] = False
    return table.reshape(-1)


_BREAKS = _breaks()


class RunBounds:
    """Bounds of runs of whole plain transactions, found by the types of the received messages."""

    def __init__(self, codes: bytes) -> None:
        self._codes = codes
        types = np.frombuffer(codes, np.uint8)
        pairs = types[:-1].astype(np.uint16) << 8
        pairs |= types[1:]
        self._ends: list[int] = [*(np.flatnonzero(_BREAKS[pairs]) + 1).tolist(), len(codes)]

    def end(self, start: int) -> int:
        """Return the end of the last whole transaction of the run at ``start``; ``start`` if none is whole."""
        stop = self._ends[bisect.bisect_right(self._ends, start)]
        return max(self._codes.rfind(_COMMIT, start, stop) + 1, start)


class TransactionRun:
    """Whole plain transactions in the order of their commits.

    :param segment: all their messages, including BEGIN, COMMIT and keepalives between them.
    :param begins: frame numbers of the BEGIN messages.
    :param commits: frame numbers of the COMMIT messages.
    :ivar finish_lsns: commit LSN of each transaction.
    """

    in_stream = False

    def __init__(
        self, segment: Segment, begins: _Numbers, commits: _Numbers, finish_lsns: _Numbers, end_lsns: _Numbers
    ) -> None:
        self.segment = segment
        self.finish_lsns, self.end_lsns = finish_lsns, end_lsns
        self._begins, self._commits = begins, commits
        self._single: dict[int, RemoteTransaction] = {}
        self._starts: list[int] | None = None

    @classmethod
    def of(cls, segment: Segment) -> TransactionRun | None:
        """Parse a stretch found by :class:`RunBounds`; return None if it has any malformed or unexpected message.

        Parsing its messages one by one then reports the error.
        """
        codes = np.frombuffer(segment.codes, np.uint8)
        begins, commits = np.flatnonzero(codes == _BEGIN), np.flatnonzero(codes == _COMMIT)
        if not _alternate(begins, commits, len(codes)):
            return None
        edges = segment.frames.places[segment.start : segment.end + 1]
        sizes = np.diff(edges)
        if (sizes[begins] != _BEGIN_SIZE).any() or (sizes[commits] != _COMMIT_SIZE).any():
            return None
        buffer, ended = segment.frames.buffer, edges[commits] + frames.ENVELOPE
        begun = _words(buffer, edges[begins] + frames.ENVELOPE + 1)
        finish, end = _words(buffer, ended + 2), _words(buffer, ended + 10)
        flags = np.frombuffer(buffer, np.uint8)[ended + 1]
        if flags.any() or (begun != finish).any() or (np.diff(end) <= 0).any() or (finish > end).any() or begun[0] <= 0:
            return None
        return cls(segment, begins + segment.start, commits + segment.start, finish, end)

    def __len__(self) -> int:
        return len(self._commits)

    @property
    def size(self) -> int:
        """Size on the wire, in bytes."""
        return self.segment.size

    @property
    def end_lsn(self) -> int:
        """End LSN of the last transaction."""
        return int(self.end_lsns[-1])

    def cut(self, count: int) -> tuple[TransactionRun, TransactionRun]:
        """Split the run after the first ``count`` transactions; neither part is empty."""
        found = self.segment.frames
        first = found.range(self.segment.start, int(self._commits[count - 1]) + 1)
        rest = found.range(int(self._begins[count]), self.segment.end)
        return self._part(first, slice(count)), self._part(rest, slice(count, None))

    def _part(self, segment: Segment, some: slice) -> TransactionRun:
        numbers = (self._begins, self._commits, self.finish_lsns, self.end_lsns)
        return TransactionRun(segment, *(one[some] for one in numbers))

    def segments(self) -> Iterator[Segment]:
        """Yield the messages."""
        yield self.segment

    def transactions(self) -> list[RemoteTransaction]:
        """Return each transaction as an object of its own."""
        return [self.one(number) for number in range(len(self))]

    def transaction_of(self, frame: int) -> RemoteTransaction:
        """Return the transaction that contains a message.

        :param frame: frame number of the message.
        """
        if self._starts is None:
            self._starts = self._begins.tolist()
        return self.one(bisect.bisect_left(self._starts, frame) - 1)

    def numbers_of(self, frames: _Numbers) -> _Numbers:
        """Map the frame numbers of messages to the numbers of their transactions."""
        found: _Numbers = np.searchsorted(self._begins, frames) - 1
        return found

    def one(self, number: int) -> RemoteTransaction:
        """Return one transaction by its number, the same object each time."""
        known = self._single.get(number)
        if known is not None:
            return known
        found, begin, commit = self.segment.frames, int(self._begins[number]), int(self._commits[number])
        xid = int.from_bytes(found.payload(begin)[17:21])
        one = RemoteTransaction(xid, int(self.finish_lsns[number]), int(self.end_lsns[number]))
        self._single[number] = one
        one.commit_ts = int.from_bytes(found.payload(commit)[18:26], signed=True)
        begin += 1
        if found.codes[begin] == _ORIGIN:
            message = decode_change(found.payload(begin), False)
            one.origin = message.name if isinstance(message, Origin) else None
            begin += 1
        one.received = [found.range(begin, commit)] if begin < commit else []
        one.size = sum(segment.size for segment in one.received)
        return one


Item: TypeAlias = RemoteTransaction | TransactionRun


class Batch:
    """Whole transactions in the order of their commits, to be applied together."""

    def __init__(self, items: Sequence[Item] = ()) -> None:
        self.items: list[Item] = []
        self.count = self.size = 0
        for item in items:
            self.add(item)

    def __len__(self) -> int:
        return self.count

    def add(self, item: Item) -> None:
        """Add a transaction or a run."""
        self.items.append(item)
        self.count += _count(item)
        self.size += item.size

    @property
    def last(self) -> RemoteTransaction:
        """The last transaction."""
        item = self.items[-1]
        return item.one(len(item) - 1) if isinstance(item, TransactionRun) else item

    def transactions(self) -> Iterator[RemoteTransaction]:
        """Yield each transaction as an object of its own."""
        for item in self.items:
            if isinstance(item, TransactionRun):
                yield from item.transactions()
            else:
                yield item

    def cut(self, count: int) -> tuple[Batch, Batch]:
        """Split the batch after the first ``count`` transactions; either part may be empty."""
        first, left = Batch(), count
        for number, item in enumerate(self.items):
            size = _count(item)
            if size <= left:
                first.add(item)
                left -= size
                continue
            if not left or not isinstance(item, TransactionRun):
                return first, Batch(self.items[number:])
            head, tail = item.cut(left)
            first.add(head)
            return first, Batch([tail, *self.items[number + 1 :]])
        return first, Batch()

    def release(self) -> None:
        """Remove the spool files of transactions that were applied."""
        for item in self.items:
            if isinstance(item, RemoteTransaction):
                item.release()


def _alternate(begins: _Numbers, commits: _Numbers, size: int) -> bool:
    """Return whether BEGIN and COMMIT messages alternate and enclose all other messages but keepalives."""
    if not len(begins) or len(begins) != len(commits) or begins[0] != 0 or commits[-1] != size - 1:
        return False
    return bool((begins < commits).all() and (commits[:-1] < begins[1:]).all())


def _count(item: Item) -> int:
    return len(item) if isinstance(item, TransactionRun) else 1


def _words(buffer: bytes, offsets: _Numbers) -> _Numbers:
    """Read a big-endian 8-byte integer at each offset. An LSN above 2^63, which no publisher has, becomes negative."""
    return np.ndarray((len(buffer) - 7,), ">i8", buffer, strides=(1,))[offsets].astype(np.int64)
