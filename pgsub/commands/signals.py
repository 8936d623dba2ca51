"""Handles signals in commands that must undo something: SIGTERM and SIGHUP of a closed terminal act like SIGINT."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def undone_by_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP of a closed terminal undo what was begun, like SIGINT. Then the process dies.

    Like :func:`pgsub.commands.serve.run.stopping_by_signal`, it respects nohup.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can set handlers
        return
    received: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        undoing = bool(received) or isinstance(sys.exc_info()[1], KeyboardInterrupt)
        received.append(number)
        if number != signal.SIGHUP or not undoing:  # shell, terminal and logind send it after other signals
            raise KeyboardInterrupt

    wanted = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is not signal.SIG_IGN]
    before = {one: signal.signal(one, handler) for one in wanted}
    try:
        yield
    finally:
        for one, handling in before.items():
            signal.signal(one, handling)
        for number in received:
            os.kill(os.getpid(), number)
