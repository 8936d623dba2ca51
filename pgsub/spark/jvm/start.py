"""The start of a JVM, which may hang, and must not outlive this process.

pyspark's ``launch_gateway()`` waits without limit until the JVM has written its gateway's port to a file. If the file's
folder is gone, the JVM runs forever: it ends with its standard input only after it has written the port.
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

#: Seconds within which a JVM must tell its port, even on a busy machine.
START_SECONDS = 300.0


class _Process(Popen[bytes]):
    """The process that pyspark starts and polls."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.starting = True
        self._deadline = time.monotonic() + START_SECONDS

    def poll(self) -> int | None:
        """Return the exit code. A late start is killed, and a start that ended early counts as failed."""
        if self.starting and time.monotonic() > self._deadline:
            self.end()
        code = super().poll()
        return code or 1 if self.starting and code is not None else code

    def end(self) -> None:
        """Kill its session, because spark-submit is a shell that runs another JVM to compose the command line."""
        with suppress(OSError):  # it has already ended
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()


@contextmanager
def bounded() -> Iterator[None]:
    """Kill the process that pyspark starts in the block, unless it has told its port at the end.

    It is killed after :data:`START_SECONDS`, at the end of this process, or after an exception in the block.
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
