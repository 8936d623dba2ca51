"""When to restart a worker that ended. Mirrors wal_retrieve_retry_interval and the launcher's last-start table."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pgsub.common.errors import Directive, Fenced, PgsubError, SpoolFailed, StreamsMustRestart, UsageError

if TYPE_CHECKING:
    import psycopg  # not loaded by commands that connect to no server

#: Seconds between attempts before the target's wal_retrieve_retry_interval is known.
RETRY_SECONDS = 5.0
COPY_BACKOFF_MAX = 300.0
BROKEN_SECONDS = 30.0
#: Seconds without a sign of life after which a worker counts as waiting, even if it never started.
WAITING_SECONDS = 4.0
#: Seconds without a sign of life after which a worker is taken over, like the server's wal_receiver_timeout.
TAKE_OVER_SECONDS = 60.0


@dataclass(slots=True)
class Retry:
    """The failures of one worker, and the time of its next start.

    :ivar faults: the failures that increased the wait. Failures to reach the publisher do not.
    """

    failures: int = 0
    faults: int = 0
    not_before: float = 0.0
    error: PgsubError | None = None
    own: bool = False  #: the error concerns only this worker, not others of its group
    interval: float = RETRY_SECONDS  #: from :func:`interval`

    def due(self) -> bool:
        """Return whether the worker may start now."""
        return time.monotonic() >= self.not_before

    def failed(self, error: PgsubError, *, growing: bool = False) -> None:
        """Schedule the next start.

        :param growing: double the wait with every fault, because a copy that fails on its data would fail again. A full
            spool always doubles it, because the publisher sends the transactions again for each attempt.
        """
        self.error = error
        if isinstance(error, Fenced | StreamsMustRestart):
            wait = 0.2 if self.failures == 0 else self._apart()
        elif error.directive is Directive.STOP:
            wait = BROKEN_SECONDS
        elif isinstance(error, SpoolFailed) or (growing and error.directive is Directive.FAULT):
            # The limit prevents an overflow of the float after days of failures.
            wait = min(self.interval * 2 ** min(self.faults, 16), COPY_BACKOFF_MAX)
            self.faults += 1
        else:
            wait = self.interval
        self.failures += 1
        self.not_before = time.monotonic() + wait

    def _apart(self) -> float:
        """Return a random wait that grows, so that one of many workers that take over from each other can finish."""
        longest = max(1.0, min(2.0 ** min(self.failures - 1, 16), self.interval))
        return random.uniform(longest / 2, longest)

    def succeeded(self) -> None:
        """Forget the failures."""
        self.failures, self.faults, self.not_before, self.error, self.own = 0, 0, 0.0, None, False


def interval(session: psycopg.Connection) -> float:
    """Return the seconds between a failure and the next attempt: the target's wal_retrieve_retry_interval.

    PGSUB_RETRY_SECONDS overrides it for users who may not change that setting.
    """
    own = seconds("PGSUB_RETRY_SECONDS")
    if own is not None:
        return own
    row = session.execute(
        "SELECT setting::float / 1000 FROM pg_catalog.pg_settings WHERE name = 'wal_retrieve_retry_interval'"
    ).fetchone()
    return row[0] if row is not None else RETRY_SECONDS


def seconds(variable: str) -> float | None:
    """Return the seconds that an environment variable sets, None if it is not set."""
    said = f"greater than 0 and up to {COPY_BACKOFF_MAX:.0f}"
    return _seconds(variable, lambda found: 0 < found <= COPY_BACKOFF_MAX, said)


def take_over_seconds() -> float:
    """Return the silence in seconds after which a worker or Spark is given up: PGSUB_WORKER_TIMEOUT."""
    said = f"{WAITING_SECONDS:g} or more"
    found = _seconds("PGSUB_WORKER_TIMEOUT", lambda found: WAITING_SECONDS <= found < math.inf, said)
    return found or TAKE_OVER_SECONDS


def _seconds(variable: str, fits: Callable[[float], bool], said: str) -> float | None:
    text = os.environ.get(variable)
    if not text:
        return None
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not fits(found):
        raise UsageError(f'invalid value for {variable}: "{text}"', detail=f"It is a number of seconds, {said}.")
    return found
