"""From single messages to whole remote transactions. Mirrors apply_dispatch's bookkeeping in worker.c."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from pgsub.apply.spool import Spool, SpooledTransaction
from pgsub.errors import ProtocolViolation
from pgsub.protocol.decoder import Decoder, decode_change, message_xid
from pgsub.protocol.messages import (
    Begin,
    Commit,
    CommitPrepared,
    LogicalMessage,
    Message,
    Origin,
    Relation,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamStart,
    StreamStop,
    Truncate,
)

_CHANGES = frozenset(b"RYIUDT")
_ROWS = frozenset(b"IUD")
_MESSAGE = ord("M")
_TRUNCATE = ord("T")
_RELATION = ord("R")
#: A transaction larger than this goes to a file: memory stays bounded whatever the publisher sends.
MEMORY_LIMIT = 16 << 20


@dataclass(slots=True)
class RemoteTransaction:
    """A committed transaction of the publisher, whole.

    ``finish_lsn`` is its commit_lsn (what decides coverage and what skip takes), ``end_lsn`` the progress after it.
    """

    xid: int
    finish_lsn: int
    end_lsn: int = 0
    commit_ts: int = 0
    origin: str | None = None
    in_stream: bool = False  #: messages carry an xid
    size: int = 0
    messages: list[bytes] = field(default_factory=list)
    spooled: SpooledTransaction | None = None

    def payloads(self) -> Iterator[bytes]:
        """Its messages in order; may be asked for again."""
        if self.spooled is not None:
            yield from self.spooled.payloads()
        yield from self.messages

    def relids(self) -> set[int]:
        """Remote relations it changes."""
        found: set[int] = set()
        start = 5 if self.in_stream else 1
        for payload in self.payloads():
            if payload[0] in _ROWS and len(payload) >= start + 4:
                found.add(struct.unpack_from(">I", payload, start)[0])
            elif payload[0] == _TRUNCATE:
                message = decode_change(payload, self.in_stream)
                found.update(message.relids if isinstance(message, Truncate) else ())
        return found

    def described(self) -> list[Relation]:
        """What it says of relations before it changes them."""
        messages = (decode_change(p, self.in_stream) for p in self.payloads() if p[0] == _RELATION)
        return [message for message in messages if isinstance(message, Relation)]

    def release(self) -> None:
        """It is done: nothing of it is needed again."""
        if self.spooled is not None:
            self.spooled.remove()


class Assembler:
    """Feeds on pgoutput messages in the order of arrival and gives whole transactions.

    :param spool: where unfinished and large ones wait.
    :param parallel_streaming: streaming = parallel was negotiated.
    """

    def __init__(self, spool: Spool, *, parallel_streaming: bool) -> None:
        self._spool = spool
        self._decoder = Decoder(parallel_streaming)
        self._current: RemoteTransaction | None = None
        self._streams: dict[int, SpooledTransaction] = {}
        self._stream: SpooledTransaction | None = None

    @property
    def in_transaction(self) -> bool:
        """Whether a plain transaction is half received; a spooled one does not count (it is sent again whole)."""
        return self._current is not None

    def feed(self, payload: bytes) -> RemoteTransaction | None:
        """Take one message.

        :return: a transaction when this message completes one.
        :raises ProtocolViolation: malformed or out of order.
        """
        kind = payload[0] if payload else 0
        if kind in _CHANGES or (kind == _MESSAGE and self._stream is not None):
            self._change(payload)
            return None
        return self._control(self._decoder.decode(payload))

    def _change(self, payload: bytes) -> None:
        if self._stream is not None:
            self._stream.append(message_xid(payload), payload)
            return
        current = self._current
        if current is None:
            raise ProtocolViolation(f"message type 0x{payload[0]:02X} outside of a transaction")
        current.size += len(payload)
        if current.spooled is not None:
            current.spooled.append(current.xid, payload)
            return
        current.messages.append(payload)
        if current.size > MEMORY_LIMIT:
            self._spill(current)

    def _spill(self, current: RemoteTransaction) -> None:
        current.spooled = self._spool.open(current.xid)
        for payload in current.messages:
            current.spooled.append(current.xid, payload)
        current.messages = []

    def _control(self, message: Message) -> RemoteTransaction | None:
        match message:
            case Begin():
                self._current = RemoteTransaction(message.xid, message.final_lsn, commit_ts=message.commit_ts)
            case Commit():
                return self._committed(message)
            case Origin():
                if self._current is not None:
                    self._current.origin = message.name
            case StreamStart():
                self._stream = self._streams.setdefault(message.xid, self._spool.open(message.xid))
            case StreamStop():
                if self._stream is not None:
                    self._stream.pause()
                self._stream = None
            case StreamAbort():
                self._aborted(message)
            case StreamCommit():
                return self._stream_committed(message)
            case CommitPrepared() | RollbackPrepared():
                pass  # known publisher bug: sent for lock-only transactions without a PREPARE; nothing to do
            case LogicalMessage():
                pass  # carries no row; worker.c ignores it as well
            case _:
                raise ProtocolViolation(f"unexpected {type(message).__name__} message: two_phase was not requested")
        return None

    def _committed(self, message: Commit) -> RemoteTransaction | None:
        done, self._current = self._current, None
        if done is not None:
            done.end_lsn, done.commit_ts = message.end_lsn, message.commit_ts
        return done

    def _aborted(self, message: StreamAbort) -> None:
        if message.xid == message.subxid:
            stream = self._streams.pop(message.xid, None)
            if stream is not None:
                stream.remove()
        elif message.xid in self._streams:
            self._streams[message.xid].abort(message.subxid)

    def _stream_committed(self, message: StreamCommit) -> RemoteTransaction:
        spooled = self._streams.pop(message.xid, None) or self._spool.open(message.xid)
        return RemoteTransaction(
            message.xid,
            message.commit_lsn,
            message.end_lsn,
            message.commit_ts,
            in_stream=True,
            size=spooled.size,
            spooled=spooled,
        )
