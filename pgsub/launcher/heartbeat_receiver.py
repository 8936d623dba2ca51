"""The launcher's end of the heartbeats (:mod:`pgsub.common.worker_heartbeat`): keeps the newest, and answers them."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import socket
import threading
import time
from collections import Counter
from typing import Any

from pgsub.common.errors import PgsubError, SparkUnusable
from pgsub.common.threads import SupervisedThread
from pgsub.common.worker_heartbeat import (
    ANSWER,
    FIELDS,
    MAX_BYTES,
    Heartbeat,
    HeartbeatAddress,
    datagram_socket,
    sealed,
    unsealed,
)

#: Seconds to wait after a socket error that may pass, for example a lack of memory.
_PAUSE = 0.2
#: Seconds after which a chunk's heartbeat is outdated.
CHUNK_SECONDS = 60.0
#: Counters that workers start at zero. pg_stat_subscription_stats counts the same since its reset.
COUNTED = ("changes_in_sets", "changes_folded", "serial_relations", "set_fallbacks")


class HeartbeatReceiver:
    """The newest heartbeat of each worker and chunk.

    :param host: address or name to which workers send, loopback for a local Spark master.
    :param bind: address to bind if it differs from ``host`` (NAT, containers).
    :param port: UDP port, 0 for any.
    :raises SparkUnusable: the address cannot be bound.
    """

    def __init__(self, host: str = "127.0.0.1", bind: str | None = None, port: int = 0) -> None:
        address = bind or host
        try:
            self._socket = datagram_socket(address, port, socket.socket.bind)
        except OSError as error:
            raise SparkUnusable(
                f'could not listen for heartbeats at "{address}", port {port}: {error.strerror}',
                detail="The address is spark.driver.bindAddress, else spark.driver.host, else where the master is"
                " reached from; the port is spark.pgsub.heartbeat.port.",
                hint="Name an address of this machine.\n--conf spark.driver.bindAddress=0.0.0.0",
            ) from None
        self._key = os.urandom(16).hex()
        self._lock = threading.Lock()
        self._newest: dict[tuple[int, int, int], tuple[float, Heartbeat]] = {}
        #: epoch and sequence number of the newest heartbeat
        self._heard: dict[tuple[int, int, int], tuple[int, int]] = {}
        self._senders: dict[tuple[int, int], tuple[int, Any]] = {}  #: epoch and address of each worker
        self._uncounted: dict[int, Counter[str]] = {}  #: by subscription: counts that are not written yet
        self._ended: dict[tuple[int, int], int] = {}  #: epoch of each ended worker, whose late heartbeats are ignored
        self._news: dict[int, threading.Event] = {}
        self._thread: SupervisedThread | None = None
        self._closing = False
        self.address = HeartbeatAddress(host, self._socket.getsockname()[1], self._key)

    def start(self) -> PgsubError | None:
        """Start the thread that receives heartbeats unless it runs. Call this repeatedly, because the thread may die.

        :return: the error that ended the previous thread, if there was one.
        """
        before = self._thread
        if before is not None and before.is_alive():
            return None
        self._thread = SupervisedThread("heartbeats", "heartbeats", self._receive)
        self._thread.start()
        return None if before is None else before.fatal_error

    def _receive(self) -> None:
        """Receive until the socket is closed."""
        while not self._closing:
            try:
                datagram, sender = self._socket.recvfrom(MAX_BYTES + 1)
            except OSError as error:
                if error.errno == errno.EBADF:
                    return
                time.sleep(_PAUSE)
                continue
            assert self._thread is not None
            self._thread.checkpoint()
            opened = unsealed(self._key, datagram, FIELDS)
            if opened is not None and self._unheard(opened[0], heartbeat := Heartbeat(**opened[1])):
                self._keep(heartbeat, sender)

    def _unheard(self, number: int, heartbeat: Heartbeat) -> bool:
        """Return whether a heartbeat is newer than all previous ones of its worker, and remember it."""
        worker = heartbeat.subid, heartbeat.worker
        key, place = (*worker, heartbeat.chunk), (heartbeat.epoch, number)
        with self._lock:
            # guard: a heartbeat counts only once
            if heartbeat.epoch <= self._ended.get(worker, -1) or place <= self._heard.get(key, (-1, 0)):
                return False
            self._heard[key] = place
        return True

    def _keep(self, heartbeat: Heartbeat, sender: Any) -> None:
        key = heartbeat.subid, heartbeat.worker, heartbeat.chunk
        with self._lock:
            before = self._newest.get(key)
            self._newest[key] = (time.monotonic(), heartbeat)
            if heartbeat.chunk < 0:
                self._senders[key[:2]] = heartbeat.epoch, sender
                self._uncounted.setdefault(heartbeat.subid, Counter()).update(_steps(before, heartbeat))
            if heartbeat.worker == 0 and (before is None or _reached(before[1]) != _reached(heartbeat)):
                self._news.setdefault(heartbeat.subid, threading.Event()).set()

    def answer(self, subid: int, worker: int, shown_lsn: int) -> None:
        """Tell a worker the position that the state store shows as applied. Needs an earlier heartbeat of it."""
        with self._lock:
            epoch, sender = self._senders.get((subid, worker), (0, None))
        if sender is not None:
            body = json.dumps(dict(zip(ANSWER, (subid, worker, epoch, shown_lsn), strict=True))).encode()
            with contextlib.suppress(OSError):
                self._socket.sendto(sealed(self._key, 0, body), sender)

    def news(self, subid: int) -> threading.Event:
        """Return the event that is set whenever apply of a subscription advances. The caller clears it."""
        with self._lock:
            return self._news.setdefault(subid, threading.Event())

    def newest(self, subid: int, worker: int) -> Heartbeat | None:
        """Return a worker's newest heartbeat, ignoring its chunks; None before the first and after :meth:`forget`."""
        with self._lock:
            _, heartbeat = self._newest.get((subid, worker, -1), (0.0, None))
            return heartbeat

    def seconds_since(self, subid: int, worker: int, epoch: int) -> float:
        """Return the age of a worker's newest heartbeat in this epoch, infinity if there is none."""
        with self._lock:
            at, heartbeat = self._newest.get((subid, worker, -1), (0.0, None))
        return time.monotonic() - at if heartbeat is not None and heartbeat.epoch == epoch else math.inf

    def of(self, subid: int) -> list[tuple[float, Heartbeat]]:
        """Return the newest heartbeats of a subscription's workers, each with its age in seconds.

        A large table has thousands of chunks, so chunks that were silent for :data:`CHUNK_SECONDS` are forgotten.
        """
        clock = time.monotonic()
        with self._lock:
            for key in [k for k, (at, _) in self._newest.items() if k[2] >= 0 and clock - at > CHUNK_SECONDS]:
                del self._newest[key]
            return [
                (clock - at, heartbeat) for (owner, _, _), (at, heartbeat) in self._newest.items() if owner == subid
            ]

    def uncounted(self, subid: int) -> Counter[str]:
        """Return the counts of a subscription's workers that are not yet passed to :meth:`counted`.

        The counts of a worker are kept when it ends, and are returned once, however many callers ask.
        """
        with self._lock:
            return self._uncounted.get(subid, Counter()).copy()

    def counted(self, subid: int, steps: Counter[str]) -> None:
        """Subtract counts that have been written."""
        with self._lock:
            self._uncounted[subid] = self._uncounted.get(subid, Counter()) - steps

    def forget(self, subid: int, worker: int) -> None:
        """Forget the heartbeats of a worker that ended."""
        with self._lock:
            for key in [k for k in self._newest if k[:2] == (subid, worker)]:
                del self._newest[key]
            self._senders.pop((subid, worker), None)
            heard = [self._heard.pop(key)[0] for key in [k for k in self._heard if k[:2] == (subid, worker)]]
            self._ended[subid, worker] = max([*heard, self._ended.get((subid, worker), -1)])

    def begin(self, subid: int) -> None:
        """Accept heartbeats of a subscription's workers whatever their epochs.

        Epochs are numbers of the target's ledger, so they are lower after the target went back in time.
        """
        with self._lock:
            self._ended = {worker: epoch for worker, epoch in self._ended.items() if worker[0] != subid}
            self._heard = {key: place for key, place in self._heard.items() if key[0] != subid}

    def close(self) -> None:
        """Stop listening."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _steps(before: tuple[float, Heartbeat] | None, heartbeat: Heartbeat) -> Counter[str]:
    """Return what a worker counted since its previous heartbeat. A worker of a new epoch starts at zero."""
    known = before[1] if before is not None and before[1].epoch == heartbeat.epoch else None
    steps = Counter({name: getattr(heartbeat, name) - (getattr(known, name) if known else 0) for name in COUNTED})
    return +steps


def _reached(heartbeat: Heartbeat) -> tuple[int, int]:
    return heartbeat.position, heartbeat.reported_lsn
