"""Reads the fields of a message: strings, rows, columns; and checks that nothing is left over.

Mirrors ``pqformat.c`` and ``logicalrep_read_tuple``/``logicalrep_read_attrs`` of ``proto.c``. Every function takes the
whole message and an offset, and returns the value and the next offset. Lengths are read as unsigned, so a negative one
is merely too long. Reading past the end, by ``struct`` or by index, raises an exception that
:mod:`pgsub.protocol.decoder` translates.
"""

from __future__ import annotations

import struct

from pgsub.common.errors import ProtocolViolation
from pgsub.protocol.messages import Column, Tuple, Update

INT16 = struct.Struct(">H")
INT32 = struct.Struct(">I")
_ATTRIBUTE = struct.Struct(">Ii")

#: MaxHeapAttributeNumber of htup_details.h.
MAX_COLUMNS = 1600

#: NAMEDATALEN - 1 bytes in the publisher's encoding, at most four times as many in UTF-8.
MAX_NAME_BYTES = 63 * 4

#: GIDSIZE - 1 of xact.h, likewise.
MAX_GID_BYTES = 199 * 4

#: MAX_RONAME_LEN of origin.h, likewise.
MAX_ORIGIN_BYTES = 512 * 4

#: Kinds of a tuple's columns; for UNCHANGED the publisher did not read the TOAST value.
NULL, UNCHANGED, TEXT, BINARY = b"nutb"

_WITH_VALUE = frozenset(b"tb")
_WITHOUT_VALUE = frozenset(b"nu")

_unpack_int32 = INT32.unpack_from
_unpack_int16 = INT16.unpack_from


def read_string(data: bytes, pos: int, limit: int | None = None) -> tuple[str, int]:
    """Read a string that ends with a NUL inside the message (``pq_getmsgstring``).

    :param limit: maximum length in bytes, without the NUL.
    :raises ProtocolViolation: no NUL, too long, or not UTF-8.
    """
    end = data.find(b"\0", pos)
    if end < 0:
        raise ProtocolViolation("string is not terminated within the message")
    if limit is not None and end - pos > limit:
        raise ProtocolViolation(f"string of {end - pos} bytes is too long", detail=f"At most {limit} are allowed here.")
    try:
        return data[pos:end].decode("utf-8"), end + 1
    except UnicodeDecodeError:
        raise ProtocolViolation("string is not valid UTF-8") from None


def read_name(data: bytes, pos: int) -> tuple[str, int]:
    """Read an identifier, which must not be empty.

    :raises ProtocolViolation: as :func:`read_string`, or empty.
    """
    name, pos = read_string(data, pos, MAX_NAME_BYTES)
    if not name:
        raise ProtocolViolation("zero-length identifier")
    return name, pos


def read_namespace(data: bytes, pos: int) -> tuple[str, int]:
    """Read a schema name, which is sent empty for pg_catalog (``logicalrep_read_namespace``).

    :raises ProtocolViolation: as :func:`read_string`.
    """
    namespace, pos = read_string(data, pos, MAX_NAME_BYTES)
    return namespace or "pg_catalog", pos


def read_tuple(data: bytes, pos: int) -> tuple[Tuple, int]:
    """Read TupleData; the values are slices of the message.

    :raises ProtocolViolation: too many columns, an unknown kind, a length beyond the message.
    """
    (count,) = _unpack_int16(data, pos)
    pos += 2
    if count > MAX_COLUMNS:
        raise ProtocolViolation(f"row of {count} columns is too wide", detail=f"At most {MAX_COLUMNS} are possible.")
    size = len(data)
    kinds: list[int] = []
    values: list[bytes | None] = []
    for _ in range(count):
        kind = data[pos]
        if kind in _WITH_VALUE:
            start = pos + 5
            pos = start + _unpack_int32(data, pos + 1)[0]
            if pos > size:
                raise ProtocolViolation("column value does not fit into its message")
            values.append(data[start:pos])
        elif kind in _WITHOUT_VALUE:
            pos += 1
            values.append(None)
        else:
            raise ProtocolViolation(f"unrecognized data representation type 0x{kind:02X}")
        kinds.append(kind)
    return Tuple(bytes(kinds), tuple(values)), pos


def read_columns(data: bytes, pos: int) -> tuple[tuple[Column, ...], int]:
    """Read the columns of a Relation message (``logicalrep_read_attrs``).

    :raises ProtocolViolation: too many columns, unknown flags, or two columns with the same name.
    """
    (count,) = _unpack_int16(data, pos)
    pos += 2
    if count > MAX_COLUMNS:
        raise ProtocolViolation(f"relation of {count} columns is too wide")
    columns: list[Column] = []
    for _ in range(count):
        flags = data[pos]
        if flags > 1:
            raise ProtocolViolation(f"unrecognized column flags 0x{flags:02X} in relation message")
        name, pos = read_name(data, pos + 1)
        type_oid, typmod = _ATTRIBUTE.unpack_from(data, pos)
        pos += 8
        columns.append(Column(flags, name, type_oid, typmod))
    if len({column.name for column in columns}) != count:
        raise ProtocolViolation("relation message names a column twice")
    return tuple(columns), pos


def expect_end(data: bytes, pos: int) -> None:
    """Check that a message was read completely.

    :raises ProtocolViolation: bytes are left over, or fields reached beyond the end.
    """
    if pos != len(data):
        raise ProtocolViolation(f"{len(data) - pos} bytes left over at the end of the message")


def filled(message: Update) -> Update:
    """Return an update whose new row has the unchanged values, too, if replica identity FULL sends them in the old one.

    The old row of another identity has only its key.
    """
    old, new = message.old, message.new
    if old is None or message.old_kind != "O" or UNCHANGED not in new.kinds:
        return message
    kinds = bytes(was if kind == UNCHANGED else kind for kind, was in zip(new.kinds, old.kinds, strict=True))
    both = zip(new.kinds, new.values, old.values, strict=True)
    values = tuple(before if kind == UNCHANGED else value for kind, value, before in both)
    return message._replace(new=Tuple(kinds, values))
