"""Decodes single pgoutput messages, and checks their order over a connection.

Mirrors ``apply_dispatch`` and the "sent out of order" checks of ``worker.c``.

NOTES: The publisher is not trusted: any bytes give a message or ProtocolViolation. A length is read as unsigned and
compared with the rest of the message before anything of that size is allocated. Strings, columns, relations and
messages have upper limits, which are the server's where it has one (:mod:`~pgsub.protocol.reader`, MAX_* here). A
message must be consumed to its last byte. A field that reaches beyond the end raises IndexError or struct.error, which
:func:`decode_change` translates. So parsers need no checks of their own, and must not catch either.

State is bounded, too: the number of columns per relation, and the xid per streamed transaction. The decoder is lenient
where the server's own publisher is known to deviate: COMMIT PREPARED and ROLLBACK PREPARED without a PREPARE, and
Stream Abort with streaming off or for a transaction that was never streamed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from pgsub.common.errors import ProtocolViolation
from pgsub.protocol import messages, parse_changes, parse_transactions
from pgsub.protocol.lsn import format_lsn
from pgsub.protocol.reader import INT32

#: MaxAllocSize of memutils.h, which limits the messages of a publisher and so every value in them.
MAX_MESSAGE_BYTES = 0x3FFFFFFF

#: Maximum number of relations that a publisher can make us remember; they last as long as the connection.
MAX_RELATIONS = 100_000

#: End of the xid of a change in a stream block.
XID_END = 5

_STREAM_ABORT = ord("A")

#: Allowed inside a stream block although they carry no xid.
_IN_STREAM_CONTROL = b"OES"

_change_parser = parse_changes.PARSERS.get
_control_parser = parse_transactions.PARSERS.get
_unpack_int32 = INT32.unpack_from


def message_xid(payload: bytes) -> int:
    """Read the xid of a message in a stream block without decoding the rest.

    :param payload: one of :data:`~pgsub.protocol.parse_changes.CHANGES`.
    :return: xid of the (sub)transaction that made the change.
    :raises ProtocolViolation: another type, too short, or xid 0.
    """
    if len(payload) < XID_END or payload[0] not in parse_changes.CHANGES:
        raise ProtocolViolation("message carries no transaction ID")
    xid: int = _unpack_int32(payload, 1)[0]
    if xid == 0:
        raise ProtocolViolation("invalid transaction ID in streamed replication transaction")
    return xid


def decode_change(payload: bytes, in_stream: bool, parallel_streaming: bool = False) -> messages.Message:
    """Decode one message without checking the order.

    :param payload: a pgoutput message, for example from a spool file.
    :param in_stream: it is from a stream block, where R Y I U D T M carry an xid, and only O E S are allowed besides.
    :param parallel_streaming: Stream Abort carries LSN and time.
    :raises ProtocolViolation: it is malformed.
    """
    try:
        kind = payload[0]
        parse_change = _change_parser(kind)
        if parse_change is not None:
            if not in_stream:
                return parse_change(payload, 1)
            message_xid(payload)
            return parse_change(payload, 5)
        if in_stream and kind not in _IN_STREAM_CONTROL:
            raise ProtocolViolation(f"message type 0x{kind:02X} inside a stream block")
        if kind == _STREAM_ABORT:
            return parse_transactions.parse_stream_abort(payload, parallel_streaming)
        parse_control = _control_parser(kind)
        if parse_control is None:
            raise ProtocolViolation(f"invalid logical replication message type 0x{kind:02X}")
        return parse_control(payload)
    except (IndexError, struct.error):
        raise ProtocolViolation("insufficient data left in message") from None


class Decoder:
    """A decoder of all messages of one connection, in the order received.

    After a violation nothing more is decoded, because later messages could be misunderstood.

    :param parallel_streaming: streaming = parallel was negotiated (protocol version 4).
    :ivar stream_xid: top-level transaction of the open stream block, else None.
    """

    def __init__(self, parallel_streaming: bool = False) -> None:
        self.stream_xid: int | None = None
        self._parallel_streaming = parallel_streaming
        self._open: messages.Begin | messages.BeginPrepare | None = None
        self._changed = False
        self._streamed: set[int] = set()
        self._natts: dict[int, int] = {}
        self._last_end_lsn = 0
        self._refused: str | None = None

    def decode(self, payload: bytes) -> messages.Message:
        """Decode the next message and check that it is allowed now.

        :param payload: content of one XLogData.
        :raises ProtocolViolation: it is malformed or out of order, or an earlier message was.
        """
        if self._refused is not None:
            raise ProtocolViolation(
                "replication stream was refused before", detail=f"The first violation was: {self._refused}."
            )
        try:
            if len(payload) > MAX_MESSAGE_BYTES:
                raise ProtocolViolation(f"message of {len(payload)} bytes is too long")
            message = decode_change(payload, self.stream_xid is not None, self._parallel_streaming)
            _CHECKS[type(message)](self, message)
            return message
        except ProtocolViolation as violation:
            self._refused = violation.message
            raise

    def passes(self, first_end_lsn: int, last_end_lsn: int) -> bool:
        """Accept whole plain transactions, whose messages the caller has checked, if they are allowed now.

        :param first_end_lsn: end LSN of the first transaction; the end LSNs increase.
        :return: whether they are allowed; if not, they must be decoded one by one.
        """
        legal = self._open is None and self.stream_xid is None and self._refused is None
        if not legal or first_end_lsn <= self._last_end_lsn:
            return False
        self._last_end_lsn = last_end_lsn
        return True

    def _check_inside(self, what: str) -> None:
        if self._open is None and self.stream_xid is None:
            raise ProtocolViolation(f"{what} message outside of a transaction")

    def _check_outside(self, what: str) -> None:
        # inside a stream block, decode_change() has already refused it
        if self._open is not None:
            raise ProtocolViolation(f"{what} message inside a transaction")

    def _check_natts(self, relid: int, natts: int) -> None:
        expected = self._natts.get(relid)
        if expected is None:
            raise ProtocolViolation(f"no relation map entry for remote relation ID {relid}")
        if natts != expected:
            raise ProtocolViolation(
                f"row of remote relation ID {relid} has {natts} columns, but its relation message had {expected}"
            )

    def _check_progress(self, end_lsn: int) -> None:
        if end_lsn <= self._last_end_lsn:
            raise ProtocolViolation(
                f"end LSN {format_lsn(end_lsn)} does not follow that of the transaction before",
                detail=f"The transaction before ended at {format_lsn(self._last_end_lsn)}.",
            )
        self._last_end_lsn = end_lsn

    def _begin(self, message: messages.Begin | messages.BeginPrepare) -> None:
        self._check_outside("BEGIN")
        self._open = message
        self._changed = False

    def _commit(self, message: messages.Commit) -> None:
        if not isinstance(self._open, messages.Begin):
            raise ProtocolViolation("COMMIT message without BEGIN")
        if message.commit_lsn != self._open.final_lsn:
            raise ProtocolViolation(
                f"incorrect commit LSN {format_lsn(message.commit_lsn)} in commit message "
                f"(expected {format_lsn(self._open.final_lsn)})"
            )
        self._check_progress(message.end_lsn)
        self._open = None

    def _prepare(self, message: messages.Prepare) -> None:
        begin = self._open
        if not isinstance(begin, messages.BeginPrepare):
            raise ProtocolViolation("PREPARE message without BEGIN PREPARE")
        if message.prepare_lsn != begin.prepare_lsn:
            raise ProtocolViolation(
                f"incorrect prepare LSN {format_lsn(message.prepare_lsn)} in prepare message "
                f"(expected {format_lsn(begin.prepare_lsn)})"
            )
        if (message.end_lsn, message.xid, message.gid) != (begin.end_lsn, begin.xid, begin.gid):
            raise ProtocolViolation("PREPARE message differs from its BEGIN PREPARE")
        # a transaction prepared before the slot's two_phase_at is sent late with its old LSNs: progress is not checked
        self._open = None

    def _finish_prepared(self, message: messages.CommitPrepared | messages.RollbackPrepared) -> None:
        if isinstance(message, messages.CommitPrepared):
            what, end_lsn = "COMMIT PREPARED", message.end_lsn
        else:
            what, end_lsn = "ROLLBACK PREPARED", message.rollback_end_lsn
        self._check_outside(what)
        self._check_progress(end_lsn)
        self._streamed.discard(message.xid)  # a publisher streams what was prepared before the stream began

    def _origin(self, _message: messages.Origin) -> None:
        if self.stream_xid is None and (self._open is None or self._changed):
            raise ProtocolViolation("ORIGIN message sent out of order")

    def _relation(self, message: messages.Relation) -> None:
        self._check_inside("RELATION")
        self._natts[message.relid] = len(message.columns)
        if len(self._natts) > MAX_RELATIONS:
            raise ProtocolViolation(f"publisher sent more than {MAX_RELATIONS} relations")

    def _type(self, _message: messages.TypeName) -> None:
        self._check_inside("TYPE")

    def _insert(self, message: messages.Insert | messages.Update) -> None:
        self._check_inside("change")
        self._changed = True
        if len(message.new.kinds) != self._natts.get(message.relid):
            self._check_natts(message.relid, len(message.new.kinds))

    def _delete(self, message: messages.Delete) -> None:
        self._check_inside("DELETE")
        self._changed = True
        self._check_natts(message.relid, len(message.old.kinds))

    def _truncate(self, message: messages.Truncate) -> None:
        self._check_inside("TRUNCATE")
        self._changed = True
        for relid in message.relids:
            if relid not in self._natts:
                raise ProtocolViolation(f"no relation map entry for remote relation ID {relid}")

    def _message(self, message: messages.LogicalMessage) -> None:
        if message.transactional:
            self._check_inside("transactional LOGICAL MESSAGE")

    def _stream_start(self, message: messages.StreamStart) -> None:
        if self.stream_xid is not None:
            raise ProtocolViolation("duplicate STREAM START message")
        self._check_outside("STREAM START")
        if message.first == (message.xid in self._streamed):
            raise ProtocolViolation(
                f"STREAM START message of transaction {message.xid} "
                + ("claims to be its first again" if message.first else "does not say that it is its first")
            )
        self._streamed.add(message.xid)
        self.stream_xid = message.xid

    def _stream_stop(self, _message: messages.StreamStop) -> None:
        if self.stream_xid is None:
            raise ProtocolViolation("STREAM STOP message without STREAM START")
        self.stream_xid = None

    def _end_stream(self, what: str, xid: int) -> None:
        self._check_outside(what)
        if xid not in self._streamed:
            raise ProtocolViolation(f"{what} message of transaction {xid}, of which nothing was streamed")
        self._streamed.remove(xid)

    def _stream_commit(self, message: messages.StreamCommit) -> None:
        self._end_stream("STREAM COMMIT", message.xid)
        self._check_progress(message.end_lsn)

    def _stream_prepare(self, message: messages.StreamPrepare) -> None:
        self._end_stream("STREAM PREPARE", message.xid)

    def _stream_abort(self, message: messages.StreamAbort) -> None:
        self._check_outside("STREAM ABORT")
        if message.subxid == message.xid:
            self._streamed.discard(message.xid)


_CHECKS: dict[type[messages.Message], Callable[[Decoder, Any], None]] = {
    messages.Begin: Decoder._begin,
    messages.BeginPrepare: Decoder._begin,
    messages.Commit: Decoder._commit,
    messages.Prepare: Decoder._prepare,
    messages.CommitPrepared: Decoder._finish_prepared,
    messages.RollbackPrepared: Decoder._finish_prepared,
    messages.Origin: Decoder._origin,
    messages.Relation: Decoder._relation,
    messages.TypeName: Decoder._type,
    messages.Insert: Decoder._insert,
    messages.Update: Decoder._insert,
    messages.Delete: Decoder._delete,
    messages.Truncate: Decoder._truncate,
    messages.LogicalMessage: Decoder._message,
    messages.StreamStart: Decoder._stream_start,
    messages.StreamStop: Decoder._stream_stop,
    messages.StreamCommit: Decoder._stream_commit,
    messages.StreamPrepare: Decoder._stream_prepare,
    messages.StreamAbort: Decoder._stream_abort,
}
