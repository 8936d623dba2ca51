"""How many task slots of Spark subscriptions need, and what it says of those that it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pgsub.common.subscription import Subscription

#: Task slots to spare on a local Spark for subscriptions that come later; there a slot is a thread and costs nothing.
SPARE_SLOTS = 48


@dataclass(frozen=True, slots=True)
class Slots:
    """Answer of Spark about a job: whether its task runs, and how many slots there are for all tasks."""

    runs: bool
    registered: int
    master: str


def start_worker(master: str) -> str:
    """Return the command that adds a worker to a standalone cluster."""
    return f'"$SPARK_HOME"/sbin/start-worker.sh {master}'


def slots_of(sub: Subscription) -> int:
    """Count the tasks that one subscription runs at once at most: apply, and chunks of each table that synchronizes."""
    return 1 + sub.max_sync_workers * sub.copy_workers


def least_slots(subscriptions: Sequence[Subscription]) -> int:
    """Return how many slots a cluster needs: one for each apply worker, and one in which copies take turns."""
    return len(subscriptions) + 1 if subscriptions else 0
