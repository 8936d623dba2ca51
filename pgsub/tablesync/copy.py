"""The copy of one chunk: the task of a Spark job. Mirrors copy_table (tablesync.c).

Bytes go from libpq to libpq in large blocks; no value is looked at. What proves that a chunk is done commits with
its rows, so a task may run twice, and a killed one leaves nothing.
"""

from __future__ import annotations

import contextlib
import select
from dataclasses import dataclass

import psycopg
from psycopg import pq

from pgsub import failpoints
from pgsub.errors import ApplyError, Fenced, PgsubError
from pgsub.publisher import connect as publisher
from pgsub.publisher.faults import translate as publisher_fault
from pgsub.publisher.snapshot import use_snapshot
from pgsub.pulse import Pulse, PulseAddress, PulseSender
from pgsub.subscription import Subscription
from pgsub.tablesync.plan import Chunk
from pgsub.target import connect as target
from pgsub.target import origins, states
from pgsub.target.connect import SessionName
from pgsub.target.ledger import Claim

_BLOCK = 1 << 17  #: one row a message costs twice the time of messages joined to blocks


@dataclass(frozen=True, slots=True)
class ChunkSpec:
    """All a chunk's task is given; picklable, without a secret."""

    subscription: Subscription
    claim: Claim
    attempt: int
    atomic: bool
    chunk: Chunk
    copy_in: str
    snapshot: str
    application_name: str
    relation: tuple[str, str]
    pulse: PulseAddress | None = None


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """Rows and bytes copied; ``again`` where an earlier attempt had done it already."""

    number: int
    rows: int
    bytes: int
    again: bool = False


def run(spec: ChunkSpec) -> ChunkResult:
    """Copy one chunk and commit it together with its ledger row (and, atomic, with ``f``).

    :raises Fenced: another attempt of the table is under way.
    :raises PgsubError: translated; located in the table.
    """
    try:
        return _run(spec)
    except psycopg.Error as error:
        raise _located(target.translate(error, "copy the table to the target"), spec, error) from None


def _run(spec: ChunkSpec) -> ChunkResult:
    sub, claim = spec.subscription, spec.claim
    name = SessionName(sub.subid, f"copy:{claim.worker}", claim.epoch)
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(
            contextlib.closing(target.connect(sub.target, name, synchronous_commit=sub.synchronous_commit))
        )
        origins.attach(session, sub.subid)
        session.execute("BEGIN")
        if spec.atomic:
            session.execute("SET LOCAL synchronous_commit = on")
        done = _lock_chunk(session, spec)
        if done is not None:
            return done
        source = stack.enter_context(
            contextlib.closing(publisher.connect(sub.connection, application_name=spec.application_name))
        )
        use_snapshot(source, spec.snapshot)
        rows, size = _Pump(source, session, spec).run()
        _finish(session, spec, rows, size)
        return ChunkResult(spec.chunk.number, rows, size)


def _lock_chunk(session: psycopg.Connection, spec: ChunkSpec) -> ChunkResult | None:
    """Lock the chunk's own row (never a shared one: chunks of a table must not wait for each other)."""
    row = session.execute(
        "SELECT xid IS NOT NULL, rows_done, bytes_done FROM pgsub.copy_chunk"
        " WHERE subid = %s AND srrelid = %s AND attempt = %s AND chunk = %s FOR UPDATE",
        (spec.claim.subid, spec.claim.worker, spec.attempt, spec.chunk.number),
    ).fetchone()
    if row is None:
        raise Fenced("this attempt of the copy is over")
    return ChunkResult(spec.chunk.number, row[1], row[2], again=True) if row[0] else None


def _finish(session: psycopg.Connection, spec: ChunkSpec, rows: int, size: int) -> None:
    claim = spec.claim
    session.execute(
        "UPDATE pgsub.copy_chunk SET xid = pg_catalog.pg_current_xact_id(), rows_done = %s, bytes_done = %s"
        " WHERE subid = %s AND srrelid = %s AND attempt = %s AND chunk = %s",
        (rows, size, claim.subid, claim.worker, spec.attempt, spec.chunk.number),
    )
    if spec.atomic:
        if not states.finish_copy(session, claim, spec.attempt):
            raise Fenced("this attempt of the copy is over")
    else:
        states.fence(session, claim)
    failpoints.point("copy.before_commit")
    session.execute("COMMIT")
    failpoints.point("copy.after_commit")


