"""The result of a switchover, as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

DONE, AS_BEFORE, UNDER_WAY, NONE, REHEARSED = "done", "as before", "under way", "none", "rehearsed"


class Choice(NamedTuple):
    """A possible next step for the user.

    :ivar what: its effect, a phrase that follows "To".
    """

    what: str
    command: str


@dataclass(slots=True)
class Outcome:
    """The result of a switchover.

    :ivar state: one of the words above.
    :ivar giving: phase of the giving side, None if it has no row. ``taking`` is the other side's.
    :ivar pause: seconds for which clients could write on neither side, or the expected value.
    :ivar said: additional text for people. Programs read the other fields.
    :ivar equal: whether all tables were equal during the pause, None if they were not compared.
    :ivar sessions: for a rehearsal, the number of clients' sessions that would be ended on the giving side.
    :ivar choices: possible next steps, the usual one first.
    :ivar unreachable: sides that cannot be reached, whose phase is not known.
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
        """Return the result as JSON."""
        shown = {"subscription": self.name, "back": self.back_name, **asdict(self)}
        return {name: value for name, value in shown.items() if name not in ("name", "back_name")} | {
            "pause": None if self.pause is None else round(self.pause, 3),
            "steps": {name: round(seconds, 3) for name, seconds in self.steps.items()},
            "choices": [one._asdict() for one in self.choices],
        }
