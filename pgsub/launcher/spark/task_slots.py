"""How many task slots of Spark subscriptions need, and what it says of those that it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pgsub.common.subscription import Subscription
from pgsub.spark import settings

#: Task slots to spare on a local Spark for subscriptions that come later; there a slot is a thread and costs nothing.
SPARE_SLOTS = 48


@dataclass(frozen=True, slots=True)
class Slots:
    """Answer of Spark about a job: whether its task runs, and how many slots there are for all tasks.

    :ivar needed: see :func:`least_slots`.
    :ivar more: the command that gives Spark more of them, None where that is not known.
    """

    runs: bool
    registered: int
    needed: int
    more: str | None

    @property
    def too_few(self) -> bool:
        """Whether there is no slot beyond those that apply workers keep."""
        return self.registered < self.needed


def start_worker(master: str) -> str:
    """Return the command that adds a worker to a standalone cluster."""
    return f'"$SPARK_HOME"/sbin/start-worker.sh {master}'


def more_slots(chosen: Mapping[str, str], needed: int) -> str | None:
    """Return the command that gives Spark as many slots; None where only its administrator knows.

    :param chosen: Spark settings of the user.
    """
    master = chosen.get("spark.master")
    if master is None:
        return "pgsub run"  # it counts the subscriptions
    cores = needed * int(chosen.get("spark.task.cpus") or 1)
    standalone = master.startswith("spark://")
    if settings.is_local(master) or (standalone and int(chosen.get("spark.cores.max") or cores) < cores):
        return f"pgsub run {settings.more_cores(master, cores).splitlines()[-1]}"
    return start_worker(master) if standalone else None


def slots_of(sub: Subscription) -> int:
    """Count the tasks that one subscription runs at once at most: apply, and chunks of each table that synchronizes."""
    return 1 + sub.max_sync_workers * sub.copy_workers


def least_slots(subscriptions: Sequence[Subscription]) -> int:
    """Return how many slots a cluster needs: one for each apply worker, and one in which copies take turns."""
    return len(subscriptions) + 1 if subscriptions else 0
