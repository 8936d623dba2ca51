"""One further target session, and the thread that executes units through it.

NOTES: A unit fails on whatever is not as it is to be: an error, a set that deviates, a missing row, a message, a lost
predecessor. Nothing of that counts but that it failed: the worker's own session applies the same transactions again, in
order, under the lock, and names what is wrong. After a lost session only the ledger knows what became of its unit; both
streams restart then, as after the loss of the worker's own.
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

#: Seconds for a writer to end with its worker.
CLOSE_SECONDS = 10.0


class Deviation(Exception):
    """The target was not as the unit presupposes."""


class Writer(SupervisedThread):
    """A writer, which takes units from a queue until it is given None.

    :param number: among the worker's writers, from 1.
    :param units: what is to be done, in order.
    :param open_session: opens the session when it is first needed.
    :ivar busy: the unit that it is at.
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
        self._ended = 0  #: units
        self._opening = False

    @property
    def pid(self) -> int | None:
        """The process of its session on the target, None where it has none."""
        session = self._session
        with contextlib.suppress(psycopg.OperationalError):  # its thread may close it at any moment
            return None if session is None else session.connection.info.backend_pid
        return None

    @property
    def moved(self) -> object:
        """What differs where it has done anything since it was asked last, or connects, which ends by itself."""
        executor = self._executor  # another thread asks
        return self._ended, 0 if executor is None else executor.changes, time.monotonic() if self._opening else 0.0

    def cancel(self) -> None:
        """Cancel the statement that its session runs, from another thread."""
        session = self._session
        if session is not None:
            with contextlib.suppress(psycopg.Error):
                session.connection.cancel_safe(timeout=1)

    def close(self) -> None:
        """Wait until the thread has ended, and its session with it; None was put into the queue before."""
        deadline = time.monotonic() + CLOSE_SECONDS
        self.join(0.5)
        while self.is_alive() and time.monotonic() < deadline:
            self.cancel()
            self.join(0.5)

    def work(self) -> None:
        """Execute one unit after the other."""
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

        :raises Deviation: a row is missing, or the target's order cannot be had.
        """
        session, executor = self._connected()
        session.relations.follow(units.relations)
        if not session.progress.turns.take(unit.turn, begin=True):
            raise Deviation("somebody else holds the lock of its turn")
        units.set(unit, "begun")
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
            # a ROLLBACK of psycopg's takes away all that is prepared, the pipeline's too, if it prepared anything
            session.connection.prepare_threshold = None
            relations = session.relations
            self._executor = Executor(session.connection, relations, _too_many, set_based=self._set_based)
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
        unit.lost = StreamsMustRestart("a session of the target was lost")  # from here on, until we know better
        session.progress.succeed(before.turn, unit.old, unit.new, last.commit_ts, units.states_version)
        failpoints.point("apply.unit_reply_lost")
        unit.lost, unit.progress = None, session.progress

    def _await(self, units: Units, unit: Unit, before: Unit, session: TargetSession) -> None:
        """Wait until the unit before has begun.

        It may have to wait for the commit of another, and that one for a lock of ours. Only the target can see that, so
        what is waited for there is the other's transaction.
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
        """End the transaction. Where that is impossible the session is lost, and nothing else is tried through it."""
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
