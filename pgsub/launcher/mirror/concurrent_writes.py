"""Rows of the state store that both commands and the mirror write. Neither may undo the other's write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class ConcurrentWrites(Generic[T]):
    """Rows that the mirror and commands write.

    A command changes the ledger first and then the state store. The mirror may have read the ledger before that change.
    If it finds other rows than the ones it wrote last, it reads the ledger again before it writes.

    :param read: reads the rows from the state store.
    """

    def __init__(self, read: Callable[[], T]) -> None:
        self._read = read
        self._left: T | None = None

    def remember(self) -> None:
        """Remember the present rows. Call it before the ledger is read for the first time."""
        self._left = self._read()

    def write(self, value: T, put: Callable[[], None]) -> bool:
        """Write the rows unless others have written them since the last call. Call it inside a batch.

        :param value: what ``read`` returns after the write.
        :return: whether they were written. If not, the ledger must be read again.
        """
        found = self._read()
        before, self._left = self._left, found
        if found != before:
            return False
        put()
        self._left = value
        return True
