"""The result of a switchover, as it is printed and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

DONE, AS_BEFORE, UNDER_WAY, NONE, REHEARSED = "done", "as before", "under way", "none", "rehearsed"


class Choice(NamedTuple):
    """A thing that a person can do next.

    :ivar what: what comes of it, behind "To".
    """

    what: str
    command: str


@dataclass(slots=True)
class Outcome:
    """Result of a switchover.

    :ivar state: one of the words above.
    :ivar giving: phase of the giving side, ``taking`` of the other; None where there is no row.
    :ivar pause: seconds for which clients could write on neither side, or that are expected.
    :ivar said: what people read besides the state; programs read the other fields.
    :ivar equal: whether all tables were equal at the moment of the switchover, None where they were not compared.
    :ivar sessions: sessions of clients that would be ended on the giving side, in a rehearsal.
    :ivar choices: what a person can do, the first what is usual.
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
    equal: bool | None = None
    sessions: int | None = None
    choices: list[Choice] = field(default_factory=list)
    obstacles: list[dict[str, Any]] = field(default_factory=list)
    unreachable: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """Make the JSON object."""
        shown = {"subscription": self.name, "back": self.back_name, **asdict(self)}
        return {name: value for name, value in shown.items() if name not in ("name", "back_name")} | {
            "pause": None if self.pause is None else round(self.pause, 3),
            "steps": {name: round(seconds, 3) for name, seconds in self.steps.items()},
            "choices": [one._asdict() for one in self.choices],
        }
