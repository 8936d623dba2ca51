"""Makes input for the target from decoded columns: COPY streams of whole rows, and array parameters of single columns.

Nothing is decoded again: pgoutput's tuples, COPY's rows and array elements have the same bytes for a value, with
different headers. Values are copied column by column, and values of the same length in one step. Mirrors
``CopyOneRowTo``, ``CopyAttributeOutText`` (copyto.c) and ``array_send``.
"""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from pgsub.protocol.columnar import PAD, Bytes, Changes, Flags, Lengths, Offsets, Rows
from pgsub.protocol.reader import BINARY, TEXT

_ARRAY = struct.Struct(">iiIii")
_SIGNATURE = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_TRAILER = b"\xff\xff"
_NULL = b"\\N"  #: in a text stream
#: A view, because conversion to bytes would copy it.
Stream: TypeAlias = memoryview

_VALUED = np.zeros(256, np.bool_)
_VALUED[[TEXT, BINARY]] = True

#: The letter after the backslash for each byte to be escaped in a text value; 0 for other bytes.
_ESCAPED = np.zeros(256, np.uint8)
for _plain, _letter in zip(b"\\\n\r\t", b"\\nrt", strict=True):
    _ESCAPED[_plain] = _letter

#: Minimum number of values of one length for which a common step is cheaper.
_MANY = 16


def formats(rows: Rows) -> str:
    """Return the form of all values: ``binary``, ``text`` or ``mixed``; ``text`` if there are none."""
    binary = bool((rows.kinds == BINARY).any())
    if not binary:
        return "text"
    return "mixed" if (rows.kinds == TEXT).any() else "binary"


def copy_stream(changes: Changes, *, binary: bool) -> Stream:
    """Make the complete stream for COPY FROM STDIN of the new rows, with all columns in their order.

    Values that were not sent (unchanged TOAST, possible where an update begins to match a row filter) become NULL, as
    in the server's own subscriber.

    :param changes: must have new rows with at least one column.
    :param binary: for WITH (FORMAT binary). There, text values are valid only for columns of type text. A text stream
        cannot have binary values.
    :raises ValueError: binary values for a text stream, or rows without columns, which COPY cannot express.
    """
    rows = changes.new
    if rows is None or not len(rows.kinds):
        raise ValueError("COPY needs new rows with columns")
    if not binary and (rows.kinds == BINARY).any():
        raise ValueError("binary values do not fit into a text stream")
    return _binary_stream(changes.buffer, rows) if binary else _text_stream(changes.buffer, rows)


def _binary_stream(buffer: bytes, rows: Rows) -> Stream:
    count = len(rows.kinds)
    sources, sizes = _elements(buffer, rows.offsets, rows.lengths, _VALUED[rows.kinds])
    sizes[0] += 2  # the number of columns
    places, size = _row_by_row(sizes)
    places += len(_SIGNATURE)
    whole = bytearray(len(_SIGNATURE) + size + len(_TRAILER))
    whole[: len(_SIGNATURE)], whole[-len(_TRAILER) :] = _SIGNATURE, _TRAILER
    _windows(whole, 2)[places[0]] = np.void(struct.pack(">H", count))
    places[0] += 2
    sizes[0] -= 2
    for column in range(count):
        _put(whole, places[column], buffer, sources[column], sizes[column])
    return memoryview(whole)


def _text_stream(buffer: bytes, rows: Rows) -> Stream:
    """Make the text stream: each row begins with the previous row's line end, each column with its tab."""
    valued = _VALUED[rows.kinds]
    sizes = np.where(valued, rows.lengths, len(_NULL)).astype(np.int64) + 1
    marks, size = _row_by_row(sizes)
    whole = bytearray(size + 1)
    lines = np.frombuffer(whole, np.uint8)
    lines[size] = ord("\n")
    for column, (has, places) in enumerate(zip(valued, marks, strict=True)):
        if has.all():  # each with the byte before it, which becomes its delimiter
            _put(whole, places, buffer, rows.offsets[column] - 1, sizes[column])
        else:
            _put(whole, places[has], buffer, rows.offsets[column][has] - 1, sizes[column][has])
            _windows(whole, len(_NULL))[places[~has] + 1] = np.void(_NULL)
        lines[places] = ord("\t") if column else ord("\n")
    if not _as_it_is(whole, valued):
        return _escaped(lines, marks, marks[~valued]).data[1:]
    return memoryview(whole)[1:]


