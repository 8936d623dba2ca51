"""Measures the gain of several sessions over one: the time per change, and how much of it is waiting for the target.

Several sessions help only if apply waits for the target and the target can do more concurrently. One session shows the
former by its own times. The latter is known once several have been tried.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from pgsub.apply.writers.auto_session_count import AutoSessionCount

#: Minimum duration of a unit, in seconds: besides its changes it costs two round trips and a commit.
UNIT_SECONDS = 0.01
#: Minimum estimated speed-up for which several sessions are used.
WORTH = 2.0
#: Seconds of work that are left to one session, and the start-up cost of further sessions in round trips.
SHORT, _CONNECTING = 0.05, 100
#: Factor on apply's computing time with several sessions: keys are compared, and threads share the interpreter.
_OVERHEAD = 1.5
#: Minimum number of changes whose duration says something about further ones.
FEW = 10
#: Transactions of the first measurement of one session, and its minimum duration in seconds.
PROBE, KNOWN_SECONDS = 50, 0.1
#: Approximate seconds for which several sessions show whether they are faster.
TRIAL_SECONDS = 0.3
#: Approximate maximum seconds of a batch if apply chooses the number of sessions. It decides between batches, and on a
#: slow target each batch would be larger than the one before.
PIECE_SECONDS = 2.0
#: Round trips of a batch besides its changes.
_ROUND_TRIPS = 6
#: Batches that one session applies after several were no faster; doubled each time, up to the maximum.
_BACK, _LONGEST = 8, 1024


class ParallelGain:
    """Measured speed of one session and of several.

    :param most: maximum number of sessions.
    :param single: each transaction is committed separately, so round trips count: several sessions share them.
    :param session_count: chooses the number of sessions and learns what each batch took; None if the number was given.
    :ivar more: whole transactions are waiting behind those being applied.
    """

    def __init__(self, most: int, *, single: bool, session_count: AutoSessionCount | None = None) -> None:
        self._most = most
        self._single = single
        self._session_count = session_count
        self.more = False
        self._changes = self._waited = self._busy = 0.0  #: totals of one session; older values count less
        self._together = self._seconds = 0.0  #: changes by several sessions, and their seconds
        self._left = self._back = 0
        self._round_trip = 0.0
        self._longest, self._sample = 0.0, 0  #: seconds and changes of the longest measure of one session

    @contextlib.contextmanager
    def one(self, changes: Callable[[], int], round_trip: float) -> Iterator[None]:
        """Measure the work of one session.

        :param changes: returns its number of changes so far.
        :param round_trip: duration in seconds.
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
        """Record the work of several sessions. If they were no faster, leave the next batches to one session.

        :param busy: total seconds that they computed.
        :param divided: all of them had work.
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
        """The number of transactions that one session must apply to measure the cost of a change; 0 if it is known.

        A change costs much more in a small batch than in a large one.
        """
        if self._longest >= KNOWN_SECONDS or (self._single and self._changes):
            return 0
        return max(PROBE, round(8 * self._sample))

    @property
    def trial(self) -> int:
        """The maximum number of transactions for several sessions until it is known whether they are faster."""
        known = self._together and not (self._session_count is not None and self._session_count.on_trial)
        return sys.maxsize if known else max(2, round(TRIAL_SECONDS / max(self._cost, 1e-9)))

    def piece(self, transactions: int, changes: int) -> int:
        """Return how many transactions to apply before apply decides again.

        :param transactions: number at hand, which have ``changes`` changes.
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
        """Minimum number of changes of a unit."""
        return max(1, round(UNIT_SECONDS / max(self._cost, 1e-9)))

    def sessions(self, changes: int, connected: int) -> int:
        """Return how many sessions should apply ``changes`` changes.

        :param connected: number of open sessions.
        """
        if self._left:
            self._left -= 1
            return 1
        if not self._changes or changes * self._cost < (SHORT if connected else _CONNECTING * self._round_trip):
            return 1
        times = (self._waited + self._busy) / max(_OVERHEAD * self._busy, 1e-9)
        most = self._most if self._session_count is None else self._session_count.sessions
        return min(most, round(times + 0.5)) if times >= WORTH else 1
