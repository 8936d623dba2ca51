"""Whether several sessions pay, by what one and several are seen to take."""

from __future__ import annotations

import pytest

from pgsub.apply.writers import balance
from pgsub.apply.writers.balance import Balance


class Clock:
    """A clock that is set by hand, with the time that the thread was busy."""

    wall = busy = 0.0
    changes = 0

    def run(self, one: Balance, changes: int, *, waited: float, busy: float) -> None:
        """Let one session apply so many changes."""
        with one.one(lambda: self.changes, 0.0):
            self.wall, self.busy, self.changes = self.wall + waited + busy, self.busy + busy, self.changes + changes


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(balance.time, "monotonic", lambda: clock.wall)
    monkeypatch.setattr(balance.time, "thread_time", lambda: clock.busy)
    return clock


def test_one_session_shows_what_a_change_costs_before_several_are_used(clock: Clock) -> None:
    one = Balance(8, single=False)
    assert one.probe == balance.PROBE
    clock.run(one, 50, waited=0.01, busy=0.001)
    assert one.probe == 400  # in a small batch nothing of that is known
    clock.run(one, 400, waited=2.0, busy=0.01)
    assert one.probe == 0
    assert one.sessions(1000, 0) == 8


def test_one_session_applies_where_it_computes_as_long_as_it_waits(clock: Clock) -> None:
    one = Balance(8, single=False)
    clock.run(one, 10_000, waited=1.0, busy=1.0)
    assert one.sessions(100_000, 7) == 1


def test_sessions_that_are_no_faster_are_given_back_for_longer_each_time(clock: Clock) -> None:
    one = Balance(8, single=False)
    clock.run(one, 1000, waited=1.0, busy=0.01)
    one.several(1000, 1.0)
    alone = [one.sessions(1000, 7) for _ in range(20)]
    assert alone == [1] * 8 + [8] * 12
    one.several(1000, 1.0)
    assert [one.sessions(1000, 7) for _ in range(20)] == [1] * 16 + [8] * 4


def test_sessions_that_are_faster_are_kept(clock: Clock) -> None:
    one = Balance(8, single=False)
    clock.run(one, 1000, waited=1.0, busy=0.01)
    assert one.trial < 1000
    one.several(1000, 0.2)
    assert one.sessions(1000, 7) == 8
    assert one.trial > 1000
