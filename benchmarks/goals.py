"""What the figures are judged by: the goal of each, and the ceiling above which it counts as not done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Goal:
    """Limits of one figure.

    :ivar goal: what is wanted.
    :ivar ceiling: what is still acceptable.
    :ivar absolute: the limits are of pgsub's own figure (seconds, bytes); else of its ratio to the other side's.
    """

    goal: float
    ceiling: float
    absolute: bool = False

    def verdict(self, value: float) -> str:
        """``goal``, ``ceiling`` (kept, the goal missed) or ``above``."""
        if value <= self.goal:
            return "goal"
        return "ceiling" if value <= self.ceiling else "above"


def _at_most(value: float) -> Goal:
    return Goal(value, value, absolute=True)


#: By case and figure. They hold for the full sizes, two cores, PostgreSQL 18 and a machine that does nothing else.
GOALS: dict[tuple[str, str], Goal] = {
    ("sync-executors", "time"): Goal(1.10, 1.10),
    ("insert", "time"): Goal(0.85, 0.95),
    ("update", "time"): Goal(0.80, 0.95),
    ("delete", "time"): Goal(0.80, 0.95),
    ("pgbench", "time"): Goal(0.45, 0.60),
    ("singles", "time"): Goal(0.65, 0.85),
    ("latency", "p50"): _at_most(0.010),
    ("latency", "p99"): _at_most(0.100),
    ("latency", "lag at the end"): _at_most(0.100),
    ("slow-statements", "time"): Goal(1 / 3, 1 / 3),
    ("slow-auto", "time"): Goal(1 / 2, 1 / 2),
    ("slow-commits", "time"): Goal(1 / 3, 1 / 3),
    ("wide-indexes", "time"): Goal(0.65, 0.75),
    ("local-auto", "time"): Goal(1.02, 1.02),
    ("stream-5gb", "python memory"): _at_most(400e6),
}

#: By case: pgsub's time as a multiple of the slowest of its floors, with one session.
FLOORS: dict[str, Goal] = {
    "insert": Goal(1.25, 1.25),
    "update": Goal(1.25, 1.25),
    "delete": Goal(1.25, 1.25),
    "pgbench": Goal(1.30, 1.30),
    "singles": Goal(1.15, 1.15),
}
