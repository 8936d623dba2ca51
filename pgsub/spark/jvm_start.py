"""The start of a JVM, which may hang, and must not outlive a process that ends meanwhile.

``launch_gateway()`` of pyspark waits without a limit until the JVM has written the port of its gateway to a file. A
JVM whose file has gone with its folder stays for ever: it ends with its standard input only once it has written it.
"""

from __future__ import annotations

import atexit
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from subprocess import Popen
from typing import Any

from pyspark import java_gateway

#: Seconds in which a JVM tells its port, on a machine that has much else to do.
START_SECONDS = 300.0


class _Process(Popen[bytes]):
    """The process that pyspark starts, and asks again and again whether it has ended."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.starting = True
        self._deadline = time.monotonic() + START_SECONDS

    def poll(self) -> int | None:
        """Return how it ended; while it starts, one that is late is killed, and one that has ended has failed."""
        if self.starting and time.monotonic() > self._deadline:
            self.end()
        code = super().poll()
        return code or 1 if self.starting and code is not None else code

    def end(self) -> None:
        """Kill its session: spark-submit is a shell, which asks a JVM of its own for the command line."""
        with suppress(OSError):  # it has ended meanwhile
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()


@contextmanager
def bounded() -> Iterator[None]:
    """Kill what pyspark starts in here, unless it has told its port when this ends.

    It is killed after :data:`START_SECONDS`, at the end of this process, and where an exception leaves this.
    """
    started: list[_Process] = []

    def start(*arguments: Any, **options: Any) -> _Process:
        started.append(_Process(*arguments, **options))
        return started[-1]

    def kill() -> None:
        for process in started:
            process.end()

    before, java_gateway.Popen = java_gateway.Popen, start
    atexit.register(kill)
    try:
        yield
    except BaseException:
        kill()
        raise
    finally:
        java_gateway.Popen = before
        atexit.unregister(kill)
        for process in started:
            process.starting = False
