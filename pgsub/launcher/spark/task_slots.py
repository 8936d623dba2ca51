"""The number of Spark task slots that subscriptions need, and Spark's answer about the slots that it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pgsub.common.subscription import Subscription
from pgsub.spark import settings

#: Spare task slots of a local Spark for later subscriptions. There a slot is only a thread.
SPARE_SLOTS = 48


@dataclass(frozen=True, slots=True)
class Slots:
    """Spark's answer about a job: whether its task runs, and how many slots are registered for all tasks.

    :ivar needed: see :func:`least_slots`.
    :ivar more: the command that adds slots, None if it is not known.
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
    """Return the command that gives Spark the needed slots, None if only its administrator knows it.

    :param chosen: the user's Spark settings.
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
    """Return the maximum number of simultaneous tasks of a subscription: apply, and chunks of copied tables."""
    return 1 + sub.max_sync_workers * sub.copy_workers


def least_slots(subscriptions: Sequence[Subscription]) -> int:
    """Return the slots that a cluster needs: one for each apply worker, and one in which copies take turns."""
    return len(subscriptions) + 1 if subscriptions else 0
