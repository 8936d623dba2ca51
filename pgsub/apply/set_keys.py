"""Which of many rows have the same key, by its bytes."""

from __future__ import annotations

import numpy as np

from pgsub.protocol.columnar import Bytes, Flags, Lengths, Offsets, Rows, Words

_TEXT, _BINARY = b"tb"
_WORD = 8  #: bytes
_BITS = 64


class Keys:
    """Keys of many rows, as their bytes in a buffer.

    :param buffer: ends in ``PAD``: eight bytes can be loaded from wherever a value begins.
    :param rows: an array row for each column of the key.
    :ivar reason: why they cannot be compared, None where they can.
    :ivar ordered: whether :meth:`grouped` sorts them so that neighbours are near each other in the target's index.
    :ivar collided: whether :meth:`grouped` found two keys with one hash.
    """

    def __init__(self, buffer: bytes, rows: Rows) -> None:
        self._words = np.ndarray((len(buffer) - _WORD + 1,), ">u8", buffer, strides=(1,))
        self._rows = rows
        self.reason = _reason(rows.kinds)
        self.ordered = self.collided = False

    def grouped(self, positions: Offsets) -> tuple[Offsets, Flags]:
        """Rows sorted by key, those of one key by position.

        :return: the order, and whether each but the first has the key of the one before it.
        """
        codes = self._packed()
        self.ordered = codes is not None
        if codes is None:
            codes = self._hashed()
        if (positions[1:] < positions[:-1]).any():
            arrival = np.argsort(positions, kind="stable")
            order = arrival[np.argsort(codes[arrival], kind="stable")]
        else:
            order = np.argsort(codes, kind="stable")
        codes = codes[order]
        same: Flags = codes[1:] == codes[:-1]
        if not self.ordered and same.any():
            self.collided = not self._equal(self._rows, order[:-1][same], self._rows, order[1:][same])
        return order, same

    def same_as(self, other: Rows) -> bool:
        """Whether other keys in the same buffer are, row by row, the same bytes."""
        at = np.arange(other.kinds.shape[1])
        return self._equal(self._rows, at, other, at)

    def _packed(self) -> Words | None:
        """Keys as numbers, if they are short: lengths and bytes of all columns; None if they are not."""
        spans = [(int(lengths.min()), int(lengths.max())) for lengths in self._rows.lengths]
        widths = [_WORD * high + (_WORD if low != high else 0) for low, high in spans]
        if sum(widths) > _BITS:
            return None
        codes: Words | None = None
        for offsets, lengths, (low, high), width in zip(
            self._rows.offsets, self._rows.lengths, spans, widths, strict=True
        ):
            part = self._word(offsets, lengths, 0)
            if low != high:
                part |= lengths.astype(np.uint64) << np.uint64(_WORD * high)
            codes = part if codes is None else (codes << np.uint64(width)) | part
        return codes

    def _hashed(self) -> Words:
        codes: Words = np.zeros(self._rows.kinds.shape[1], np.uint64)
        for offsets, lengths in zip(self._rows.offsets, self._rows.lengths, strict=True):
            codes = mix(codes, lengths.astype(np.uint64))
            for index in range(-(-int(lengths.max()) // _WORD)):
                some = np.flatnonzero(lengths > index * _WORD)
                codes[some] = mix(codes[some], self._word(offsets[some], lengths[some], index))
        return codes

    def _word(self, offsets: Offsets, lengths: Lengths, index: int) -> Words:
        """Bytes from ``8 * index`` on, eight at most, as a number; 0 where there are none."""
        rest = np.clip(lengths.astype(np.int64) - index * _WORD, 0, _WORD)
        words = self._words[offsets + index * _WORD].astype(np.uint64)
        if rest.all():
            found: Words = words >> (_BITS - 8 * rest).astype(np.uint64)
            return found
        return np.where(rest > 0, words >> (_BITS - 8 * np.maximum(rest, 1)).astype(np.uint64), np.uint64(0))

    def _equal(self, first: Rows, at: Offsets, second: Rows, other: Offsets) -> bool:
        for column in range(len(first.kinds)):
            lengths = first.lengths[column][at]
            if (lengths != second.lengths[column][other]).any():
                return False
            offsets, others = first.offsets[column][at], second.offsets[column][other]
            for index in range(-(-int(lengths.max(initial=0)) // _WORD)):
                some = np.flatnonzero(lengths > index * _WORD)
                words = self._word(offsets[some], lengths[some], index)
                if (words != self._word(others[some], lengths[some], index)).any():
                    return False
        return True


def _reason(kinds: Bytes) -> str | None:
    for column in kinds:
        if not ((column == _TEXT) | (column == _BINARY)).all():
            return "a key has a column without a value"
        if (column != column[0]).any():
            return "a key comes in text and in binary form"
    return None


def mix(codes: Words, words: Words) -> Words:
    """Hashes of what was mixed so far and a further word; equal ones say nothing, the bytes are compared."""
    codes = (codes ^ words) * np.uint64(0x9E3779B97F4A7C15)
    return codes ^ (codes >> np.uint64(29))
