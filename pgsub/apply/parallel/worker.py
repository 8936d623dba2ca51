"""Applies a transaction while it is received, inside one open target transaction. Mirrors applyparallelworker.c.

NOTES: Every change is written to the transaction's spool file, which a parallel worker follows. So its errors do not
matter: it rolls back, and the file is replayed when the transaction ends, as with ``streaming = on``. The invariants:

* It never decides. The worker's own thread commits, under the lock, and only if the table states have not changed.
* It commits nothing before everything that the publisher committed earlier, and holds its locks until then.
* So there are deadlocks that no server detects: it may hold what an earlier transaction needs, perhaps through another
  client. A parallel worker that waits for more of its file, and blocks any session, therefore gives way.
* A subtransaction that was rolled back is undone before anything after it is applied.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import psycopg

from pgsub.apply.conflicts.conflict import Record
from pgsub.apply.execute.executor import Executor
from pgsub.apply.parallel.savepoints import ReplayFromFile, Savepoints
from pgsub.apply.rows.table_state_filter import Filter
from pgsub.apply.rows.worker_sessions import TargetSession
from pgsub.apply.stream.spool import SpooledTransaction, by_subtransaction
from pgsub.apply.stream.transactions import RemoteTransaction
from pgsub.common import failpoints
from pgsub.common.query import roll_back
from pgsub.common.threads import SupervisedThread
from pgsub.protocol.frames import Segment

_log = logging.getLogger(__name__)

#: Seconds without messages after which a parallel worker checks whether it blocks another session.
IDLE_SECONDS = 0.5
#: Maximum wait for a lock. Its holder may be a prepared transaction whose end is read only after this one has ended,
#: because on the publisher the change failed or was undone in time. The server would wait forever.
LOCK_TIMEOUT = "2s"
#: Seconds for a parallel worker to end.
CLOSE_SECONDS = 10.0

_AWAITED = (
    "SELECT EXISTS (SELECT FROM pg_catalog.pg_locks l WHERE NOT l.granted"
    " AND pg_catalog.pg_backend_pid() = ANY (pg_catalog.pg_blocking_pids(l.pid)))"
)
#: Ends a lost session whose locks the server still holds because it has not noticed the loss.
_END = (
    "SELECT pg_catalog.pg_terminate_backend(pid, 5000) FROM pg_catalog.pg_stat_activity"
    " WHERE pid = %s AND application_name = pg_catalog.current_setting('application_name')"
)


@dataclass(slots=True)
class _Growth:
    """A command to apply the file up to ``end``."""

    end: int


class ParallelWorker(SupervisedThread):
    """A thread with a target session of its own, which applies one transaction at a time.

    The worker's own thread gives the commands, and waits only in :meth:`complete`. From then until :meth:`release` the
    session belongs to the worker's own thread.

    :param number: number among the worker's parallel workers, from 1.
    :param open_session: opens the session when it is first needed.
    :ivar xid: the transaction being applied, 0 if the worker is free.
    :ivar reason: why it gave the transaction up, None if it did not.
    """

    def __init__(self, number: int, open_session: Callable[[], TargetSession], *, set_based: bool = True) -> None:
        super().__init__("parallel_worker", f"parallel apply {number}")
        self._open_session = open_session
        self._set_based = set_based
        self._lock = threading.Lock()
        self._growth: _Growth | None = None  #: the last command if not begun; its end may still grow
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ready = threading.Event()
        self._executor: Executor | None = None
        self._savepoints: Savepoints | None = None  #: of an open target transaction that this thread uses
        self._read = self._changes = 0
        self._records: list[Record] = []
        self.session: TargetSession | None = None
        self._pid = 0  #: backend PID of this or the previous session
        self._closing = False
        self._wanted: object = None  #: token of the transaction that the worker's own thread wants applied
        self._token: object = None  #: token of the one that this thread applies, compared because files are long
        self.xid = 0
        self.version = -1
        self.reason: str | None = None

    # called by the worker's own thread

    @property
    def changes(self) -> int:
        """Number of rows of this transaction applied so far, for statistics."""
        executor = self._executor  # called from other threads, too
        return 0 if executor is None else executor.changes - self._changes

    @property
    def counters(self) -> Counter[str]:
        """Number of changes by method."""
        return Counter() if self._executor is None else self._executor.counters

    @property
    def free(self) -> bool:
        """Whether it can begin another transaction immediately."""
        return self.xid == 0 and self._savepoints is None and self._commands.empty()

    def assign(self, xid: int, spooled: SpooledTransaction, version: int, should_apply: Filter) -> None:
        """Start to apply a transaction.

        :param version: the states_version that ``should_apply`` is based on.
        """
        self.xid, self.version = xid, version
        with self._lock:
            self._growth = None
        self._ready.clear()
        self._wanted = token = object()
        transaction = RemoteTransaction(xid, 0, in_stream=True)
        self._commands.put(partial(self._begin, token, transaction, spooled, should_apply))

    def grown(self, end: int) -> None:
        """Apply the file up to its new end."""
        with self._lock:
            if self._growth is not None:
                self._growth.end = end
                return
            self._growth = growth = _Growth(end)
        self._commands.put(partial(self._apply_growth, growth))

    def aborted(self, subxid: int) -> None:
        """Note the abort of a subtransaction before later changes are applied."""
        with self._lock:
            self._growth = None
        self._commands.put(partial(self._abort, subxid))

    def complete(self, transaction: RemoteTransaction, beat: Callable[[], None]) -> list[Record] | None:
        """Wait until all of a transaction that has ended is applied.

        :param beat: called regularly meanwhile.
        :return: messages, and changes whose row is missing; None if it was given up. The target transaction stays open.
        """
        self._commands.put(partial(self._drain, transaction))
        while not self._ready.wait(0.2):
            if not self.is_alive():  # no other thread uses its session any more
                self._give_up(str(self.fatal_error or "its thread has ended"))
                break
            beat()
        return None if self.reason is not None else self._records

    def release(self) -> None:
        """End the transaction; roll back if it is still open."""
        self.xid, self._wanted = 0, None
        self._commands.put(self._rollback)

    def stop(self) -> None:
        """Let the thread end after the running command."""
        self._closing, self._wanted = True, None
        self._commands.put(None)

    def close(self) -> None:
        """End the thread and the session; roll back if a transaction is open."""
        self.stop()
        deadline = time.monotonic() + CLOSE_SECONDS
        self.join(0.5)
        while self.is_alive() and time.monotonic() < deadline:
            session = self.session
            if session is not None:
                with contextlib.suppress(psycopg.Error):
                    session.connection.cancel_safe(timeout=1)  # it may be waiting for a lock
            self.join(0.5)

    # the thread

    def work(self) -> None:
        """Run one command after another until :meth:`stop`."""
        while True:
            try:
                command = self._commands.get(timeout=None if self._savepoints is None else IDLE_SECONDS)
            except queue.Empty:
                command = self._give_way
            if command is None:
                break
            try:
                self.checkpoint()
                if not self._closing:
                    command()
            except Exception as error:
                self._give_up(f"{type(error).__name__}: {error}")
        if self.session is not None:
            self.session.connection.close()

    def _begin(
        self, token: object, transaction: RemoteTransaction, spooled: SpooledTransaction, should_apply: Filter
    ) -> None:
        self._rollback()
        self._token = token
        self._transaction, self._spooled = transaction, spooled
        self._read, self._records, self.reason = 0, [], None
        session, executor = self._connected()
        session.relations.restore({})
        session.connection.execute("BEGIN")
        executor.settled()
        executor.begin(should_apply)
        executor.counters = Counter()
        self._changes = executor.changes
        self._savepoints = Savepoints(executor, transaction.xid)

    def _connected(self) -> tuple[TargetSession, Executor]:
        if self.session is None or self._executor is None:
            session = self._open_session()
            session.connection.execute("SELECT pg_catalog.set_config('lock_timeout', %s, false)", (LOCK_TIMEOUT,))
            self._executor = Executor(
                session.connection, session.relations, self._too_many, set_based=self._set_based, looks_again=True
            )
            self.session, before = session, self._pid
            self._pid = session.connection.info.backend_pid
            if before:
                session.connection.execute(_END, (before,))
        return self.session, self._executor

    def _apply_growth(self, growth: _Growth) -> None:
        with self._lock:
            if self._growth is growth:
                self._growth = None
        self._apply_to(growth.end)

    def _apply_to(self, end: int) -> None:
        if self._savepoints is not None and end > self._read:
            self._savepoints.executor.feed(self._transaction, self._segments(end, self._savepoints))
            failpoints.point("apply.stream_open")

    def _segments(self, end: int, savepoints: Savepoints) -> Iterator[Segment]:
        savepoints.take_back()
        for segment in self._spooled.segments(self._read, end):
            for subxid, stretch in by_subtransaction(segment):
                if self._token is not self._wanted:
                    raise ReplayFromFile("it is no longer needed")
                if subxid:
                    savepoints.enter(subxid)
                yield stretch
        self._read = end

    def _abort(self, subxid: int) -> None:
        if self._savepoints is not None:
            self._savepoints.abort(subxid)

    def _drain(self, transaction: RemoteTransaction) -> None:
        try:
            if self._savepoints is None:
                raise ReplayFromFile("it was given up before")
            own = self._transaction
            own.finish_lsn, own.end_lsn = transaction.finish_lsn, transaction.end_lsn
            own.commit_ts = transaction.commit_ts
            self._apply_to(self._spooled.end)
            self._savepoints.take_back()
            self._records = self._savepoints.executor.finish()
            # from now on it waits only for the ledger's row, as without a parallel worker
            self._connected()[0].connection.execute("SET LOCAL lock_timeout = 0")
            self._savepoints = None
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}")
        finally:
            self._ready.set()

    def _give_way(self) -> None:
        """Give the transaction up if it has nothing more to apply and blocks another session.

        Aborted subtransactions are undone first, which releases their locks.
        """
        if self.session is None or self._savepoints is None:
            return
        self._savepoints.take_back()
        self._savepoints.executor.wait()
        row = self.session.connection.execute(_AWAITED.encode()).fetchone()
        if row is not None and row[0]:
            self._give_up("another session waited for it")

    def _too_many(self, records: Sequence[Record]) -> None:
        raise ReplayFromFile("too many rows are missing, or too many messages")

    def _give_up(self, reason: str) -> None:
        _log.debug("transaction %s is not applied while it arrives: %s", self.xid, reason)
        self.reason = self.reason or reason
        self._rollback()

    def _rollback(self) -> None:
        self._savepoints = None
        session = self.session
        if session is None:
            return
        try:
            if self._executor is not None:
                self._executor.abandon()
            roll_back(session.connection)
        except Exception:
            self._lost(session)

    def _lost(self, session: TargetSession) -> None:
        """Open a new session immediately. It ends the lost one's backend, whose locks would block the replay."""
        session.connection.close()
        self.session = self._executor = None
        with contextlib.suppress(Exception):
            if not self._closing:  # otherwise a take-over ends the backend
                self._connected()
