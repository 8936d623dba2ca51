"""A copy whose conflicts are resolved by rules: rows are read one by one and applied as inserts, many at a time.

It is slower than :mod:`pgsub.tablesync.copy.copy_to_copy`, which decodes no values, and is used for tables with such
rules. It too is one transaction. The server has no such copy: its copy_table (tablesync.c) fails.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import psycopg

from pgsub.apply.commit.ledger_commit import LedgerCommit
from pgsub.apply.conflicts.unique_violation import complete_errors
from pgsub.apply.execute.executor import Executor
from pgsub.apply.resolve.resolver import Change
from pgsub.apply.rows.relation_cache import RelationCache
from pgsub.apply.rows.table_state_filter import Decision
from pgsub.apply.rows.worker_sessions import TargetSession
from pgsub.apply.stream.transactions import RemoteTransaction
from pgsub.common import failpoints
from pgsub.common.errors import ProtocolViolation
from pgsub.common.subscription import Subscription
from pgsub.protocol.encoder import encode
from pgsub.protocol.messages import KEY_COLUMN, Column, Insert, Relation, Tuple
from pgsub.protocol.reader import NULL, TEXT
from pgsub.publisher.connect import Connection
from pgsub.publisher.copy_statements import selection
from pgsub.publisher.tables import RemoteTable
from pgsub.tablesync.copy.below_libpq import Moved, SourceError
from pgsub.target.catalog.relation import TargetRelation
from pgsub.target.ledger.progress import Progress
from pgsub.target.ledger.worker_takeover import Claim
from pgsub.target.session import connect as target

#: Maximum rows and bytes of a batch.
ROWS, BYTES = 2000, 4 << 20

_ESCAPED = re.compile(rb"\\(.)", re.DOTALL)
_CONTROL = {b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}
_NULL = rb"\N"
_TIME = re.compile(rb"-?[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class CopiedTable:
    """A table to copy.

    :ivar relation: as in a Relation message, with the target's name and the copied columns.
    :ivar selection: SQL for the publisher that selects all rows.
    :ivar oid: OID of the target's table.
    :ivar copy_in: COPY statement for the target.
    :ivar atomic: it is copied in one piece, and ``f`` commits with it.
    :ivar resolves: rules resolve the conflicts of its rows.
    :ivar acts_as: role that stores the rows; None: the session's own.
    :ivar locks: that role may lock the table.
    :ivar types: the publisher's types, as SQL, of columns that have another type on the target; for hints.
    :ivar columns: number, type and modifier of the target's columns by name.
    """

    relation: Relation
    selection: str
    oid: int
    copy_in: str
    atomic: bool
    resolves: bool
    acts_as: str | None
    locks: bool
    types: tuple[tuple[str, str], ...]
    columns: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)

    @property
    def name(self) -> tuple[str, str]:
        """Schema and name on the target."""
        return self.relation.namespace, self.relation.name


def described(remote: RemoteTable, local: TargetRelation) -> tuple[Relation, str]:
    """Return relation and selection of a :class:`CopiedTable`."""
    full = remote.replica_identity == "f"
    sent = tuple(Column(KEY_COLUMN if c.is_key or full else 0, c.name, c.type_oid, c.typmod) for c in remote.columns)
    relation = Relation(remote.oid, local.schema, local.name, remote.replica_identity, sent)
    return relation, selection(remote, [c.name for c in sent]).as_string(None)


class Writer:
    """A target session that stores rows and resolves their conflicts.

    :param session: the caller opens and ends its transactions.
    :param tagged: its commits carry a replication origin.
    """

    def __init__(self, session: psycopg.Connection, sub: Subscription, claim: Claim, *, tagged: bool) -> None:
        tracked = tagged and target.tracks_commits(session)
        self.relations = RelationCache(session, sub, replica=target.is_replica(session), tracked=tracked)
        self.ledger_commit = LedgerCommit(
            TargetSession(session, Progress(session, claim, tagged=tagged), self.relations)
        )
        self.executor = Executor(session, self.relations, self.ledger_commit.record, set_based=False)
        self.session, self.sub = session, sub


def move(source: Connection, writer: Writer, copy_out: str, table: CopiedTable, moved: Moved) -> tuple[int, int]:
    """Run the publisher's COPY and store its rows, in the open transactions of both connections.

    :param copy_out: in text format. An additional last column is the row's commit time.
    :return: number of rows, including those that rules left out, and bytes.
    :raises SourceError: the publisher failed.
    :raises PgsubError: no rule resolves the conflict of a row.
    """
    count = size = 0
    for rows, read in store(writer, table, _rows(source, copy_out)):
        count, size = count + rows, size + read
        moved(size)
        failpoints.point("copy.middle")
    return count, size


def store(writer: Writer, table: CopiedTable, rows: Iterable[bytes]) -> Iterator[tuple[int, int]]:
    """Store rows in the open transaction of the writer's session.

    :param rows: as sent by COPY in text format.
    :return: rows and bytes of each batch, after it was sent.
    :raises PgsubError: no rule resolves the conflict of a row.
    """
    executor = writer.executor
    writer.relations.learn(table.relation)
    with complete_errors(writer.session, writer.sub), executor.row_by_row():
        executor.begin(lambda relation, oid, finish_lsn: Decision(table.oid))
        for changes, size in _batches(rows, table.relation):
            executor.copied(changes)
            yield len(changes), size
        writer.ledger_commit.record(executor.finish())


def _rows(source: Connection, copy_out: str) -> Iterator[bytes]:
    """Read the publisher's rows; raise its errors as SourceError."""
    try:
        with source.cursor() as cursor, cursor.copy(copy_out.encode()) as copy:
            for row in copy:
                yield bytes(row)
    except psycopg.Error as error:
        raise SourceError(error) from None


def _batches(rows: Iterable[bytes], relation: Relation) -> Iterator[tuple[list[Change], int]]:
    waiting: list[Change] = []
    size = 0
    for row in rows:
        waiting.append(_change(row, relation))
        size += len(row)
        if len(waiting) >= ROWS or size >= BYTES:
            yield waiting, size
            waiting, size = [], 0
    if waiting:
        yield waiting, size


def _change(row: bytes, relation: Relation) -> Change:
    """Convert a row of COPY in text format to an INSERT message, in a transaction without a position.

    :raises ProtocolViolation: the row is malformed.
    """
    fields = row[:-1].split(b"\t") if len(row) > 1 or relation.columns else []
    values = [_value(field) for field in fields]
    time = (values.pop() if len(values) > len(relation.columns) else None) or b"0"
    if len(values) != len(relation.columns) or row[-1:] != b"\n" or not _TIME.fullmatch(time):
        raise ProtocolViolation(
            "malformed row in the publisher's answer to COPY",
            detail=f"A row of {len(relation.columns)} columns in text form was expected.",
        )
    transaction = RemoteTransaction(0, 0, commit_ts=int(time))
    kinds = bytes(NULL if value is None else TEXT for value in values)
    return transaction, encode(Insert(relation.relid, Tuple(kinds, tuple(values))))


def _value(field: bytes) -> bytes | None:
    if b"\\" not in field:
        return field
    return None if field == _NULL else _ESCAPED.sub(lambda found: _CONTROL.get(found[1], found[1]), field)
