"""A whole remote transaction, which the other packages apply. Mirrors the state that worker.c keeps of one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from pgsub.apply.stream.spool import SpooledTransaction
from pgsub.common.errors import ProtocolViolation
from pgsub.protocol.decoder import MAX_RELATIONS, decode_change
from pgsub.protocol.frames import Segment
from pgsub.protocol.lsn import MAX_LSN
from pgsub.protocol.messages import Begin, BeginPrepare, CommitPrepared, Message, Relation, RollbackPrepared, Truncate
from pgsub.protocol.parse_changes import ROW_CHANGES, relid_of

_DECODED = frozenset(b"RT")


class Kind(Enum):
    """The way a remote transaction ended, or the decision of a prepared one."""

    COMMIT = "COMMIT"
    PREPARE = "PREPARE"
    COMMIT_PREPARED = "COMMIT PREPARED"
    ROLLBACK_PREPARED = "ROLLBACK PREPARED"


@dataclass(slots=True)
class RemoteTransaction:
    """A whole transaction of the publisher that was committed or prepared, or the end of a prepared one.

    ``finish_lsn`` is its commit_lsn or prepare_lsn, which decides coverage and is the LSN for skip. ``end_lsn`` is the
    progress after it, 0 until its end is received.
    """

    xid: int
    finish_lsn: int
    end_lsn: int = 0
    commit_ts: int = 0
    kind: Kind = Kind.COMMIT
    begin_lsn: int = 0  #: LSN of its first published change, where requested
    gid: str | None = None  #: the publisher's GID of a prepared transaction
    origin: str | None = None
    in_stream: bool = False  #: messages carry an xid
    size: int = 0
    received: list[Segment] = field(default_factory=list)
    spooled: SpooledTransaction | None = None
    #: the relations that a streamed transaction described, as the publisher believes they are known here: since then,
    #: other transactions may have described them differently
    leaves: tuple[Relation, ...] = ()
    _scanned: tuple[set[int], set[Relation]] | None = None

    @property
    def decision_lsn(self) -> int:
        """The LSN that decides on which side of a table's hand-over the transaction lies.

        A transaction is sent as prepared only once every table is ready: the slot's two_phase_at is beyond every
        srsublsn. One that was prepared before that is sent late with its old LSN. Neither is covered.
        """
        return self.finish_lsn if self.kind is Kind.COMMIT else MAX_LSN

    def segments(self) -> Iterator[Segment]:
        """Yield the messages in order; may be called repeatedly."""
        if self.spooled is not None:
            yield from self.spooled.kept()
        yield from self.received

    def payloads(self) -> Iterator[bytes]:
        """Yield the messages in order, one by one."""
        for segment in self.segments():
            yield from segment.payloads()

    def relids(self) -> set[int]:
        """Return the remote relations that the transaction changes."""
        return self._scan()[0]

    def described(self) -> set[Relation]:
        """Return its Relation messages, without their columns.

        :raises ProtocolViolation: there are more than any publisher has relations.
        """
        return self._scan()[1]

    def _scan(self) -> tuple[set[int], set[Relation]]:
        """Scan the messages once: the file may be large, and a blocked transaction asks for the result repeatedly."""
        if self._scanned is None:
            found: set[int] = set()
            described: set[Relation] = set()
            for payload in self.payloads():
                if payload[0] in ROW_CHANGES:
                    found.add(relid_of(payload, in_stream=self.in_stream))
                elif payload[0] in _DECODED:
                    message = decode_change(payload, self.in_stream)
                    found.update(message.relids if isinstance(message, Truncate) else ())
                    if isinstance(message, Relation):
                        described.add(message._replace(columns=()))
                if len(described) > MAX_RELATIONS:
                    raise ProtocolViolation(f"transaction describes more than {MAX_RELATIONS} relations")
            self._scanned = found, described
        return self._scanned

    def release(self) -> None:
        """Remove the spool file."""
        if self.spooled is not None:
            self.spooled.remove()


def opened(message: Message, lsn: int = 0) -> RemoteTransaction | None:
    """Return the transaction that a message begins, or the end of a prepared one; None for any other message."""
    match message:
        case Begin():
            return RemoteTransaction(message.xid, message.final_lsn, 0, message.commit_ts, Kind.COMMIT, lsn)
        case BeginPrepare(prepare_lsn, _, prepare_ts, xid, gid):
            return RemoteTransaction(xid, prepare_lsn, 0, prepare_ts, Kind.PREPARE, lsn, gid)
        case CommitPrepared(commit_lsn, end_lsn, commit_ts, xid, gid):
            return RemoteTransaction(xid, commit_lsn, end_lsn, commit_ts, Kind.COMMIT_PREPARED, commit_lsn, gid)
        case RollbackPrepared(_, end, _, rollback_ts, xid, gid):
            # the message has only the end of its record; any LSN inside the record gives the same coverage
            return RemoteTransaction(xid, end - 1, end, rollback_ts, Kind.ROLLBACK_PREPARED, end - 1, gid)
    return None
