"""Several writers whether they pay or not: what they do is tested, and a small target's haste would hide it."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator

import pytest

from pgsub.apply.writers import plan
from pgsub.apply.writers.auto_session_count import AutoSessionCount
from pgsub.apply.writers.parallel_gain import ParallelGain

Log = Callable[[str], list[str]]


def forced(monkeypatch: pytest.MonkeyPatch, least: int = 5, seed: int = 0) -> None:
    """Have all sessions used that a subscription may have; where apply decides how many, another number all the time.

    :param least: changes of a unit.
    :param seed: of those numbers.
    """
    chance = random.Random(f"growth {seed}")

    def look(self: AutoSessionCount, now: float) -> int:
        self.sessions = chance.randrange(1, self._most + 1)
        return 0

    def sessions(self: ParallelGain, changes: int, connected: int) -> int:
        return self._most if self._session_count is None else self._session_count.sessions

    monkeypatch.setattr(AutoSessionCount, "look", look)
    monkeypatch.setattr(ParallelGain, "sessions", sessions)
    monkeypatch.setattr(ParallelGain, "least", least)
    monkeypatch.setattr(plan, "WORTH", 1.01)
    monkeypatch.setattr(ParallelGain, "probe", 0)
    monkeypatch.setattr(ParallelGain, "trial", 1000)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Log]:
    """Several sessions whether they pay or not; what the log says with some words in it."""
    forced(monkeypatch)
    with caplog.at_level(logging.DEBUG, logger="pgsub.apply"):
        yield lambda words: [r.getMessage() for r in caplog.records if words in r.getMessage()]
