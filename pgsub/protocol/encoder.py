"""Row messages as pgoutput writes them: the other direction of :mod:`pgsub.protocol.changes`.

Mirrors ``logicalrep_write_insert`` and its like (proto.c). For changes that were kept in another form and are applied
later, by what applies those of a stream.
"""

from __future__ import annotations

import struct
from typing import TypeAlias

from pgsub.protocol.messages import Delete, Insert, Truncate, Tuple, Update

RowMessage: TypeAlias = Insert | Update | Delete | Truncate

_COUNT = struct.Struct(">H")
_LENGTH = struct.Struct(">I")
_VALUES = b"tb"


def encode(message: RowMessage) -> bytes:
    """The bytes that :func:`~pgsub.protocol.decoder.decode_change` reads the message from, outside of a stream block.

    :param message: its rows have as many kinds as values.
    """
    match message:
        case Insert():
            return b"I" + _LENGTH.pack(message.relid) + b"N" + _tuple(message.new)
        case Update():
            old = b"" if message.old is None else message.old_kind.encode() + _tuple(message.old)
            return b"U" + _LENGTH.pack(message.relid) + old + b"N" + _tuple(message.new)
        case Delete():
            return b"D" + _LENGTH.pack(message.relid) + message.old_kind.encode() + _tuple(message.old)
        case Truncate():
            options = message.cascade | message.restart_identity << 1
            head = b"T" + _LENGTH.pack(len(message.relids)) + bytes([options])
            return head + b"".join(_LENGTH.pack(relid) for relid in message.relids)


def _tuple(row: Tuple) -> bytes:
    parts = [_COUNT.pack(len(row.kinds))]
    for kind, value in zip(row.kinds, row.values, strict=True):
        parts.append(bytes([kind]))
        if kind in _VALUES:
            assert value is not None
            parts += [_LENGTH.pack(len(value)), value]
    return b"".join(parts)
