"""The messages of pgoutput, protocol versions 1 to 4, as named tuples.

Mirrors ``src/include/replication/logicalproto.h``. LSNs are ints, timestamps are microseconds since 2000-01-01 UTC as
ints, names are str, and column values are the received bytes.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

#: Flag of a column in the replica identity; with FULL all columns have it.
KEY_COLUMN = 1


class Column(NamedTuple):
    """A column of a relation; ``flags`` may have :data:`KEY_COLUMN`."""

    flags: int
    name: str
    type_oid: int
    typmod: int

    @property
    def is_key(self) -> bool:
        """Whether it is part of the replica identity."""
        return bool(self.flags & KEY_COLUMN)


class Relation(NamedTuple):
    """``R``: the publisher's table from now on; ``replica_identity`` is one of d n f i."""

    relid: int
    namespace: str
    name: str
    replica_identity: str
    columns: tuple[Column, ...]


class TypeName(NamedTuple):
    """``Y``: the name of a type that is not built in."""

    oid: int
    namespace: str
    name: str


class Tuple(NamedTuple):
    """A row: ``kinds`` has one byte per column; the values of NULL and unchanged columns are None."""

    kinds: bytes
    values: tuple[bytes | None, ...]


class Begin(NamedTuple):
    """``B``: final_lsn is the commit_lsn of the Commit that follows."""

    final_lsn: int
    commit_ts: int
    xid: int


class Commit(NamedTuple):
    """``C``: the end of a committed transaction."""

    commit_lsn: int
    end_lsn: int
    commit_ts: int


class Origin(NamedTuple):
    """``O``: the origin of the transaction; lsn is 0 while it is unknown (streaming)."""

    lsn: int
    name: str


class Insert(NamedTuple):
    """``I``: an insert."""

    relid: int
    new: Tuple


class Update(NamedTuple):
    """``U``: an update; ``old_kind`` is K (key columns), O (whole row, replica identity full) or empty (no old row)."""

    relid: int
    old_kind: str
    old: Tuple | None
    new: Tuple


class Delete(NamedTuple):
    """``D``: a delete; ``old_kind`` is K or O."""

    relid: int
    old_kind: str
    old: Tuple


class Truncate(NamedTuple):
    """``T``: the tables of one TRUNCATE."""

    relids: tuple[int, ...]
    cascade: bool
    restart_identity: bool


class LogicalMessage(NamedTuple):
    """``M``: pg_logical_emit_message(); a non-transactional one is sent outside transactions."""

    transactional: bool
    lsn: int
    prefix: str
    content: bytes


class StreamStart(NamedTuple):
    """``S``: the start of a block of changes of a transaction in progress; ``first`` is set for its first block."""

    xid: int
    first: bool


class StreamStop(NamedTuple):
    """``E``: the end of a stream block."""


class StreamCommit(NamedTuple):
    """``c``: the commit of a streamed transaction."""

    xid: int
    commit_lsn: int
    end_lsn: int
    commit_ts: int


class StreamAbort(NamedTuple):
    """``A``: subxid equals xid for the whole transaction; LSN and time are sent only with streaming = parallel.

    The LSN is 0 if the publisher noticed the abort late, by a running-xacts record.
    """

    xid: int
    subxid: int
    abort_lsn: int | None
    abort_ts: int | None


class BeginPrepare(NamedTuple):
    """``b``: the start of a prepared transaction."""

    prepare_lsn: int
    end_lsn: int
    prepare_ts: int
    xid: int
    gid: str


class Prepare(NamedTuple):
    """``P``: the PREPARE of the transaction that BeginPrepare started."""

    prepare_lsn: int
    end_lsn: int
    prepare_ts: int
    xid: int
    gid: str


class CommitPrepared(NamedTuple):
    """``K``: COMMIT PREPARED."""

    commit_lsn: int
    end_lsn: int
    commit_ts: int
    xid: int
    gid: str


class RollbackPrepared(NamedTuple):
    """``r``: ROLLBACK PREPARED."""

    prepare_end_lsn: int
    rollback_end_lsn: int
    prepare_ts: int
    rollback_ts: int
    xid: int
    gid: str


class StreamPrepare(NamedTuple):
    """``p``: the PREPARE of a streamed transaction."""

    prepare_lsn: int
    end_lsn: int
    prepare_ts: int
    xid: int
    gid: str


#: Messages that carry an Int32 xid after the type byte in a stream block.
Change: TypeAlias = Relation | TypeName | Insert | Update | Delete | Truncate | LogicalMessage

#: Messages that are outside transactions or delimit them.
Control: TypeAlias = (
    Begin
    | Commit
    | Origin
    | StreamStart
    | StreamStop
    | StreamCommit
    | StreamAbort
    | BeginPrepare
    | Prepare
    | CommitPrepared
    | RollbackPrepared
    | StreamPrepare
)

Message: TypeAlias = Change | Control
