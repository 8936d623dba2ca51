"""Queries whose cost grows with what they count, and that must not become all that a launcher does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

Found = TypeVar("Found")

#: Seconds between two looks, and how many times the duration of the last one.
SECONDS, FACTOR = 1.0, 20


class ThrottledQuery(Generic[Found]):
    """A query that is repeated at a pace that follows from its cost.

    :param look: runs the query.
    :param last: the result before the first look.
    :ivar last: the newest result.
    """

    def __init__(self, look: Callable[[], Found], last: Found) -> None:
        self._look = look
        self._next = 0.0
        self.last = last

    def __call__(self) -> Found:
        """Return the newest result; repeat the query if it is time."""
        began = time.monotonic()
        if began >= self._next:
            self.last = self._look()
            ended = time.monotonic()
            self._next = ended + max(SECONDS, FACTOR * (ended - began))
        return self.last

    def again(self) -> None:
        """Look at the next call, whatever it costs."""
        self._next = 0.0
