"""Failpoints of the workers that run in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pgsub import failpoints

At = Callable[[str], None]


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> At:
    """``at("copy.middle=error@2")``: actions at failpoints, each counted from here; ``at("")``: none any more."""

    def set_(actions: str) -> None:
        monkeypatch.setattr(failpoints, "_counts", {})
        monkeypatch.setenv("PGSUB_FAILPOINTS", actions)

    return set_
