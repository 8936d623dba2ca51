"""Units of one batch on their way: who has begun, who has committed, who failed first."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pgsub.apply.rows.table_state_filter import Filter
from pgsub.apply.stream.batch import Batch
from pgsub.protocol.messages import Relation
from pgsub.target.ledger.progress import Progress


class Abandoned(Exception):
    """A unit before this one failed."""


class NoSession(Exception):
    """The further session could not be opened; the message says why."""


@dataclass(slots=True)
class Unit:
    """A run of whole transactions that one session executes and commits.

    :ivar number: its place in the batch.
    :ivar after: number of the unit that must be committed before this one is executed, -1 for none.
    :ivar turn: of its transaction: see :meth:`~pgsub.target.ledger.turns.Turns.take`.
    :ivar old: where the ledger is when it commits, and ``new`` where it leaves it.
    :ivar state: ``waiting``, ``begun`` (its transaction has taken its turn), ``committed``, ``failed``.
    :ivar lost: why only the ledger knows what became of it.
    """

    number: int
    batch: Batch
    after: int
    turn: int
    old: int
    new: int
    state: str = "waiting"
    error: BaseException | None = None
    lost: BaseException | None = None
    progress: Progress | None = None  #: of the session that committed it
    changes: int = 0
    busy: float = 0.0  #: seconds that its session computed
    counters: Counter[str] = field(default_factory=Counter)

    @property
    def ended(self) -> bool:
        """Whether nothing of it is under way any more."""
        return self.state in ("committed", "failed")


@dataclass(slots=True)
class Units:
    """The units of one batch, and what all of them are decided by.

    :ivar relations: descriptions by the publisher that hold for all of them.
    :ivar sessions: that they are for.
    :ivar changes: of all of them.
    :ivar divided: every session has something to do.
    :ivar states_version: the table states' that ``should_apply`` decides by.
    """

    units: Sequence[Unit]
    relations: dict[int, Relation]
    should_apply: Filter
    states_version: int
    sessions: int
    changes: int
    divided: bool = True
    changed: threading.Condition = field(default_factory=threading.Condition)

    def set(self, unit: Unit, state: str) -> None:
        """Note what has become of a unit."""
        with self.changed:
            unit.state = state
            self.changed.notify_all()

    def is_abandoned(self, unit: Unit) -> bool:
        """Return whether a unit cannot commit any more."""
        return any(one.state == "failed" for one in self.units[: unit.number])

    def wait(self, unit: Unit, done: Callable[[], bool]) -> None:
        """Wait, in the thread of a unit.

        :raises Abandoned: one before it has failed.
        """
        with self.changed:
            self.changed.wait_for(lambda: done() or self.is_abandoned(unit))
            if self.is_abandoned(unit):
                raise Abandoned

    def holds_up(self, unit: Unit) -> Unit:
        """Return whose commit a unit awaits before it begins, or whose commit that one awaits; else the unit itself."""
        while unit.state == "waiting" and unit.after >= 0 and self.units[unit.after].state != "committed":
            unit = self.units[unit.after]
        return unit

    @property
    def committed(self) -> int:
        """How many have committed, of those at the beginning."""
        return next((one.number for one in self.units if one.state != "committed"), len(self.units))
