"""How many sessions are used where nobody has said how many: a rule that is told what happens, without a clock."""

from __future__ import annotations

import itertools

import pytest

from pgsub.apply.writers import auto_session_count
from pgsub.apply.writers.auto_session_count import AutoSessionCount


class Target:
    """A target at work, and the rule that watches apply.

    :param speeds: how many times as fast so many sessions are as one; others as the next smaller number of them.
    :param wait: the part of one session's time in which it waits for the target.
    :param load: seconds of work for one session that come in a second.
    """

    def __init__(self, *, wait: float = 0.95, load: float = 100.0, most: int = 8, **speeds: float) -> None:
        self.now = 100.0
        self.rule = AutoSessionCount(most, self.now)
        self.wait, self.load = wait, load
        self.speeds = {1: 1.0} | {int(name[1:]): speed for name, speed in speeds.items()}
        self.room = 100
        self.divided = self.more = True
        self.course = [1]

    def second(self) -> None:
        """One second of work, and what the rule makes of it."""
        rule = self.rule
        speed = self.speeds[max(number for number in self.speeds if number <= rule.sessions)]
        work = min(self.load, speed)
        lasted = work / speed
        self.now += 1.0
        if rule.sessions > 1 and self.divided:
            rule.together(lasted, lasted - work * (1 - self.wait), round(1000 * work), divided=True)
        else:
            rule.alone(lasted, lasted * self.wait, round(1000 * work), more=self.more)
        if count := rule.look(self.now):
            if self.room:
                rule.add(min(count, self.room))
            else:
                rule.refused(self.now, "no room")
        if self.course[-1] != rule.sessions:
            self.course.append(rule.sessions)

    def go(self, seconds: int) -> list[int]:
        """Work for so long; the numbers of sessions that there were, without repetitions."""
        for _ in range(seconds):
            self.second()
        return self.course


def test_sessions_are_added_while_each_step_pays() -> None:
    target = Target(s2=1.9, s4=3.6, s8=6.5)
    assert target.go(10) == [1, 2, 4, 8]
    assert "waited for the target" in target.rule.why
    assert target.go(1000) == [1, 2, 4, 8]


def test_a_target_that_does_no_more_at_once_keeps_the_sessions_that_it_gained_by() -> None:
    target = Target(s2=1.7, s4=1.75)
    assert target.go(20) == [1, 2, 4, 2]
    assert target.rule.why == "4 sessions were 1.0 times as fast as 2."


def test_where_several_sessions_do_not_pay_they_are_tried_less_and_less_often() -> None:
    target = Target(s2=1.1)
    tries = [n for n in range(4000) if target.second() or (target.rule.on_trial)]
    starts = [n for n, before in zip(tries[1:], tries, strict=False) if n > before + 1]
    apart = [b - a for a, b in itertools.pairwise([tries[0], *starts])]
    assert all(b >= 1.9 * a for a, b in itertools.pairwise(apart)), apart
    assert len(tries) <= 2 * 8  # of 4,000 seconds


def test_a_short_wait_of_the_target_is_no_reason_for_a_session() -> None:
    assert Target(wait=0.5, s2=2.0).go(100) == [1]


def test_an_idle_subscription_has_one_session_and_so_has_one_whose_target_keeps_up() -> None:
    assert Target(load=0.0, s2=2.0).go(100) == [1]
    assert Target(load=0.5, s2=2.0).go(100) == [1]


def test_a_lone_transaction_is_no_reason_for_a_session_however_long_it_takes() -> None:
    target = Target(s2=2.0)
    target.more = False
    assert target.go(100) == [1]


def test_what_cannot_be_divided_gives_the_session_back() -> None:
    target = Target(s2=2.0)
    target.divided = False
    assert target.go(20) == [1, 2, 1]
    assert target.rule.why == "The transactions at hand could not be executed at once."


def test_sessions_are_given_back_one_step_after_the_other_when_the_load_ends() -> None:
    target = Target(s2=1.9, s4=3.6, s8=6.5)
    target.go(10)
    target.load = 0.01
    assert target.go(int(auto_session_count.CALM_SECONDS)) == [1, 2, 4, 8]  # not at the first pause
    assert target.go(100) == [1, 2, 4, 8, 4, 2, 1]


def test_a_steady_load_makes_the_number_of_sessions_swing_neither_up_nor_down() -> None:
    for load in (0.3, 0.55, 0.8, 1.0, 1.5, 2.5, 3.3, 5.0):
        target = Target(load=load, s2=1.9, s4=3.6, s8=6.5)
        target.go(100)
        settled = target.rule.sessions
        target.course = [settled]
        assert target.go(1000) == [settled], load


def test_the_room_of_the_target_limits_them_and_is_asked_for_again_after_a_pause() -> None:
    target = Target(most=3, s2=1.9, s3=2.8)
    target.room = 1
    assert target.go(2) == [1, 2]
    target.room = 0
    assert target.go(20) == [1, 2]
    assert target.rule.why == "no room"
    target.room = 1
    assert target.go(int(auto_session_count.PAUSE)) == [1, 2, 3]


def test_a_deadlock_leaves_one_session_for_long() -> None:
    target = Target(most=4, s2=1.9, s4=3.6)
    target.go(10)
    target.rule.deadlock(target.now)
    target.course = [target.rule.sessions]
    assert target.go(int(auto_session_count.DEADLOCK_PAUSE) - 1) == [1]
    assert target.go(10) == [1, 2, 4]


@pytest.mark.parametrize("most", [1, 2, 3, 5])
def test_there_are_never_more_than_there_may_be(most: int) -> None:
    target = Target(most=most, s2=2.0, s3=3.0, s4=4.0, s8=8.0)
    assert max(target.go(50)) == most
