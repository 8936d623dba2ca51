"""Runs the publisher's PREPARE, COMMIT PREPARED and ROLLBACK PREPARED on the target. Mirrors apply_handle_prepare and
similar functions (worker.c). The ledger follows in a commit of its own: see :mod:`pgsub.target.ledger.prepared_xacts`.

NOTES: PREPARE TRANSACTION ends a transaction, so the ledger cannot move in it. Three things show how far an attempt
came: the gid names the remote transaction; the marker, written by the prepared transaction, is visible once that is
committed; the list is written with the ledger. Prepared but not listed: the ledger's commit was lost; roll back and
prepare again. Listed but not prepared: it was decided, and the marker says how. So every step may be repeated. The
prepared transaction must never lock the progress row, because it would keep the lock until it is decided.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from pgsub.apply.commit.ledger_commit import LedgerCommit
from pgsub.apply.conflicts.conflict import Record
from pgsub.apply.conflicts.error_context import Place, locate
from pgsub.apply.conflicts.logical_messages import LoggedMessage
from pgsub.apply.rows.worker_sessions import TargetSession
from pgsub.apply.stream.transactions import Kind, RemoteTransaction
from pgsub.common import failpoints, quoting
from pgsub.common.errors import ApplyError
from pgsub.target.ledger import prepared_xacts
from pgsub.target.ledger.prepared_xacts import Found, PreparedTransactions
from pgsub.target.ledger.skip import Skip

_log = logging.getLogger(__name__)

_DUPLICATE = "42710"
#: A session in whose open transaction the changes were applied, and the resulting records.
Applied = tuple[TargetSession, Sequence[Record]]
#: Applies the changes in an open transaction of some session; None if it cannot begin now.
Apply = Callable[[RemoteTransaction], Applied | None]


class TwoPhase:
    """Prepared transactions in the worker's own session.

    :param ledger_commit: of the worker's own session, which writes the ledger; other sessions may have the data.
    :param skip: returns the stream's skip, once the ledger's row is read.
    """

    def __init__(self, ledger_commit: LedgerCommit, skip: Callable[[], Skip | None]) -> None:
        self._session = session = ledger_commit.session
        self._ledger_commit = ledger_commit
        self._skip = skip
        self._subid = session.relations.subid
        self._transactions = PreparedTransactions(session.connection, self._subid)

    def prepare(self, old: int, transaction: RemoteTransaction, apply: Apply) -> int | None:
        """Prepare the transaction unless an earlier attempt did, then advance the ledger.

        :param old: position of the ledger.
        :param apply: applies the changes and leaves the target transaction open.
        :return: new position of the ledger, None if ``apply`` could not begin.
        """
        gid = self._transactions.gid(transaction.xid, transaction.finish_lsn)
        found = self._transactions.find(gid)
        missing: Sequence[Record] = ()
        if found.prepared and not found.listed:
            # Only the ledger's commit was lost. Preparing again finds and records its missing rows again.
            _log.debug("prepared transaction %s was sent again: prepared again", gid)
            self._session.connection.execute(prepared_xacts.ROLLBACK.format(gid))
        if found.listed or found.marker:
            _log.debug("prepared transaction %s was sent again: found", gid)
            self._session.relations.learn_all(transaction)
        else:
            applied = apply(transaction)
            if applied is None:
                return None
            session, records = applied
            missing = [one for one in records if not isinstance(one, LoggedMessage)]
            self._end(session, gid, transaction, records)
        self._session.progress.open(old)
        self._transactions.list_(gid, transaction.finish_lsn, transaction.xid)
        self._ledger_commit.record(missing, keep=False)
        return self._ledger_commit.commit(old, transaction)

    def _end(self, session: TargetSession, gid: str, transaction: RemoteTransaction, records: Sequence[Record]) -> None:
        """Prepare the transaction with its messages and skipped changes, which are visible only if it is committed."""
        ledger_commit = LedgerCommit(session)
        ledger_commit.record([one for one in records if isinstance(one, LoggedMessage)])
        ledger_commit.keep(records)
        # guard: a prepared transaction leaves a marker
        self._transactions.mark(session.connection, gid)
        session.progress.tag(transaction.end_lsn, transaction.commit_ts)
        failpoints.point("apply.before_prepare")
        try:
            ledger_commit.end(transaction, prepared_xacts.PREPARE.format(gid))
        except ApplyError as error:
            if "max_prepared_transactions" in (error.hint or ""):  # the server's text; add commands to paste
                error.hint = f"{error.hint}\n{prepared_xacts.ENABLE}"
            if error.sqlstate == _DUPLICATE:
                self._name_holder(error, gid)
            raise
        failpoints.point("apply.after_prepare")

    def _name_holder(self, error: ApplyError, gid: str) -> None:
        """Complete the error if another role's prepared transaction has the name; pgsub never ends that."""
        holder = self._transactions.holder(gid)
        if holder is not None:
            error.detail = f'Role "{holder[0]}" has prepared a transaction of that name in database "{holder[1]}".'
            where = f"WHERE gid = {quoting.literal(gid)};"
            error.hint = (
                "Let that role commit it or roll it back there; apply continues by itself.\n"
                f"SELECT * FROM pg_catalog.pg_prepared_xacts {where}"
            )

    def finish(self, old: int, transaction: RemoteTransaction) -> int:
        """Run COMMIT PREPARED or ROLLBACK PREPARED unless an earlier attempt did, then advance the ledger.

        :return: new position of the ledger.
        :raises ApplyError: the prepared transaction was ended by hand in the other way.
        """
        gid = self._transactions.listed(transaction.xid)
        if gid is None:
            # Publishers send this without a PREPARE for transactions that only took locks (a known bug).
            _log.debug("%s of transaction %s, which was never prepared", transaction.kind.value, transaction.xid)
        else:
            self._finish(gid, self._transactions.find(gid), transaction)
        failpoints.point("apply.after_finish_prepared")
        self._session.progress.open(old)
        if gid is not None:
            self._transactions.unlist(gid)
            # the prepared transaction had messages, and most records if many rows were missing, which are visible now
            self._ledger_commit.recorded = True
        skip = self._skip()
        if skip is not None:  # the server also clears it here, by the end LSN (apply_handle_commit_prepared)
            self._ledger_commit.consume(skip, transaction.end_lsn)
        return self._ledger_commit.commit(old, transaction)

    def _finish(self, gid: str, found: Found, transaction: RemoteTransaction) -> None:
        committing = transaction.kind is Kind.COMMIT_PREPARED
        if found.prepared:
            if committing:
                self._session.progress.tag(transaction.end_lsn, transaction.commit_ts)
            failpoints.point("apply.before_finish_prepared")
            finish = prepared_xacts.COMMIT if committing else prepared_xacts.ROLLBACK
            self._ledger_commit.end(transaction, finish.format(gid))
        elif found.marker != committing:
            raise self._ended_elsewhere(gid, transaction)
        else:
            _log.debug("%s of %s was sent again: found done", transaction.kind.value, gid)

    def _ended_elsewhere(self, gid: str, transaction: RemoteTransaction) -> ApplyError:
        committing = transaction.kind is Kind.COMMIT_PREPARED
        theirs, ours = ("rolled back", "committed") if committing else ("committed", "rolled back")
        where = f"WHERE subid = {self._subid} AND gid = {quoting.literal(gid)};"
        error = ApplyError(
            f'prepared transaction "{gid}" was {theirs} on the target, but {ours} on the publisher',
            detail="It was ended by hand: pgsub does that only when the publisher says so.",
            hint="Correct the rows of that transaction on the target, then let apply pass it:\n"
            f"DELETE FROM pgsub.prepared_xact {where} DELETE FROM pgsub.prepared_pending {where}",
            sqlstate="42704",
        )
        locate(error, self._subid, Place(transaction, transaction.kind.value))
        return error