def _as_it_is(text: bytearray, valued: Flags) -> bool:
    """Return whether no value needs escaping: all line ends, tabs and backslashes are delimiters or NULLs."""
    columns, rows = valued.shape
    if b"\r" in text or text.count(b"\\") != valued.size - int(valued.sum()):
        return False
    return (text.count(b"\n"), text.count(b"\t")) == (rows + 1, rows * (columns - 1))


def _escaped(lines: Bytes, marks: Offsets, nulls: Offsets) -> Bytes:
    """Put a backslash before each byte that needs it.

    :param marks: positions of the delimiters; ``nulls`` are those of NULL columns.
    """
    special = _ESCAPED[lines].astype(np.bool_)
    special[-1] = False
    special[marks] = False
    special[nulls + 1] = False
    places = np.flatnonzero(special)
    escapes = _ESCAPED[lines[places]]
    whole = np.insert(lines, places, ord("\\"))
    whole[places + np.arange(1, len(places) + 1)] = escapes
    return whole


def array_parameter(buffer: bytes, rows: Rows, column: int, element_type: int) -> bytearray:
    """Make a one-dimensional binary array from a column, for unnest. Null and unchanged values become NULLs.

    :param buffer: buffer for the rows' offsets; ends in ``PAD``.
    :param rows: any old or new rows of a group.
    :param element_type: oid. Text values make an array of text, binary ones an array of their own type.
    """
    has = _VALUED[rows.kinds[column]]
    sources, sizes = _elements(buffer, rows.offsets[column], rows.lengths[column], has)
    places = _starts(sizes)
    whole = bytearray(_ARRAY.size + int(places[-1]))
    _ARRAY.pack_into(whole, 0, 1, int(not has.all()), element_type, len(has), 1)
    _put(whole, places[:-1] + _ARRAY.size, buffer, sources, sizes)
    return whole


def gathered(buffer: bytes, sources: Offsets, sizes: Offsets) -> tuple[bytes, Offsets]:
    """Copy pieces of a buffer one after another.

    :return: the new buffer, and the start of each piece followed by the end of the last.
    """
    places = _starts(sizes)
    whole = bytearray(int(places[-1]))
    _put(whole, places[:-1], buffer, sources, sizes)
    return bytes(whole), places


def _elements(buffer: bytes, offsets: Offsets, lengths: Lengths, has: Flags) -> tuple[Offsets, Offsets]:
    """Find the offsets and sizes of values together with their lengths, as in binary rows and arrays.

    A value is preceded by its length; the length of a NULL is in ``PAD``.
    """
    return np.where(has, offsets - 4, len(buffer) - len(PAD)), lengths.astype(np.int64) + 4


def _put(whole: bytearray, places: Offsets, buffer: bytes, sources: Offsets, sizes: Offsets) -> None:
    """Copy pieces of a buffer to their places, those of the same length in one step."""
    if not len(sizes):
        return
    least, most = int(sizes.min()), int(sizes.max())
    if least == most:
        _windows(whole, most)[places] = _windows(buffer, most)[sources]
        return
    # small numbers are sorted in linear time
    order = np.argsort((sizes - least).astype(np.uint16) if most - least < 1 << 16 else sizes, kind="stable")
    places, sources, sizes = places[order], sources[order], sizes[order]
    edges = [0, *(np.flatnonzero(np.diff(sizes)) + 1).tolist(), len(sizes)]
    for first, last in pairwise(edges):
        size = int(sizes[first])
        if last - first >= _MANY:
            _windows(whole, size)[places[first:last]] = _windows(buffer, size)[sources[first:last]]
        else:
            for to, at in zip(places[first:last].tolist(), sources[first:last].tolist(), strict=True):
                whole[to : to + size] = buffer[at : at + size]


def _windows(buffer: bytes | bytearray, size: int) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    """View the ``size`` bytes at every offset as one element each."""
    return np.ndarray((len(buffer) - size + 1,), f"V{size}", buffer, strides=(1,))


def _starts(sizes: Offsets) -> Offsets:
    """Return the starts of consecutive pieces, followed by the end of the last."""
    starts = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=starts[1:])
    return starts


def _row_by_row(sizes: Offsets) -> tuple[Offsets, int]:
    """Return the starts of the columns of consecutive rows, and the end of the last row.

    :param sizes: in the shape (columns, rows), like the result.
    """
    starts = _starts(sizes.T.reshape(-1))
    return np.ascontiguousarray(starts[:-1].reshape(sizes.shape[::-1]).T), int(starts[-1])
