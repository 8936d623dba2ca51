"""Several writers whether they pay or not: what they do is tested, and a small target's haste would hide it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest

from pgsub.apply.writers import plan
from pgsub.apply.writers.balance import Balance

Log = Callable[[str], list[str]]


def forced(monkeypatch: pytest.MonkeyPatch, least: int = 5) -> None:
    """Have all sessions used that a subscription may have.

    :param least: changes of a unit.
    """
    monkeypatch.setattr(Balance, "sessions", lambda self, changes, connected: self._most)
    monkeypatch.setattr(Balance, "least", least)
    monkeypatch.setattr(plan, "WORTH", 1.01)
    monkeypatch.setattr(Balance, "probe", 0)
    monkeypatch.setattr(Balance, "trial", 1000)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Log]:
    """Several sessions whether they pay or not; what the log says with some words in it."""
    forced(monkeypatch)
    with caplog.at_level(logging.DEBUG, logger="pgsub.apply"):
        yield lambda words: [r.getMessage() for r in caplog.records if words in r.getMessage()]
