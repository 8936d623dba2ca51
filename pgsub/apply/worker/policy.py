"""The interface for the differences between an apply worker and a tablesync worker."""

from __future__ import annotations

from typing import Protocol

from pgsub.apply.rows.table_state_filter import Decision, Filter
from pgsub.apply.stream.transaction_batch import Batch
from pgsub.apply.stream.transactions import RemoteTransaction
from pgsub.protocol.messages import Relation
from pgsub.target.ledger.progress import Control
from pgsub.target.ledger.skip import Skip


class Positions(Protocol):
    """The positions of a worker."""

    @property
    def remote_lsn(self) -> int:
        """End LSN of the last committed transaction."""

    @property
    def position(self) -> int:
        """Everything before it is applied or needs no applying, including idle stretches."""


class ChangePolicy(Protocol):
    """The decisions on what a committer may apply."""

    def admit(self, batch: Batch) -> int:
        """Return how many transactions may be applied now, under the lock; 0 makes the loop wait and ask again."""

    def admit_end(self, transaction: RemoteTransaction) -> bool:
        """Return whether the end of a prepared transaction may be applied now; called without the lock."""
        return True

    def should_apply(self, relation: Relation, oid: int | None, finish_lsn: int) -> Decision | None:
        """Decide about a relation's changes, under the progress row's lock.

        This method is a :data:`~pgsub.apply.rows.table_state_filter.Filter`.
        """

    def skip(self) -> Skip | None:
        """Return the skip for the transactions that :meth:`admit` admitted last."""

    def holds(self) -> bool:
        """Return whether :meth:`should_apply` may decide to keep changes: only tables in the care of apply are held."""
        return False


class WorkerPolicy(ChangePolicy, Protocol):
    """The differences between an apply worker and a tablesync worker."""

    def attach(self, loop: Positions) -> None:
        """Set the loop whose positions the policy reads; called once, before anything else."""

    def filter_for_streaming(self) -> tuple[int, Filter] | None:
        """Return the filter for transactions without a finish LSN, and the states_version that it is based on.

        Return None while a decision needs the LSN. The caller checks the version when the transaction ends.
        """

    def refused(self) -> bool:
        """Act without the lock after :meth:`admit` gave 0; return True if what waits is no longer this worker's."""

    def boundary(self, control: Control | None) -> bool:
        """Act between batches and when idle; return True to end the worker. ``control`` is fresh if given."""

    def hurries(self) -> bool:
        """Return whether somebody waits for apply to reach a position or to continue."""
        return False

    def unfinished(self) -> bool:
        """Return whether :meth:`boundary` has work left after the stream was applied up to its end."""
