"""Commits a transaction that a parallel worker applied while it was received.

Mirrors apply_handle_stream_commit and apply_handle_stream_prepare (worker.c) for TRANS_LEADER_SEND_TO_PARALLEL.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

import psycopg

from pgsub.apply.commit.ledger_commit import LedgerCommit
from pgsub.apply.commit.prepared_transactions import Applied
from pgsub.apply.parallel.worker import ParallelWorker
from pgsub.apply.rows.worker_sessions import TargetSession
from pgsub.apply.stream.transactions import RemoteTransaction
from pgsub.common.errors import PgsubError, StreamsMustRestart
from pgsub.target.ledger.progress import Progress

_log = logging.getLogger(__name__)


class ParallelCommit:
    """The end of transactions that parallel workers applied.

    :param session: the worker's own session.
    :param own: ledger commits of that session; is told whether an event was recorded.
    :param counters: changes by method; those of parallel workers are added.
    :param beat: called regularly while a parallel worker is waited for.
    :ivar changes: rows that parallel workers applied, for statistics.
    """

    def __init__(
        self, session: TargetSession, own: LedgerCommit, counters: Counter[str], beat: Callable[[], None]
    ) -> None:
        self._session = session
        self._own = own
        self._counters = counters
        self._beat = beat
        self.changes = 0

    def commit(self, remote_lsn: int, transaction: RemoteTransaction, parallel: ParallelWorker) -> int | None:
        """Commit the parallel worker's transaction.

        :param remote_lsn: position of the ledger.
        :return: its new position; None if the transaction must be replayed from its file.
        """
        completed = self._completed(transaction, parallel)
        if completed is None:
            return None
        session, records = completed
        ledger_commit = LedgerCommit(session)
        try:
            session.progress.lock(remote_lsn)
            if not self._still_holds(session.progress, parallel, ledger_commit):
                return None
            ledger_commit.record(records)
            moved = ledger_commit.commit(remote_lsn, transaction)
        except (PgsubError, psycopg.Error) as error:
            if error.sqlstate is None or isinstance(error, StreamsMustRestart) or not ledger_commit.rolled_back():
                raise  # it may be committed, which only the ledger knows
            _log.debug("transaction %s is replayed from its file: %s", transaction.xid, error)
            return None
        self._done(transaction, parallel, ledger_commit.recorded)
        return moved

    def held(self, transaction: RemoteTransaction, parallel: ParallelWorker) -> Applied | None:
        """Return the parallel worker's session and records for PREPARE; None if the transaction must be replayed."""
        completed = self._completed(transaction, parallel)
        if completed is None:
            return None
        self._session.progress.read()
        if not self._still_holds(self._session.progress, parallel, LedgerCommit(completed[0])):
            return None
        self._done(transaction, parallel, recorded=False)
        return completed

    def _completed(self, transaction: RemoteTransaction, parallel: ParallelWorker) -> Applied | None:
        """Wait for the parallel worker; return None if it gave the transaction up."""
        records, session = parallel.complete(transaction, self._beat), parallel.session
        if records is None or session is None:
            _log.debug("transaction %s is replayed from its file: %s", transaction.xid, parallel.reason)
            return None
        return session, records

    def _still_holds(self, progress: Progress, parallel: ParallelWorker, ledger_commit: LedgerCommit) -> bool:
        """Check that the parallel worker's decisions still hold; else roll its transaction back.

        :param progress: as just read.
        :param ledger_commit: ledger commits of the parallel worker's session.
        """
        changed = progress.states_version != parallel.version
        # guard: work done early commits only under the table states it was decided with, without "changed or "
        if changed or progress.skips:
            why = "the states of tables changed meanwhile" if changed else "something is to be skipped"
            _log.debug("transaction %s is replayed: %s", parallel.xid, why)
            ledger_commit.rolled_back()  # its locks would block the replay
            return False
        return True

    def _done(self, transaction: RemoteTransaction, parallel: ParallelWorker, recorded: bool) -> None:
        self._own.recorded |= recorded
        self.changes += parallel.changes
        self._counters.update(parallel.counters)
        self._session.relations.learn_from(transaction)
