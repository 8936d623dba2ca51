"""Commits remote transactions on the target: each whole, in order, together with the ledger.

The promise is kept here alone: the lock before the decision, and the compare-and-set together with the data. Mirrors
apply_handle_commit, apply_handle_stream_commit and apply_handle_prepare (worker.c).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from pgsub.apply.commit.ledger_commit import LedgerCommit
from pgsub.apply.commit.prepared_transactions import Applied, TwoPhase
from pgsub.apply.conflicts.logical_messages import LoggedMessage
from pgsub.apply.conflicts.skipped_publication import SkippedPublication
from pgsub.apply.execute.executor import Executor
from pgsub.apply.parallel.worker import ParallelWorker
from pgsub.apply.rows.set_fallback import SetFallback
from pgsub.apply.rows.worker_sessions import TargetSession
from pgsub.apply.skip.skip import SkipHandler
from pgsub.apply.stream.transaction_batch import Batch
from pgsub.apply.stream.transactions import Kind, RemoteTransaction
from pgsub.apply.worker.batch_size import can_be_located, good_before
from pgsub.apply.worker.parallel_commit import ParallelCommit
from pgsub.apply.worker.policy import ChangePolicy
from pgsub.apply.writers.pool import Writers
from pgsub.common import failpoints
from pgsub.common.errors import PgsubError, StreamsMustRestart, TableAltered
from pgsub.common.server_words import DEADLOCK
from pgsub.protocol.messages import LogicalMessage, Relation
from pgsub.target.ledger import subscriptions
from pgsub.target.ledger.skip import Skip
from pgsub.target.sql.prepared_statements import DEALLOCATED

_log = logging.getLogger(__name__)

_TRIES = 5
#: Maximum transactions per commit if changes are executed row by row. A row that all of them change has a version for
#: each, and none can be pruned before the commit.
ROW_TRANSACTIONS = 200
#: Maximum transactions per commit if sets change each row once.
TRANSACTIONS = 1_000_000
#: Maximum number of non-transactional messages that wait for a commit.
_MESSAGES = 1000


class Committer:
    """The committer of transactions through the worker's own session, including those that parallel workers applied.

    :param stop_streaming: stops parallel workers if this session is in a deadlock; returns False if there are none.
    :param beat: called regularly while a parallel worker is waited for.
    :param writers: further sessions that apply, if any.
    :param transactional: each transaction of the publisher is committed separately.
    :param set_based: changes may be executed as sets.
    :ivar remote_lsn: end LSN of the last committed transaction.
    :ivar ledger_commit: ends the transactions.
    """

    def __init__(
        self,
        session: TargetSession,
        policy: ChangePolicy,
        *,
        stop_streaming: Callable[[], bool] = lambda: False,
        beat: Callable[[], None] = lambda: None,
        writers: Writers | None = None,
        transactional: bool = False,
        set_based: bool,
    ) -> None:
        self._session = session
        self._policy = policy
        self._stop_streaming = stop_streaming
        self._beat = beat
        self.ledger_commit = LedgerCommit(session)
        self._executor = Executor(
            session.connection,
            session.relations,
            self.ledger_commit.record,
            set_based=set_based,
            holds=policy.holds,
            looks_again=True,
        )
        self.counters = self._executor.counters
        self._set_based = set_based
        self._writers = writers
        self._beside = False  #: writers are working beside the own session
        self._altered = 0  #: attempts in a row in which a table was altered
        self._most = 1 if transactional else TRANSACTIONS
        self._limit = min(self._most, TRANSACTIONS if set_based else ROW_TRANSACTIONS)
        self._parallel = ParallelCommit(session, self.ledger_commit, self.counters, beat)
        self._skipping = SkipHandler(self.ledger_commit, self._executor)
        self._two_phase = TwoPhase(self.ledger_commit, policy.skip)
        self._messages: list[LoggedMessage | SkippedPublication] = []
        self.remote_lsn = session.progress.remote_lsn

    @property
    def changes(self) -> int:
        """Number of applied rows, for statistics."""
        return self._executor.changes + self._parallel.changes + (self._writers.changes if self._writers else 0)

    def take_message(self, message: LogicalMessage) -> None:
        """Buffer a non-transactional message."""
        self._messages.append(LoggedMessage.of(message, None))
        if len(self._messages) >= _MESSAGES:
            self.record_messages()

    def take_skipped_publication(self, subid: int, position: int) -> None:
        """Buffer the notice that changes were decoded without a publication, behind a position.

        A stream may begin before a publication that was made and added only now. Its tables are copied as of later.
        """
        # guard: a publication that was just made and added is not said to have been missing, always
        if not subscriptions.grown_since(self._session.connection, subid, position):
            self._messages.append(SkippedPublication())

    def record_messages(self) -> None:
        """Commit the buffered messages. Ledger and feedback must not pass them before: they are not sent again."""
        if not self._messages:
            return
        with self._session.connection.transaction():
            self._session.progress.lock(self.remote_lsn)
            self.ledger_commit.record(self._messages)
        self._messages = []

    def apply(self, batch: Batch, parallel: ParallelWorker | None = None) -> int:
        """Apply transactions from the start of a batch, as many as the policy admits, if possible in one commit.

        :param batch: transactions of kind COMMIT, or a single one of any kind.
        :param parallel: the worker that applied the single transaction while it was received.
        :return: the number of committed transactions; 0 if the policy must be asked again.
        :raises PgsubError: located; the session has left its transaction, or is lost.
        """
        first = batch.items[0]
        if isinstance(first, RemoteTransaction):
            if first.kind is Kind.PREPARE:
                return self._prepare(first, parallel)
            if first.kind is not Kind.COMMIT:
                if not self._policy.admit_end(first):
                    return 0
                return self._moved(self._two_phase.finish(self.remote_lsn, first))
            if parallel is not None:
                moved = self._parallel.commit(self.remote_lsn, first, parallel)
                if moved is not None:
                    return self._moved(moved)
        writers = self._writers
        batch = batch.cut(self._limit if writers is None else writers.limit(self._limit, len(batch)))[0]
        serial = self.counters["serial_relations"]
        done = self._trying(lambda: self._commit(batch))
        by_rows = done is None or not self._set_based or self.counters["serial_relations"] > serial
        self._limit = min(ROW_TRANSACTIONS if by_rows else 2 * self._limit, self._most)
        return self._serially(batch) if done is None else done

    # whole transactions, in the worker's own session

    def _trying(self, apply: Callable[[], int]) -> int | None:
        """Try, and retry where that helps; return None if the faulty row has yet to be located."""
        before = self._session.relations.snapshot()
        self._altered = 0
        for _ in range(_TRIES):
            try:
                return apply()
            except SetFallback as deviation:
                self._back_to(before)
                if self._was_beside():
                    continue
                _log.debug("a batch is replayed row by row: %s", deviation)
            except PgsubError as error:
                if not self._back_to(before):
                    raise
                if self._was_beside():
                    continue
                if error.sqlstate == DEALLOCATED or isinstance(error, TableAltered):
                    continue
                if error.sqlstate == DEADLOCK and self._stop_streaming():
                    continue
                if not can_be_located(error):
                    raise
            self.counters["set_fallbacks"] += 1
            break
        return None

    def _was_beside(self) -> bool:
        """Return whether the failed attempt ran beside other sessions; alone it may succeed, or shows the fault."""
        beside, self._beside = self._beside, False
        return beside

    def _back_to(self, relations: dict[int, Relation]) -> bool:
        """Restore the relations after a rollback; return False if the session is lost."""
        if not self.ledger_commit.rolled_back():
            return False
        self._session.relations.restore(relations)
        self._executor.forget()
        return True

    def _start_over(self, relations: dict[int, Relation], why: SetFallback | TableAltered) -> None:
        if not self._back_to(relations):
            raise StreamsMustRestart("the session was lost")
        self._altered = self._altered + 1 if isinstance(why, TableAltered) else 0
        if self._altered > _TRIES:  # a trigger of the transaction itself may alter the table
            raise why

    def _serially(self, batch: Batch) -> int:
        """Apply row by row: commit all transactions before the faulty one, and raise the located fault."""
        total, size = len(batch), min(ROW_TRANSACTIONS, self._most)
        with self._executor.row_by_row():
            while len(batch):
                part = batch.cut(size)[0]
                before = self._session.relations.snapshot()
                try:
                    done = self._commit(part)
                # a row appeared while its change was buffered, or moved, or a table was altered before its lock: retry
                except (SetFallback, TableAltered) as why:
                    self._start_over(before, why)
                    continue
                except PgsubError as error:
                    size = good_before(part, error)
                    if not self._back_to(before) or not size:
                        raise
                    continue
                batch = batch.cut(done)[1]
                if not done:
                    break
                size = min(2 * size, ROW_TRANSACTIONS, self._most)
                self._beat()
        return total - len(batch)

    def _commit(self, batch: Batch) -> int:
        clock = time.monotonic()
        self._session.progress.open(self.remote_lsn)
        opened = time.monotonic() - clock
        if not (count := self._policy.admit(batch)):
            self._session.connection.execute("ROLLBACK")
            return 0
        failpoints.point("apply.batch_open")
        batch = batch.cut(count)[0]
        writers = self._writers
        if writers is None or self._executor.names_rows:
            return self._commit_open(batch)
        units = writers.units(batch, self.remote_lsn)
        if isinstance(units, int):
            with writers.gain.one(lambda: self._executor.changes, opened):
                return self._commit_open(batch.cut(min(units, self._limit))[0])
        self._beside = True
        with writers.beside(units):
            self._commit_open(units.units[0].batch)
        self._beside = False
        done, remote_lsn = writers.finish(units)
        self._moved(remote_lsn)
        return done

    def _commit_open(self, batch: Batch) -> int:
        batch = self._run(batch)
        self._moved(self.ledger_commit.commit(self.remote_lsn, batch.last))
        return len(batch)

    def _run(self, batch: Batch) -> Batch:
        """Apply the batch in the open transaction; apply only its first part if something is to be skipped."""
        skip = self._skip()
        if skip is None:
            self.ledger_commit.record(self._executor.run(batch.items, self._policy.should_apply))
            return batch
        part = self._skipping.part(skip, batch)
        self._skipping.run(skip, part, self._policy.should_apply)
        return part

    def _skip(self) -> Skip | None:
        """Return the ledger's present skip. Also set the rules with a limit, which only the apply worker uses."""
        progress = self._session.progress
        self._session.relations.limit_rules(progress.rules if progress.applies else ())
        return self._policy.skip()

    def _moved(self, remote_lsn: int) -> int:
        self.remote_lsn = remote_lsn
        self._executor.settled()
        return 1

    # prepared transactions

    def _prepare(self, transaction: RemoteTransaction, parallel: ParallelWorker | None) -> int:
        def applied(transaction: RemoteTransaction) -> Applied | None:
            # a failed PREPARE discards the parallel worker's transaction, so the next try starts from scratch
            nonlocal parallel
            once, parallel = parallel, None
            held = None if once is None else self._parallel.held(transaction, once)
            return held or self._open(transaction)

        def attempt() -> int:
            moved = self._two_phase.prepare(self.remote_lsn, transaction, applied)
            return 0 if moved is None else self._moved(moved)

        done = self._trying(attempt)
        if done is not None:
            return done
        with self._executor.row_by_row():
            while True:
                before = self._session.relations.snapshot()
                try:
                    return attempt()
                except (SetFallback, TableAltered) as why:  # see _serially()
                    self._start_over(before, why)
                except PgsubError:
                    self.ledger_commit.rolled_back()
                    raise

    def _open(self, transaction: RemoteTransaction) -> Applied | None:
        """Apply in a transaction that never locks the progress row: a prepared transaction would keep the lock."""
        progress = self._session.progress
        progress.read()
        if progress.remote_lsn != self.remote_lsn:
            raise StreamsMustRestart("the ledger is not where this worker left it")
        if not self._policy.admit(Batch([transaction])):
            return None
        self._session.connection.execute("BEGIN")
        skip = self._skip()
        if skip is None:
            return self._session, self._executor.run([transaction], self._policy.should_apply)
        self._skipping.run(skip, Batch([transaction]), self._policy.should_apply)
        return self._session, ()
