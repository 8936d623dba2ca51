"""Single-row statements in libpq's pipeline mode: many changes in a round trip, each with its own row count.

psycopg's cursors cost more per statement than the server needs to run it. So ``pgconn`` is called directly, with the
bytes from the wire as parameters.
"""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable, Sequence

import psycopg
from psycopg import pq

from pgsub.common import server_words
from pgsub.common.errors import TargetUnavailable
from pgsub.target.sql.prepared_statements import PreparedStatements
from pgsub.target.sql.statement_builder import Statement

#: Number of unread results after which the sender reads some. It is enough for a round trip, and small enough that the
#: socket buffers do not fill while nobody reads. (Unbounded queues are quadratic in libpq's memmove.)
WINDOW = 256
#: Bytes of values after which the sender also waits: libpq's buffer and the senders' tags hold them.
WINDOW_BYTES = 4 << 20

RowCount = Callable[[int], None]
#: A function that receives the values of a row as text.
FirstRow = Callable[[list[str | None]], None]
#: A step of :meth:`Pipeline.round_trip`: statement, values, and the receiver of its first row.
Step = tuple[Statement, Sequence[object], FirstRow | None]


class StatementFailed(Exception):
    """The failure of a statement in the pipeline. No later statement was run.

    :ivar tag: the sender's tag.
    :ivar error: psycopg's exception with SQLSTATE and diagnostics.
    :ivar statement: the failed statement; None if it was not a single-row statement.
    """

    def __init__(self, tag: object, error: psycopg.Error, statement: Statement | None) -> None:
        super().__init__(server_words.said(error).message)
        self.tag = tag
        self.error = error
        self.statement = statement


class Pipeline:
    """A sender of prepared statements that checks their row counts.

    :param connection: in autocommit mode. Others may use it between :meth:`sync` and the next :meth:`send`.
    :param prefix: prefix of the names of its prepared statements, unique in the session.
    """

    def __init__(self, connection: psycopg.Connection, prefix: str = "pgsub") -> None:
        self._connection = connection
        self._pgconn = connection.pgconn
        waiting: deque[tuple[object, Statement | None, RowCount | None, FirstRow | None]] = deque()
        self._waiting = waiting
        self._prepared = PreparedStatements(connection, prefix, lambda tag, one: waiting.append((tag, one, None, None)))
        self._unread = self._unread_bytes = 0
        self._active = False
        self._failure: StatementFailed | None = None
        self.undo = "ROLLBACK"  #: statement that ends a failed transaction

    def send(
        self,
        statement: Statement,
        values: Sequence[bytes | bytearray | None],
        formats: Sequence[int],
        tag: object,
        on_count: RowCount | None = None,
        on_row: FirstRow | None = None,
    ) -> None:
        """Queue one execution.

        :param values: parameter values as received.
        :param formats: for each value, 0 text or 1 binary.
        :param tag: tag for :class:`StatementFailed`.
        :param on_count: receives the number of rows when the result is read.
        :param on_row: receives the first row, if there is one.
        """
        if not self._active:
            self._pgconn.nonblocking = 1
            self._pgconn.enter_pipeline_mode()
            self._active = True
        name = self._prepared.name(statement, tag)
        if statement.replanned:
            self._pgconn.send_query_params(name, values, statement.types or None, formats)
        else:
            self._pgconn.send_query_prepared(name, values, param_formats=formats)
        self._waiting.append((tag, statement, on_count, on_row))
        self._unread += 1
        self._unread_bytes += sum([len(value) for value in values if value is not None])
        if self._unread >= WINDOW or self._unread_bytes >= WINDOW_BYTES:
            self._pgconn.send_flush_request()
            self._pump(until_sync=False)

    def round_trip(self, *steps: Step) -> None:
        """Send statements with their values as text, and wait for all of them. Each statement is its own tag.

        :raises StatementFailed: see :meth:`sync`, also for TargetUnavailable.
        """
        for statement, values, on_row in steps:
            texts = [None if value is None else str(value).encode() for value in values]
            self.send(statement, texts, [0] * len(texts), statement, on_row=on_row)
        self.sync()

    def sync(self) -> None:
        """Wait for every result.

        :raises StatementFailed: the first failure. The session has left the pipeline and its transaction is aborted.
        :raises TargetUnavailable: the connection broke.
        """
        if not self._active:
            return
        self._pgconn.pipeline_sync()
        self._pump(until_sync=True)
        self._pgconn.exit_pipeline_mode()
        self._pgconn.nonblocking = 0
        self._active = False
        self._unread = self._unread_bytes = 0
        failure, self._failure = self._failure, None
        if failure is not None:
            self.reset()
            raise failure

    def reset(self) -> None:
        """Roll back what failed, and prepare all statements again when they are needed."""
        self._prepared.forget()
        self._waiting.clear()
        if self._pgconn.transaction_status != pq.TransactionStatus.IDLE:
            self._connection.execute(self.undo.encode())
        self._prepared.deallocate_forgotten()

    def _pump(self, *, until_sync: bool) -> None:
        poll = select.poll()
        poll.register(self._pgconn.socket, select.POLLIN | select.POLLOUT)
        while True:
            unsent = self._flush()
            if self._drain(until_sync):
                return
            if not unsent:
                poll.modify(self._pgconn.socket, select.POLLIN)
            poll.poll()
            self._consume()

    def _flush(self) -> int:
        try:
            return self._pgconn.flush()
        except psycopg.Error as error:
            raise TargetUnavailable(f"could not send to the target: {server_words.said(error).message}") from None

    def _consume(self) -> None:
        try:
            self._pgconn.consume_input()
        except psycopg.Error as error:
            raise TargetUnavailable(f"could not receive from the target: {server_words.said(error).message}") from None

    def _drain(self, until_sync: bool) -> bool:
        """Read the available results; return True once everything that was waited for is complete."""
        separator = False  # libpq returns None after each statement's result, and again if there is nothing to read
        while not self._pgconn.is_busy():
            result = self._pgconn.get_result()
            if result is None:
                if self._pgconn.status == pq.ConnStatus.BAD:
                    raise TargetUnavailable("connection to the target was lost")
                if separator:
                    return False
                separator = True
                continue
            separator = False
            if result.status == pq.ExecStatus.PIPELINE_SYNC:
                return True
            self._take(result)
            if not until_sync and not self._waiting:
                self._unread = self._unread_bytes = 0
                return True
        return False

    def _take(self, result: pq.abc.PGresult) -> None:
        tag, statement, on_count, on_row = self._waiting.popleft() if self._waiting else (None, None, None, None)
        if result.status == pq.ExecStatus.FATAL_ERROR:
            if self._failure is None:
                error = psycopg.errors.error_from_result(result)
                if error.sqlstate is None or self._pgconn.status == pq.ConnStatus.BAD:
                    raise TargetUnavailable("connection to the target was lost", sqlstate=error.sqlstate)
                self._failure = StatementFailed(tag, error, statement)
        elif result.status != pq.ExecStatus.PIPELINE_ABORTED:
            if on_count is not None:
                on_count(result.command_tuples or 0)
            if on_row is not None and result.ntuples:
                values = [result.get_value(0, n) for n in range(result.nfields)]
                on_row([None if value is None else value.decode("utf-8", "replace") for value in values])
