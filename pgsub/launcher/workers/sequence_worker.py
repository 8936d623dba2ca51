"""The sequence worker: repeatedly sets the sequences of one subscription to the publisher's values.

Mirrors the sequence synchronization worker (sequencesync.c), which the server starts only for REFRESH SEQUENCES. The
pause between attempts doubles while no value changes. Apply does not depend on this worker.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import psycopg

from pgsub.apply import verified_publisher
from pgsub.catalog.rows import SequenceRow
from pgsub.catalog.store import StateStore
from pgsub.catalog.times import utc_now
from pgsub.common.errors import (
    Directive,
    PgsubError,
    PublisherUnavailable,
    SchemaFault,
    StateStoreError,
    TargetUnavailable,
)
from pgsub.common.subscription import Subscription
from pgsub.common.threads import SupervisedThread
from pgsub.launcher import error_rows, retry
from pgsub.launcher.error_handling import SEQUENCES, ErrorReporter
from pgsub.launcher.recorder import Run
from pgsub.publisher import connect as publisher
from pgsub.publisher import database
from pgsub.tablesync.sequences import reading
from pgsub.tablesync.sequences.definition import Position
from pgsub.tablesync.sequences.synchronization import Outcome, bring, failure, kept, look
from pgsub.target.session import connect as target
from pgsub.target.session import ledger_guard
from pgsub.target.session.connect import SessionName, must_use_password

#: Shortest and longest pause between attempts, in seconds. PGSUB_SEQUENCE_SECONDS replaces the longest.
SHORTEST, LONGEST = 2.0, 30.0
#: Minimum pause as a multiple of the attempt's duration, unless a bounded run waits.
FACTOR = 10
#: Successive attempts, or seconds, after which an error that may pass by itself is shown.
LASTING_ATTEMPTS, LASTING_SECONDS = 5, 60.0
#: Limit for locks, because sessions of the target that draw values must not wait long for a repeated attempt.
_LOCK_TIMEOUT = "100ms"
_MOST = 2**63 - 1  #: the largest value of a column


class SequenceWorker:
    """The attempts, each in its own thread. The owner calls :meth:`tick` and then knows how the last one ended.

    :param current: returns the present definition, because the option may change while the subscription is served.
    :param stopping: set when nothing may be written any more.
    :ivar error: the error of the last attempt, None if every sequence is synchronized.
    """

    def __init__(
        self,
        sub: Subscription,
        store: StateStore,
        errors: ErrorReporter,
        run: Run,
        current: Callable[[], Subscription | None],
        stopping: threading.Event,
    ) -> None:
        self._sub = sub
        self._store = store
        self._errors = errors
        self._run = run
        self._current = current
        self._stopping = stopping
        self._longest = retry.seconds("PGSUB_SEQUENCE_SECONDS") or LONGEST
        self._pause = min(SHORTEST, self._longest)
        self._next = 0.0
        self._thread: SupervisedThread | None = None
        self._outcomes: Sequence[Outcome] | None = None  #: of the last attempt, None if it failed
        self._failure: PgsubError | None = None
        self._begun = self._ended = 0  #: numbers of attempts
        self._last = 0  #: number of the attempt that a bounded run waits for
        #: successive attempts with an error that may pass, and the time of the first
        self._passing: tuple[int, float] | None = None
        self.error: PgsubError | None = None

    @property
    def _follows(self) -> bool:
        now = self._current()
        return now is not None and now.sequences

    def tick(self) -> None:
        """Handle the end of the last attempt, and start another if it is time."""
        if self._thread is not None:
            if self._thread.is_alive():
                return
            self._conclude(self._thread)
            self._thread = None
        if not self._follows:
            self._errors.clear(SEQUENCES)
            self._passing = self.error = None
        elif time.monotonic() >= self._next or self._begun < self._last:
            self._begun += 1
            self._outcomes = self._failure = None
            self._thread = SupervisedThread("sequences", "sequences", self._attempt)
            self._thread.try_start()

    def settled(self, *, well: bool) -> bool:
        """Return whether an attempt that started after the first call has ended. A bounded run waits for this.

        :param well: also require that the attempt's error, if any, is not one that may pass by itself.
        """
        self._last = self._last or self._begun + 1
        if not self._follows:
            return True
        return self._ended >= self._last and not (well and _may_pass(self.error))

    def close(self) -> None:
        """Wait for a running attempt."""
        if self._thread is not None:
            self._thread.join(2)

    def _conclude(self, thread: SupervisedThread) -> None:
        self._ended = self._begun
        moving = any(one.moved or one.busy for one in self._outcomes or ())
        self._pause = min(SHORTEST if moving or self._last else 2 * self._pause, self._longest)
        self._next = max(self._next, time.monotonic() + self._pause)
        outcomes = self._outcomes or ()
        error = self._failure or thread.fatal_error or failure(self._sub, outcomes, SchemaFault)
        error = self.error = error or kept(self._sub, outcomes)
        lasts = self._lasts(error)
        if error is None:
            self._errors.clear(SEQUENCES)
        # the recorder reports the store
        elif lasts and not isinstance(error, StateStoreError):
            self._errors.report(SEQUENCES, error, "sync_seq_error_count", repeats=False)

    def _lasts(self, error: PgsubError | None) -> bool:
        """Count successive attempts with an error that may pass by itself, and return whether to show the error."""
        if not _may_pass(error):
            self._passing = None
            return error is not None
        attempts, since = self._passing or (0, time.monotonic())
        self._passing = attempts + 1, since
        return attempts + 1 >= LASTING_ATTEMPTS or time.monotonic() - since >= LASTING_SECONDS

    # Runs in the thread.

    def _attempt(self) -> None:
        began = time.monotonic()
        try:
            outcomes = self._synchronize()
            if not self._stopping.is_set():  # a stopped attempt leaves sequences out
                self._outcomes = outcomes
                self._run(lambda: self._write(outcomes))
        except Exception as error:
            self._failure = error_rows.internal_error(error)
        self._next = time.monotonic() + (1 if self._last else FACTOR) * (time.monotonic() - began)

    def _write(self, outcomes: Sequence[Outcome]) -> None:
        """Write the sequences' states, unless a command has removed the option and the rows meanwhile."""
        with self._store.batch():
            now = self._store.subscription_by_id(self._sub.subid)
            if now is not None and now.sequences:
                self._store.put_sequences(self._sub.subid, rows(outcomes))

    def _synchronize(self) -> list[Outcome]:
        """Set the sequences that are behind. A stop leaves out those not yet reached."""
        sub = self._sub
        name = SessionName(sub.subid, "sequences", 0)
        with contextlib.closing(target.open_session(sub, name, replica=False)) as session:
            try:
                ledger_guard.check(session)
                reading.prepare(session)  # what is read before the sequences does not wait for locks either
                must = must_use_password(session, sub)
                with contextlib.closing(
                    publisher.connect(sub.connection, application_name=sub.name, must_use_password=must)
                ) as source:
                    # guard: only values of the publisher are used
                    self._check_publisher(session, source)
                    found = look(session, source, sub)
                stop = self._stopping.is_set
                return bring(session, found, run_as_owner=sub.run_as_owner, lock_timeout=_LOCK_TIMEOUT, stop=stop)
            except psycopg.Error as error:
                failed = target.translate(error, "synchronize sequences")
                # A timeout is not the fault of a sequence.
                slow = isinstance(error, psycopg.errors.QueryCanceled)
                raise TargetUnavailable(failed.message, sqlstate=failed.sqlstate) if slow else failed from None

    def _check_publisher(self, session: psycopg.Connection, source: publisher.Connection) -> None:
        """Refuse values of another server.

        :raises PublisherUnavailable: another server answers, which apply reports in detail, or none is known yet.
        """
        known = verified_publisher.recorded_database(session, self._sub.subid)
        if known is None or database.database(source)[:2] != known[:2]:
            raise PublisherUnavailable(
                "sequences were not synchronized: the server that answers is not known as the publisher"
            )


def _may_pass(error: PgsubError | None) -> bool:
    """Return whether there is an error that the next attempt may not meet."""
    return error is not None and (error.directive is Directive.RETRY or isinstance(error, StateStoreError))


def rows(outcomes: Iterable[Outcome]) -> list[SequenceRow]:
    """Make the rows of the state store for sequences after an attempt to synchronize them, also by a command."""
    now = utc_now()
    return [
        SequenceRow(
            one.oid,
            "r" if one.problem is None else "i",
            *one.key,
            *_position(one.publisher),
            *_position(one.target),
            None if one.ahead is None else max(-_MOST, min(one.ahead, _MOST)),
            one.problem,
            now,
        )
        for one in outcomes
    ]


def _position(position: Position | None) -> tuple[int | None, bool | None]:
    return (None, None) if position is None else (position.last_value, position.is_called)
