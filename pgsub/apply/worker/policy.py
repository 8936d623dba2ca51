"""The differences between an apply worker and a tablesync worker, as the loop that both run asks for them."""

from __future__ import annotations

from typing import Protocol

from pgsub.apply.rows.table_state_filter import Decision, Filter
from pgsub.apply.stream.batch import Batch
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
        """Everything before it is applied or needs no applying, idle stretches included."""


class ChangePolicy(Protocol):
    """The decisions about what a committer may apply."""

    def admit(self, batch: Batch) -> int:
        """Return how many of these may be applied now, under the lock; 0 makes the loop wait and ask again."""

    def admit_end(self, transaction: RemoteTransaction) -> bool:
        """Return whether what ends a prepared transaction may be applied now; asked without the lock."""
        return True

    def should_apply(self, relation: Relation, oid: int | None, finish_lsn: int) -> Decision | None:
        """Decide about a change, under the progress row's lock.

        It is a :data:`~pgsub.apply.rows.table_state_filter.Filter`.
        """

    def skip(self) -> Skip | None:
        """Return what is to be skipped of the transactions that :meth:`admit` admitted last."""

    def holds(self) -> bool:
        """Return whether :meth:`should_apply` may have a change kept."""
        return False


class WorkerPolicy(ChangePolicy, Protocol):
    """The differences between an apply worker and a tablesync worker."""

    def attach(self, loop: Positions) -> None:
        """Take the loop whose positions the policy looks at; called once, before anything else."""

    def filter_for_streaming(self) -> tuple[int, Filter] | None:
        """Return the filter for transactions that have no finish LSN yet, and the states_version it decides by.

        None while the decision needs one. The caller checks the version when the transaction ends.
        """

    def refused(self) -> bool:
        """Act without the lock after :meth:`admit` gave 0; True: what waits is not this worker's any more."""

    def boundary(self, control: Control | None) -> bool:
        """Act between batches and when idle; ``control`` is fresh when given. True ends the worker well."""

    def hurries(self) -> bool:
        """Return whether somebody waits for apply to get to a position or to go on."""
        return False

    def unfinished(self) -> bool:
        """Return whether :meth:`boundary` has something to do although the stream was applied as far as it is to be."""
