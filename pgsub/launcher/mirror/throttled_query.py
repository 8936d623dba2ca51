"""Queries whose cost grows with what they count, and that must not become all that a launcher does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

Found = TypeVar("Found")

#: Seconds between two runs of a query, and how many times the duration of the last one.
SECONDS, FACTOR = 1.0, 20


class ThrottledQuery(Generic[Found]):
    """A query that is repeated at a pace that follows from its cost.

    :param last: the result before the first run.
    :ivar last: the newest result.
    """

    def __init__(self, query: Callable[[], Found], last: Found) -> None:
        self._query = query
        self._next = 0.0
        self.last = last

    def __call__(self) -> Found:
        """Return the newest result; repeat the query if it is time."""
        began = time.monotonic()
        if began >= self._next:
            self.last = self._query()
            ended = time.monotonic()
            self._next = ended + max(SECONDS, FACTOR * (ended - began))
        return self.last

    def expire(self) -> None:
        """Run the query at the next call, whatever it costs."""
        self._next = 0.0
