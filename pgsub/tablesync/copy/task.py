"""Copying: the task of a Spark job that does one piece after another. Mirrors copy_table (tablesync.c).

A piece is a table or a chunk of one. Bytes go from socket to socket; no value is looked at. What proves that a piece
is done commits with its rows, so a task may run twice, and a killed one leaves nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psycopg

from pgsub.common import failpoints
from pgsub.common.errors import ApplyError, Fenced, PgsubError, TargetUnavailable
from pgsub.common.subscription import Subscription
from pgsub.common.worker_heartbeat import Heartbeat, HeartbeatAddress, HeartbeatSender
from pgsub.publisher import connect as publisher
from pgsub.publisher.channel import plain
from pgsub.publisher.faults import translate as publisher_fault
from pgsub.publisher.snapshot import check_not_rewritten, leave_snapshot, use_snapshot
from pgsub.publisher.tables import Leaf
from pgsub.tablesync.copy import conflict, row_by_row, stream
from pgsub.tablesync.copy.row_by_row import CopiedRelation
from pgsub.target.catalog import ddl_hints
from pgsub.target.ledger import chunks, owner
from pgsub.target.ledger.chunks import ChunkKey
from pgsub.target.session import connect as target
from pgsub.target.session import origins, roles
from pgsub.target.session.connect import SessionName
from pgsub.target.session.owner import must_use_password
from pgsub.target.sql import copy_from

#: What a table that is copied together with others may wait for a lock, on either side.
PATIENCE = "SET LOCAL lock_timeout = '1s'"
LOCKED = "55P03"  #: lock_not_available


@dataclass(frozen=True, slots=True)
class Piece:
    """What is copied in one transaction.

    :ivar atomic: it is a whole table: ``f`` commits with it.
    :ivar bytes: estimate.
    :ivar acts_as: role that stores the rows, None: the session's own.
    :ivar types: what the publisher's columns are that are of other types on the target, for hints.
    :ivar rows: estimate, None where the table was never analyzed.
    :ivar rows_of: what its rows are of.
    :ivar resolves: rules resolve the conflicts of its rows.
    :ivar leaf: of which it is a range of blocks, None for a whole table.
    """

    key: ChunkKey
    schema: str
    name: str
    atomic: bool
    copy_out: str
    copy_in: str
    bytes: int
    rows: int | None
    rows_of: CopiedRelation
    resolves: bool = False
    leaf: Leaf | None = None
    types: tuple[tuple[str, str], ...] = ()
    acts_as: str | None = None


@dataclass(frozen=True, slots=True)
class CopySpec:
    """All a copy task is given; picklable, without a secret.

    :ivar spare: others copy the same pieces; see :func:`pgsub.target.session.origins.attach`.
    :ivar grouped: several tables are copied together: one that somebody locks must not hold up the others.
    """

    subscription: Subscription
    pieces: tuple[Piece, ...]
    snapshot: str
    application_name: str
    heartbeat: HeartbeatAddress | None = None
    spare: bool = False
    grouped: bool = False


@dataclass(frozen=True, slots=True)
class CopyResult:
    """Rows and bytes copied, and where it ended early: at which piece, by which error."""

    rows: int = 0
    bytes: int = 0
    failed: ChunkKey | None = None
    error: PgsubError | None = None


def run(spec: CopySpec) -> CopyResult:
    """Copy pieces that nobody else copies until none is left or one fails.

    :raises PgsubError: a server could not be reached.
    """
    try:
        with _Ends.open(spec) as ends:
            return _all(ends, spec.pieces)
    except TargetUnavailable as error:
        if spec.spare and error.sqlstate == origins.EXHAUSTED:
            return CopyResult()
        raise


def _all(ends: _Ends, pieces: Sequence[Piece]) -> CopyResult:
    rows = size = 0
    for piece in pieces:
        try:
            copied = ends.copy(piece)
        except PgsubError as error:
            return CopyResult(rows, size, piece.key, _located(error, piece))
        rows, size = rows + copied[0], size + copied[1]
    return CopyResult(rows, size)


class _Ends:
    """Both connections of a copy task, used for all its pieces."""

    def __init__(
        self, spec: CopySpec, session: psycopg.Connection, source: publisher.Connection, *, tagged: bool
    ) -> None:
        self._spec = spec
        self._session, self._source, self._tagged = session, source, tagged
        self._raw = plain(session, source)
        self._sender = HeartbeatSender(spec.heartbeat)
        self._writer: row_by_row.Writer | None = None

    @classmethod
    @contextlib.contextmanager
    def open(cls, spec: CopySpec) -> Iterator[_Ends]:
        """Connect to both servers."""
        sub, first = spec.subscription, spec.pieces[0].key.claim
        name = SessionName(sub.subid, f"copy:{first.worker}", first.epoch)
        with contextlib.ExitStack() as stack:
            try:
                opened = target.connect(sub.target, name, synchronous_commit=sub.synchronous_commit, bulk=True)
                session = stack.enter_context(contextlib.closing(opened))
                owner.check(session)
                session.execute("SET client_min_messages = error")  # nobody reads others while rows are sent
                tagged = origins.attach(session, sub, spare=spec.spare) is not None
                source = stack.enter_context(
                    contextlib.closing(
                        publisher.connect(
                            sub.connection,
                            application_name=spec.application_name,
                            must_use_password=must_use_password(session, sub),
                        )
                    )
                )
                ends = cls(spec, session, source, tagged=tagged)
            except psycopg.Error as error:
                raise target.translate(error, "start to copy on the target") from None
            yield ends

    def copy(self, piece: Piece) -> tuple[int, int]:
        """One piece, committed together with its ledger row (and, atomic, with ``f``).

        :return: rows and bytes; both 0 where there was nothing to do.
        :raises Fenced: another attempt of the table is under way.
        :raises PgsubError: translated; neither connection is to be used again.
        """
        try:
            return self._copy(piece)
        except stream.SourceError as failure:
            doing = "copy the table from the publisher"
            raise publisher_fault(failure.error, doing, table=(piece.schema, piece.name)) from None
        except psycopg.Error as error:
            raised = target.translate(error, "copy the table to the target")
            raised.context = error.diag.context
            if isinstance(raised, ApplyError):
                self._explain(raised, error, piece)
            raise raised from None

    def _copy(self, piece: Piece) -> tuple[int, int]:
        key = piece.key
        if not chunks.begin(self._session, key, durable=piece.atomic):
            return 0, 0
        heartbeat = Heartbeat(key.claim.subid, key.claim.worker, key.number, epoch=key.claim.epoch, state="d")

        def moved(size: int) -> None:
            heartbeat.bytes_done = size
            self._sender.send(heartbeat)

        moved(0)
        # a transaction for each piece: locks on several tables at once could make others' transactions deadlock victims
        use_snapshot(self._source, self._spec.snapshot)
        if self._spec.grouped:
            self._source.execute(PATIENCE)
            self._session.execute(PATIENCE)
        if piece.resolves:
            writer = self._resolving(key)
            rows, size = row_by_row.move(self._source, writer, piece.copy_out, piece.rows_of, moved)
        else:
            with roles.acting(self._session, piece.acts_as):
                rows, size = stream.move(
                    self._source, self._session, piece.copy_out, piece.copy_in, moved, raw=self._raw
                )
        if self._spec.grouped:
            self._session.execute("SET LOCAL lock_timeout = 0")  # the ledger's rows are others' for longer
        # guard: chunks of a rewritten table are not mixed
        check_not_rewritten(self._source, *_source_of(piece))
        leave_snapshot(self._source)
        if not chunks.finish(self._session, key, rows, size, atomic=piece.atomic):
            raise Fenced("this attempt of the copy is over")
        failpoints.point("copy.before_commit")
        self._session.execute("COMMIT")
        failpoints.point("copy.after_commit")
        heartbeat.rows_done = rows
        self._sender.send(heartbeat, now=True)
        return rows, size

    def _explain(self, raised: ApplyError, error: psycopg.Error, piece: Piece) -> None:
        _name_column(raised, error, piece)
        raised.record = conflict.record(
            error, self._spec.subscription, piece.key.claim, self._spec.snapshot, piece.rows_of
        )

    def _resolving(self, key: ChunkKey) -> row_by_row.Writer:
        """One for the session: what it prepares stays there."""
        if self._writer is None:
            sub = self._spec.subscription
            self._writer = row_by_row.Writer(self._session, sub, key.claim, tagged=self._tagged)
        return self._writer


def _source_of(piece: Piece) -> tuple[str, str]:
    return (piece.leaf.schema, piece.leaf.name) if piece.leaf else (piece.schema, piece.name)


def _name_column(raised: ApplyError, error: psycopg.Error, piece: Piece) -> None:
    """The column that the server's CONTEXT names, and the DDL that makes it fit."""
    column = error.diag.column_name or copy_from.column_of(error.diag.context or "", [name for name, _ in piece.types])
    raised.column = column
    wanted = dict(piece.types).get(column or "")
    if wanted is not None and (error.sqlstate or "")[:2] == "22":
        raised.hint = ddl_hints.hint(ddl_hints.retype(piece.schema, piece.name, column or "", wanted))


def _located(error: PgsubError, piece: Piece) -> PgsubError:
    where = f"{piece.schema}.{piece.name}"
    error.context = f'synchronizing table "{where}"' + (f", {error.context}" if error.context else "")
    if isinstance(error, ApplyError):
        error.relation = where
    return error
