"""CopyData messages as received, many in one buffer; ranges of them represent messages until they are used.

A message costs one number here, without an object of its own: bytes are extracted on demand, and go unchanged into
spool files. Protocol section "Message Formats": CopyData is ``d``, a length that includes itself, and the content,
which is an envelope (:mod:`pgsub.protocol.walsender_messages`) with one pgoutput message.
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

#: Bytes of a CopyData header, and of header and envelope of WAL data, after which the pgoutput message begins.
HEADER, ENVELOPE = 5, 30
#: Message types that a server may send at any time: NoticeResponse, ParameterStatus, NotificationResponse.
ANY_TIME = b"NSA"
_COPY_DATA, _WAL_DATA, _KEEPALIVE, _NEWLINE = b"dwk\n"
_LENGTH = struct.Struct(">xI")
_HEADER_BYTES = f"V{HEADER}"
_SMALL = 200  #: average bytes per message up to which joining is faster
_LENGTH_BYTES = 4  #: a length includes itself
_UNSET = bytes(24)

#: Codes that are not type bytes of pgoutput: a keepalive, and anything that the envelope's parser must judge.
KEEPALIVE, OTHER = 0, 1


def walk(buffer: bytes | bytearray, end: int, limit: int, start: int = 0) -> array[int]:
    """Find the starts of consecutive whole CopyData messages in a buffer, and the end of the last.

    :param end: number of bytes in the buffer.
    :param limit: maximum number of messages.
    :param start: start of the first message.
    :return: edges, at least ``[start]``.
    :raises ProtocolViolation: an impossible length.
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
    """Do as :func:`walk` for messages that are rows of COPY in text format, each with its only newline at the end.

    The bytes after a newline are tried as a header, which counts only if its length leads to the next newline. So other
    messages are found too, but not as fast.

    :param end: number of bytes in the buffer.
    :param start: start of the first message.
    :return: edges, at least ``[start]``.
    :raises ProtocolViolation: an impossible length.
    """
    data = np.frombuffer(buffer, np.uint8, end - start, start)
    begins = np.concatenate(([0], np.flatnonzero(data == _NEWLINE) + 1))
    begins = begins[np.diff(begins, prepend=-HEADER - 1) > HEADER]  # a header may contain that byte, too
    heads = begins[:-1]
    lengths = np.ndarray((max(len(data) - HEADER + 1, 0),), ">u4", buffer, start + 1, (1,))[heads]
    rows = (data[heads] == _COPY_DATA) & (heads + lengths + 1 == begins[1:])
    count = len(rows) if rows.all() else int(rows.argmin())
    edges = array("q", (begins[: count + 1] + start).tobytes())
    edges.extend(walk(buffer, end, len(data), edges[-1])[1:])
    return edges


def contents(buffer: bytearray, edges: array[int]) -> list[memoryview]:
    """Return the contents of whole CopyData messages in order. Many small ones are joined, which is faster.

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
    """Return the size of the message whose header is at an offset, including bytes not yet received.

    :raises ProtocolViolation: a length that no server sends.
    """
    length = int(_LENGTH.unpack_from(buffer, at)[0])
    if not 0 <= length - _LENGTH_BYTES <= MAX_MESSAGE_BYTES:
        raise _impossible(length)
    return 1 + length


def _impossible(length: int) -> ProtocolViolation:
    return ProtocolViolation(f"message length {length} from the publisher is impossible")


def size_of_first(buffer: bytes | bytearray, at: int) -> int:
    """Return the size of the message at an offset, including bytes not yet received; 0 if it is unknown."""
    return 1 + int(_LENGTH.unpack_from(buffer, at)[0]) if len(buffer) - at >= HEADER else 0


class Frames:
    """Whole CopyData messages; indexing and iteration return their contents.

    :param buffer: the messages and nothing else.
    :param edges: the start of each message, and the end of the last.
    """

    def __init__(self, buffer: bytes, edges: Sequence[int]) -> None:
        self.buffer = buffer
        self.edges = edges

    @classmethod
    def of(cls, contents: Iterable[bytes]) -> Frames:
        """Make frames from the contents of CopyData messages."""
        parts, edges = [], [0]
        for content in contents:
            parts.append(struct.pack(">cI", b"d", len(content) + 4) + content)
            edges.append(edges[-1] + len(parts[-1]))
        return cls(b"".join(parts), edges)

    @classmethod
    def around(cls, payloads: Iterable[bytes]) -> Frames:
        """Make frames from pgoutput messages, with empty envelopes."""
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
        """The edges as a numpy array."""
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
        """Return the envelope of a frame, without its message."""
        return self.buffer[self.edges[number] + HEADER : min(self.edges[number] + ENVELOPE, self.edges[number + 1])]

    def payload(self, number: int) -> bytes:
        """Return the pgoutput message of a frame."""
        return self.buffer[self.edges[number] + ENVELOPE : self.edges[number + 1]]

    def range(self, start: int, end: int) -> Segment:
        """Return consecutive messages."""
        return Segment(self, start, end)

    def all(self) -> Segment:
        """Return all messages."""
        return Segment(self, 0, len(self))


class Segment(NamedTuple):
    """Consecutive messages of some frames, ``start`` to ``end`` (exclusive)."""

    frames: Frames
    start: int
    end: int

    @property
    def codes(self) -> bytes:
        """The types of the messages."""
        return self.frames.codes[self.start : self.end]

    @property
    def size(self) -> int:
        """Size on the wire in bytes, including headers."""
        return self.frames.edges[self.end] - self.frames.edges[self.start]

    @property
    def shortest(self) -> int:
        """Size of the shortest pgoutput message in bytes; there must be a message."""
        return int(np.diff(self.frames.places[self.start : self.end + 1]).min()) - ENVELOPE

    @property
    def wire(self) -> memoryview:
        """The bytes as received."""
        edges = self.frames.edges
        return memoryview(self.frames.buffer)[edges[self.start] : edges[self.end]]

    def payloads(self) -> list[bytes]:
        """Return the pgoutput messages."""
        buffer, edges = self.frames.buffer, self.frames.edges[self.start : self.end + 1]
        return [buffer[a + ENVELOPE : b] for a, b in pairwise(edges)]

    def numbered(self) -> Iterator[tuple[int, int]]:
        """Yield the frame number and type of each message."""
        return enumerate(self.codes, self.start)
