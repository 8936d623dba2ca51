"""Checks whether Spark's JVM answers. A stopped one, or one busy with garbage collection, does not report it."""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial
from typing import Any

from py4j.protocol import Py4JError
from pyspark import SparkContext

from pgsub.common.threads import CallTimedOut, TimedExecutor
from pgsub.spark import contexts

#: Seconds that a look waits for an answer. A later answer counts for the next look.
_PATIENCE = 0.05
#: Seconds that a look adds at most, so that the JVM gets its full time after this process was suspended.
_STEP = 1.0


class JvmWatch:
    """A repeated question to pyspark's JVM, in a thread that may hang with it.

    It needs no context, so the creation of a context is watched, too, as soon as the JVM has told its port.

    :ivar silent: seconds without an answer, counted in looks.
    """

    def __init__(self) -> None:
        self._asking = TimedExecutor("jvm_watch", _PATIENCE)
        self._gateway: Any = None
        self._answers = self._heard = 0
        self._clock = time.monotonic()
        self.silent = 0.0

    def look(self) -> float:
        """Ask, and return ``silent``. A dead JVM is not silent, because its users are told.

        One thread must call this at least once per second.
        """
        gateway, clock = SparkContext._gateway, time.monotonic()
        passed, self._clock = min(clock - self._clock, _STEP), clock
        if gateway is not None:
            with suppress(CallTimedOut):
                self._asking.run(partial(self._ask, gateway))
        quiet = gateway is not None and gateway is self._gateway and self._answers == self._heard
        self.silent = self.silent + passed if quiet else 0.0
        self._gateway, self._heard = gateway, self._answers
        return self.silent

    def _ask(self, gateway: Any) -> None:
        with suppress(Py4JError, OSError, AttributeError):  # it has died
            gateway.jvm.System.nanoTime()
        self._answers += 1

    @property
    def own(self) -> bool:
        """Whether this process started the JVM for itself, and may end it."""
        return contexts.is_own(self._gateway)

    @property
    def pid(self) -> int | None:
        """The process ID of the JVM, None if unknown."""
        gateway = self._gateway
        if gateway is None or gateway.proc is None:
            return None if gateway is None else contexts.pids.get(gateway)
        return int(gateway.proc.pid)

    def kill(self) -> None:
        """Kill the JVM. Its callers handle this like its death."""
        contexts.kill(self._gateway)
        self.silent = 0.0  # it takes a while to end

    def close(self) -> None:
        """Stop asking."""
        self._asking.close()
