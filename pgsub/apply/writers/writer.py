"""A further target session, and the thread that executes units in it.

NOTES: A unit fails on anything unexpected: an error, a set that deviates, a missing row, a message, a lost predecessor.
The kind of failure does not matter. The worker's own session applies the same transactions again, in order, under the
lock, and names the fault. After a lost session only the ledger knows whether its unit was committed. Both streams then
restart, as after the loss of the worker's own session.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections import Counter
from collections.abc import Callable, Sequence

import psycopg

from pgsub.apply.conflicts.conflict import Record
from pgsub.apply.execute.executor import Executor
from pgsub.apply.rows.worker_sessions import TargetSession
from pgsub.apply.writers.unit import Abandoned, NoSession, Unit, Units
from pgsub.common import failpoints, server_words
from pgsub.common.errors import PgsubError, StreamsMustRestart
from pgsub.common.threads import SupervisedThread

#: Seconds for a writer to end.
CLOSE_SECONDS = 10.0


class Deviation(Exception):
    """State of the target that the unit did not expect."""


class Writer(SupervisedThread):
    """A thread that executes units from a queue until it receives None.

    :param number: number among the worker's writers, from 1.
    :param units: queue of the units, in order.
    :param open_session: opens the session when it is first needed.
    :ivar busy: the unit being executed.
    """

    def __init__(
        self,
        number: int,
        units: queue.SimpleQueue[tuple[Units, Unit] | None],
        open_session: Callable[[], TargetSession],
        *,
        set_based: bool = True,
    ) -> None:
        super().__init__("writer", f"apply writer {number}")
        self._units = units
        self._open_session = open_session
        self._set_based = set_based
        self._session: TargetSession | None = None
        self._executor: Executor | None = None
        self.busy: Unit | None = None
        self._ended = 0  #: number of ended units
        self._opening = False

    @property
    def pid(self) -> int | None:
        """The process ID of its session on the target, None if it has none."""
        session = self._session
        with contextlib.suppress(psycopg.OperationalError):  # its thread may close it at any moment
            return None if session is None else session.connection.info.backend_pid
        return None

    @property
    def moved(self) -> object:
        """A value that changes with any progress; it also changes while the session connects, which ends by itself."""
        executor = self._executor  # called from another thread
        return self._ended, 0 if executor is None else executor.changes, time.monotonic() if self._opening else 0.0

    def cancel(self) -> None:
        """Cancel the running statement of its session, from another thread."""
        session = self._session
        if session is not None:
            with contextlib.suppress(psycopg.Error):
                session.connection.cancel_safe(timeout=1)

    def close(self) -> None:
        """Wait for the thread and its session to end; the caller has put None into the queue."""
        deadline = time.monotonic() + CLOSE_SECONDS
        self.join(0.5)
        while self.is_alive() and time.monotonic() < deadline:
            self.cancel()
            self.join(0.5)

    def work(self) -> None:
        """Execute one unit after another."""
        try:
            while (taken := self._units.get()) is not None:
                units, unit = taken
                self.busy = unit
                self._do(units, unit)
                self.busy = None
                self._ended += 1
        finally:
            if self._session is not None:
                self._session.connection.close()

    def _do(self, units: Units, unit: Unit) -> None:
        busy = time.thread_time()
        try:
            self.checkpoint()
            units.wait(unit, lambda: unit.after < 0 or units.units[unit.after].state == "committed")
            self._commit(units, unit, self._executed(units, unit))
            unit.busy = time.thread_time() - busy
        except BaseException as error:
            unit.error = error
            self._roll_back(unit, error)
            units.set(unit, "failed")
            if not isinstance(error, Exception):
                raise
        else:
            units.set(unit, "committed")

    def _executed(self, units: Units, unit: Unit) -> TargetSession:
        """Execute the changes of a unit in an open transaction.

        :raises Deviation: a row is missing, or the lock of the turn is taken.
        """
        session, executor = self._connected()
        session.relations.follow(units.relations)
        if not session.progress.turns.take(unit.turn, begin=True):
            raise Deviation("somebody else holds the lock of its turn")
        units.set(unit, "begun")
        executor.settled()
        changes, executor.counters = executor.changes, Counter()
        records = executor.run(unit.batch.items, units.should_apply)
        # guard: a unit that is executed early finds the rows as the publisher found them
        if records:
            raise Deviation("a row is missing, or another origin wrote it")
        unit.changes, unit.counters = executor.changes - changes, executor.counters
        failpoints.point("apply.unit_executed")
        return session

    def _connected(self) -> tuple[TargetSession, Executor]:
        if self._session is None or self._executor is None:
            session = self._opened()
            relations = session.relations
            self._executor = Executor(
                session.connection, relations, _too_many, set_based=self._set_based, looks_again=True
            )
            self._session = session
        return self._session, self._executor

    def _opened(self) -> TargetSession:
        self._opening = True
        try:
            return self._open_session()
        except (PgsubError, psycopg.Error) as error:
            known = error if isinstance(error, PgsubError) else server_words.said(error)
            raise NoSession(known.message) from error
        finally:
            self._opening = False

    def _commit(self, units: Units, unit: Unit, session: TargetSession) -> None:
        before = units.units[unit.number - 1]
        self._await(units, unit, before, session)
        last = unit.batch.last
        unit.lost = StreamsMustRestart("a session of the target was lost")  # until the outcome is known
        session.progress.succeed(before.turn, unit.old, unit.new, last.commit_ts, units.states_version)
        failpoints.point("apply.unit_reply_lost")
        unit.lost, unit.progress = None, session.progress

    def _await(self, units: Units, unit: Unit, before: Unit, session: TargetSession) -> None:
        """Wait until the previous unit has begun.

        It may have to wait for the commit of another unit, and that one for a lock of this session. Only the target can
        detect such a deadlock, so the wait happens there, for the transaction of the other unit.
        """
        while before.state == "waiting":
            units.wait(unit, lambda: units.holds_up(before).state != "waiting")
            # guard: a session that holds locks waits for its turn where the target detects deadlocks
            self._follow(units, unit, units.holds_up(before), session)
        units.wait(unit, lambda: True)

    def _follow(self, units: Units, unit: Unit, other: Unit, session: TargetSession) -> None:
        if other.state == "begun" and other.number != unit.number - 1:
            session.progress.turns.wait(other.turn)
            units.wait(unit, lambda: other.ended)

    def _roll_back(self, unit: Unit, error: BaseException) -> None:
        """Roll back the transaction. If that fails, the session is lost and is not used again."""
        session, executor, unit.lost = self._session, self._executor, None
        if session is None or executor is None or (isinstance(error, Abandoned) and unit.state == "waiting"):
            return  # nothing was begun
        try:
            executor.abandon()
            session.connection.execute("ROLLBACK")
            session.relations.restore({})  # any error may come from DDL on the target
            executor.forget()
        except (PgsubError, psycopg.Error) as lost:
            unit.lost = lost
            session.connection.close()
            self._session = self._executor = None


def _too_many(records: Sequence[Record]) -> None:
    raise Deviation("many rows are missing")
