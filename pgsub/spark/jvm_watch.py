"""Whether Spark's JVM answers: one that was stopped, or does nothing but collect garbage, tells nobody."""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial
from typing import Any

from py4j.protocol import Py4JError
from pyspark import SparkContext

from pgsub.common.threads import CallTimedOut, TimedExecutor
from pgsub.spark import contexts

#: Seconds that a look waits for an answer; one that comes later counts for the next look.
_PATIENCE = 0.05
#: Seconds that a look adds at most: after this process was suspended, the JVM gets its time again.
_STEP = 1.0


class JvmWatch:
    """A question to the JVM that pyspark uses, asked again and again, in a thread that may hang with it.

    It needs no context: one that is being made is watched as well, from the moment that the JVM has told its port.

    :ivar silent: seconds for which it has not answered, counted in looks.
    """

    def __init__(self) -> None:
        self._asking = TimedExecutor("jvm_watch", _PATIENCE)
        self._gateway: Any = None
        self._answers = self._heard = 0
        self._clock = time.monotonic()
        self.silent = 0.0

    def look(self) -> float:
        """Ask, and return ``silent``; one that has died is not silent, for whoever uses it is told.

        To be called every second or more often, by one thread.
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
        """Its process id; None where it is not known."""
        gateway = self._gateway
        if gateway is None or gateway.proc is None:
            return None if gateway is None else contexts.pids.get(gateway)
        return int(gateway.proc.pid)

    def kill(self) -> None:
        """Kill the JVM; whoever waits for it is told then, as of one that died."""
        contexts.kill(self._gateway)
        self.silent = 0.0  # it takes its time to go

    def close(self) -> None:
        """Ask no more."""
        self._asking.close()
