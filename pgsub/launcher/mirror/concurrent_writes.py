"""What of the state store commands write as well as the mirror: neither may take the other's word back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class ConcurrentWrites(Generic[T]):
    """Rows that the mirror and commands write.

    A command changes the ledger and then shows in the state store what it changed. What the mirror has read of the
    ledger before may be older: where the rows are not those that it left there, it reads anew before it writes.

    :param read: what the state store shows.
    """

    def __init__(self, read: Callable[[], T]) -> None:
        self._read = read
        self._left: T | None = None

    def look(self) -> None:
        """Ask for the first time: before the ledger is read."""
        self._left = self._read()

    def untouched(self) -> bool:
        """Return whether nobody else has written since :meth:`wrote`, or since this was asked last; inside a batch."""
        found = self._read()
        before, self._left = self._left, found
        return found == before

    def wrote(self, value: T) -> None:
        """Remember what the mirror has written."""
        self._left = value
