"""The publisher's side of the protocol, for tests: messages to bytes, as ``logicalrep_write_*`` of ``proto.c`` do."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from pgsub.protocol.messages import (
    Begin,
    BeginPrepare,
    Change,
    Commit,
    CommitPrepared,
    Control,
    Delete,
    Insert,
    LogicalMessage,
    Message,
    Origin,
    Prepare,
    Relation,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Truncate,
    Tuple,
    TypeName,
    Update,
)


def encode(message: Message, xid: int | None = None) -> bytes:
    """Write a message as the publisher would.

    :param message: any message.
    :param xid: inside a stream block: the (sub)transaction, written into the messages that carry one.
    :return: its bytes.
    """
    if isinstance(message, Change):
        kind, fields = _change(message)
        return kind + (b"" if xid is None else struct.pack(">I", xid)) + fields
    return _control(message)


def text_tuple(values: Iterable[bytes | None]) -> Tuple:
    """A row of text values; None is NULL."""
    values = tuple(values)
    return Tuple(bytes(b"n"[0] if value is None else b"t"[0] for value in values), values)


def _string(text: str) -> bytes:
    return text.encode() + b"\0"


def _namespace(name: str) -> bytes:
    return _string("" if name == "pg_catalog" else name)


def _tuple(row: Tuple) -> bytes:
    parts = [struct.pack(">H", len(row.kinds))]
    for kind, value in zip(row.kinds, row.values, strict=True):
        parts.append(bytes([kind]))
        if value is not None:
            parts.append(struct.pack(">I", len(value)) + value)
    return b"".join(parts)


def _relation(relation: Relation) -> bytes:
    head = struct.pack(">I", relation.relid) + _namespace(relation.namespace) + _string(relation.name)
    parts = [head + relation.replica_identity.encode() + struct.pack(">H", len(relation.columns))]
    for column in relation.columns:
        attribute = struct.pack(">Ii", column.type_oid, column.typmod)
        parts.append(bytes([column.flags]) + _string(column.name) + attribute)
    return b"".join(parts)


def _change(message: Change) -> tuple[bytes, bytes]:
    match message:
        case Relation():
            return b"R", _relation(message)
        case TypeName(oid, namespace, name):
            return b"Y", struct.pack(">I", oid) + _namespace(namespace) + _string(name)
        case Insert(relid, new):
            return b"I", struct.pack(">I", relid) + b"N" + _tuple(new)
        case Update(relid, old_kind, old, new):
            old_part = b"" if old is None else old_kind.encode() + _tuple(old)
            return b"U", struct.pack(">I", relid) + old_part + b"N" + _tuple(new)
        case Delete(relid, old_kind, old):
            return b"D", struct.pack(">I", relid) + old_kind.encode() + _tuple(old)
        case Truncate(relids, cascade, restart_identity):
            return b"T", struct.pack(f">IB{len(relids)}I", len(relids), cascade | restart_identity << 1, *relids)
        case LogicalMessage(transactional, lsn, prefix, content):
            head = struct.pack(">BQ", transactional, lsn) + _string(prefix)
            return b"M", head + struct.pack(">I", len(content)) + content


def _control(message: Control) -> bytes:
    match message:
        case Begin():
            return b"B" + struct.pack(">QqI", *message)
        case Commit():
            return b"C\0" + struct.pack(">QQq", *message)
        case Origin(lsn, name):
            return b"O" + struct.pack(">Q", lsn) + _string(name)
        case StreamStart(xid, first):
            return b"S" + struct.pack(">IB", xid, first)
        case StreamStop():
            return b"E"
        case StreamCommit(xid, commit_lsn, end_lsn, commit_ts):
            return b"c" + struct.pack(">IBQQq", xid, 0, commit_lsn, end_lsn, commit_ts)
        case StreamAbort(xid, subxid, abort_lsn, abort_ts):
            info = b"" if abort_lsn is None else struct.pack(">Qq", abort_lsn, abort_ts)
            return b"A" + struct.pack(">II", xid, subxid) + info
        case _:
            return _two_phase(message)


def _two_phase(message: BeginPrepare | Prepare | CommitPrepared | RollbackPrepared | StreamPrepare) -> bytes:
    *fields, gid = message
    match message:
        case BeginPrepare():
            return b"b" + struct.pack(">QQqI", *fields) + _string(gid)
        case Prepare():
            return b"P\0" + struct.pack(">QQqI", *fields) + _string(gid)
        case CommitPrepared():
            return b"K\0" + struct.pack(">QQqI", *fields) + _string(gid)
        case StreamPrepare():
            return b"p\0" + struct.pack(">QQqI", *fields) + _string(gid)
        case RollbackPrepared():
            return b"r\0" + struct.pack(">QQqqI", *fields) + _string(gid)
