"""Messages of pgoutput that are put away for later: written as they would come outside of stream blocks.

Protocol section "Logical Replication Message Formats": row messages are kept as they came, but for the xid that they
carry inside of a stream block; Relation messages are made again.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from pgsub.common.errors import ProtocolViolation
from pgsub.protocol.messages import Relation

_LENGTH = struct.Struct(">I")


def relation(message: Relation) -> bytes:
    """A Relation message."""
    head = b"R" + struct.pack(">I", message.relid) + _string(message.namespace) + _string(message.name)
    parts = [head, message.replica_identity.encode("ascii"), struct.pack(">H", len(message.columns))]
    for column in message.columns:
        parts.append(bytes([column.flags]) + _string(column.name))
        parts.append(struct.pack(">Ii", column.type_oid, column.typmod))
    return b"".join(parts)


def row(payload: bytes, *, in_stream: bool) -> bytes:
    """A row message as it would be outside of a stream block."""
    return payload[:1] + payload[5:] if in_stream else payload


def joined(payloads: Iterable[bytes]) -> bytes:
    """Messages one behind the other, each behind its length."""
    return b"".join(part for payload in payloads for part in (_LENGTH.pack(len(payload)), payload))


def split(messages: bytes) -> list[bytes]:
    """What :func:`joined` joined.

    :raises ProtocolViolation: it is not whole.
    """
    found, at, end = [], 0, len(messages)
    while at + 4 <= end:
        size = _LENGTH.unpack_from(messages, at)[0]
        at += 4 + size
        found.append(messages[at - size : at])
    if at != end:
        raise ProtocolViolation("kept messages are cut short")
    return found


def _string(text: str) -> bytes:
    return text.encode() + b"\0"
