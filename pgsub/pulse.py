"""Heartbeats of workers to the launcher: small datagrams, lost ones do not matter.

What a worker does between two commits (positions, bytes of a running copy) is for the eyes only. It must not be
written to the target: two subscriptions that feed each other would keep each other awake. Whatever must not be lost
goes through the ledger. A datagram is JSON and carries the launcher's random key; anything else is dropped.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass, field

#: A chunk's pulse says nothing any more after so long.
CHUNK_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class PulseAddress:
    """Where the launcher listens; part of every task's spec."""

    host: str
    port: int
    key: str


@dataclass(slots=True)
class Pulse:
    """What one worker has to show: the columns of pg_stat_subscription and of pg_stat_progress_copy.

    Positions are LSNs as integers, timestamps microseconds since 2000-01-01 UTC, 0 where there is none yet.
    """

    subid: int
    worker: int  #: 0 apply, else the table's oid
    chunk: int = -1  #: chunk of a copy, else -1
    epoch: int = 0
    pid: int = field(default_factory=os.getpid)
    state: str = ""  #: live srsubstate of a sync worker, w and c included
    received_lsn: int = 0
    last_msg_send_time: int = 0
    last_msg_receipt_time: int = 0
    latest_end_lsn: int = 0
    latest_end_time: int = 0
    position: int = 0  #: everything before is applied or needs no applying, idle stretches included
    changes: int = 0
    transactions: int = 0
    #: how changes were executed, since the worker began: see the row of pg_stat_subscription_stats
    changes_in_sets: int = 0
    changes_folded: int = 0
    serial_relations: int = 0
    set_fallbacks: int = 0
    parallel: int = 0  #: transactions in progress that are being applied
    bytes_done: int = 0
    rows_done: int = 0


class PulseSender:
    """Sends at most every ``interval`` seconds, from the worker's own thread."""

    def __init__(self, address: PulseAddress | None, interval: float = 0.2) -> None:
        self._address = address
        self._interval = interval
        self._next = 0.0
        self._socket = None
        if address is not None:
            family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
            self._socket = socket.socket(family, socket.SOCK_DGRAM)

    def send(self, pulse: Pulse, *, now: bool = False) -> None:
        """Send if it is time, or ``now``; a launcher that cannot be reached is no error of the worker."""
        if self._socket is None or self._address is None:
            return
        clock = time.monotonic()
        if not now and clock < self._next:
            return
        self._next = clock + self._interval
        body = json.dumps({"key": self._address.key, **asdict(pulse)}).encode()
        with contextlib.suppress(OSError):
            self._socket.sendto(body, (self._address.host, self._address.port))


class PulseReceiver(threading.Thread):
    """The launcher's end: keeps the newest pulse of each worker and chunk.

    :param host: address to bind, loopback for a local Spark master.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        super().__init__(name="pulse", daemon=True)
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((host, 0))
        self._key = os.urandom(16).hex()
        self._lock = threading.Lock()
        self._newest: dict[tuple[int, int, int], tuple[float, Pulse]] = {}
        self.address = PulseAddress(host, self._socket.getsockname()[1], self._key)

    def run(self) -> None:
        """Thread body; ends when the socket is closed."""
        with contextlib.suppress(OSError):
            while True:
                self._take(self._socket.recv(65536))

    def _take(self, datagram: bytes) -> None:
        try:
            body = json.loads(datagram)
            if body.pop("key") != self._key:
                return
            pulse = Pulse(**body)
        except (ValueError, TypeError, KeyError, AttributeError):
            return  # not ours
        with self._lock:
            self._newest[pulse.subid, pulse.worker, pulse.chunk] = (time.monotonic(), pulse)

    def newest(self, subid: int, worker: int) -> Pulse | None:
        """The newest pulse of a worker itself, not of a chunk; None before the first one and once it was forgotten."""
        with self._lock:
            _, pulse = self._newest.get((subid, worker, -1), (0.0, None))
            return pulse

    def of(self, subid: int) -> list[tuple[float, Pulse]]:
        """Newest pulses of a subscription's workers, each with its age in seconds.

        A large table has thousands of chunks: those that were silent for :data:`CHUNK_SECONDS` are forgotten.
        """
        clock = time.monotonic()
        with self._lock:
            for key in [k for k, (at, _) in self._newest.items() if k[2] >= 0 and clock - at > CHUNK_SECONDS]:
                del self._newest[key]
            return [(clock - at, pulse) for (owner, _, _), (at, pulse) in self._newest.items() if owner == subid]

    def forget(self, subid: int, worker: int) -> None:
        """A worker ended: what it showed is no longer true."""
        with self._lock:
            for key in [k for k in self._newest if k[:2] == (subid, worker)]:
                del self._newest[key]

    def close(self) -> None:
        """Stop listening."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
