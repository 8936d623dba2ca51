"""Executes units of a batch in the writers of one worker, beside the worker's own session."""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections import Counter
from collections.abc import Callable, Iterator

from psycopg.pq import TransactionStatus

from pgsub.apply.rows.table_state_filter import Filter
from pgsub.apply.rows.worker_sessions import TargetSession
from pgsub.apply.stream.transaction_batch import Batch
from pgsub.apply.writers.auto_session_count import AutoSessionCount
from pgsub.apply.writers.dependencies import Dependencies, Together
from pgsub.apply.writers.parallel_gain import ParallelGain
from pgsub.apply.writers.plan import DIVIDED, count_changes, gain, parts, plain
from pgsub.apply.writers.unit import NoSession, Unit, Units
from pgsub.apply.writers.writer import CLOSE_SECONDS, Writer
from pgsub.common.errors import StreamsMustRestart
from pgsub.common.server_words import DEADLOCK
from pgsub.common.subscription import AUTO
from pgsub.target.session import free_sessions
from pgsub.target.sql.pipeline import StatementFailed

_log = logging.getLogger(__name__)

#: Maximum number of transactions that are executed together as a unit each.
SINGLE = 256
#: Number of batches that one session applies after a failure; doubled after each further failure, up to the maximum.
PAUSE, LONGEST_PAUSE = 2, 128
#: Maximum number of sessions if none was given.
MOST = 8
#: Seconds between checks for units that wait for an advisory lock of another role.
STRANGER_SECONDS = 1.0
#: Seconds after which unused sessions are closed.
IDLE_SECONDS = 60.0


