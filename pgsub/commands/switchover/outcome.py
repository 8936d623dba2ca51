"""The result of a switchover, as it is printed and as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

DONE, AS_BEFORE, UNDER_WAY, NONE, REHEARSED = "done", "as before", "under way", "none", "rehearsed"


@dataclass(slots=True)
class Outcome:
    """Result of a switchover.

    :ivar state: one of the words above.
    :ivar giving: phase of the giving side, ``taking`` of the other; None where there is no row.
    :ivar pause: seconds for which clients could write on neither side, or that are expected.
    :ivar unreachable: sides whose phase is not known, because they cannot be reached.
    """

    name: str
    back_name: str
    state: str
    giving: str | None = None
    taking: str | None = None
    pause: float | None = None
    steps: dict[str, float] = field(default_factory=dict)
    said: str | None = None
    obstacles: list[dict[str, Any]] = field(default_factory=list)
    unreachable: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """Make the JSON object."""
        return {
            "subscription": self.name,
            "back": self.back_name,
            "state": self.state,
            "giving": self.giving,
            "taking": self.taking,
            "pause": None if self.pause is None else round(self.pause, 3),
            "steps": {name: round(seconds, 3) for name, seconds in self.steps.items()},
            "said": self.said,
            "obstacles": self.obstacles,
            "unreachable": list(self.unreachable),
        }
