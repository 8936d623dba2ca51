"""The bytes of keys: whether they decide which keys are equal, and rows grouped by them."""

from __future__ import annotations

import numpy as np

from pgsub.protocol.columnar import Bytes, Flags, Lengths, Offsets, Rows, Words
from pgsub.protocol.reader import BINARY, TEXT
from pgsub.target.catalog.relation_map import RelationMap

#: Types of key columns whose equality is that of their bytes, in text and in binary form: bool, bytea, int8, int2,
#: int4, text, oid, varchar, date, timestamp, timestamptz, uuid.
KEY_TYPES = frozenset({16, 17, 20, 21, 23, 25, 26, 1043, 1082, 1114, 1184, 2950})
_WORD = 8  #: bytes
_BITS = 64


def incomparable(relation: RelationMap) -> str | None:
    """Return why the bytes of this relation's keys do not decide whether keys are equal, None if they do."""
    for position in relation.lookup:
        column = relation.columns[position]
        if column.type_oid not in KEY_TYPES or relation.remote.columns[position].type_oid != column.type_oid:
            return f'equality of key column "{column.name}" is not that of its bytes'
        if position in relation.modified:
            return f'the modifier of key column "{column.name}" may make one key of two'
        if not column.deterministic:
            return f'the collation of key column "{column.name}" is not deterministic'
    return "the key's index has a collation or an operator class of its own" if relation.target.key_equality else None


class Keys:
    """Keys of many rows, as bytes in a buffer.

    :param buffer: ends in ``PAD``, so that eight bytes can be loaded from any value's start.
    :param rows: one array row per key column.
    :ivar reason: why they cannot be compared, None if they can.
    :ivar ordered: :meth:`grouped` sorts them so that neighbours are near each other in the target's index.
    :ivar collided: :meth:`grouped` found two keys with the same hash.
    """

    def __init__(self, buffer: bytes, rows: Rows) -> None:
        self._words = np.ndarray((len(buffer) - _WORD + 1,), ">u8", buffer, strides=(1,))
        self._rows = rows
        self.reason = _reason(rows.kinds)
        self.ordered = self.collided = False

    def grouped(self, positions: Offsets) -> tuple[Offsets, Flags]:
        """Sort rows by key, and rows with the same key by position.

        :param positions: small distinct numbers.
        :return: the order, and for each row but the first whether its key equals the previous one.
        """
        codes, bits = self._packed()
        self.ordered = codes is not None
        low = int(positions.max()).bit_length()
        if codes is None:
            codes, bits = self._hashed() >> np.uint64(low), _BITS - low
        if bits + low > _BITS:
            arrival = np.argsort(positions)
            order = arrival[np.argsort(codes[arrival], kind="stable")]
            codes = codes[order]
        else:  # sorting numbers is several times as fast as sorting indexes
            both = np.sort((codes << np.uint64(low)) | positions.astype(np.uint64))
            places = np.empty(int(positions.max()) + 1, np.int64)
            places[positions] = np.arange(len(positions))
            order = places[both & np.uint64((1 << low) - 1)]
            codes = both >> np.uint64(low)
        same: Flags = codes[1:] == codes[:-1]
        if not self.ordered and same.any():
            self.collided = not self._equal(self._rows, order[:-1][same], self._rows, order[1:][same])
        return order, same

    def same_as(self, other: Rows) -> bool:
        """Return whether other keys in the same buffer have the same bytes, row by row."""
        at = np.arange(other.kinds.shape[1])
        return self._equal(self._rows, at, other, at)

    def _packed(self) -> tuple[Words | None, int]:
        """Pack short keys into numbers with a bit field per column, and return their width; None if they do not fit."""
        codes: Words = np.zeros(1, np.uint64)
        bits = 0
        for offsets, lengths in zip(self._rows.offsets, self._rows.lengths, strict=True):
            part = self._part(offsets, lengths, int(lengths.max()))
            if part is None:
                return None, 0
            part -= part.min()
            width = int(part.max()).bit_length()
            bits += width
            if bits > _BITS:
                return None, 0
            codes = part if bits == width else (codes << np.uint64(width)) | part
        return codes, bits

    def _part(self, offsets: Offsets, lengths: Lengths, longest: int) -> Words | None:
        """Read values of a column as numbers, decimal integers in their order; None if they are too long."""
        if longest > 2 * _WORD - 1:
            return None
        fixed = bool((lengths == longest).all())
        words = self._word(offsets, lengths, 0)
        digits = _digits(words, np.minimum(lengths, _WORD))
        if digits is not None and longest > _WORD:
            some = np.flatnonzero(lengths > _WORD)
            more = _digits(self._word(offsets[some], lengths[some], 1), lengths[some] - _WORD)
            if more is None:
                return None
            digits[some] = (digits[some] << (4 * (lengths[some] - _WORD)).astype(np.uint64)) | more
        if digits is not None:
            return digits if fixed else digits | (lengths.astype(np.uint64) << np.uint64(60))
        if fixed and longest <= _WORD:
            return words
        return words | (lengths.astype(np.uint64) << np.uint64(_BITS - 8)) if longest < _WORD else None

    def _hashed(self, seed: int = 0) -> Words:
        codes: Words = np.full(self._rows.kinds.shape[1], seed, np.uint64)
        for offsets, lengths in zip(self._rows.offsets, self._rows.lengths, strict=True):
            codes = mix(codes, lengths.astype(np.uint64))
            for index in range(-(-int(lengths.max()) // _WORD)):
                some = np.flatnonzero(lengths > index * _WORD)
                codes[some] = mix(codes[some], self._word(offsets[some], lengths[some], index))
        return codes

    def _word(self, offsets: Offsets, lengths: Lengths, index: int) -> Words:
        """Read up to eight bytes from ``8 * index`` on as a number; 0 if there are none."""
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


def hashes(buffer: bytes, rows: Rows, seed: int) -> Words:
    """Hash keys; different keys may have the same hash.

    :param buffer: see :class:`Keys`.
    :param seed: seed for the table of the keys.
    """
    return Keys(buffer, rows)._hashed(seed)


def _reason(kinds: Bytes) -> str | None:
    for column in kinds:
        if not ((column == TEXT) | (column == BINARY)).all():
            return "a key has a column without a value"
        if (column != column[0]).any():
            return "a key comes in text and in binary form"
    return None


def _digits(words: Words, lengths: Lengths) -> Words | None:
    """Encode up to eight decimal digits with four bits each; return None if there is anything else."""
    # the bytes above a short word must be zero
    threes = np.uint64(0x3030303030303030) >> (_BITS - 8 * lengths.astype(np.int64)).astype(np.uint64)
    if (words & np.uint64(0xF0F0F0F0F0F0F0F0) != threes).any():
        return None
    words = words & np.uint64(0x0F0F0F0F0F0F0F0F)
    for shift, kept in ((4, 0x00FF00FF00FF00FF), (8, 0x0000FFFF0000FFFF), (16, 0x00000000FFFFFFFF)):
        words = (words | (words >> np.uint64(shift))) & np.uint64(kept)
    return words


def mix(codes: Words, words: Words) -> Words:
    """Combine a hash with a further word; equal hashes prove nothing, so the bytes are compared."""
    codes = (codes ^ words) * np.uint64(0x9E3779B97F4A7C15)
    return codes ^ (codes >> np.uint64(29))
