"""Rows of the state store that commands write as well as the mirror: neither may undo the other's write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class ConcurrentWrites(Generic[T]):
    """Rows that the mirror and commands write.

    A command changes the ledger and then shows in the state store what it changed. What the mirror has read of the
    ledger before may be older: where the rows are not those that it left there, it reads anew before it writes.

    :param read: reads the rows from the state store.
    """

    def __init__(self, read: Callable[[], T]) -> None:
        self._read = read
        self._left: T | None = None

    def remember(self) -> None:
        """Remember the rows as they are; to be called before the ledger is read for the first time."""
        self._left = self._read()

    def write(self, value: T, put: Callable[[], None]) -> bool:
        """Write the rows unless others have written since the last call; inside a batch.

        :param value: what :meth:`remember` would read afterwards.
        :return: whether they were written; else the ledger is to be read again.
        """
        found = self._read()
        before, self._left = self._left, found
        if found != before:
            return False
        put()
        self._left = value
        return True
