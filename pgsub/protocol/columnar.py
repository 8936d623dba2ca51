"""Decodes many row messages at once, column by column, without a Python object per value.

The result is what :func:`decode_change` of :mod:`pgsub.protocol.decoder` returns for each message, in another form, and
the errors are the same. Mirrors ``logicalrep_read_insert``, ``_update``, ``_delete`` and ``_tuple`` of ``proto.c``.

All messages are in one buffer, at any place. Each column of the messages of one relation and kind has arrays of kinds,
offsets and lengths, with an element per message. :mod:`pgsub.protocol.columnar_copy` makes COPY streams and array
parameters from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pgsub.common.errors import InternalError, ProtocolViolation
from pgsub.protocol.decoder import decode_change
from pgsub.protocol.messages import Message
from pgsub.protocol.parse_changes import RELID_AT
from pgsub.protocol.reader import BINARY, MAX_COLUMNS, NULL, TEXT, UNCHANGED

#: Follows the last message: a NULL of a binary row for :mod:`columnar_copy`, and bytes that unaligned loads may read.
PAD = b"\xff\xff\xff\xff" + bytes(12)

_INSERT, _UPDATE, _DELETE = b"IUD"
_NEW, _KEY, _OLD = b"NKO"

Bytes = NDArray[np.uint8]
Offsets = NDArray[np.int64]
Lengths = NDArray[np.int32]
Words = NDArray[np.uint64]
Flags = NDArray[np.bool_]


class Messages(NamedTuple):
    """The pgoutput messages in a buffer, which may have anything between them.

    :ivar buffer: ends in ``PAD``.
    :ivar starts: the start of each message; ``ends`` has the end of each.
    """

    buffer: bytes
    starts: Offsets
    ends: Offsets

    @classmethod
    def of(cls, payloads: Sequence[bytes]) -> Messages:
        """Join messages in one buffer."""
        edges: Offsets = np.zeros(len(payloads) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, payloads), np.int64, len(payloads)), out=edges[1:])
        return cls(b"".join([*payloads, PAD]), edges[:-1], edges[1:])

    @property
    def types(self) -> Bytes:
        """The type bytes of the messages."""
        return np.frombuffer(self.buffer, np.uint8)[self.starts]

    def payload(self, number: int) -> bytes:
        """Return one message."""
        return self.buffer[self.starts[number] : self.ends[number]]

    def some(self, numbers: Offsets) -> Messages:
        """Return some of the messages."""
        return Messages(self.buffer, self.starts[numbers], self.ends[numbers])

    def words(self, at: Offsets) -> Words:
        """Return the eight bytes at each offset as a big-endian number."""
        every = np.ndarray((len(self.buffer) - 7,), ">u8", self.buffer, strides=(1,))
        return every[at].astype(np.uint64)


@dataclass(frozen=True, slots=True)
class Rows:
    """One tuple of every message of a group; all arrays have the shape (columns, messages).

    ``offsets`` are the starts of values in the group's buffer. A column without a value (null, unchanged) has the
    offset of its end, and length 0. A value takes 13 bytes here, whatever its length, so callers must limit very wide
    rows by columns too. ``kinds`` are those of :class:`~pgsub.protocol.messages.Tuple`.
    """

    kinds: Bytes
    offsets: Offsets
    lengths: Lengths


@dataclass(frozen=True, slots=True)
class Changes:
    """All messages with the same type, relation, kind of old tuple and number of columns, in their order.

    ``kind`` is I, U or D; ``old_kind`` is K, O or empty as in :class:`~pgsub.protocol.messages.Update`. ``buffer``,
    which all groups share, has the messages from ``starts[i]`` to ``ends[i]`` as in :class:`Messages`. ``positions``
    are their indexes among the given messages.
    """

    kind: str
    old_kind: str
    relid: int
    buffer: bytes
    starts: Offsets
    ends: Offsets
    positions: Offsets
    old: Rows | None
    new: Rows | None


def decode(messages: Messages | Sequence[bytes], in_stream: bool) -> tuple[list[Changes], list[tuple[int, Message]]]:
    """Decode messages without checking their order, as :func:`~pgsub.protocol.decoder.decode_change` does.

    :param in_stream: they are from stream blocks, where messages that describe or change relations carry an xid.
    :return: the row changes by group, and the other messages with their positions.
    :raises ProtocolViolation: a message is malformed; the error is that of the first one.
    """
    if not isinstance(messages, Messages):
        messages = Messages.of(messages)
    try:
        return _decode(messages, in_stream)
    except ProtocolViolation:
        for number in range(len(messages.starts)):
            decode_change(messages.payload(number), in_stream)
        raise InternalError("the columnar decoder rejects messages that the message decoder accepts") from None


def _decode(messages: Messages, in_stream: bool) -> tuple[list[Changes], list[tuple[int, Message]]]:
    if not len(messages.starts):
        return [], []
    if not (messages.starts < messages.ends).all():
        raise ProtocolViolation("empty message")
    first = messages.types
    rows = (first == _INSERT) | (first == _UPDATE) | (first == _DELETE)
    others: list[tuple[int, Message]] = []
    if rows.all():
        positions = np.arange(len(rows), dtype=np.int64)
    else:
        others = [(at, decode_change(messages.payload(at), in_stream)) for at in np.flatnonzero(~rows).tolist()]
        positions = np.flatnonzero(rows).astype(np.int64)
        if not len(positions):
            return [], others
        messages = messages.some(positions)
    return _groups(messages, positions, in_stream), others


def _groups(messages: Messages, positions: Offsets, in_stream: bool) -> list[Changes]:
    head = RELID_AT[in_stream]
    starts = messages.starts
    _refuse_if(messages.ends - starts < head + 7)  # relid, marker of the tuple, its number of columns
    relid = messages.words(starts + head) >> np.uint64(32)
    rest = messages.words(starts + head + 4) >> np.uint64(40)  # marker of the tuple, number of columns
    kind = messages.types.astype(np.uint64)
    key = (relid << np.uint64(32)) | (kind << np.uint64(24)) | rest
    if (key == key[0]).all():
        return [_group(messages, positions, in_stream)]
    order = np.argsort(key, kind="stable")
    edges = np.flatnonzero(np.diff(key[order])) + 1
    return [_group(messages.some(part), positions[part], in_stream) for part in np.split(order, edges)]


def _group(messages: Messages, positions: Offsets, in_stream: bool) -> Changes:
    """Decode messages with the same type, relation, kind of first tuple and number of columns."""
    head = RELID_AT[in_stream]
    start = int(messages.starts[0])
    first = messages.buffer[start : start + head + 7]
    kind, relid = first[0], int.from_bytes(first[head : head + 4])
    marker, count = first[head + 4], int.from_bytes(first[head + 5 :])
    _refuse_if(marker not in {_INSERT: b"N", _UPDATE: b"NKO", _DELETE: b"KO"}[kind] or count > MAX_COLUMNS)
    if in_stream:
        _refuse_if((messages.words(messages.starts + 1) >> np.uint64(32)) == 0)  # xid
    walk = _Walk(messages, head + 7)
    old = new = None
    if marker == _NEW:
        new = walk.rows(count)
    else:
        old = walk.rows(count)
        if marker == _KEY:
            _refuse_if(old.kinds == UNCHANGED)
        if kind == _UPDATE:
            walk.expect(_NEW, count)
            new = walk.rows(count)
    walk.expect_end()
    old_kind = "" if marker == _NEW else chr(marker)
    return Changes(chr(kind), old_kind, relid, messages.buffer, messages.starts, messages.ends, positions, old, new)


class _Walk:
    """A pass over all messages of a group at once, one column per step."""

    def __init__(self, messages: Messages, offset: int) -> None:
        self._messages = messages
        self._at: Offsets = messages.starts + offset
        self._ends: Offsets = messages.ends

    def rows(self, count: int) -> Rows:
        """Decode a tuple of ``count`` columns."""
        shape = (count, len(self._at))
        rows = Rows(np.empty(shape, np.uint8), np.empty(shape, np.int64), np.empty(shape, np.int32))
        for column in range(count):
            self._column(rows.kinds[column], rows.offsets[column], rows.lengths[column])
        return rows

    def _column(self, kinds: Bytes, offsets: Offsets, lengths: Lengths) -> None:
        # a load at the end of a message reads bytes after it: whatever they are, the column ends beyond the message
        words = self._messages.words(self._at)
        kinds[:] = words >> np.uint64(56)
        sizes: Offsets = ((words >> np.uint64(24)) & np.uint64(0xFFFFFFFF)).astype(np.int64)
        valued = (kinds == BINARY) | (kinds == TEXT)
        if valued.all():
            offsets[:] = self._at + 5
        else:
            _refuse_if(~(valued | (kinds == NULL) | (kinds == UNCHANGED)))
            sizes *= valued
            offsets[:] = self._at + np.where(valued, 5, 1)
        self._at = offsets + sizes
        _refuse_if(self._at > self._ends)
        lengths[:] = sizes

    def expect(self, marker: int, count: int) -> None:
        """Expect a further tuple with the same number of columns."""
        words = self._messages.words(self._at)
        _refuse_if((words >> np.uint64(40)) != np.uint64(marker << 16 | count))
        self._at = self._at + 3
        _refuse_if(self._at > self._ends)

    def expect_end(self) -> None:
        """Expect the end of every message."""
        _refuse_if(self._at != self._ends)


def _refuse_if(fault: Flags | bool | np.bool_) -> None:
    if np.any(fault):
        raise ProtocolViolation("malformed row message")
