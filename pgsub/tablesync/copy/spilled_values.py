"""Values that are kept for later and spill to a temporary file. Mirrors tuplestore.c."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Iterator
from typing import Generic, TypeVar

Value = TypeVar("Value")
#: Bytes above which the values are moved to a file.
_IN_MEMORY = 16 << 20


class SpilledValues(Generic[Value]):
    """A list of values that can be read repeatedly, in the order in which they were added."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115 - as long as the task needs it
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, value: Value) -> None:
        """Add a value. Not while they are read."""
        pickle.dump(value, self._file)
        self._count += 1

    def __iter__(self) -> Iterator[Value]:
        at = 0
        while True:
            self._file.seek(at)  # several readers may alternate
            try:
                value = pickle.load(self._file)
            except EOFError:
                return
            at = self._file.tell()
            yield value
