"""The gain of several sessions over one: what a change takes with each, and how much of that is waiting for the target.

Several sessions only help where apply waits for the target, and where the target does more at once. The first is known
from what one session measures; the second shows when several have been tried.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from pgsub.apply.writers.auto_session_count import AutoSessionCount

#: Seconds that a unit takes at least, about: what it costs besides is two round trips and a commit.
UNIT_SECONDS = 0.01
#: Several sessions are to be so many times as fast as one, as far as one can tell before.
WORTH = 2.0
#: A batch that one session applies within so many seconds is left to it; and round trips that a session costs at first.
SHORT, _CONNECTING = 0.05, 100
#: What apply computes takes so many times as long where keys are compared and several threads want the interpreter.
_OVERHEAD = 1.5
#: Fewer changes than these tell nothing of what further ones take.
FEW = 10
#: Transactions by which one session shows at first how long a change takes, and for how long it does, at least.
PROBE, KNOWN_SECONDS = 50, 0.1
#: And for how long several do, about, to show that they are faster.
TRIAL_SECONDS = 0.3
#: Seconds that a batch takes at most, about, where apply decides how many sessions there are: it looks between batches,
#: and where the target is slow each would be larger than the one before.
PIECE_SECONDS = 2.0
#: Round trips of a batch besides its changes.
_ROUND_TRIPS = 6
#: Batches that one session applies after several were no faster; twice as many each time, up to so many.
_BACK, _LONGEST = 8, 1024


class ParallelGain:
    """A measure of one session and of several.

    :param most: sessions.
    :param single: each transaction is a commit of its own: round trips count, for several sessions share them.
    :param session_count: decides how many sessions pay, and learns what each batch took; None where a number was given.
    :ivar more: whole transactions are at hand behind those that are applied.
    """

    def __init__(self, most: int, *, single: bool, session_count: AutoSessionCount | None = None) -> None:
        self._most = most
        self._single = single
        self._session_count = session_count
        self.more = False
        self._changes = self._waited = self._busy = 0.0  #: of one session; what is older counts less
        self._together = self._seconds = 0.0  #: changes by several sessions, and how long they took
        self._left = self._back = 0
        self._round_trip = 0.0
        self._longest, self._sample = 0.0, 0  #: of what one session did at once: seconds and changes

    @contextlib.contextmanager
    def one(self, changes: Callable[[], int], round_trip: float) -> Iterator[None]:
        """Measure what one session does.

        :param changes: counts its changes.
        :param round_trip: seconds.
        """
        wall, busy, before = time.monotonic(), time.thread_time(), changes()
        yield
        made, busy = changes() - before, time.thread_time() - busy
        if made < (1 if self._single else FEW):
            return
        lasted = time.monotonic() - wall
        self._longest, self._sample = max(self._longest, lasted), max(self._sample, made)
        waited = lasted - busy
        if not self._single:
            waited -= _ROUND_TRIPS * round_trip
        self._round_trip = round_trip
        if self._session_count is not None:
            more = self.more and (self._single or lasted >= SHORT)
            self._session_count.alone(lasted, max(waited, 0.0), made, more=more)
        self._changes = self._changes / 2 + made
        self._waited = self._waited / 2 + max(waited, 0.0)
        self._busy = self._busy / 2 + busy

    def several(self, changes: int, seconds: float, busy: float = 0.0, *, divided: bool = True) -> None:
        """Take what several sessions did, and leave the next batches to one if that was no faster.

        :param busy: seconds that all of them computed.
        :param divided: all of them had something to do.
        """
        self._together, self._seconds = self._together / 2 + changes, self._seconds / 2 + seconds
        if self._session_count is not None:
            self._session_count.together(seconds, max(seconds - busy, 0.0), changes, divided=divided)
            return
        if self._seconds / max(self._together, 1) <= 0.9 * self._cost:
            self._back //= 2
            return
        self._left = self._back = min(max(2 * self._back, _BACK), _LONGEST)
        self._together = self._seconds = 0.0

    @property
    def probe(self) -> int:
        """How many transactions one session is to apply to see what a change costs; 0 where that is known.

        In a small batch a change costs much more than in a large one.
        """
        if self._longest >= KNOWN_SECONDS or (self._single and self._changes):
            return 0
        return max(PROBE, round(8 * self._sample))

    @property
    def trial(self) -> int:
        """How many transactions several sessions are given while it is not known whether they are faster."""
        known = self._together and not (self._session_count is not None and self._session_count.on_trial)
        return sys.maxsize if known else max(2, round(TRIAL_SECONDS / max(self._cost, 1e-9)))

    def piece(self, transactions: int, changes: int) -> int:
        """Return how many transactions are to be applied at once, so that apply can decide anew soon.

        :param transactions: at hand, with so many ``changes``.
        """
        if self._session_count is None:
            return transactions
        expected = changes * self._cost / self._session_count.sessions
        return transactions if expected <= PIECE_SECONDS else max(1, int(transactions * PIECE_SECONDS / expected))

    @property
    def _cost(self) -> float:
        return (self._waited + self._busy) / self._changes if self._changes else 0.0

    @property
    def least(self) -> int:
        """Changes that a unit is to have."""
        return max(1, round(UNIT_SECONDS / max(self._cost, 1e-9)))

    def sessions(self, changes: int, connected: int) -> int:
        """Return how many sessions are to apply so many changes.

        :param connected: sessions that there are already.
        """
        if self._left:
            self._left -= 1
            return 1
        if not self._changes or changes * self._cost < (SHORT if connected else _CONNECTING * self._round_trip):
            return 1
        times = (self._waited + self._busy) / max(_OVERHEAD * self._busy, 1e-9)
        most = self._most if self._session_count is None else self._session_count.sessions
        return min(most, round(times + 0.5)) if times >= WORTH else 1
