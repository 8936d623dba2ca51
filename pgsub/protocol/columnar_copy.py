"""Makes of decoded columns what the target takes: COPY streams of whole rows, array parameters of single columns.

Nothing is decoded again: pgoutput's tuples, COPY's rows and the elements of an array hold the same bytes of a value
behind different headers, so streams are made by leaving bytes out and putting few in. Mirrors ``CopyOneRowTo``,
``CopyAttributeOutText`` (copyto.c) and ``array_send``.
"""

from __future__ import annotations

import struct

import numpy as np

from pgsub.protocol.columnar import PAD, Bytes, Changes, Flags, Offsets, Rows

_SIGNATURE = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_TRAILER = b"\xff\xff"
_TEXT, _BINARY = b"tb"
_VALUED = np.zeros(256, np.bool_)
_VALUED[[_TEXT, _BINARY]] = True

#: What stands for a byte of a text value behind a backslash; 0: it stands for itself.
_ESCAPED = np.zeros(256, np.uint8)
for _plain, _letter in zip(b"\\\n\r\t", b"\\nrt", strict=True):
    _ESCAPED[_plain] = _letter

#: Values of one length from which one step for all of them is cheaper than one for each.
_MANY = 16

#: Bytes between rows that are left out with other bytes; rows further from each other are brought together first.
_NEAR = 64


def formats(rows: Rows) -> str:
    """The form of all values, ``binary`` or ``text``, else ``mixed``; ``text`` where there is none."""
    binary = bool((rows.kinds == _BINARY).any())
    if not binary:
        return "text"
    return "mixed" if (rows.kinds == _TEXT).any() else "binary"


def copy_stream(changes: Changes, *, binary: bool) -> bytes:
    """The whole stream for COPY FROM STDIN of the new rows, all columns in their order.

    What was not sent (unchanged TOAST, legitimate where an update begins to match a row filter) becomes NULL, as in
    the server's own subscriber.

    :param changes: with new rows that have a column at least.
    :param binary: for WITH (FORMAT binary). Text values in such a stream suit columns of type text only, and a
        text stream takes no binary values.
    :raises ValueError: binary values for a text stream, or rows without columns, which COPY cannot express.
    """
    rows = changes.new
    if rows is None or not len(rows.kinds):
        raise ValueError("COPY needs new rows with columns")
    if not binary and (rows.kinds == _BINARY).any():
        raise ValueError("binary values do not fit into a text stream")
    begins = rows.offsets - np.where(_VALUED[rows.kinds], 5, 1)  # where each column's kind stands
    starts, ends = begins[0] - 2, changes.ends  # from the number of columns on
    if (starts[1:] - ends[:-1]).max(initial=0) > _NEAR:
        buffer, places = gathered(changes.buffer, starts, ends - starts)
        begins, starts, ends = begins + (places[:-1] - starts), places[:-1], places[1:]
    else:
        buffer, begins, ends = changes.buffer, begins - starts[0], ends - starts[0]
        buffer, starts = buffer[starts[0] : changes.ends[-1]], starts - starts[0]
    kept = _Kept(starts, ends)
    return _binary_stream(buffer, rows, begins, kept) if binary else _text_stream(buffer, rows, begins, kept)


class _Kept:
    """Which bytes of a buffer come into a stream.

    :param starts: of the stretches that do, the first of which begins the buffer; ``ends``: the last ends it.
    """

    def __init__(self, starts: Offsets, ends: Offsets) -> None:
        self._mask = bytearray(b"\1") * int(ends[-1])
        gaps = starts[1:] - ends[:-1]
        if not len(gaps) or not gaps.any():
            return
        if (gaps == gaps[0]).all():
            self.drop(ends[:-1], int(gaps[0]))
            return
        edges = np.zeros(len(self._mask) + 1, np.int8)
        edges[ends[:-1]] += 1
        edges[starts[1:]] -= 1
        self._mask[:] = np.logical_not(np.cumsum(edges, dtype=np.int8)[:-1]).tobytes()

    def drop(self, at: Offsets, size: int) -> None:
        """Leave out so many bytes at each offset."""
        _windows(self._mask, size)[at] = np.zeros((), f"V{size}")

    def of(self, data: Bytes) -> Bytes:
        """What is left of the data."""
        return data[np.frombuffer(self._mask, np.bool_)]


def _binary_stream(buffer: bytes, rows: Rows, begins: Offsets, kept: _Kept) -> bytes:
    valued = _VALUED[rows.kinds]
    for begin in begins:
        kept.drop(begin, 1)  # the kind; what follows is the length
    data = kept.of(np.frombuffer(buffer, np.uint8))
    if not valued.all():
        data = _with_nulls(data, rows, valued)
    return b"".join([_SIGNATURE, data.data, _TRAILER])


