"""``run --until-…``: the goal of a run, and whether it is reached."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

import psycopg

from pgsub.apply import verified_publisher
from pgsub.common.errors import Directive, PgsubError, StateStoreError
from pgsub.common.subscription import Subscription
from pgsub.launcher.mirror.mirror import Mirror
from pgsub.launcher.workers.apply_worker import ApplyWorkerHandle
from pgsub.launcher.workers.sequence_worker import SequenceWorker
from pgsub.launcher.workers.sync_workers import SyncWorkers
from pgsub.publisher import publication
from pgsub.tablesync import sync_order
from pgsub.target.ledger import two_phase_state, worker_takeover


@dataclass(slots=True)
class Goal:
    """The goal of a bounded run, which ``create`` and ``run --until-…`` start.

    :ivar caught_up: end when every table is in state ``r``, two_phase is not pending, and apply has reached the
        position that the publisher has at that moment.
    :ivar until_lsn: apply nothing beyond this position, 0 for no limit.
    :ivar everything: for ``caught_up``, also wait until every replicated sequence has the publisher's value or is
        ahead, and fail if a publication is missing.
    """

    caught_up: bool = False
    until_lsn: int = 0
    everything: bool = False

    @property
    def bounded(self) -> bool:
        """Whether the run has a goal."""
        return self.caught_up or bool(self.until_lsn)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a run: ``reached``, ``stopped``, ``disabled`` or ``failed``, and the error to exit with."""

    name: str
    error: PgsubError | None = None


class GoalCheck:
    """The progress of one subscription towards its goal. It outlives the sessions that serve it."""

    def __init__(self, goal: Goal, sub: Subscription) -> None:
        self.goal = goal
        self._sub = sub
        self._position = 0  #: the publisher's position when all tables were synchronized
        self._missing: PgsubError | None = None  #: says which publications were missing then

    def caught_up(
        self,
        session: psycopg.Connection,
        mirror: Mirror,
        apply: ApplyWorkerHandle,
        sync: SyncWorkers,
        sequences: SequenceWorker,
        unrecorded: PgsubError | None,
    ) -> Outcome | None:
        """Return how the run ends if everything is caught up or can never be, None while it goes on.

        :param unrecorded: why the state store cannot be written. The ledger does not get the position behind a conflict
            that is not recorded, and no attempt at sequences succeeds, so the run would not end.
        """
        if not self.goal.caught_up:
            return None
        error = sync.hopeless(mirror.relations)
        if error is None and _unfinished(mirror):
            return None
        if mirror.held.releasing:
            return None
        if not self._position:
            position = verified_publisher.committed_position(session, self._sub)
            if self.goal.everything:
                # guard: a subscription without one of its publications is not reported as caught up
                self._missing = self._absence(session)
            worker_takeover.ask_to_record(session, self._sub.subid, position)
            self._position = position
        if unrecorded is not None and apply.alive and apply.applied >= self._position > mirror.reported_lsn:
            return Outcome("failed", unrecorded)
        well = self.goal.everything
        waits = well and not (unrecorded is not None and isinstance(sequences.error, StateStoreError))
        if not (apply.alive and mirror.reported_lsn >= self._position and sequences.settled(well=waits)):
            return None
        error = error or self._missing or (sequences.error if well else None)
        return Outcome("failed" if error else "reached", error)

    def _absence(self, session: psycopg.Connection) -> PgsubError | None:
        with closing(verified_publisher.connect(session, self._sub)) as connection:
            return publication.absence(connection, self._sub)

    def ended(self, apply: ApplyWorkerHandle) -> Outcome | None:
        """Return how the run ends with its apply worker, None while it goes on. Unbounded runs keep trying."""
        failed = apply.failed
        if apply.reached and self.goal.until_lsn:
            return Outcome("reached")
        if self.goal.bounded and failed is not None and failed.directive is not Directive.RETRY:
            return Outcome("failed", failed)
        return None


def _unfinished(mirror: Mirror) -> bool:
    """Return whether a table is not synchronized yet, or the worker is about to restart for two_phase."""
    relations = mirror.relations
    if any(one.srsubstate != "r" or sync_order.unfinished(one) for one in relations):
        return True
    return bool(relations) and mirror.two_phase == two_phase_state.PENDING