class _Pump:
    """Moves CopyData from the publisher's connection to the target's.

    Both connections are non-blocking and waited for with poll: libpq's blocking calls would hold the interpreter.
    A block is flushed before the next one is read, so libpq keeps no more than that in memory.
    """

    def __init__(self, source: publisher.Connection, session: psycopg.Connection, spec: ChunkSpec) -> None:
        self._source, self._session = source.pgconn, session.pgconn
        self._session.nonblocking = 1
        self._spec = spec
        self._pulse = Pulse(spec.claim.subid, spec.claim.worker, spec.chunk.number, epoch=spec.claim.epoch, state="d")
        self._sender = PulseSender(spec.pulse)

    def run(self) -> tuple[int, int]:
        """:return: rows and bytes."""
        self._begin(self._source, self._spec.chunk.copy_out, pq.ExecStatus.COPY_OUT, of_source=True)
        self._begin(self._session, self._spec.copy_in, pq.ExecStatus.COPY_IN, of_source=False)
        size = self._move()
        self._check_source()
        self._session.put_copy_end()
        self._flush()
        result = self._answer(self._session)
        if result is None or result.status != pq.ExecStatus.COMMAND_OK:
            raise _error(result)
        while self._answer(self._session) is not None:
            pass
        self._pulse.rows_done = result.command_tuples or 0
        self._sender.send(self._pulse, now=True)
        return self._pulse.rows_done, size

    def _begin(self, connection: pq.abc.PGconn, statement: str, wanted: pq.ExecStatus, *, of_source: bool) -> None:
        result = connection.exec_(statement.encode())
        if result.status != wanted:
            error = _error(result)
            if of_source:
                raise _located(publisher_fault(error, "start initial contents copy"), self._spec, None)
            raise error

    def _move(self) -> int:
        size = held = 0
        block: list[bytes] = []
        while True:
            try:
                count, data = self._next()
            except psycopg.Error as error:
                raise _located(publisher_fault(error, "copy the table from the publisher"), self._spec, None) from None
            if count > 0:
                block.append(bytes(data))
                held += count
            if held >= _BLOCK or count < 0:
                self._put(b"".join(block))
                size, held, block = size + held, 0, []
                self._pulse.bytes_done = size
                self._sender.send(self._pulse)
                failpoints.point("copy.middle")
            if count < 0:
                return size

    def _check_source(self) -> None:
        """An error of the publisher ends the rows as their end does: only the result tells which it was."""
        result = self._answer(self._source)
        if result is None or result.status != pq.ExecStatus.COMMAND_OK:
            fault = publisher_fault(_error(result), "copy the table from the publisher")
            raise _located(fault, self._spec, None)

    def _answer(self, connection: pq.abc.PGconn) -> pq.abc.PGresult | None:
        """The next result."""
        while connection.is_busy():
            _wait(connection, select.POLLIN)
            connection.consume_input()
        return connection.get_result()

    def _next(self) -> tuple[int, memoryview]:
        """The next row of the publisher; a negative length at the end."""
        while True:
            count, data = self._source.get_copy_data(1)
            if count:
                return count, data
            _wait(self._source, select.POLLIN)
            self._source.consume_input()

    def _put(self, block: bytes) -> None:
        if block:
            self._session.put_copy_data(block)
            self._flush()

    def _flush(self) -> None:
        while self._session.flush():
            if _wait(self._session, select.POLLIN | select.POLLOUT) & select.POLLIN:
                self._session.consume_input()


def _error(result: pq.abc.PGresult | None) -> psycopg.Error:
    """The server's error; without an SQLSTATE it is libpq that speaks, of a connection that was lost."""
    if result is None or result.status != pq.ExecStatus.FATAL_ERROR:
        return psycopg.OperationalError("the connection was lost")
    error = psycopg.errors.error_from_result(result)
    return error if error.sqlstate else psycopg.OperationalError(str(error))


def _wait(connection: pq.abc.PGconn, events: int) -> int:
    poll = select.poll()
    poll.register(connection.socket, events)
    return poll.poll()[0][1]


def _located(raised: PgsubError, spec: ChunkSpec, error: psycopg.Error | None) -> PgsubError:
    where = ".".join(spec.relation)
    raised.context = f'synchronizing table "{where}"' + (
        f", {error.diag.context}" if error and error.diag.context else ""
    )
    if isinstance(raised, ApplyError):
        raised.relation = where
    return raised
