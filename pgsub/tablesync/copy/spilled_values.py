"""Values that are kept until later, spilled to a temporary file where they are many. Mirrors tuplestore.c."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Iterator
from typing import Generic, TypeVar

Value = TypeVar("Value")
#: What takes more than this is kept in a file.
_IN_MEMORY = 16 << 20


class SpilledValues(Generic[Value]):
    """Values in the order in which they came, that can be read again and again."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115 - as long as the task needs it
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, value: Value) -> None:
        """Keep one more; nothing is read meanwhile."""
        pickle.dump(value, self._file)
        self._count += 1

    def __iter__(self) -> Iterator[Value]:
        at = 0
        while True:
            self._file.seek(at)  # several may read
            try:
                value = pickle.load(self._file)
            except EOFError:
                return
            at = self._file.tell()
            yield value
