"""Assembles messages into whole remote transactions. Mirrors apply_dispatch's bookkeeping in worker.c."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from pgsub.apply.stream.spool import Spool, SpooledTransaction
from pgsub.apply.stream.transaction_batch import RUN_FROM, RunBounds, TransactionRun
from pgsub.apply.stream.transactions import Kind, RemoteTransaction, opened
from pgsub.common.errors import ProtocolViolation
from pgsub.protocol import frames, walsender_messages
from pgsub.protocol.decoder import MAX_RELATIONS, XID_END, Decoder, decode_change
from pgsub.protocol.frames import Frames, Segment
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
from pgsub.protocol.parse_changes import CHANGES, relid_of
from pgsub.protocol.walsender_messages import Keepalive

_CHANGES = re.compile(b"[" + CHANGES + b"]+")
_RELATION, _COMMIT, _BEGIN = b"RCB"
#: Size in bytes above which a transaction is spilled to a file, so that memory stays bounded.
MEMORY_LIMIT = 16 << 20
#: Limit in bytes for the newest Relation messages of all relations. They take ten times as much memory when decoded,
#: three times if the names are long. A transaction may describe thousands of wide partitions.
MAX_DESCRIBED_BYTES = 256 << 20
#: Bytes after which a new connection is opened once a transaction has ended. 50,000 tables of 25 columns fit.
ENOUGH_DESCRIBED_BYTES = 32 << 20
_PASS_HINT = (
    "Write to fewer partitions in one transaction. Then make another slot; every table is compared with the"
    " publisher's, and only what differs is brought:\npgsub reconcile NAME --force"
)

#: Output of a stream: whole transactions, and the publisher's progress without one.
Received: TypeAlias = RemoteTransaction | TransactionRun | Keepalive


class StreamWatch:
    """Callbacks for transactions whose stream blocks are being received; this base class ignores them."""

    def started(self, xid: int, spooled: SpooledTransaction) -> None:
        """Handle the start of a stream block."""

    def grown(self, xid: int, spooled: SpooledTransaction) -> None:
        """Handle further messages of the open stream block."""

    def stopped(self, xid: int, spooled: SpooledTransaction) -> None:
        """Handle the end of a stream block; all of its messages are in the file."""

    def aborted(self, xid: int, subxid: int) -> None:
        """Handle the rollback of a subtransaction, or of the whole transaction if ``subxid == xid``."""


class Assembler:
    """Assembler of pgoutput messages, in the order of arrival, into whole transactions.

    :param parallel_streaming: streaming = parallel was negotiated.
    :ivar spool: holds unfinished and large transactions.
    :ivar watch: is told about transactions in progress.
    :ivar on_message: called with each non-transactional logical message.
    """

    def __init__(self, spool: Spool, *, parallel_streaming: bool) -> None:
        self.spool = spool
        self._decoder = Decoder(parallel_streaming)
        self._current: RemoteTransaction | None = None
        self._streams: dict[int, _Stream] = {}
        self._stream: _Stream | None = None
        self._described: dict[int, tuple[bytes, bool]] = {}  #: the newest Relation message of each, undecoded
        self._described_bytes = 0
        self.watch = StreamWatch()
        self.on_message: Callable[[LogicalMessage], object] = lambda message: None

    @property
    def crowded(self) -> bool:
        """Whether enough relations are remembered for one connection; those of dropped tables are never forgotten."""
        return len(self._described) > MAX_RELATIONS // 2 or self._described_bytes > ENOUGH_DESCRIBED_BYTES

    def pause(self) -> None:
        """Publish the open stream block, because nothing more was received for now."""
        if self._stream is not None:
            self.watch.grown(self._stream.xid, self._stream.spooled)

    def take(self, received: Frames) -> Iterator[Received]:
        """Take received messages; each is read only after the caller has handled the previous results.

        :return: whole transactions as they end, and keepalives outside transactions.
        :raises ProtocolViolation: malformed or out of order.
        """
        at, codes = 0, received.codes
        stretches = RunBounds(codes) if codes.count(_COMMIT) >= RUN_FROM else None
        while at < len(codes):
            code = codes[at]
            if self._current is not None or self._stream is not None:
                changes = _CHANGES.match(codes, at)
                if changes is not None:
                    self._change(received.range(at, changes.end()))
                    at = changes.end()
                    continue
            elif code == _BEGIN and stretches is not None:
                run = self._run(received, at, stretches.end(at))
                if run is not None:
                    yield run
                    at = run.segment.end
                    continue
            yield from self._single(received, at, code)
            at += 1

    def _single(self, received: Frames, at: int, code: int) -> Iterator[Received]:
        if code in (frames.KEEPALIVE, frames.OTHER):
            parsed = walsender_messages.parse(received[at])  # refuses anything else
            if isinstance(parsed, Keepalive):
                if self._current is None:
                    yield parsed
                return
        transaction = self._control(self._decoder.decode(received.payload(at)), received.range(at, at + 1))
        if transaction is not None:
            yield transaction

    def _run(self, received: Frames, start: int, end: int) -> TransactionRun | None:
        """Take many transactions as a run; return None if they must be taken one by one."""
        if received.codes.count(_COMMIT, start, end) < RUN_FROM:
            return None
        run = TransactionRun.of(received.range(start, end))
        if run is None or not self._decoder.passes(int(run.end_lsns[0]), run.end_lsn):
            return None
        self._describes(run.segment, in_stream=False)
        return run

    def _change(self, messages: Segment) -> None:
        stream, current = self._stream, self._current
        if stream is not None:
            if messages.shortest < XID_END:  # readers of many xids do not check each message
                raise ProtocolViolation("message carries no transaction ID")
            stream.described.update(self._describes(messages, in_stream=True))
            stream.spooled.append(messages)
        elif current is not None:
            self._describes(messages, in_stream=False)
            current.size += messages.size
            current.received.append(messages)
            if current.spooled is not None or current.size > MEMORY_LIMIT:
                self._spill(current)

    def _describes(self, messages: Segment, *, in_stream: bool) -> list[int]:
        """Remember the Relation messages; return the oids of the relations."""
        found, codes = [], messages.codes
        at = codes.find(_RELATION)
        while at >= 0:
            payload = messages.frames.payload(messages.start + at)
            found.append(relid_of(payload, in_stream=in_stream))
            self._describe(found[-1], payload, in_stream)
            at = codes.find(_RELATION, at + 1)
        return found

    def _describe(self, relid: int, payload: bytes, in_stream: bool) -> None:
        self._described_bytes += len(payload) - len(self._described.get(relid, (b"", False))[0])
        self._described[relid] = (payload, in_stream)
        if len(self._described) > MAX_RELATIONS:
            raise ProtocolViolation(f"publisher sent more than {MAX_RELATIONS} relations")
        if self._described_bytes > MAX_DESCRIBED_BYTES:
            raise ProtocolViolation(
                f"publisher described its relations in more than {MAX_DESCRIBED_BYTES} bytes", hint=_PASS_HINT
            )

    def _spill(self, current: RemoteTransaction) -> None:
        current.spooled = current.spooled or self.spool.open(current.xid)
        for messages in current.received:
            current.spooled.append(messages)
        current.received = []

    def _control(self, message: Message, raw: Segment) -> RemoteTransaction | None:
        match message:
            case Begin():  # without opened(), for speed
                self._current = RemoteTransaction(message.xid, message.final_lsn, commit_ts=message.commit_ts)
            case BeginPrepare():
                self._current = opened(message)
            case Commit() | Prepare():
                done, self._current = self._current, None
                if done is not None:
                    done.end_lsn = message.end_lsn
                    done.commit_ts = message.commit_ts if isinstance(message, Commit) else message.prepare_ts
                return done
            case CommitPrepared() | RollbackPrepared():
                self._discard(message.xid)
                return opened(message)
            case Origin():
                if self._current is not None:
                    self._current.origin = message.name
            case StreamStart() | StreamStop() | StreamAbort() | StreamCommit() | StreamPrepare():
                return self._stream_control(message, raw)
            case LogicalMessage():  # non-transactional: the decoder refuses others here
                self.on_message(message)
            case _:
                raise ProtocolViolation(f"{type(message).__name__} message outside of a transaction")
        return None

    def _stream_control(self, message: Message, raw: Segment) -> RemoteTransaction | None:
        match message:
            case StreamStart(xid):
                if xid not in self._streams:
                    self._streams[xid] = _Stream(xid, self.spool.open(xid))
                self._stream = self._streams[xid]
                self.watch.started(xid, self._stream.spooled)
            case StreamStop() if self._stream is not None:
                stream, self._stream = self._stream, None
                stream.spooled.pause()
                self.watch.stopped(stream.xid, stream.spooled)
            case StreamAbort(xid, subxid) if xid == subxid:
                self._discard(xid)
            case StreamAbort(xid, subxid) if xid in self._streams:
                self.watch.aborted(xid, subxid)
                self._streams[xid].spooled.abort(subxid, raw)
            case StreamCommit(xid, finish_lsn, end_lsn, at):
                return self._streamed(xid, finish_lsn, end_lsn, at, Kind.COMMIT)
            case StreamPrepare(finish_lsn, end_lsn, at, xid):
                return self._streamed(xid, finish_lsn, end_lsn, at, Kind.PREPARE)
        return None

    def _discard(self, xid: int) -> None:
        """Discard a transaction in progress.

        A transaction that was prepared before the stream began is not sent again as prepared. But its changes are
        streamed if it is the largest one when the publisher's memory is full (ReorderBufferCheckMemoryLimit). Then only
        COMMIT PREPARED or ROLLBACK PREPARED ends it.
        """
        stream = self._streams.pop(xid, None)
        if stream is not None:
            self.watch.aborted(xid, xid)
            stream.spooled.remove()

    def _streamed(self, xid: int, finish_lsn: int, end_lsn: int, at: int, kind: Kind) -> RemoteTransaction:
        stream = self._streams.pop(xid)
        newest = [decode_change(*self._described[relid]) for relid in sorted(stream.described)]
        leaves = tuple(one for one in newest if isinstance(one, Relation))
        size, spooled = stream.spooled.size, stream.spooled
        return RemoteTransaction(
            xid, finish_lsn, end_lsn, at, kind, in_stream=True, size=size, spooled=spooled, leaves=leaves
        )


@dataclass(slots=True)
class _Stream:
    """A transaction in progress."""

    xid: int
    spooled: SpooledTransaction
    described: set[int] = field(default_factory=set)  #: relations that it described
