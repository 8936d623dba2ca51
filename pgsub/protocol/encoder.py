"""Encodes messages as pgoutput does: the reverse of :mod:`pgsub.protocol.parse_changes`.

Mirrors ``logicalrep_write_insert`` and similar functions (proto.c). It serves changes that are stored to be applied
later like those of a stream.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import TypeAlias

from pgsub.common.errors import ProtocolViolation
from pgsub.protocol.messages import Delete, Insert, Relation, Truncate, Tuple, Update
from pgsub.protocol.reader import BINARY, TEXT

RowMessage: TypeAlias = Insert | Update | Delete | Truncate

_COUNT = struct.Struct(">H")
_LENGTH = struct.Struct(">I")


def encode(message: RowMessage) -> bytes:
    """Encode a row message as :func:`~pgsub.protocol.decoder.decode_change` reads it outside a stream block.

    :param message: its rows must have as many kinds as values.
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
        if kind in (TEXT, BINARY):
            assert value is not None
            parts += [_LENGTH.pack(len(value)), value]
    return b"".join(parts)


def relation(message: Relation) -> bytes:
    """Encode a Relation message, as outside a stream block."""
    head = b"R" + _LENGTH.pack(message.relid) + _string(message.namespace) + _string(message.name)
    parts = [head, message.replica_identity.encode("ascii"), _COUNT.pack(len(message.columns))]
    for column in message.columns:
        parts += [bytes([column.flags]), _string(column.name), struct.pack(">Ii", column.type_oid, column.typmod)]
    return b"".join(parts)


def _string(text: str) -> bytes:
    return text.encode() + b"\0"


def outside_stream(payload: bytes, *, in_stream: bool) -> bytes:
    """Return a row message without the xid that it carries in a stream block."""
    return payload[:1] + payload[5:] if in_stream else payload


def joined(payloads: Iterable[bytes]) -> bytes:
    """Join messages, each preceded by its length."""
    return b"".join(part for payload in payloads for part in (_LENGTH.pack(len(payload)), payload))


def split(messages: bytes) -> list[bytes]:
    """Reverse :func:`joined`.

    :raises ProtocolViolation: the last message is truncated.
    """
    found, at = [], 0
    while at + _LENGTH.size <= len(messages):
        start = at + _LENGTH.size
        at = start + _LENGTH.unpack_from(messages, at)[0]
        found.append(messages[start:at])
    if at != len(messages):
        raise ProtocolViolation("stored messages are cut short")
    return found
