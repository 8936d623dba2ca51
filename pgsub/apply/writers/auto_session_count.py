"""``--apply-workers auto``: decides how many sessions a worker may use.

The decision has no input, output or clock of its own: callers report what batches took and ask for a decision now and
then. It starts with one session, and returns to one in idle times. It tries more only while apply mostly waits for the
target and has further transactions that could run concurrently. It keeps them only if a change then costs clearly less.
"""

from __future__ import annotations

#: Minimum seconds between decisions.
LOOK_SECONDS = 1.0
#: Shares of the time that apply waits for the target with more to do: sessions are added from the first on, and given
#: back up to the second. Halving the sessions doubles the share, so the first is more than twice the second.
GROWS, SHRINKS = 0.6, 0.2
#: Seconds at or below SHRINKS after which half of the sessions are given back.
CALM_SECONDS = 10.0
#: Seconds of work before added sessions are judged, and the part of the best possible saving that they must achieve.
TRIAL_SECONDS, PAYS = 1.0, 0.5
#: Seconds of work that could not be divided after which a trial ends.
UNDIVIDED_SECONDS = 2.0
#: Seconds until more sessions are tried again; doubled after each failed trial.
PAUSE, LONGEST_PAUSE = 60.0, 3600.0
#: Pause in seconds after a deadlock: the next one may abort a client of the target.
DEADLOCK_PAUSE = 600.0


class AutoSessionCount:
    """The number of sessions: one, or more if they pay.

    :param most: maximum number of sessions.
    :param now: seconds of any monotonic clock, as everywhere here.
    :ivar sessions: number of sessions that may be used now.
    :ivar why: the reason as a sentence.
    """

    def __init__(self, most: int, now: float) -> None:
        self._most = most
        self.sessions = 1
        self.why = "Apply has not waited for the target much."
        self._since = now
        self._pressed = 0.0  #: seconds since then in which apply waited for the target with more to do
        self._seconds = self._changes = 0.0  #: totals measured with the present number of sessions
        self._undivided = 0.0
        self._cost: float | None = None  #: measured seconds per change, None if unknown
        self._before: tuple[int, float] | None = None  #: sessions before the trial, and seconds per change with them
        self._calm_since: float | None = None
        self._pause, self._paused_until = PAUSE, now
        self._ceiling = most  #: maximum number of sessions until the pause is over
        self._grounds = ""  #: reason for the sessions that :meth:`look` wants

    @property
    def on_trial(self) -> bool:
        """Whether it is not yet known if the present number of sessions pays."""
        return self._before is not None

    # reports

    def alone(self, lasted: float, waited: float, changes: int, *, more: bool) -> None:
        """Report the work of one session.

        :param lasted: seconds, of which it spent ``waited`` waiting for the target.
        :param more: further whole transactions were at hand that others might have executed.
        """
        if self.sessions > 1:
            self._undivided += lasted if more else 0.0
            return
        self._pressed += waited if more else 0.0
        self._seconds += lasted
        self._changes += changes

    def together(self, lasted: float, waited: float, changes: int, *, divided: bool) -> None:
        """Report the work of several sessions.

        :param waited: seconds in which none of them computed.
        :param divided: all of them had work.
        """
        self._pressed += waited if divided else 0.0
        self._seconds += lasted
        self._changes += changes
        self._undivided = 0.0

    def deadlock(self, now: float) -> None:
        """Return to one session for a while, because a deadlock involved a session of this worker."""
        self._set(1, "Sessions that apply were in a deadlock.")
        self._pause = max(self._pause, DEADLOCK_PAUSE)
        self._wait(now, 1)

    def refused(self, now: float, why: str) -> None:
        """Add no session for a while, because the target has no room."""
        if self._before is not None:
            self._set(self._before[0], why)
        self.why = why
        self._wait(now, self.sessions)

    # decisions

    def look(self, now: float) -> int:
        """Judge the reports since the last decision, and give sessions back if they do not pay.

        :return: number of sessions to :meth:`add` if the target has room for them.
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
        """Start a trial with ``count`` more sessions, for which the target has room."""
        assert self._cost is not None
        before = self.sessions, self._cost
        self._set(self.sessions + count, self._grounds)
        self._before = before

    def _wanted(self, now: float, share: float) -> int:
        ceiling = self._most if now >= self._paused_until else self._ceiling
        self._grounds = f"Apply waited for the target {share:.0%} of the time, with more transactions at hand."
        return max(min(2 * self.sessions, ceiling) - self.sessions, 0)

    def _judge(self, now: float) -> bool:
        """Judge the sessions on trial, if any; return whether none were."""
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
        """Set the number of sessions and restart the measurement."""
        self.sessions, self.why, self._before, self._cost = sessions, why, None, None
        self._seconds = self._changes = self._undivided = 0.0
