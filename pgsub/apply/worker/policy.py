"""What an apply worker and a tablesync worker do differently: asked by the loop that both run."""

from __future__ import annotations

from typing import Protocol

from pgsub.apply.rows.change_filter import Filter
from pgsub.apply.stream.batch import Batch
from pgsub.protocol.messages import Relation
from pgsub.target.ledger.progress import Control


class Positions(Protocol):
    """Where the worker is."""

    @property
    def remote_lsn(self) -> int:
        """End LSN of the last committed transaction."""

    @property
    def position(self) -> int:
        """Everything before it is applied or needs no applying, idle stretches included."""


class ChangePolicy(Protocol):
    """What may be applied: all that a committer asks."""

    def admit(self, batch: Batch) -> int:
        """How many of these may be decided now, under the lock; 0 makes the loop wait and ask again."""

    def admits(self, relation: Relation, oid: int, finish_lsn: int) -> int | None:
        """The oid of the subscribed table if a change is taken, None to leave it; asked under the progress row's lock.

        :param oid: of the target's table that bears the relation's name; negative where there is none.
        :return: as :class:`~pgsub.apply.rows.change_filter.Kept` where the change is to be kept.
        """

    def holds(self) -> bool:
        """Whether :meth:`admits` may have a change kept."""


class WorkerPolicy(ChangePolicy, Protocol):
    """What an apply worker and a tablesync worker do differently."""

    def attach(self, loop: Positions) -> None:
        """Called once, before anything else: the loop whose positions the policy looks at."""

    def filter_for_streaming(self) -> tuple[int, Filter] | None:
        """The filter for transactions that have no finish LSN yet, and the states_version it decides by.

        None while it takes one to decide. Whoever uses it checks the version when the transaction ends.
        """

    def refused(self) -> bool:
        """Called without the lock after :meth:`admit` gave 0; True: what waits is not this worker's any more."""

    def boundary(self, control: Control | None) -> bool:
        """Called between batches and when idle; ``control`` is fresh when given. True ends the worker well."""

    def unfinished(self) -> bool:
        """Whether something is left to do in :meth:`boundary` although the stream was applied as far as it is to be."""
