"""The load that a comparison puts on a server: how much one statement reads, and how fast all of them read."""

from __future__ import annotations

import os
import threading
import time

#: Bytes of a block, for estimates.
BLOCK = 8192
#: Maximum and minimum number of blocks that one statement reads. PGSUB_CHUNK_BYTES is for tests, so that small tables
#: have several pieces.
MOST_BLOCKS, LEAST_BLOCKS = max(1, int(os.environ.get("PGSUB_CHUNK_BYTES", 128 << 20)) // BLOCK), 128


class RateLimit:
    """A limit for reading one server's tables.

    :param rate: bytes per second; None: no limit.
    """

    def __init__(self, rate: int | None) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._free = time.monotonic()  #: time when the next piece may be read

    @property
    def blocks(self) -> int:
        """The number of blocks that one statement reads: those of one second, because it reads without a pause."""
        return MOST_BLOCKS if self._rate is None else min(max(self._rate // BLOCK, LEAST_BLOCKS), MOST_BLOCKS)

    def wait(self, blocks: int, over: threading.Event) -> None:
        """Wait until these blocks may be read.

        :param blocks: 0: unknown.
        :param over: ends the wait.
        """
        if self._rate is None:
            return
        with self._lock:
            begin = max(self._free, time.monotonic())
            self._free = begin + blocks * BLOCK / self._rate
        over.wait(begin - time.monotonic())
