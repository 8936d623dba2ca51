"""Whether several sessions pay, by what one and several are seen to take."""

from __future__ import annotations

import numpy as np
import pytest

from pgsub.apply.writers import parallel_gain, plan
from pgsub.apply.writers.auto_session_count import AutoSessionCount
from pgsub.apply.writers.dependencies import Dependencies
from pgsub.apply.writers.parallel_gain import ParallelGain


class Clock:
    """A clock that is set by hand, with the time that the thread was busy."""

    wall = busy = 0.0
    changes = 0

    def run(self, one: ParallelGain, changes: int, *, waited: float, busy: float) -> None:
        """Let one session apply so many changes."""
        with one.one(lambda: self.changes, 0.0):
            self.wall, self.busy, self.changes = self.wall + waited + busy, self.busy + busy, self.changes + changes


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(parallel_gain.time, "monotonic", lambda: clock.wall)
    monkeypatch.setattr(parallel_gain.time, "thread_time", lambda: clock.busy)
    return clock


def test_one_session_shows_what_a_change_costs_before_several_are_used(clock: Clock) -> None:
    one = ParallelGain(8, single=False)
    assert one.probe == parallel_gain.PROBE
    clock.run(one, 50, waited=0.01, busy=0.001)
    assert one.probe == 400  # in a small batch nothing of that is known
    clock.run(one, 400, waited=2.0, busy=0.01)
    assert one.probe == 0
    assert one.sessions(1000, 0) == 8


def test_one_session_applies_where_it_computes_as_long_as_it_waits(clock: Clock) -> None:
    one = ParallelGain(8, single=False)
    clock.run(one, 10_000, waited=1.0, busy=1.0)
    assert one.sessions(100_000, 7) == 1


def test_sessions_that_are_no_faster_are_given_back_for_longer_each_time(clock: Clock) -> None:
    one = ParallelGain(8, single=False)
    clock.run(one, 1000, waited=1.0, busy=0.01)
    one.several(1000, 1.0)
    alone = [one.sessions(1000, 7) for _ in range(20)]
    assert alone == [1] * 8 + [8] * 12
    one.several(1000, 1.0)
    assert [one.sessions(1000, 7) for _ in range(20)] == [1] * 16 + [8] * 4


def test_sessions_that_are_faster_are_kept(clock: Clock) -> None:
    one = ParallelGain(8, single=False)
    clock.run(one, 1000, waited=1.0, busy=0.01)
    assert one.trial < 1000
    one.several(1000, 0.2)
    assert one.sessions(1000, 7) == 8
    assert one.trial > 1000


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("sessions", [2, 3, 8])
def test_transactions_without_a_key_in_common_are_divided_among_all_sessions(sessions: int, *, single: bool) -> None:
    none = np.empty(0, np.int64)
    found = Dependencies(np.ones(1001, np.int64), none, none)
    made = plan.parts(found, sessions, 1, single=single)
    assert plan.gain(found, made, sessions) > 0.9 * sessions


def test_transactions_that_all_change_the_same_row_are_left_to_one_session() -> None:
    numbers = np.arange(1000)
    found = Dependencies(np.ones(1000, np.int64), numbers[:-1], numbers[1:])
    assert plan.parts(found, 2, 1, single=False) == [plan.Part(0, 1000, -1)]
    assert plan.parts(found, 2, 1, single=True) == [plan.Part(0, 1000, -1)]


def test_what_is_applied_at_once_leaves_room_for_decisions_where_apply_makes_them(clock: Clock) -> None:
    one = ParallelGain(0, single=False, session_count=AutoSessionCount(8, 0.0))
    clock.run(one, 400, waited=1.9, busy=0.1)
    assert one.piece(10_000, 20_000) == 200  # transactions of two changes of 5 ms
    assert one.piece(100, 200) == 100
    assert ParallelGain(8, single=False).piece(10_000, 20_000) == 10_000


def test_a_part_waits_for_what_any_of_its_transactions_depends_on() -> None:
    found = Dependencies(np.ones(4, np.int64), np.array([0, 1, 2]), np.array([2, 3, 3]))
    joined = plan._merged(found, [0, 1, 2, 3, 4], merge=True)
    assert joined == [plan.Part(0, 1, -1), plan.Part(1, 2, -1), plan.Part(2, 4, 1)]
