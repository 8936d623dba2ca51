"""A remote transaction, whole: what the rest of this room is given. Mirrors what worker.c keeps of one."""

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
    """The way a remote transaction ended, or a prepared one was decided."""

    COMMIT = "COMMIT"
    PREPARE = "PREPARE"
    COMMIT_PREPARED = "COMMIT PREPARED"
    ROLLBACK_PREPARED = "ROLLBACK PREPARED"


@dataclass(slots=True)
class RemoteTransaction:
    """A transaction of the publisher that was committed or prepared, whole; or the end of a prepared one.

    ``finish_lsn`` is its commit_lsn or prepare_lsn (what decides coverage and what skip takes), ``end_lsn`` the
    progress after it, 0 until its end was read.
    """

    xid: int
    finish_lsn: int
    end_lsn: int = 0
    commit_ts: int = 0
    kind: Kind = Kind.COMMIT
    begin_lsn: int = 0  #: of its first published change, where it was asked for
    gid: str | None = None  #: that the publisher's prepared transaction has
    origin: str | None = None
    in_stream: bool = False  #: messages carry an xid
    size: int = 0
    received: list[Segment] = field(default_factory=list)
    spooled: SpooledTransaction | None = None
    #: what the publisher takes for known of the relations that a streamed transaction described: it may have
    #: described them anew, in other transactions, since
    leaves: tuple[Relation, ...] = ()
    _scanned: tuple[set[int], set[Relation]] | None = None

    @property
    def decision_lsn(self) -> int:
        """The LSN that says which side of a table's hand-over it lies on.

        A transaction is only sent as prepared once every table is ready (the slot's two_phase_at lies beyond every
        srsublsn), and one that was prepared before that is sent late, with its old LSN: neither is covered.
        """
        return self.finish_lsn if self.kind is Kind.COMMIT else MAX_LSN

    def segments(self) -> Iterator[Segment]:
        """Yield its messages in order; may be asked for again."""
        if self.spooled is not None:
            yield from self.spooled.kept()
        yield from self.received

    def payloads(self) -> Iterator[bytes]:
        """Yield the same, one by one."""
        for segment in self.segments():
            yield from segment.payloads()

    def relids(self) -> set[int]:
        """Return the remote relations that it changes."""
        return self._scan()[0]

    def described(self) -> set[Relation]:
        """Return its Relation messages, without their columns.

        :raises ProtocolViolation: there are more than any publisher has relations.
        """
        return self._scan()[1]

    def _scan(self) -> tuple[set[int], set[Relation]]:
        """Read the file once: it may be long, and is asked for repeatedly while a claim keeps the transaction back."""
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
        """Remove its file: it is not needed again."""
        if self.spooled is not None:
            self.spooled.remove()


def opened(message: Message, lsn: int = 0) -> RemoteTransaction | None:
    """Return the transaction that a message begins, or the end of a prepared one; None for any other message.

    :param lsn: of the message.
    """
    match message:
        case Begin():
            return RemoteTransaction(message.xid, message.final_lsn, 0, message.commit_ts, Kind.COMMIT, lsn)
        case BeginPrepare(prepare_lsn, _, prepare_ts, xid, gid):
            return RemoteTransaction(xid, prepare_lsn, 0, prepare_ts, Kind.PREPARE, lsn, gid)
        case CommitPrepared(commit_lsn, end_lsn, commit_ts, xid, gid):
            return RemoteTransaction(xid, commit_lsn, end_lsn, commit_ts, Kind.COMMIT_PREPARED, commit_lsn, gid)
        case RollbackPrepared(_, end, _, rollback_ts, xid, gid):
            # the message has no start of its record, only the end: any LSN inside the record covers alike
            return RemoteTransaction(xid, end - 1, end, rollback_ts, Kind.ROLLBACK_PREPARED, end - 1, gid)
    return None
