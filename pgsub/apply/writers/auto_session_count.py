"""``--apply-workers auto``: how many sessions a worker may use at the moment, where nobody has said how many.

A rule without input, output or clock: it is told what batches took, and looked at now and then. One session is the
beginning and what idle times lead back to. More are tried only while apply does little but wait for the target with
transactions at hand that could be executed at once, and stay only if a change costs clearly less with them.
"""

from __future__ import annotations

#: Seconds that one look covers, at least.
LOOK_SECONDS = 1.0
#: The share of time in which apply waits for the target with more to do: from here on sessions are added, and up to
#: here they are given back. With half as many sessions the share doubles: the first is more than twice the second.
GROWS, SHRINKS = 0.6, 0.2
#: Seconds below that share until half of the sessions are given back.
CALM_SECONDS = 10.0
#: Seconds that more sessions work for before they are judged, and the part of the best possible that they must spare.
TRIAL_SECONDS, PAYS = 1.0, 0.5
#: Seconds of work that could not be divided, after which no more is expected.
UNDIVIDED_SECONDS = 2.0
#: Seconds until more sessions are tried again, twice as many after each vain try.
PAUSE, LONGEST_PAUSE = 60.0, 3600.0
#: And after a deadlock: the next one may be at the cost of a client of the target.
DEADLOCK_PAUSE = 600.0


class AutoSessionCount:
    """The number of sessions, from one to as many as pay.

    :param most: sessions.
    :param now: seconds of any clock that does not go back, as all of these.
    :ivar sessions: that may be used now.
    :ivar why: a sentence about that.
    """

    def __init__(self, most: int, now: float) -> None:
        self._most = most
        self.sessions = 1
        self.why = "Apply has not waited for the target much."
        self._since = now
        self._pressed = 0.0  #: seconds since then in which apply waited for the target with more to do
        self._seconds = self._changes = 0.0  #: what was done by as many sessions as there may be
        self._undivided = 0.0
        self._cost: float | None = None  #: seconds of a change, as far as that was seen
        self._before: tuple[int, float] | None = None  #: sessions before those on trial, and what a change cost then
        self._calm_since: float | None = None
        self._pause, self._paused_until = PAUSE, now
        self._ceiling = most  #: sessions until the pause is over
        self._grounds = ""  #: of what :meth:`look` returned

    @property
    def on_trial(self) -> bool:
        """Whether it is still to be seen if as many sessions pay."""
        return self._before is not None

    # what it is told

    def alone(self, lasted: float, waited: float, changes: int, *, more: bool) -> None:
        """Take what one session did.

        :param lasted: seconds; for so many of them, ``waited``, it waited for the target.
        :param more: whole transactions were at hand that others might have executed.
        """
        if self.sessions > 1:
            self._undivided += lasted if more else 0.0
            return
        self._pressed += waited if more else 0.0
        self._seconds += lasted
        self._changes += changes

    def together(self, lasted: float, waited: float, changes: int, *, divided: bool) -> None:
        """Take what several sessions did.

        :param waited: seconds in which none of them computed.
        :param divided: all of them had something to do.
        """
        self._pressed += waited if divided else 0.0
        self._seconds += lasted
        self._changes += changes
        self._undivided = 0.0

    def deadlock(self, now: float) -> None:
        """Go back to one session for a while: some session of the target was in a deadlock with one of these."""
        self._set(1, "Sessions that apply were in a deadlock.")
        self._pause = max(self._pause, DEADLOCK_PAUSE)
        self._wait(now, 1)

    def refused(self, now: float, why: str) -> None:
        """Stay with what there is for a while: the target has no room."""
        if self._before is not None:
            self._set(self._before[0], why)
        self.why = why
        self._wait(now, self.sessions)

    # what it decides

    def look(self, now: float) -> int:
        """Judge what was told since the last look, and take sessions back.

        :return: how many sessions to :meth:`add`, if there is room for them; 0 for none.
        """
        if now - self._since < LOOK_SECONDS:
            return 0
        share = min(self._pressed / (now - self._since), 1.0)
        self._since, self._pressed = now, 0.0
        judged = self._judge(now)
        if share > SHRINKS:
            self._calm_since = None
        elif self.sessions > 1:
            self._calm(now)
        if judged and share >= GROWS and self._cost is not None:
            return self._wanted(now, share)
        return 0

    def add(self, count: int) -> None:
        """Try so many more, for which there is room."""
        assert self._cost is not None
        before = self.sessions, self._cost
        self._set(self.sessions + count, self._grounds)
        self._before = before

    def _wanted(self, now: float, share: float) -> int:
        ceiling = self._most if now >= self._paused_until else self._ceiling
        self._grounds = f"Apply waited for the target {share:.0%} of the time, with more transactions at hand."
        return max(min(2 * self.sessions, ceiling) - self.sessions, 0)

    def _judge(self, now: float) -> bool:
        """Return whether nothing is on trial any more."""
        if self._before is None:
            if self._changes:
                self._cost = self._seconds / self._changes
            self._seconds = self._changes = self._undivided = 0.0
            return True
        if self._seconds >= TRIAL_SECONDS and self._changes:
            self._decide(now, self._before)
        elif self._undivided >= UNDIVIDED_SECONDS:
            self._back(now, "The transactions at hand could not be executed at once.")
        return False

    def _decide(self, now: float, before: tuple[int, float]) -> None:
        cost = self._seconds / self._changes
        # guard: further sessions are kept only while they increase throughput
        if cost > before[1] * (1 - PAYS * (1 - before[0] / self.sessions)):
            self._back(now, f"{self.sessions} sessions were {before[1] / cost:.1f} times as fast as {before[0]}.")
            return
        if now >= self._paused_until:
            self._pause = PAUSE
        self._set(self.sessions, self.why)
        self._cost = cost

    def _back(self, now: float, why: str) -> None:
        assert self._before is not None
        sessions, cost = self._before
        self._set(sessions, why)
        self._cost = cost
        self._wait(now, sessions)

    def _wait(self, now: float, ceiling: int) -> None:
        self._paused_until, self._ceiling = now + self._pause, ceiling
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def _calm(self, now: float) -> None:
        self._calm_since = now if self._calm_since is None else self._calm_since
        if now - self._calm_since >= CALM_SECONDS:
            self._calm_since = now
            self._set(self.sessions // 2, "Apply does not wait for the target much any more.")

    def _set(self, sessions: int, why: str) -> None:
        """Begin anew with what is measured."""
        self.sessions, self.why, self._before, self._cost = sessions, why, None, None
        self._seconds = self._changes = self._undivided = 0.0
