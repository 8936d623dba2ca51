"""The load that a comparison puts on a server: how much of a table is read by one statement, and how fast in all."""

from __future__ import annotations

import os
import threading
import time

#: Bytes of a block, for what need not be exact.
BLOCK = 8192
#: Blocks of a table that are read by one statement, at most and at least. PGSUB_CHUNK_BYTES is for tests, which reach
#: several pieces with small tables.
MOST_BLOCKS, LEAST_BLOCKS = max(1, int(os.environ.get("PGSUB_CHUNK_BYTES", 128 << 20)) // BLOCK), 128


class RateLimit:
    """A limit of what is read of one server's tables.

    :param rate: bytes a second; None for no limit.
    """

    def __init__(self, rate: int | None) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._free = time.monotonic()  #: when the next piece may be read

    @property
    def blocks(self) -> int:
        """Blocks that one statement reads: what may be read in a second, for it is read without a pause."""
        return MOST_BLOCKS if self._rate is None else min(max(self._rate // BLOCK, LEAST_BLOCKS), MOST_BLOCKS)

    def wait(self, blocks: int, over: threading.Event) -> None:
        """Wait until so many blocks may be read.

        :param blocks: 0 where that is not known.
        :param over: ends the wait.
        """
        if self._rate is None:
            return
        with self._lock:
            begin = max(self._free, time.monotonic())
            self._free = begin + blocks * BLOCK / self._rate
        over.wait(begin - time.monotonic())
