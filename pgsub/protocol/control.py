"""Parsing of the messages that delimit transactions and stream blocks: B C O S E c A b P K r p.

Mirrors ``logicalrep_read_begin`` to ``logicalrep_read_stream_prepare`` of ``proto.c`` with their checks of LSNs, flags
and transaction IDs.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from pgsub.common.errors import ProtocolViolation
from pgsub.protocol.messages import (
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    Control,
    Origin,
    Prepare,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
)
from pgsub.protocol.reader import MAX_GID_BYTES, MAX_ORIGIN_BYTES, expect_end, read_string

_BEGIN = struct.Struct(">QqI")
_COMMIT = struct.Struct(">BQQq")
_ORIGIN = struct.Struct(">Q")
_STREAM_START = struct.Struct(">IB")
_STREAM_COMMIT = struct.Struct(">IBQQq")
_STREAM_ABORT = struct.Struct(">II")
_STREAM_ABORT_INFO = struct.Struct(">IIQq")
_BEGIN_PREPARE = struct.Struct(">QQqI")
_PREPARE = struct.Struct(">BQQqI")
_ROLLBACK_PREPARED = struct.Struct(">BQQqqI")


def _check_lsns(what: str, finish_lsn: int, end_lsn: int) -> None:
    if finish_lsn == 0 or end_lsn == 0:
        raise ProtocolViolation(f"LSN is not set in {what} message")
    if end_lsn < finish_lsn:
        raise ProtocolViolation(f"end LSN precedes the finish LSN in {what} message")


def _check_flags(what: str, flags: int) -> None:
    if flags != 0:
        raise ProtocolViolation(f"unrecognized flags {flags} in {what} message")


def _check_xid(what: str, xid: int) -> None:
    if xid == 0:
        raise ProtocolViolation(f"invalid transaction ID in {what} message")


def _begin(data: bytes) -> Begin:
    begin = Begin(*_BEGIN.unpack_from(data, 1))
    if begin.final_lsn == 0:
        raise ProtocolViolation("final_lsn not set in begin message")
    expect_end(data, 1 + _BEGIN.size)
    return begin


def _commit(data: bytes) -> Commit:
    flags, commit_lsn, end_lsn, commit_ts = _COMMIT.unpack_from(data, 1)
    _check_flags("commit", flags)
    _check_lsns("commit", commit_lsn, end_lsn)
    expect_end(data, 1 + _COMMIT.size)
    return Commit(commit_lsn, end_lsn, commit_ts)


def _origin(data: bytes) -> Origin:
    (lsn,) = _ORIGIN.unpack_from(data, 1)
    name, pos = read_string(data, 1 + _ORIGIN.size, MAX_ORIGIN_BYTES)
    expect_end(data, pos)
    return Origin(lsn, name)


def _stream_start(data: bytes) -> StreamStart:
    xid, first = _STREAM_START.unpack_from(data, 1)
    _check_xid("stream start", xid)
    if first > 1:
        raise ProtocolViolation(f"unrecognized first-segment flag {first} in stream start message")
    expect_end(data, 1 + _STREAM_START.size)
    return StreamStart(xid, first == 1)


def _stream_stop(data: bytes) -> StreamStop:
    expect_end(data, 1)
    return StreamStop()


def _stream_commit(data: bytes) -> StreamCommit:
    xid, flags, commit_lsn, end_lsn, commit_ts = _STREAM_COMMIT.unpack_from(data, 1)
    _check_xid("stream commit", xid)
    _check_flags("stream commit", flags)
    _check_lsns("stream commit", commit_lsn, end_lsn)
    expect_end(data, 1 + _STREAM_COMMIT.size)
    return StreamCommit(xid, commit_lsn, end_lsn, commit_ts)


def parse_stream_abort(data: bytes, with_info: bool) -> StreamAbort:
    """Parse a Stream Abort message (``logicalrep_read_stream_abort``).

    :param data: the whole message.
    :param with_info: whether LSN and time follow: exactly when streaming = parallel was negotiated.
    :return: the message; LSN and time are None where they do not follow.
    :raises ProtocolViolation: a zero xid, or another length.
    """
    layout = _STREAM_ABORT_INFO if with_info else _STREAM_ABORT
    xid, subxid, *info = layout.unpack_from(data, 1)
    _check_xid("stream abort", xid)
    _check_xid("stream abort", subxid)
    expect_end(data, 1 + layout.size)
    abort_lsn, abort_ts = info or (None, None)
    return StreamAbort(xid, subxid, abort_lsn, abort_ts)


def _begin_prepare(data: bytes) -> BeginPrepare:
    prepare_lsn, end_lsn, prepare_ts, xid = _BEGIN_PREPARE.unpack_from(data, 1)
    _check_lsns("begin prepare", prepare_lsn, end_lsn)
    _check_xid("begin prepare", xid)
    gid, pos = read_string(data, 1 + _BEGIN_PREPARE.size, MAX_GID_BYTES)
    expect_end(data, pos)
    return BeginPrepare(prepare_lsn, end_lsn, prepare_ts, xid, gid)


def _prepare_fields(data: bytes, what: str) -> tuple[int, int, int, int, str]:
    flags, finish_lsn, end_lsn, timestamp, xid = _PREPARE.unpack_from(data, 1)
    _check_flags(what, flags)
    _check_lsns(what, finish_lsn, end_lsn)
    _check_xid(what, xid)
    gid, pos = read_string(data, 1 + _PREPARE.size, MAX_GID_BYTES)
    expect_end(data, pos)
    return finish_lsn, end_lsn, timestamp, xid, gid


def _prepare(data: bytes) -> Prepare:
    return Prepare(*_prepare_fields(data, "prepare"))


def _commit_prepared(data: bytes) -> CommitPrepared:
    return CommitPrepared(*_prepare_fields(data, "commit prepared"))


def _stream_prepare(data: bytes) -> StreamPrepare:
    return StreamPrepare(*_prepare_fields(data, "stream prepare"))


def _rollback_prepared(data: bytes) -> RollbackPrepared:
    flags, prepare_end_lsn, rollback_end_lsn, prepare_ts, rollback_ts, xid = _ROLLBACK_PREPARED.unpack_from(data, 1)
    _check_flags("rollback prepared", flags)
    _check_lsns("rollback prepared", prepare_end_lsn, rollback_end_lsn)
    _check_xid("rollback prepared", xid)
    gid, pos = read_string(data, 1 + _ROLLBACK_PREPARED.size, MAX_GID_BYTES)
    expect_end(data, pos)
    return RollbackPrepared(prepare_end_lsn, rollback_end_lsn, prepare_ts, rollback_ts, xid, gid)


#: Type byte to parser; Stream Abort, whose layout depends on the negotiation, is :func:`parse_stream_abort`.
PARSERS: dict[int, Callable[[bytes], Control]] = {
    ord("B"): _begin,
    ord("C"): _commit,
    ord("O"): _origin,
    ord("S"): _stream_start,
    ord("E"): _stream_stop,
    ord("c"): _stream_commit,
    ord("b"): _begin_prepare,
    ord("P"): _prepare,
    ord("K"): _commit_prepared,
    ord("r"): _rollback_prepared,
    ord("p"): _stream_prepare,
}
