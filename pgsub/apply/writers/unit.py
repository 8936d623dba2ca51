"""The state of the units of one batch: which have begun, committed or failed."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pgsub.apply.rows.table_state_filter import Filter
from pgsub.apply.stream.transaction_batch import Batch
from pgsub.protocol.messages import Relation
from pgsub.target.ledger.progress import Progress


class Abandoned(Exception):
    """Failure of an earlier unit."""


class NoSession(Exception):
    """Failure to open a further session; the message is the reason."""


@dataclass(slots=True)
class Unit:
    """A run of whole transactions that one session executes and commits.

    :ivar number: its index in the batch.
    :ivar after: number of the unit that must be committed before this one is executed, -1 for none.
    :ivar turn: turn of its transaction: see :meth:`~pgsub.target.ledger.commit_turns.Turns.take`.
    :ivar old: position of the ledger before its commit; ``new`` is the one after it.
    :ivar state: ``waiting``, ``begun`` (its transaction has taken its turn), ``committed``, ``failed``.
    :ivar lost: the error if only the ledger knows whether it was committed.
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
    progress: Progress | None = None  #: progress of the session that committed it
    changes: int = 0
    busy: float = 0.0  #: computing time of its session in seconds
    counters: Counter[str] = field(default_factory=Counter)

    @property
    def ended(self) -> bool:
        """Whether it is committed or failed."""
        return self.state in ("committed", "failed")


@dataclass(slots=True)
class Units:
    """The units of one batch with their common filter.

    :ivar relations: the publisher's relation descriptions for all of them.
    :ivar sessions: number of sessions that execute them.
    :ivar divided: every session has work.
    :ivar states_version: version of the table states that ``should_apply`` is based on.
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
        """Set the state of a unit."""
        with self.changed:
            unit.state = state
            self.changed.notify_all()

    def is_abandoned(self, unit: Unit) -> bool:
        """Return whether an earlier unit has failed, so that this one cannot commit."""
        return any(one.state == "failed" for one in self.units[: unit.number])

    def wait(self, unit: Unit, done: Callable[[], bool]) -> None:
        """Wait until ``done`` is true, in the thread of a unit.

        :raises Abandoned: an earlier unit has failed.
        """
        with self.changed:
            self.changed.wait_for(lambda: done() or self.is_abandoned(unit))
            if self.is_abandoned(unit):
                raise Abandoned

    def holds_up(self, unit: Unit) -> Unit:
        """Return the unit whose commit a unit finally waits for before it begins; itself if it does not wait."""
        while unit.state == "waiting" and unit.after >= 0 and self.units[unit.after].state != "committed":
            unit = self.units[unit.after]
        return unit

    @property
    def committed(self) -> int:
        """The number of committed units before the first uncommitted one."""
        return next((one.number for one in self.units if one.state != "committed"), len(self.units))
