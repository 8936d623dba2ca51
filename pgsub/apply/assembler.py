"""From single messages to whole remote transactions. Mirrors apply_dispatch's bookkeeping in worker.c."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from pgsub.apply.spool import Spool, SpooledTransaction
from pgsub.apply.transactions import Kind, RemoteTransaction
from pgsub.errors import ProtocolViolation
from pgsub.protocol.decoder import MAX_RELATIONS, Decoder, decode_change, message_xid
from pgsub.protocol.messages import (
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
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
)

_CHANGES = frozenset(b"RYIUDT")
_MESSAGE = ord("M")
_RELATION = ord("R")
#: A transaction larger than this goes to a file: memory stays bounded whatever the publisher sends.
MEMORY_LIMIT = 16 << 20


class StreamWatch(Protocol):
    """Hears of transactions in progress as their stream blocks come in."""

    def started(self, xid: int, spooled: SpooledTransaction) -> None:
        """A stream block begins."""

    def grown(self, xid: int, spooled: SpooledTransaction) -> None:
        """More of the open block came in."""

    def stopped(self, xid: int, spooled: SpooledTransaction) -> None:
        """A stream block ended: everything of it is in the file."""

    def aborted(self, xid: int, subxid: int) -> None:
        """A subtransaction was rolled back, or with ``subxid == xid`` all of it."""


class Assembler:
    """Feeds on pgoutput messages in the order of arrival and gives whole transactions.

    :param spool: where unfinished and large ones wait.
    :param parallel_streaming: streaming = parallel was negotiated.
    :ivar watch: told of transactions in progress, if anybody wants to know.
    :ivar emitted: takes messages that are not transactional.
    """

    def __init__(self, spool: Spool, *, parallel_streaming: bool) -> None:
        self._spool = spool
        self._decoder = Decoder(parallel_streaming)
        self._current: RemoteTransaction | None = None
        self._streams: dict[int, _Stream] = {}
        self._stream: _Stream | None = None
        self._described: dict[int, tuple[bytes, bool]] = {}  #: the newest Relation message of each, undecoded
        self.watch: StreamWatch | None = None
        self.emitted: Callable[[LogicalMessage], None] | None = None

    @property
    def in_transaction(self) -> bool:
        """Whether a plain transaction is half received; a spooled one does not count (it is sent again whole)."""
        return self._current is not None

    def pause(self) -> None:
        """Nothing more has come in for now: what is buffered of an open stream block can be read."""
        if self._stream is not None and self.watch is not None:
            self.watch.grown(self._stream.xid, self._stream.spooled)

    def feed(self, payload: bytes) -> RemoteTransaction | None:
        """Take one message.

        :return: a transaction when this message completes one.
        :raises ProtocolViolation: malformed or out of order.
        """
        kind = payload[0] if payload else 0
        if kind in _CHANGES or (kind == _MESSAGE and (self._stream is not None or self._current is not None)):
            self._change(payload, kind)
            return None
        return self._control(self._decoder.decode(payload))

    def _change(self, payload: bytes, kind: int) -> None:
        stream = self._stream
        if stream is not None:
            if kind == _RELATION:
                stream.described.add(self._describe(payload, 5))
            stream.spooled.append(message_xid(payload), payload)
            return
        current = self._current
        if current is None:
            raise ProtocolViolation(f"message type 0x{payload[0]:02X} outside of a transaction")
        if kind == _RELATION:
            self._describe(payload, 1)
        current.size += len(payload)
        if current.spooled is not None:
            current.spooled.append(current.xid, payload)
            return
        current.messages.append(payload)
        if current.size > MEMORY_LIMIT:
            self._spill(current)

    def _describe(self, payload: bytes, start: int) -> int:
        if len(payload) < start + 4:
            raise ProtocolViolation("insufficient data left in message")
        relid: int = struct.unpack_from(">I", payload, start)[0]
        self._described[relid] = (payload, start == 5)
        if len(self._described) > MAX_RELATIONS:
            raise ProtocolViolation(f"publisher sent more than {MAX_RELATIONS} relations")
        return relid

    def _spill(self, current: RemoteTransaction) -> None:
        current.spooled = self._spool.open(current.xid)
        for payload in current.messages:
            current.spooled.append(current.xid, payload)
        current.messages = []

    def _control(self, message: Message) -> RemoteTransaction | None:
        match message:
            case Begin():
                self._current = RemoteTransaction(message.xid, message.final_lsn, commit_ts=message.commit_ts)
            case BeginPrepare():
                self._current = RemoteTransaction(message.xid, message.prepare_lsn, kind=Kind.PREPARE)
            case Commit():
                return self._ended(message.end_lsn, message.commit_ts)
            case Prepare():
                return self._ended(message.end_lsn, message.prepare_ts)
            case Origin():
                if self._current is not None:
                    self._current.origin = message.name
            case StreamStart():
                self._started(message.xid)
            case StreamStop():
                self._stopped()
            case StreamAbort():
                self._aborted(message)
            case StreamCommit():
                return self._streamed(message.xid, message.commit_lsn, message.end_lsn, message.commit_ts, Kind.COMMIT)
            case StreamPrepare():
                return self._streamed(
                    message.xid, message.prepare_lsn, message.end_lsn, message.prepare_ts, Kind.PREPARE
                )
            case CommitPrepared(commit_lsn, end_lsn, commit_ts, xid):
                self._discard(xid)
                return RemoteTransaction(xid, commit_lsn, end_lsn, commit_ts, Kind.COMMIT_PREPARED)
            case RollbackPrepared():
                # the message has no start of its record, only the end: any LSN inside the record covers alike
                end = message.rollback_end_lsn
                self._discard(message.xid)
                return RemoteTransaction(message.xid, end - 1, end, message.rollback_ts, Kind.ROLLBACK_PREPARED)
            case LogicalMessage():  # of no transaction: the decoder lets no other pass here
                if self.emitted is not None:
                    self.emitted(message)
            case _:
                raise ProtocolViolation(f"unexpected {type(message).__name__} message")
        return None

    def _ended(self, end_lsn: int, at: int) -> RemoteTransaction | None:
        done, self._current = self._current, None
        if done is not None:
            done.end_lsn, done.commit_ts = end_lsn, at
        return done

    def _started(self, xid: int) -> None:
        known = self._streams.get(xid)
        if known is None:
            known = self._streams[xid] = _Stream(xid, self._spool.open(xid))
        self._stream = known
        if self.watch is not None:
            self.watch.started(xid, known.spooled)

    def _stopped(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.spooled.pause()
            if self.watch is not None:
                self.watch.stopped(stream.xid, stream.spooled)

    def _aborted(self, message: StreamAbort) -> None:
        if message.xid == message.subxid:
            self._discard(message.xid)
            return
        stream = self._streams.get(message.xid)
        if stream is not None:
            if self.watch is not None:
                self.watch.aborted(message.xid, message.subxid)
            stream.spooled.abort(message.subxid)

    def _discard(self, xid: int) -> None:
        """A transaction in progress comes to nothing.

        One that was prepared before the stream began is not sent again as prepared, but when it is the largest that a
        full memory of the publisher holds (ReorderBufferCheckMemoryLimit) its changes are streamed all the same, and
        nothing but COMMIT PREPARED or ROLLBACK PREPARED ends that.
        """
        stream = self._streams.pop(xid, None)
        if stream is not None:
            if self.watch is not None:
                self.watch.aborted(xid, xid)
            stream.spooled.remove()

    def _streamed(self, xid: int, finish_lsn: int, end_lsn: int, at: int, kind: Kind) -> RemoteTransaction:
        stream = self._streams.pop(xid, None) or _Stream(xid, self._spool.open(xid))
        newest = [decode_change(*self._described[relid]) for relid in sorted(stream.described)]
        return RemoteTransaction(
            xid,
            finish_lsn,
            end_lsn,
            at,
            kind,
            in_stream=True,
            size=stream.spooled.size,
            spooled=stream.spooled,
            leaves=tuple(one for one in newest if isinstance(one, Relation)),
        )


@dataclass(slots=True)
class _Stream:
    """A transaction in progress."""

    xid: int
    spooled: SpooledTransaction
    described: set[int] = field(default_factory=set)  #: relations of which it said something
