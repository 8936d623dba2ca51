"""Notifies a service manager that the launcher is ready, alive or stopping. Mirrors sd_notify(3).

The server does the same when built with ``--with-systemd`` (``postmaster.c``). It needs ``NOTIFY_SOCKET``.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time


class ServiceManager:
    """The socket of the service manager, if there is one. Its failures are ignored."""

    def __init__(self) -> None:
        # Removed from the environment, because only the launcher speaks for the service.
        self._path = os.environ.pop("NOTIFY_SOCKET", "")
        # Twice per timeout of systemd's watchdog.
        every = os.environ.pop("WATCHDOG_USEC", "")
        self._every = int(every) / 2e6 if every.isascii() and every.isdigit() else 0.0
        self._next = 0.0

    def ready(self) -> None:
        """Report that the launcher serves."""
        self._send("READY=1")

    def stopping(self) -> None:
        """Report that the launcher stops, which takes as long as open transactions."""
        self._send("STOPPING=1")

    def alive(self) -> None:
        """Report to the watchdog. Call it in every round of the launcher's loop."""
        if self._every and time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every
            self._send("WATCHDOG=1")

    def _send(self, text: str) -> None:
        if not self._path:
            return
        address = "\0" + self._path[1:] if self._path.startswith("@") else self._path
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.setblocking(False)
            channel.sendto(text.encode(), address)
