"""Failpoints of the workers that run in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from pgsub.common import failpoints

At = Callable[[str], None]


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch, reached: Callable[[str], None]) -> Iterator[At]:
    """``at("copy.middle=error@2")``: actions at failpoints, each counted from here; ``at("")``: none any more.

    A point whose action ran is counted as reached.
    """
    armed = ""

    def count() -> None:
        for name, _, action in (item.partition("=") for item in armed.split(";")):
            if failpoints._counts.get(name, 0) >= int(action.partition("@")[2] or 1):
                reached(name)

    def set_(actions: str) -> None:
        nonlocal armed
        count()
        armed = actions
        monkeypatch.setattr(failpoints, "_counts", {})
        monkeypatch.setenv("PGSUB_FAILPOINTS", actions)

    yield set_
    count()
