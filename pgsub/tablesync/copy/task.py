"""The copy task of a Spark job, which copies one piece after another. Mirrors copy_table (tablesync.c).

A piece is a table or a chunk of one. Bytes go from socket to socket, and no value is decoded. The record that a piece
is done commits with its rows. So a task may run twice, and one that was killed leaves nothing behind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import LiteralString

import psycopg

from pgsub.apply import verified_publisher
from pgsub.common import failpoints, server_words, table_lock
from pgsub.common.connections.exported_snapshot import ExportedSnapshot
from pgsub.common.errors import ApplyError, Fenced, PgsubError, TargetUnavailable
from pgsub.common.subscription import Subscription
from pgsub.common.worker_heartbeat import Heartbeat, HeartbeatAddress, HeartbeatSender
from pgsub.publisher import connect as publisher
from pgsub.publisher.server_errors import translate as publisher_fault
from pgsub.publisher.snapshot import check_not_rewritten, hold_table, leave_snapshot, use_snapshot
from pgsub.publisher.stream.transport import reachable
from pgsub.tablesync.copy import conflict, copy_to_copy, row_by_row
from pgsub.tablesync.copy.adoption import Adopter, Adoption, alone
from pgsub.tablesync.copy.adoption_writer import Bringing
from pgsub.tablesync.copy.below_libpq import Moved
from pgsub.tablesync.copy.plan import Chunk
from pgsub.tablesync.copy.resume import Resumed, Resumption
from pgsub.tablesync.copy.row_by_row import CopiedTable
from pgsub.target.catalog import ddl_hints
from pgsub.target.ledger.tables import chunks
from pgsub.target.ledger.tables.chunks import ChunkKey
from pgsub.target.session import connect as target
from pgsub.target.session import ledger_guard, origins, publications, roles
from pgsub.target.session.connect import SessionName
from pgsub.target.sql import copy_from

#: Limits the wait for a lock, on either side, of a table that is copied together with others.
PATIENCE = "SET LOCAL lock_timeout = '1s'"
ADOPT_PATIENCE = "SET LOCAL lock_timeout = '10s'"
LOCKED = "55P03"  #: lock_not_available


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk of a table, copied in one transaction, or a table that is adopted or whose copy goes on."""

    key: ChunkKey
    chunk: Chunk
    table: CopiedTable
    adoption: Adoption | None = None
    resumption: Resumption | None = None


@dataclass(frozen=True, slots=True)
class CopySpec:
    """The specification of a copy task. It can be pickled and contains no secret.

    :ivar spare: other tasks copy the same pieces; see :func:`pgsub.target.session.origins.attach`.
    :ivar grouped: several tables are copied together, so a locked one must not delay the others.
    """

    subscription: Subscription
    pieces: tuple[Piece, ...]
    snapshot: ExportedSnapshot
    application_name: str
    heartbeat: HeartbeatAddress | None = None
    spare: bool = False
    grouped: bool = False


@dataclass(frozen=True, slots=True)
class CopyResult:
    """Rows and bytes copied. After an early end also the failed piece and its error."""

    rows: int = 0
    bytes: int = 0
    failed: ChunkKey | None = None
    error: PgsubError | None = None


def run(spec: CopySpec) -> CopyResult:
    """Copy pieces that nobody else copies, until none is left or one fails.

    :raises PgsubError: a server could not be reached.
    """
    rows = size = 0
    try:
        with _CopySessions.open(spec) as sessions:
            for piece in spec.pieces:
                try:
                    copied = sessions.copy(piece)
                except PgsubError as error:
                    return CopyResult(rows, size, piece.key, _located(error, piece.table))
                rows, size = rows + copied[0], size + copied[1]
    except TargetUnavailable as error:
        if not spec.spare or error.sqlstate != origins.EXHAUSTED:
            raise
    return CopyResult(rows, size)


