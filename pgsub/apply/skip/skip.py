"""Applies ``subskiplsn``: skips a transaction, or those of its rows that cannot be applied.

Mirrors maybe_start_skipping_changes, stop_skipping_changes and clear_subscription_skip_lsn (worker.c). A transaction
matches by its finish LSN. The first one with changes clears the skip, whether it matches or not. A sync worker applies
the skip too, but only the apply worker clears it. Skipped changes are kept in the same commit
(:mod:`pgsub.apply.commit.skipped_writer`).
"""

from __future__ import annotations

from pgsub.apply.commit.ledger_commit import LedgerCommit
from pgsub.apply.commit.skipped_writer import SkippedChanges, changed
from pgsub.apply.execute.executor import Executor
from pgsub.apply.rows.relation_cache import NEVER, local_name
from pgsub.apply.rows.table_state_filter import Filter
from pgsub.apply.skip.partial_skip import PartialSkip
from pgsub.apply.stream.transaction_batch import Batch
from pgsub.apply.stream.transactions import RemoteTransaction
from pgsub.common import failpoints
from pgsub.common.errors import LogText, log_text
from pgsub.common.plural import counted
from pgsub.protocol.decoder import decode_change
from pgsub.protocol.lsn import format_lsn
from pgsub.protocol.messages import Relation
from pgsub.target.ledger.skip import WHOLE, Skip


class SkipHandler:
    """The handling of transactions under a skip, inside the caller's target transaction."""

    def __init__(self, ledger_commit: LedgerCommit, executor: Executor) -> None:
        self._session = ledger_commit.session
        self._ledger_commit = ledger_commit
        self._executor = executor

    def part(self, skip: Skip, batch: Batch) -> Batch:
        """Return the first transactions of a batch that :meth:`run` takes at once.

        They end with the first one that has changes, at or after the skip's LSN if the skip waits for it.
        """
        if not self._session.progress.applies:
            lsns = [one.finish_lsn for one in batch.transactions()]
            before = next((number for number, lsn in enumerate(lsns) if lsn in skip.lsns), len(lsns))
            return batch.cut(max(before, 1))[0]
        for number, transaction in enumerate(batch.transactions()):
            if (not skip.waits or transaction.finish_lsn >= skip.lsn) and transaction.relids():
                return batch.cut(number + 1)[0]
        return batch

    def run(self, skip: Skip, batch: Batch, should_apply: Filter) -> None:
        """Apply a :meth:`part`; skip its last transaction, or rows of it, if it is the one to skip."""
        last, applies, relations = batch.last, self._session.progress.applies, self._session.relations
        changes = bool(last.relids())
        # guard: a transaction is skipped only by its own finish LSN
        if last.finish_lsn not in skip.lsns or not changes:
            self._ledger_commit.record(self._executor.run(batch.items, should_apply))
            if applies and changes:
                self._ledger_commit.consume(skip, last.finish_lsn)
            return
        before = batch.cut(len(batch) - 1)[0]
        self._ledger_commit.record(self._executor.run(before.items, should_apply))
        left = SkippedChanges(self._session.connection, relations.subid, last)
        if skip.rows == WHOLE:
            self._whole(last, left, should_apply)
        else:
            PartialSkip(self._executor, self._ledger_commit, left).run(last, should_apply)
        left.write()
        failpoints.point("apply.skipped")
        if applies:
            self._ledger_commit.consume(skip, last.finish_lsn, _messages(skip.rows, last.finish_lsn, left))

    def _whole(self, transaction: RemoteTransaction, left: SkippedChanges, should_apply: Filter) -> None:
        """Skip the whole transaction; the target need not even have the tables."""
        relations = self._session.relations
        taken: dict[int, bool] = {}
        for payload in transaction.payloads():
            message = decode_change(payload, transaction.in_stream)
            relations.learn(message)
            if isinstance(message, Relation):
                taken.pop(message.relid, None)
            for relid in changed(message):
                if relid not in taken:
                    taken[relid] = self._taken(relations.remote(relid), transaction, should_apply)
                if taken[relid]:
                    left.keep(relations.remote(relid), message, {"skipped": WHOLE})
        relations.learn_from(transaction)

    def _taken(self, remote: Relation, transaction: RemoteTransaction, should_apply: Filter) -> bool:
        """Return whether apply would make a relation's changes. It would stop at a missing relation."""
        oids = self._session.relations.oids([local_name(remote)])
        if not oids:
            return self._session.progress.applies
        [oid] = oids
        return oid != NEVER and should_apply(remote, oid, transaction.decision_lsn) is not None


def _messages(rows: str, finish_lsn: int, left: SkippedChanges) -> tuple[LogText, ...]:
    lsn = format_lsn(finish_lsn)
    what = "whole" if rows == WHOLE else "its conflicting rows"
    kept = counted(left.count, "change", ("was", "were"))
    cut = f" {counted(left.cut, 'value', ('was', 'were'))} too large to be kept." if left.cut else ""
    detail = f"Skipped {what}: {kept} not applied, see pgsub.skipped_change.{cut}"
    return (
        log_text(f"logical replication starts skipping transaction at LSN {lsn}"),
        log_text(f"logical replication completed skipping transaction at LSN {lsn}", detail=detail),
    )
