"""How changes were executed: what pg_stat_subscription_stats shows of it."""

from __future__ import annotations

from dataclasses import dataclass

from pgsub.apply.sets.writer import SetResult


@dataclass(slots=True)
class Counters:
    """How changes were executed, for statistics.

    :ivar in_sets: changes that were executed as sets.
    :ivar folded: of them, those that touched no row of their own: a later change of the same row took them along.
    :ivar serial: sets of one relation's changes that could not be one, and went row by row.
    :ivar fallbacks: batches, or blocks of large ones, that were undone and replayed row by row.
    """

    in_sets: int = 0
    folded: int = 0
    serial: int = 0
    fallbacks: int = 0

    def add(self, other: Counters) -> None:
        """What another executor did that counts now."""
        self.in_sets += other.in_sets
        self.folded += other.folded
        self.serial += other.serial
        self.fallbacks += other.fallbacks

    def note(self, result: SetResult) -> None:
        """A block was executed."""
        self.in_sets += result.changes
        self.folded += result.folded
        self.serial += len(result.serial)