class _CopySessions:
    """Both connections of a copy task, which it uses for all its pieces."""

    def __init__(
        self, spec: CopySpec, session: psycopg.Connection, source: publisher.Connection, *, tagged: bool
    ) -> None:
        self._spec = spec
        self._session, self._source, self._tagged = session, source, tagged
        self._direct = reachable(session) and reachable(source)
        self._user = source.info.user
        self._sender = HeartbeatSender(spec.heartbeat)
        self._writer: row_by_row.Writer | None = None
        self._adopter: Adopter | None = None

    @classmethod
    @contextlib.contextmanager
    def open(cls, spec: CopySpec) -> Iterator[_CopySessions]:
        """Connect to both servers."""
        sub, first = spec.subscription, spec.pieces[0].key.claim
        name = SessionName(sub.subid, f"copy:{first.worker}", first.epoch)
        with contextlib.ExitStack() as stack:
            try:
                session = target.open_session(sub, name, synchronous_commit=sub.synchronous_commit, bulk=True)
                stack.enter_context(contextlib.closing(session))
                ledger_guard.check(session)
                session.execute("SET client_min_messages = error")  # nobody reads other messages while rows are sent
                tagged = origins.attach(session, sub, spare=spec.spare) is not None
                source = verified_publisher.connect(session, sub, spec.application_name)
                stack.enter_context(contextlib.closing(source))
                sessions = cls(spec, session, source, tagged=tagged)
                stack.callback(sessions._close)
            except psycopg.Error as error:
                raise target.translate(error, "start to copy on the target") from None
            yield sessions

    def _close(self) -> None:
        if self._adopter is not None:
            self._adopter.close()

    def copy(self, piece: Piece) -> tuple[int, int]:
        """Copy one piece and commit it together with its ledger row (an atomic one also with ``f``).

        :return: rows and bytes; both 0 if there was nothing to do.
        :raises Fenced: another attempt at the table is in progress.
        :raises PgsubError: a translated error; neither connection may be used again.
        """
        try:
            if piece.resumption is not None:
                return self._resume(piece, piece.resumption)
            return self._copy(piece) if piece.adoption is None else self._adopt(piece, piece.adoption)
        except copy_to_copy.SourceError as failure:
            doing = "copy the table from the publisher"
            raise publisher_fault(failure.error, doing, table=piece.table.name, user=self._user) from None
        except psycopg.Error as error:
            raised = target.translate(error, "copy the table to the target", user=self._session.info.user)
            raised.context = server_words.fields(error.diag).context
            if isinstance(raised, ApplyError):
                _name_column(raised, error, piece.table)
                spec, claim = self._spec, piece.key.claim
                raised.record = conflict.record(error, spec.subscription, claim, spec.snapshot, piece.table)
            raise raised from None

    def _copy(self, piece: Piece) -> tuple[int, int]:
        key, chunk, table = piece.key, piece.chunk, piece.table
        patience = PATIENCE if self._spec.grouped else ""
        if not chunks.begin(self._session, key, patience, durable=table.atomic):
            return 0, 0
        heartbeat = Heartbeat(key.claim.subid, key.claim.worker, key.number, epoch=key.claim.epoch, state="d")

        def moved(size: int) -> None:
            heartbeat.bytes_done = size
            self._sender.send(heartbeat)

        moved(0)
        leaf = chunk.leaf
        source_of = (leaf.oid, leaf.schema, leaf.name) if leaf else (table.relation.relid, *table.name)
        rows, size = self._move(piece, chunk.copy_out, source_of, moved, patience)
        if self._spec.grouped:
            self._session.execute("SET LOCAL lock_timeout = 0")  # other sessions hold the ledger's rows for longer
        if not chunks.finish(self._session, key, rows, size, atomic=table.atomic):
            raise Fenced("this attempt of the copy is over")
        failpoints.point("copy.before_commit")
        self._session.execute("COMMIT")
        failpoints.point("copy.after_commit")
        heartbeat.rows_done = rows
        self._sender.send(heartbeat, now=True)
        return rows, size

    def _move(
        self, piece: Piece, copy_out: str, source_of: tuple[int, str, str], moved: Moved, patience: LiteralString = ""
    ) -> tuple[int, int]:
        table = piece.table
        # one transaction per piece: locks on several tables at once could make others' transactions deadlock victims
        use_snapshot(self._source, self._spec.snapshot, patience)
        hold_table(self._source, *source_of)
        if table.resolves:
            writer = self._resolving(piece.key)
            rows, size = row_by_row.move(self._source, writer, copy_out, table, moved)
        else:
            with roles.acting(self._session, table.acts_as):
                table_lock.hold(self._session, table.oid, *table.name, may_lock=table.locks)
                rows, size = copy_to_copy.move(
                    self._source, self._session, copy_out, table.copy_in, moved, direct=self._direct
                )
        # guard: chunks of a rewritten table are not mixed
        check_not_rewritten(self._source, *source_of[1:])
        # guard: chunks are not stored in columns that got each other's names, or another type
        table_lock.check_columns(self._session, table.oid, *table.name, table.columns)
        leave_snapshot(self._source)
        return rows, size

    def _resume(self, piece: Piece, resumption: Resumption) -> tuple[int, int]:
        session, key, sub = self._session, piece.key, self._spec.subscription
        heartbeat = Heartbeat(key.claim.subid, key.claim.worker, key.number, epoch=key.claim.epoch, state="d")

        def alive(size: int = 0) -> None:
            self._sender.send(heartbeat)

        def move(copy_out: str, source_of: tuple[int, str, str]) -> tuple[int, int]:
            return self._move(piece, copy_out, source_of, alive)

        with alone(session, key) as first:
            # guard: only one session repairs a copied table
            if not first:
                return 0, 0
            resumed = Resumed(session, sub, key, resumption, move=move, alive=alive)
            resumed.mend(self._comparing(key))
            if not chunks.begin(session, key, durable=True):
                return 0, 0
            resumed.record()
            chunks.finish(session, key, 0, 0, atomic=False)
            session.execute("COMMIT")
        return 0, 0

    def _adopt(self, piece: Piece, adoption: Adoption) -> tuple[int, int]:
        session, key, sub = self._session, piece.key, self._spec.subscription
        heartbeat = Heartbeat(key.claim.subid, key.claim.worker, key.number, epoch=key.claim.epoch, state="d")

        def alive() -> None:
            self._sender.send(heartbeat)

        def progress(done: int, total: int) -> None:
            heartbeat.bytes_done = max(heartbeat.bytes_done, piece.chunk.bytes * done // max(total, 1))
            alive()

        with alone(session, key) as first:
            # guard: only one session repairs the rows of an adopted table
            if not first:
                return 0, 0
            if not self._tagged:
                publications.check_not_published(session, key.claim.worker)
            # another session of this task holds the comparison's locks, so no server could detect a deadlock with it
            patience = PATIENCE if self._spec.grouped else ADOPT_PATIENCE
            found = Bringing(session, sub, key, adoption.table, patience=patience, alive=alive)
            rows = self._comparing(key).compare(adoption, found, progress)
            failpoints.point("adopt.compared")
            found.finish()
            if not chunks.begin(session, key, durable=True):
                return 0, 0
            found.record()
            if not chunks.finish(session, key, rows, piece.chunk.bytes, atomic=True):
                raise Fenced("this attempt of the copy is over")
            session.execute("COMMIT")
        heartbeat.rows_done = rows
        self._sender.send(heartbeat, now=True)
        return rows, 0

    def _comparing(self, key: ChunkKey) -> Adopter:
        """Return the sessions that compare tables."""
        if self._adopter is None:
            sub = self._spec.subscription
            name = SessionName(sub.subid, f"copy:{key.claim.worker}", key.claim.epoch)
            there = verified_publisher.opener(self._session, sub, self._spec.application_name)
            self._adopter = Adopter(self._session, sub, self._spec.snapshot, there=there, name=name)
        return self._adopter

    def _resolving(self, key: ChunkKey) -> row_by_row.Writer:
        """Return the session's writer, which keeps its prepared statements."""
        if self._writer is None:
            sub = self._spec.subscription
            self._writer = row_by_row.Writer(self._session, sub, key.claim, tagged=self._tagged)
        return self._writer


def _name_column(raised: ApplyError, error: psycopg.Error, table: CopiedTable) -> None:
    """Name the column in the server's CONTEXT, and the DDL that makes it fit."""
    types = dict(table.types)
    raised.column = error.diag.column_name or copy_from.column_of(server_words.fields(error.diag).context or "", types)
    if raised.column in types and (error.sqlstate or "")[:2] == "22":
        raised.hint = ddl_hints.hint(ddl_hints.retype(*table.name, raised.column, types[raised.column]))


def _located(error: PgsubError, table: CopiedTable) -> PgsubError:
    where = ".".join(table.name)
    error.context = f'synchronizing table "{where}"' + (f", {error.context}" if error.context else "")
    if isinstance(error, ApplyError):
        error.relation = where
    return error
