"""Ends a target transaction that contains remote transactions: records, compare-and-set of the ledger, commit.

Mirrors apply_handle_commit_internal (worker.c), where the origin's progress is part of the commit record. It serves
sessions that apply whole transactions and sessions that apply them while they are received.

NOTES: Data, ``remote_lsn``, records of conflicts and skipped changes are in one commit. ``remote_lsn`` is compared and
set: the UPDATE must find the row at the position where this worker left it, under its claim. So if two workers have
applied the same transaction, only one can commit. After an error of the COMMIT only the ledger, nothing in memory, says
whether it happened. A transaction that depends on table states must lock the row before it reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import psycopg
from psycopg import sql

from pgsub.apply.commit.skipped_writer import SkippedChanges
from pgsub.apply.conflicts import conflict
from pgsub.apply.conflicts.conflict import Record, ResolvedConflict
from pgsub.apply.conflicts.error_context import Place
from pgsub.apply.rows.worker_sessions import TargetSession
from pgsub.apply.stream.transactions import RemoteTransaction
from pgsub.common import failpoints
from pgsub.common.errors import LogText, StreamsMustRestart, log_text
from pgsub.common.plural import counted
from pgsub.protocol.lsn import format_lsn
from pgsub.target.ledger import events
from pgsub.target.ledger import skip as skips
from pgsub.target.ledger.progress import of_commit
from pgsub.target.ledger.skip import Skip
from pgsub.target.sql.pipeline import StatementFailed


class LedgerCommit:
    """The end of the open transaction of one target session, together with the ledger.

    :ivar recorded: an event was recorded that the launcher must see before feedback passes it.
    """

    def __init__(self, session: TargetSession) -> None:
        self.session = session
        self._connection, self._progress = session.connection, session.progress
        self._subid, self._subname = session.relations.subid, session.relations.subname
        self.recorded = False
        self._consumed: tuple[Skip, Skip | None, list[dict[str, Any]]] | None = None  #: a skip, the rest, events
        self._used: Counter[tuple[str, str]] = Counter()  #: number of changes decided by rules with a limit

    def consume(self, skip: Skip, finish_lsn: int, skipped: Sequence[LogText] = ()) -> None:
        """Clear ``subskiplsn``, or the first of several, in the next :meth:`commit`; a rollback keeps it.

        LSNs before the transaction can match no later one (clear_subscription_skip_lsn).

        :param finish_lsn: the transaction's, or the end LSN for the end of a prepared transaction, as in the server.
        :param skipped: log messages if the transaction or its conflicting rows were skipped.
        """
        missed = skip.missed_at(finish_lsn)
        left = skip.without([*missed, finish_lsn])
        if left == skip:
            return
        bodies = [events.log_entry(*skips.cleared(lsn, finish_lsn, self._subname)) for lsn in missed]
        bodies += [events.log_entry("LOG", text) for text in skipped]
        bodies += [{"kind": "skipped", "finish_lsn": format_lsn(finish_lsn)}] if skipped else []
        self._consumed = skip, left, bodies

    def keep(self, records: Sequence[Record]) -> None:
        """Keep the changes that a rule skipped, in the transaction that would have made them."""
        resolved = [one for one in records if isinstance(one, ResolvedConflict)]
        found = [(one.transaction, one.skipped) for one in resolved if one.skipped is not None]
        for _, group in groupby(found, lambda one: id(one[0])):
            of_one = list(group)
            changes = SkippedChanges(self._connection, self._subid, of_one[0][0])
            for _, skipped in of_one:
                changes.keep(*skipped)
            changes.write()

    def record(self, records: Sequence[Record], *, keep: bool = True) -> None:
        """Record messages, and conflicts that did not stop apply, in the commit of their transaction.

        :param keep: also :meth:`keep` the skipped changes.
        """
        if not records:
            return
        self.recorded = True
        # guard: changes that a rule skips are kept
        if keep:
            self.keep(records)
        rules = [one.rule for one in records if isinstance(one, ResolvedConflict) and one.rule is not None]
        self._used.update(rule.place for rule in rules if rule.limit is not None)
        named = conflict.with_partitions(self._connection, records)
        events.add(self._connection, self._subid, *(one.body(self._subid) for one in named))

    def commit(self, old: int, last: RemoteTransaction) -> int:
        """Advance the ledger to the end of ``last`` and commit.

        :param old: position of the ledger, which must not have changed.
        :return: its new position; it never moves backwards (a transaction sent late as prepared has an old LSN).
        :raises PgsubError: located; without a SQLSTATE only the ledger knows whether it was committed.
        """
        new = max(old, last.end_lsn)
        if self._consumed is not None:
            skip, left, bodies = self._consumed
            skips.replace(self._connection, self._subid, skip, left)
            events.add(self._connection, self._subid, *bodies)
            self._consumed, self.recorded = None, True
        self._count_off()
        failpoints.point("apply.before_target_commit")
        try:
            self._progress.close(old, new, last.commit_ts)
        except StatementFailed as failure:  # e.g. a deferred constraint
            place = Place(last, last.kind.value) if of_commit(failure) else None
            raise conflict.fault(self._subid, failure.error, place) from None
        failpoints.point("apply.commit_reply_lost")
        return new

    def _count_off(self) -> None:
        """Subtract the decided changes from the limits of their rules, and log them."""
        if not self._used:
            return
        rules, used, self._used = self._progress.rules, self._used, Counter()
        left = {one.place: one.limit for one in skips.use(self._connection, self._subid, rules, used)}
        for (table, kind), count in used.items():
            more = left.get((table, kind), 0)
            then = f"{more} more will be." if more else "The limit of its rule is reached."
            verb = "was" if count == 1 else "were"
            text = f'{counted(count, "change")} of relation "{table}" {verb} skipped: conflict={kind}'
            entry = log_text(text, detail=f"What was skipped is in pgsub.skipped_change. {then}")
            events.add(self._connection, self._subid, events.log_entry("LOG", entry))

    def end(self, last: RemoteTransaction, command: sql.SQL | sql.Composed) -> None:
        """End a transaction by a statement of two-phase commit.

        :raises PgsubError: see :meth:`commit`.
        """
        try:
            done = self._connection.execute(command).statusmessage
        except psycopg.Error as error:  # a deferred constraint, or a lost reply after which only the ledger knows
            place = Place(last, last.kind.value) if error.sqlstate else None
            raise conflict.fault(self._subid, error, place) from None
        if done == "ROLLBACK":  # the server's answer if there was nothing to commit or prepare
            raise StreamsMustRestart("the target rolled back what it was to commit")

    def rolled_back(self) -> bool:
        """Roll back; return whether the session survived. If not, the error that broke it is already known."""
        self._consumed, self._used = None, Counter()
        try:
            self._connection.execute("ROLLBACK")
        except psycopg.Error:
            return False
        return True
