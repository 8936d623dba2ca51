"""Parses the messages that describe and change relations: R Y I U D T M.

Mirrors ``logicalrep_read_rel``, ``_typ``, ``_insert``, ``_update``, ``_delete``, ``_truncate`` of ``proto.c``. Inside a
stream block each carries an xid between type byte and fields, so a parser takes the offset of the fields.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from pgsub.common.errors import ProtocolViolation
from pgsub.protocol.messages import Change, Delete, Insert, LogicalMessage, Relation, Truncate, Tuple, TypeName, Update
from pgsub.protocol.reader import (
    INT32,
    UNCHANGED,
    expect_end,
    read_columns,
    read_name,
    read_namespace,
    read_string,
    read_tuple,
)

_TRUNCATE = struct.Struct(">IB")
_MESSAGE = struct.Struct(">BQ")

_NEW, _KEY, _OLD = b"NKO"

_unpack_int32 = INT32.unpack_from

#: Offset of the relation's oid in a message: after the type byte, and in a stream block also after an xid.
RELID_AT = {False: 1, True: 5}


def relid_of(payload: bytes, *, in_stream: bool) -> int:
    """Read the relation's oid from a row message or a Relation message.

    :raises ProtocolViolation: the message is too short.
    """
    start = RELID_AT[in_stream]
    if len(payload) < start + 4:
        raise ProtocolViolation("insufficient data left in message")
    relid: int = _unpack_int32(payload, start)[0]
    return relid


def _relation(data: bytes, pos: int) -> Relation:
    (relid,) = _unpack_int32(data, pos)
    namespace, pos = read_namespace(data, pos + 4)
    name, pos = read_name(data, pos)
    identity = data[pos]
    if identity not in b"dnfi":
        raise ProtocolViolation(f"unrecognized replica identity 0x{identity:02X} in relation message")
    columns, pos = read_columns(data, pos + 1)
    expect_end(data, pos)
    return Relation(relid, namespace, name, chr(identity), columns)


def _type(data: bytes, pos: int) -> TypeName:
    (oid,) = _unpack_int32(data, pos)
    namespace, pos = read_namespace(data, pos + 4)
    name, pos = read_name(data, pos)
    expect_end(data, pos)
    return TypeName(oid, namespace, name)


def _insert(data: bytes, pos: int) -> Insert:
    (relid,) = _unpack_int32(data, pos)
    if data[pos + 4] != _NEW:
        raise ProtocolViolation(f"expected new tuple but got 0x{data[pos + 4]:02X} in insert message")
    new, pos = read_tuple(data, pos + 5)
    # An unchanged TOAST value is possible here: an UPDATE whose row begins to match a row filter is sent as an insert.
    # The server's own subscriber treats it as NULL (slot_store_data), and so does apply.
    expect_end(data, pos)
    return Insert(relid, new)


def _old_tuple(data: bytes, pos: int) -> tuple[str, Tuple, int]:
    kind = data[pos]
    old, pos = read_tuple(data, pos + 1)
    if kind == _KEY and UNCHANGED in old.kinds:
        raise ProtocolViolation("unchanged column value in a replica identity key")
    return chr(kind), old, pos


def _update(data: bytes, pos: int) -> Update:
    (relid,) = _unpack_int32(data, pos)
    pos += 4
    old_kind, old = "", None
    if data[pos] == _KEY or data[pos] == _OLD:
        old_kind, old, pos = _old_tuple(data, pos)
    if data[pos] != _NEW:
        raise ProtocolViolation(f"expected action N, O or K, got 0x{data[pos]:02X} in update message")
    new, pos = read_tuple(data, pos + 1)
    if old is not None and len(old.kinds) != len(new.kinds):
        raise ProtocolViolation("old and new row of an update message differ in their number of columns")
    expect_end(data, pos)
    return Update(relid, old_kind, old, new)


def _delete(data: bytes, pos: int) -> Delete:
    (relid,) = _unpack_int32(data, pos)
    pos += 4
    if data[pos] != _KEY and data[pos] != _OLD:
        raise ProtocolViolation(f"expected action O or K, got 0x{data[pos]:02X} in delete message")
    old_kind, old, pos = _old_tuple(data, pos)
    expect_end(data, pos)
    return Delete(relid, old_kind, old)


def _truncate(data: bytes, pos: int) -> Truncate:
    count, options = _TRUNCATE.unpack_from(data, pos)
    if options > 3:
        raise ProtocolViolation(f"unrecognized options 0x{options:02X} in truncate message")
    pos += 5
    # compare before anything of that size is allocated
    expect_end(data, pos + 4 * count)
    relids = struct.unpack_from(f">{count}I", data, pos)
    return Truncate(relids, bool(options & 1), bool(options & 2))


def _message(data: bytes, pos: int) -> LogicalMessage:
    flags, lsn = _MESSAGE.unpack_from(data, pos)
    if flags > 1:
        raise ProtocolViolation(f"unrecognized flags {flags} in logical message")
    prefix, pos = read_string(data, pos + 9)
    (length,) = _unpack_int32(data, pos)
    pos += 4
    expect_end(data, pos + length)
    return LogicalMessage(flags == 1, lsn, prefix, data[pos:])


#: Maps type bytes to parser(message, offset of its fields).
PARSERS: dict[int, Callable[[bytes, int], Change]] = {
    ord("R"): _relation,
    ord("Y"): _type,
    ord("I"): _insert,
    ord("U"): _update,
    ord("D"): _delete,
    ord("T"): _truncate,
    ord("M"): _message,
}

#: Types of the messages of a transaction: row changes, and messages between them. All code that compares types uses
#: these, so that no place silently ignores a new type.
CHANGES = bytes(PARSERS)
ROW_CHANGES = b"IUD"
BETWEEN_ROWS = CHANGES.translate(None, ROW_CHANGES)
