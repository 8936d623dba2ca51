"""CopyData messages as they came over the wire, many in one buffer; ranges of them stand for messages until used.

A message costs one number here and no object of its own: bytes are cut out on demand. The same bytes go
into spool files as they are. Protocol section "Message Formats": CopyData is ``d``, a length that counts itself, and
the content, which is an envelope (:mod:`pgsub.protocol.walsender_messages`) around one pgoutput message.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pgsub.common.errors import ProtocolViolation
from pgsub.protocol.decoder import MAX_MESSAGE_BYTES

#: Bytes of a CopyData header, and of that with the envelope of WAL data: there the pgoutput message begins.
HEADER, ENVELOPE = 5, 30
#: Kinds that a server may send whatever is under way: NoticeResponse, ParameterStatus, NotificationResponse.
ANY_TIME = b"NSA"
_COPY_DATA, _WAL_DATA, _KEEPALIVE, _NEWLINE = b"dwk\n"
_LENGTH = struct.Struct(">xI")
_HEADER_BYTES = f"V{HEADER}"
_SMALL = 200  #: bytes a message
_LENGTH_BYTES = 4  #: a length counts itself
_UNSET = bytes(24)

#: Codes that are no type byte of pgoutput: a keepalive; anything that the envelope's own parser is to judge.
KEEPALIVE, OTHER = 0, 1


def walk(buffer: bytes | bytearray, end: int, limit: int, start: int = 0) -> array[int]:
    """Find where whole CopyData messages begin, one behind the other in a buffer, and where the last of them ends.

    :param end: bytes in the buffer.
    :param limit: of messages.
    :param start: where the first begins.
    :return: edges, at least ``[start]``.
    :raises ProtocolViolation: a length that cannot be.
    """
    edges = array("q", [start])
    append, length, position, last = edges.append, _LENGTH.unpack_from, start, end - HEADER
    while position <= last and buffer[position] == _COPY_DATA and limit:
        size = length(buffer, position)[0]
        if size < _LENGTH_BYTES:
            raise _impossible(size)
        position += 1 + size
        if position > end:
            break
        append(position)
        limit -= 1
    return edges


def walk_lines(buffer: bytearray, end: int, start: int) -> array[int]:
    """Do as :func:`walk` where each message is a row of COPY in text format, which ends with its only newline.

    What follows a newline is taken for a header, and counts only if its length leads to the next one. So messages that
    are no such rows are found as well, only not as fast.

    :param end: bytes in the buffer.
    :param start: where the first begins.
    :return: edges, at least ``[start]``.
    :raises ProtocolViolation: a length that cannot be.
    """
    data = np.frombuffer(buffer, np.uint8, end - start, start)
    begins = np.concatenate(([0], np.flatnonzero(data == _NEWLINE) + 1))
    begins = begins[np.diff(begins, prepend=-HEADER - 1) > HEADER]  # a header may have that byte, too
    heads = begins[:-1]
    lengths = np.ndarray((max(len(data) - HEADER + 1, 0),), ">u4", buffer, start + 1, (1,))[heads]
    rows = (data[heads] == _COPY_DATA) & (heads + lengths + 1 == begins[1:])
    count = len(rows) if rows.all() else int(rows.argmin())
    edges = array("q", (begins[: count + 1] + start).tobytes())
    edges.extend(walk(buffer, end, len(data), edges[-1])[1:])
    return edges


def contents(buffer: bytearray, edges: array[int]) -> list[memoryview]:
    """Return the contents of whole CopyData messages, in order. Many small ones come joined, which is faster.

    :param edges: from :func:`walk`.
    :return: valid until the buffer changes.
    """
    size, count = edges[-1] - edges[0], len(edges) - 1
    if size > _SMALL * count or not count:
        view = memoryview(buffer)
        return [view[begin + HEADER : end] for begin, end in pairwise(edges)]
    begins = np.frombuffer(edges, np.int64)[:-1] - edges[0]
    kept = np.ones(size, np.bool_)
    np.ndarray((size - HEADER + 1,), _HEADER_BYTES, kept, 0, (1,))[begins] = np.zeros((), _HEADER_BYTES)
    return [np.frombuffer(buffer, np.uint8, size, edges[0])[kept].data]


def size_of(buffer: bytes | bytearray, at: int) -> int:
    """Return the bytes of the message whose header is at an offset; those that are still to come included.

    :raises ProtocolViolation: a length that no server sends.
    """
    length = int(_LENGTH.unpack_from(buffer, at)[0])
    if not 0 <= length - _LENGTH_BYTES <= MAX_MESSAGE_BYTES:
        raise _impossible(length)
    return 1 + length


def _impossible(length: int) -> ProtocolViolation:
    return ProtocolViolation(f"message length {length} from the publisher is impossible")


def size_of_first(buffer: bytes | bytearray, at: int) -> int:
    """Return the bytes of the message that begins at an offset, those to come included; 0 if that is not known."""
    return 1 + int(_LENGTH.unpack_from(buffer, at)[0]) if len(buffer) - at >= HEADER else 0


class Frames:
    """Whole CopyData messages. By index and iterated: their contents.

    :param buffer: the messages, nothing else.
    :param edges: where each begins, and the end of the last.
    """

    def __init__(self, buffer: bytes, edges: Sequence[int]) -> None:
        self.buffer = buffer
        self.edges = edges

    @classmethod
    def of(cls, contents: Iterable[bytes]) -> Frames:
        """Make frames of contents of CopyData messages."""
        parts, edges = [], [0]
        for content in contents:
            parts.append(struct.pack(">cI", b"d", len(content) + 4) + content)
            edges.append(edges[-1] + len(parts[-1]))
        return cls(b"".join(parts), edges)

    @classmethod
    def around(cls, payloads: Iterable[bytes]) -> Frames:
        """Make frames of pgoutput messages, in empty envelopes."""
        return cls.of(b"w" + _UNSET + payload for payload in payloads)

    def __len__(self) -> int:
        return len(self.edges) - 1

    def __iter__(self) -> Iterator[bytes]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, index: int) -> bytes:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.buffer[self.edges[index] + HEADER : self.edges[index + 1]]

    @cached_property
    def places(self) -> NDArray[np.int64]:
        """The edges as numpy has them."""
        return np.asarray(self.edges, np.int64)

    @cached_property
    def codes(self) -> bytes:
        """The type of each message: pgoutput's type byte, or :data:`KEEPALIVE`, or :data:`OTHER`."""
        if not len(self):
            return b""
        edges = self.places
        data = np.frombuffer(self.buffer, np.uint8)
        sizes = np.diff(edges)
        content = data[np.minimum(edges[:-1] + HEADER, len(data) - 1)]
        codes = data[np.minimum(edges[:-1] + ENVELOPE, len(data) - 1)].copy()
        codes[(content != _WAL_DATA) | (sizes <= ENVELOPE)] = OTHER
        codes[(content == _KEEPALIVE) & (sizes > HEADER)] = KEEPALIVE
        return codes.tobytes()

    def head(self, number: int) -> bytes:
        """Return the envelope of one, without the message in it."""
        return self.buffer[self.edges[number] + HEADER : min(self.edges[number] + ENVELOPE, self.edges[number + 1])]

    def payload(self, number: int) -> bytes:
        """Return the pgoutput message of one."""
        return self.buffer[self.edges[number] + ENVELOPE : self.edges[number + 1]]

    def range(self, start: int, end: int) -> Segment:
        """Return some messages, one behind the other."""
        return Segment(self, start, end)

    def all(self) -> Segment:
        """Return all of them."""
        return Segment(self, 0, len(self))


class Segment(NamedTuple):
    """Messages ``start`` to ``end`` (exclusive) of some frames, without keepalives."""

    frames: Frames
    start: int
    end: int

    @property
    def codes(self) -> bytes:
        """Their types."""
        return self.frames.codes[self.start : self.end]

    @property
    def size(self) -> int:
        """Bytes on the wire, headers included."""
        return self.frames.edges[self.end] - self.frames.edges[self.start]

    @property
    def shortest(self) -> int:
        """Bytes of the shortest pgoutput message; there is at least one."""
        return int(np.diff(self.frames.places[self.start : self.end + 1]).min()) - ENVELOPE

    @property
    def wire(self) -> memoryview:
        """The bytes as they came."""
        edges = self.frames.edges
        return memoryview(self.frames.buffer)[edges[self.start] : edges[self.end]]

    def payloads(self) -> list[bytes]:
        """Return their pgoutput messages."""
        buffer, edges = self.frames.buffer, self.frames.edges[self.start : self.end + 1]
        return [buffer[a + ENVELOPE : b] for a, b in pairwise(edges)]

    def numbered(self) -> Iterator[tuple[int, int]]:
        """Yield number in the frames and type of each."""
        return enumerate(self.codes, self.start)