def _with_nulls(data: Bytes, rows: Rows, valued: Flags) -> Bytes:
    """Put four bytes for the length -1 where columns have no value."""
    sizes = rows.lengths.astype(np.int64) + 4
    places = _starts(sizes.sum(axis=0) + 2)[:-1] + 2
    room = np.ones(len(data) + 4 * int((~valued).sum()), np.bool_)
    for has, size in zip(valued, sizes, strict=True):
        missing = places[~has]
        for offset in range(4):
            room[missing + offset] = False
        places = places + size
    whole = np.full(len(room), 0xFF, np.uint8)
    whole[room] = data
    return whole


def _text_stream(buffer: bytes, rows: Rows, begins: Offsets, kept: _Kept) -> bytes:
    """A row begins with the line end of the row before it, a column with its tab: each in the place of its kind."""
    valued = _VALUED[rows.kinds]
    kept.drop(begins[0] - 2, 2)
    data = np.frombuffer(buffer, np.uint8).copy()
    for column, (has, begin) in enumerate(zip(valued, begins, strict=True)):
        data[begin] = ord("\t") if column else ord("\n")
        kept.drop(begin[has] + 1, 4)
    lines = kept.of(data)
    text = lines.tobytes()
    if not valued.all() or not _as_it_is(text, *valued.shape):
        sizes = rows.lengths.astype(np.int64) + 1
        marks = _starts(sizes.sum(axis=0))[:-1] + np.cumsum(sizes, axis=0) - sizes  # where columns begin in lines
        text = _escaped(lines, marks, valued).tobytes()
    return text[1:] + b"\n"


def _as_it_is(text: bytes, columns: int, rows: int) -> bool:
    """Whether no value has a byte to escape: all line ends and tabs are those between columns."""
    if b"\\" in text or b"\r" in text:
        return False
    return text.count(b"\n") == rows and text.count(b"\t") == rows * (columns - 1)


def _escaped(lines: Bytes, marks: Offsets, valued: Flags) -> Bytes:
    """Put a backslash before what needs one, and ``\\N`` where columns have no value."""
    special = _ESCAPED[lines].astype(np.bool_)
    special[marks] = False
    lines[special] = _ESCAPED[lines[special]]
    nulls = marks[~valued]
    gains = np.zeros(len(lines) + 1, np.int64)  # bytes that come in before each
    gains[:-1] += special
    gains[nulls + 1] += 2
    moved = np.arange(len(lines)) + np.cumsum(gains)[:-1]
    whole = np.full(len(lines) + int(gains.sum()), ord("\\"), np.uint8)
    whole[moved] = lines
    whole[moved[nulls] + 2] = ord("N")
    return whole


def array_parameter(buffer: bytes, rows: Rows, column: int, element_type: int) -> bytes:
    """A column as a one-dimensional array in binary form, for unnest; null and unchanged values are NULLs in it.

    :param buffer: what the rows' offsets point into; ends in ``PAD``.
    :param rows: old or new rows of a group, any of them.
    :param element_type: oid. Text values make an array of text, binary ones an array of their own type.
    """
    has = _VALUED[rows.kinds[column]]
    # The length that an element has before it stands before the value already; that of a NULL is in PAD.
    sizes = rows.lengths[column].astype(np.int64) + 4
    sources = np.where(has, rows.offsets[column] - 4, len(buffer) - len(PAD))
    head = struct.pack(">iiIii", 1, int(not has.all()), element_type, len(has), 1)
    return head + gathered(buffer, sources, sizes)[0]


def gathered(buffer: bytes, sources: Offsets, sizes: Offsets) -> tuple[bytes, Offsets]:
    """Pieces of a buffer, one behind the other: those of one length in one step.

    :return: them, and where each begins and the last one ends.
    """
    places = _starts(sizes)
    if not len(sizes):
        return b"", places
    size = int(sizes[0])
    if (sizes == size).all():
        return _windows(buffer, size)[sources].tobytes(), places
    whole = bytearray(int(places[-1]))
    order = np.argsort(sizes, kind="stable")
    for same in np.split(order, np.flatnonzero(np.diff(sizes[order])) + 1):
        size = int(sizes[same[0]])
        if len(same) >= _MANY:
            _windows(whole, size)[places[same]] = _windows(buffer, size)[sources[same]]
        else:
            for to, at in zip(places[same].tolist(), sources[same].tolist(), strict=True):
                whole[to : to + size] = buffer[at : at + size]
    return bytes(whole), places


def _windows(buffer: bytes | bytearray, size: int) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    """The ``size`` bytes from every offset on, as one element each."""
    return np.ndarray((len(buffer) - size + 1,), f"V{size}", buffer, strides=(1,))


def _starts(sizes: Offsets) -> Offsets:
    """Where pieces begin that stand one behind the other, and where the last one ends."""
    starts = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=starts[1:])
    return starts
