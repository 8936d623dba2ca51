"""Parses the messages that delimit transactions and stream blocks: B C O S E c A b P K r p.

Mirrors ``logicalrep_read_begin`` to ``logicalrep_read_stream_prepare`` of ``proto.c`` with their checks of LSNs, flags
and transaction IDs.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial

from pgsub.common.errors import ProtocolViolation
from pgsub.protocol import messages
from pgsub.protocol.messages import Control
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


def _check(what: str, *, flags: int = 0, xid: int = 1, lsns: tuple[int, int] = (1, 1)) -> None:
    """Refuse any flags, an unset transaction ID or LSN, and an end LSN before the finish LSN."""
    if flags != 0:
        raise ProtocolViolation(f"unrecognized flags {flags} in {what} message")
    if xid == 0:
        raise ProtocolViolation(f"invalid transaction ID in {what} message")
    if 0 in lsns:
        raise ProtocolViolation(f"LSN is not set in {what} message")
    if lsns[1] < lsns[0]:
        raise ProtocolViolation(f"end LSN precedes the finish LSN in {what} message")


def _begin(data: bytes) -> messages.Begin:
    begin = messages.Begin(*_BEGIN.unpack_from(data, 1))
    if begin.final_lsn == 0:
        raise ProtocolViolation("final_lsn not set in begin message")
    expect_end(data, 1 + _BEGIN.size)
    return begin


def _commit(data: bytes) -> messages.Commit:
    flags, *fields = _COMMIT.unpack_from(data, 1)
    commit = messages.Commit(*fields)
    _check("commit", flags=flags, lsns=(commit.commit_lsn, commit.end_lsn))
    expect_end(data, 1 + _COMMIT.size)
    return commit


def _origin(data: bytes) -> messages.Origin:
    (lsn,) = _ORIGIN.unpack_from(data, 1)
    name, pos = read_string(data, 1 + _ORIGIN.size, MAX_ORIGIN_BYTES)
    expect_end(data, pos)
    return messages.Origin(lsn, name)


def _stream_start(data: bytes) -> messages.StreamStart:
    xid, first = _STREAM_START.unpack_from(data, 1)
    _check("stream start", xid=xid)
    if first > 1:
        raise ProtocolViolation(f"unrecognized first-segment flag {first} in stream start message")
    expect_end(data, 1 + _STREAM_START.size)
    return messages.StreamStart(xid, first == 1)


def _stream_stop(data: bytes) -> messages.StreamStop:
    expect_end(data, 1)
    return messages.StreamStop()


def _stream_commit(data: bytes) -> messages.StreamCommit:
    xid, flags, commit_lsn, end_lsn, commit_ts = _STREAM_COMMIT.unpack_from(data, 1)
    _check("stream commit", flags=flags, xid=xid, lsns=(commit_lsn, end_lsn))
    expect_end(data, 1 + _STREAM_COMMIT.size)
    return messages.StreamCommit(xid, commit_lsn, end_lsn, commit_ts)


def parse_stream_abort(data: bytes, with_info: bool) -> messages.StreamAbort:
    """Parse a Stream Abort message (``logicalrep_read_stream_abort``).

    :param with_info: streaming = parallel was negotiated, so LSN and time follow; otherwise they are None.
    :raises ProtocolViolation: a zero xid, or another length.
    """
    layout = _STREAM_ABORT_INFO if with_info else _STREAM_ABORT
    xid, subxid, *info = layout.unpack_from(data, 1)
    _check("stream abort", xid=xid and subxid)
    expect_end(data, 1 + layout.size)
    abort_lsn, abort_ts = info or (None, None)
    return messages.StreamAbort(xid, subxid, abort_lsn, abort_ts)


def _begin_prepare(data: bytes) -> messages.BeginPrepare:
    prepare_lsn, end_lsn, prepare_ts, xid = _BEGIN_PREPARE.unpack_from(data, 1)
    _check("begin prepare", xid=xid, lsns=(prepare_lsn, end_lsn))
    return messages.BeginPrepare(prepare_lsn, end_lsn, prepare_ts, xid, _gid(data, _BEGIN_PREPARE))


def _gid(data: bytes, before: struct.Struct) -> str:
    """Read the GID, which is the last field."""
    gid, pos = read_string(data, 1 + before.size, MAX_GID_BYTES)
    expect_end(data, pos)
    return gid


def _prepared(make: Callable[[int, int, int, int, str], Control], what: str, data: bytes) -> Control:
    flags, finish_lsn, end_lsn, timestamp, xid = _PREPARE.unpack_from(data, 1)
    _check(what, flags=flags, xid=xid, lsns=(finish_lsn, end_lsn))
    return make(finish_lsn, end_lsn, timestamp, xid, _gid(data, _PREPARE))


def _rollback_prepared(data: bytes) -> messages.RollbackPrepared:
    flags, prepare_end_lsn, rollback_end_lsn, prepare_ts, rollback_ts, xid = _ROLLBACK_PREPARED.unpack_from(data, 1)
    _check("rollback prepared", flags=flags, xid=xid, lsns=(prepare_end_lsn, rollback_end_lsn))
    gid = _gid(data, _ROLLBACK_PREPARED)
    return messages.RollbackPrepared(prepare_end_lsn, rollback_end_lsn, prepare_ts, rollback_ts, xid, gid)


#: Maps type bytes to parsers. The layout of Stream Abort depends on the negotiation: see :func:`parse_stream_abort`.
PARSERS: dict[int, Callable[[bytes], Control]] = {
    ord("B"): _begin,
    ord("C"): _commit,
    ord("O"): _origin,
    ord("S"): _stream_start,
    ord("E"): _stream_stop,
    ord("c"): _stream_commit,
    ord("b"): _begin_prepare,
    ord("P"): partial(_prepared, messages.Prepare, "prepare"),
    ord("K"): partial(_prepared, messages.CommitPrepared, "commit prepared"),
    ord("r"): _rollback_prepared,
    ord("p"): partial(_prepared, messages.StreamPrepare, "stream prepare"),
}
