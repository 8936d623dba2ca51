"""Queries whose cost grows with the data. Running them must not take up most of a launcher's time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

Found = TypeVar("Found")

#: Minimum seconds between two runs of a query, and the minimum multiple of its last duration.
SECONDS, FACTOR = 1.0, 20


class ThrottledQuery(Generic[Found]):
    """A query whose rate of repetition depends on its cost.

    :param last: the result before the first run.
    :ivar last: the newest result.
    """

    def __init__(self, query: Callable[[], Found], last: Found) -> None:
        self._query = query
        self._next = 0.0
        self.last = last

    def __call__(self) -> Found:
        """Return the newest result. Run the query first if it is time."""
        began = time.monotonic()
        if began >= self._next:
            self.last = self._query()
            ended = time.monotonic()
            self._next = ended + max(SECONDS, FACTOR * (ended - began))
        return self.last

    def expire(self) -> None:
        """Run the query at the next call, regardless of its cost."""
        self._next = 0.0