class Writers:
    """The writers of one worker.

    :param sessions: sessions that apply, including the worker's own; 1 for no writers, AUTO for as many as pay.
    :param own: the worker's own session.
    :param should_apply: returns the filter and the states_version that it is based on; None while a table is not ready.
    :param beat: called regularly while units make progress.
    :param single: each transaction of the publisher is committed separately.
    :ivar changes: rows applied by writers; ``counters`` has them by method. For statistics.
    """

    def __init__(
        self,
        sessions: int,
        own: TargetSession,
        open_session: Callable[[], TargetSession],
        *,
        should_apply: Callable[[], tuple[int, Filter] | None],
        beat: Callable[[], None],
        single: bool = False,
        set_based: bool = True,
    ) -> None:
        self._sessions, self._own, self._open_session = sessions, own, open_session
        self._should_apply = should_apply
        self._beat = beat
        self._single = single
        self._set_based = set_based
        self._queue: queue.SimpleQueue[tuple[Units, Unit] | None] = queue.SimpleQueue()
        self._writers: list[Writer] = []
        self._turn = self._pause = self._paused = 0
        self.session_count = AutoSessionCount(MOST, time.monotonic()) if sessions == AUTO else None
        self.gain = ParallelGain(sessions, single=single, session_count=self.session_count)
        self._used = self._began = self._busy = 0.0
        self._fresh = False  #: a session of these units had to connect first
        self.changes = 0
        self.counters: Counter[str] = Counter()

    @property
    def open(self) -> int:
        """Number of sessions beside the worker's own."""
        return len(self._writers)

    @property
    def wanted(self) -> bool:
        """Whether there may be several sessions."""
        return self._sessions != 1

    @property
    def several(self) -> bool:
        """Whether several sessions may apply the next batch."""
        return self._sessions > 1 if self.session_count is None else self.session_count.sessions > 1

    @property
    def why(self) -> str:
        """The reason for the number of sessions as a sentence, if apply chose it."""
        return "" if self.session_count is None else self.session_count.why

    def limit(self, limit: int, transactions: int) -> int:
        """Return how many transactions may be taken from a batch at once.

        :param limit: maximum for one session.
        :param transactions: number at hand.
        """
        self.gain.more = transactions > 1
        return SINGLE if self._single and self.several and not self._paused else limit

    def units(self, batch: Batch, old: int) -> Units | int:
        """Divide the start of a batch into units for several sessions.

        Called while the progress row is locked, with the table states that hold under the lock.

        :param old: position of the ledger.
        :return: the units, or the number of transactions that one session must apply.
        """
        if self._paused:
            self._paused -= 1
            return len(batch)
        if self.gain.probe:
            return self.gain.probe
        changes = count_changes(batch)
        piece = self.gain.piece(len(batch), changes)
        sessions = self.gain.sessions(changes, len(self._writers)) if self.several else 1
        if sessions == 1:
            return piece
        decided = self._should_apply()
        relations = self._own.relations
        if decided is None or relations.rules or not relations.replica or self._own.progress.skips:
            return piece
        count = plain(batch)
        if count < 2:  # a Relation message comes once, before the first change of its relation
            return 1
        relations.notice_ddl()
        count = min(count, self.gain.trial, max(piece, 2))
        batch = batch.cut(count)[0]
        try:
            found = Dependencies.of(batch, relations.known)
        except Together as reason:
            _log.debug("one session applies a batch: %s", reason)
            return count
        cut = parts(found, sessions, self.gain.least, single=self._single)
        if len(cut) < 2:
            return count
        _log.debug("%s units of %s transactions", len(cut), count)
        made = []
        for number, part in enumerate(cut):
            first, batch = batch.cut(part.end - part.begin)
            new = max(old, first.last.end_lsn)
            self._turn += 1
            turn = relations.subid << 32 | self._turn & 0xFFFFFFFF  # unique to this subscription, in all likelihood
            made.append(Unit(number, first, part.after, turn, old, new))
            old = new
        divided = gain(found, cut, sessions) >= DIVIDED * sessions
        changes = int(found.changes.sum())
        return Units(made, relations.snapshot(), decided[1], decided[0], sessions, changes, divided)

    @contextlib.contextmanager
    def beside(self, units: Units) -> Iterator[None]:
        """Let the writers execute all units but the first, which the body commits.

        The caller's transaction holds the lock of the progress row and takes the first turn. If the body fails, nothing
        of the other units is left on return.
        """
        first = units.units[0]
        if not self._own.progress.turns.take(first.turn, begin=False):
            raise StreamsMustRestart("an advisory lock of the subscription is taken")
        units.set(first, "begun")
        self._start(min(len(units.units), units.sessions) - 1)
        self._began, self._busy = time.monotonic(), time.thread_time()
        for unit in units.units[1:]:
            self._queue.put((units, unit))
        try:
            yield
        except BaseException as error:
            units.set(first, "failed")
            self._wait(units)
            self._failed(error)
            raise
        units.set(first, "committed")

    def _start(self, count: int) -> None:
        self._fresh = len(self._writers) < count
        for dead in [one for one in self._writers if not one.is_alive()]:
            self._writers.remove(dead)
        while len(self._writers) < count:
            writer = Writer(len(self._writers) + 1, self._queue, self._open_session, set_based=self._set_based)
            if not writer.try_start():
                if (lack := writer.fatal_error) is None or self._writers:
                    return  # the existing writers suffice
                self._failed(NoSession(lack.message))
                raise lack
            self._writers.append(writer)

    def finish(self, units: Units) -> tuple[int, int]:
        """Wait until all units have ended.

        :return: the number of committed transactions, and the new position of the ledger.
        :raises StreamsMustRestart: only the ledger knows how many were committed.
        """
        self._wait(units)
        done = units.units[: units.committed]
        self._used = time.monotonic()
        for unit in done[1:]:
            self.changes += unit.changes
            self.counters.update(unit.counters)
        if done[-1].progress is not None:
            self._own.progress.follow(done[-1].progress)
        if len(done) < len(units.units):
            error = units.units[len(done)].error
            self._failed(error)
            _log.debug("unit %s of %s failed: %s", len(done), len(units.units), error)
        else:
            self._pause //= 2
            if not self._fresh:
                busy = time.thread_time() - self._busy + sum(unit.busy for unit in done)
                self.gain.several(units.changes, self._used - self._began, busy, divided=units.divided)
        lost = next((unit.lost for unit in units.units if unit.lost is not None), None)
        if lost is not None:
            raise StreamsMustRestart("a session of several that apply was lost", detail=f"{lost}.") from lost
        return sum(len(unit.batch) for unit in done), done[-1].new

    def _failed(self, error: BaseException | None) -> None:
        self._pause = min(max(2 * self._pause, PAUSE), LONGEST_PAUSE)
        self._paused = self._pause
        if self.session_count is not None:
            found = error.error if isinstance(error, StatementFailed) else error
            if getattr(found, "sqlstate", None) == DEADLOCK:
                self.session_count.deadlock(time.monotonic())
            elif isinstance(error, NoSession):
                self.session_count.refused(time.monotonic(), f"No further session could be opened: {error}.")

    def _wait(self, units: Units) -> None:
        """Wait for units; cancel those that can no longer commit or that wait for another role's advisory lock."""
        moved: object = None
        next_look = time.monotonic() + STRANGER_SECONDS
        while not all(unit.ended for unit in units.units):
            with units.changed:
                units.changed.wait_for(lambda: all(unit.ended for unit in units.units), 0.2)
                late = [unit for unit in units.units if not unit.ended and units.is_abandoned(unit)]
            for writer in self._writers:
                if any(unit is writer.busy for unit in late):
                    writer.cancel()
            before, moved = moved, [writer.moved for writer in self._writers]
            # guard: sessions that all wait for a lock give no sign of life, always
            if moved != before:
                self._beat()
            if any(not writer.is_alive() for writer in self._writers):
                raise StreamsMustRestart("a thread of several that apply has ended")
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + STRANGER_SECONDS
                self._cancel_held_up()

    def _cancel_held_up(self) -> None:
        connection = self._own.connection
        if connection.info.transaction_status is not TransactionStatus.IDLE:
            return
        others = (writer.pid for writer in self._writers)
        pids = [connection.info.backend_pid, *(pid for pid in others if pid is not None)]
        # guard: a lock that another role holds does not block a unit
        if count := self._own.progress.turns.cancel_held_up(pids):
            _log.debug("%s units waited for a stranger's advisory lock", count)

    def rest(self) -> None:
        """Close unused sessions, and open more if they pay; must not be called inside a transaction."""
        if self.session_count is not None:
            self._settle(self.session_count, time.monotonic())
        elif self._writers and time.monotonic() >= self._used + IDLE_SECONDS:
            self.close()

    def _settle(self, session_count: AutoSessionCount, now: float) -> None:
        count = session_count.look(now)
        if count:
            own, present, tagged = self._own, len(self._writers), self._own.progress.tagged
            free, why = free_sessions.further_sessions(own.connection, own.relations.subid, present, tagged=tagged)
            if free < 1:
                session_count.refused(now, why)
            else:
                session_count.add(min(count, free))
        if len(self._writers) >= session_count.sessions:
            self._close(len(self._writers) + 1 - session_count.sessions)

    def close(self) -> None:
        """End all writers; their open transactions are rolled back."""
        for _ in self._writers:
            self._queue.put(None)
        for writer in self._writers:
            writer.close()
        self._writers = []

    def _close(self, count: int) -> None:
        """End ``count`` idle writers, whichever are first."""
        for _ in range(count):
            self._queue.put(None)
        deadline, left = time.monotonic() + CLOSE_SECONDS, len(self._writers) - count
        while sum(writer.is_alive() for writer in self._writers) > left:
            if time.monotonic() > deadline:
                raise StreamsMustRestart("a session of several that apply does not end")
            time.sleep(0.001)
        self._writers = [writer for writer in self._writers if writer.is_alive()]
