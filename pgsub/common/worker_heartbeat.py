"""Heartbeats of workers to the launcher, and its answers: small datagrams, lost ones do not matter.

What a worker does between two commits (positions, bytes of a running copy) is for the eyes only. It must not be
written to the target: two subscriptions that feed each other would keep each other awake. Whatever must not be lost
goes through the ledger. A datagram is a code of authentication (BLAKE2b, RFC 7693, under a random key of the launcher),
a number that rises with every datagram of the sender (as in RFC 4303, section 3.4.3), and JSON. Nothing is parsed
before the code was checked: any user of the machine may send to the port. What was heard before, or is older than what
was heard, is dropped: so nobody who recorded heartbeats can let a worker that hangs seem alive. An answer says how far
the state store shows the worker's progress, in the same shape.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from pgsub.common.errors import PgsubError, SparkUnusable
from pgsub.common.threads import SupervisedThread

#: Bytes of a datagram at most, and of the code of authentication that it begins with. A heartbeat has some 700.
MAX_BYTES, CODE_BYTES = 4096, 16
NUMBER_BYTES = 8
#: After a failure to find the launcher's address by its name.
_UNKNOWN_SECONDS = 30.0
INTERVAL = 0.2  #: seconds between heartbeats of a worker
#: After an error of the socket that is no end of it (memory of the system, say).
_PAUSE = 0.2
#: A chunk's heartbeat says nothing any more after so long.
CHUNK_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class HeartbeatAddress:
    """The address at which the launcher listens; part of every task's spec."""

    host: str
    port: int
    key: str


@dataclass(slots=True)
class Heartbeat:
    """The state of one worker: the columns of pg_stat_subscription and of pg_stat_progress_copy.

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
    reported_lsn: int = 0  #: as the ledger has it
    changes: int = 0
    transactions: int = 0
    #: how changes were executed, since the worker began: see the row of pg_stat_subscription_stats
    changes_in_sets: int = 0
    changes_folded: int = 0
    serial_relations: int = 0
    set_fallbacks: int = 0
    parallel: int = 0  #: transactions in progress that are being applied
    sessions: int = 1  #: of the target that apply what was committed, and a sentence why, where apply decides that
    sessions_why: str = ""
    untagged: bool = False  #: what it writes carries no replication origin
    bytes_done: int = 0
    rows_done: int = 0


#: What an answer holds: a worker's identity, and up to where the state store shows what it has applied.
_ANSWER: dict[str, type] = {"subid": int, "worker": int, "epoch": int, "shown_lsn": int}
_TYPES: dict[str, type] = {one.name: {"int": int, "str": str, "bool": bool}[str(one.type)] for one in fields(Heartbeat)}


def _code(key: str, body: bytes) -> bytes:
    return hashlib.blake2b(body, key=bytes.fromhex(key), digest_size=CODE_BYTES).digest()


def sealed(key: str, number: int, body: bytes) -> bytes:
    """Return the datagram of a body."""
    numbered = number.to_bytes(NUMBER_BYTES) + body
    return _code(key, numbered) + numbered


def _opened(key: str, datagram: bytes, types: dict[str, type]) -> tuple[int, dict[str, Any]] | None:
    """Read number and values of a datagram; None unless the launcher or one of its own workers sent it."""
    code, numbered = datagram[:CODE_BYTES], datagram[CODE_BYTES:]
    if len(datagram) > MAX_BYTES or not hmac.compare_digest(code, _code(key, numbered)):
        return None
    try:
        values = json.loads(numbered[NUMBER_BYTES:])
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or values.keys() != types.keys():
        return None  # of another version, or of another kind
    fit = all(type(values[name]) is kind for name, kind in types.items())
    if not fit or not all(-1 <= v < 1 << 64 for v in values.values() if type(v) is int):
        return None
    return int.from_bytes(numbered[:NUMBER_BYTES]), values


def _reached(heartbeat: Heartbeat) -> tuple[int, int]:
    return heartbeat.position, heartbeat.reported_lsn


def _datagrams(host: str, port: int, use: Callable[[socket.socket, Any], object]) -> socket.socket:
    """Return a socket that is connected or bound to the first address of a host with which that succeeds.

    :param host: an address, also of version 6 in brackets, as Spark has it, or a name.
    :raises OSError: there is none.
    """
    reason: OSError | None = None
    found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)
    # version 4 first: Spark itself uses it
    for family, kind, _, _, address in sorted(found, key=lambda one: one[0] != socket.AF_INET):
        opened = socket.socket(family, kind)
        try:
            use(opened, address)
        except OSError as error:
            opened.close()
            reason = error
        else:
            return opened
    raise reason or OSError(errno.EADDRNOTAVAIL, "it has no address")


class HeartbeatSender:
    """The worker's end: sends at most every :data:`INTERVAL` seconds, from the worker's own thread."""

    def __init__(self, address: HeartbeatAddress | None) -> None:
        self._address = address
        self._next = 0.0
        self._number = 0
        self._not_before = -math.inf
        self._socket: socket.socket | None = None

    def send(self, heartbeat: Heartbeat, *, now: bool = False) -> None:
        """Send if it is time, or ``now``; a launcher that cannot be reached is no error of the worker."""
        clock = time.monotonic()
        if self._address is None or (not now and clock < self._next):
            return
        self._next = clock + INTERVAL
        # rises over the tries of a chunk, too, and no other clock does on two machines
        self._number = max(self._number + 1, time.time_ns())
        body = json.dumps(asdict(heartbeat)).encode()
        with contextlib.suppress(OSError):
            self._connected(self._address).send(sealed(self._address.key, self._number, body))

    def shown_lsn(self, heartbeat: Heartbeat) -> int | None:
        """Return the furthest position that answers since the last call name; None where none came.

        :param heartbeat: of the worker that asks; answers to an earlier epoch do not count.
        """
        furthest = None
        with contextlib.suppress(OSError):  # among them: no more is there
            while self._socket is not None and self._address is not None:
                opened = _opened(self._address.key, self._socket.recv(MAX_BYTES + 1, socket.MSG_DONTWAIT), _ANSWER)
                mine = (heartbeat.subid, heartbeat.worker, heartbeat.epoch)
                if opened is not None and (*opened[1].values(),)[:3] == mine:
                    furthest = max(furthest or 0, opened[1]["shown_lsn"])
        return furthest

    def _connected(self, address: HeartbeatAddress) -> socket.socket:
        """Return the socket, which is bound to the one address that leads there and closed to all others.

        A name that no server knows is not asked for again at once: each question may take seconds, of apply's own.
        """
        if self._socket is None:
            if time.monotonic() < self._not_before:
                raise OSError(errno.EHOSTUNREACH, "the launcher's name was not found a moment ago")
            self._not_before = time.monotonic() + _UNKNOWN_SECONDS
            self._socket = _datagrams(address.host, address.port, socket.socket.connect)
        return self._socket


class HeartbeatReceiver:
    """The launcher's end: keeps the newest heartbeat of each worker and chunk.

    :param host: address or name that workers send to, loopback for a local Spark master.
    :param bind: address to bind, where that is another (NAT, containers).
    :param port: UDP port, 0 for any.
    :raises SparkUnusable: it cannot be bound.
    """

    def __init__(self, host: str = "127.0.0.1", bind: str | None = None, port: int = 0) -> None:
        address = bind or host
        try:
            self._socket = _datagrams(address, port, socket.socket.bind)
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
        self._heard: dict[tuple[int, int, int], tuple[int, int]] = {}  #: epoch and number of the newest
        self._senders: dict[tuple[int, int], tuple[int, Any]] = {}  #: epoch and address of a worker itself
        self._ended: dict[tuple[int, int], int] = {}  #: the epoch of a worker that ended: nothing of it is heard again
        self._news: dict[int, threading.Event] = {}
        self._thread: SupervisedThread | None = None
        self._closing = False
        self.address = HeartbeatAddress(host, self._socket.getsockname()[1], self._key)

    def start(self) -> PgsubError | None:
        """Receive from now on, in a thread; to be called again now and then, for what ends the thread must not blind.

        :return: what ended it, if it had to be started again.
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
            opened = _opened(self._key, datagram, _TYPES)
            if opened is not None and self._unheard(opened[0], heartbeat := Heartbeat(**opened[1])):
                self._keep(heartbeat, sender)

    def _unheard(self, number: int, heartbeat: Heartbeat) -> bool:
        """Return whether a heartbeat is newer than all of its worker, and remember it."""
        worker = heartbeat.subid, heartbeat.worker
        key, place = (*worker, heartbeat.chunk), (heartbeat.epoch, number)
        with self._lock:
            # guard: a heartbeat counts once
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
            if heartbeat.worker == 0 and (before is None or _reached(before[1]) != _reached(heartbeat)):
                self._news.setdefault(heartbeat.subid, threading.Event()).set()

    def answer(self, subid: int, worker: int, shown_lsn: int) -> None:
        """Tell a worker up to where the state store shows what it has applied; one that was not heard is not told."""
        with self._lock:
            epoch, sender = self._senders.get((subid, worker), (0, None))
        if sender is not None:
            body = json.dumps(dict(zip(_ANSWER, (subid, worker, epoch, shown_lsn), strict=True))).encode()
            with contextlib.suppress(OSError):
                self._socket.sendto(sealed(self._key, 0, body), sender)

    def news(self, subid: int) -> threading.Event:
        """Return the event that is set whenever apply of a subscription has got further; the caller clears it."""
        with self._lock:
            return self._news.setdefault(subid, threading.Event())

    def newest(self, subid: int, worker: int) -> Heartbeat | None:
        """Return the newest heartbeat of a worker itself, not of a chunk; None before the first and once forgotten."""
        with self._lock:
            _, heartbeat = self._newest.get((subid, worker, -1), (0.0, None))
            return heartbeat

    def seconds_since(self, subid: int, worker: int, epoch: int) -> float:
        """Return the age of the newest heartbeat of a worker of that epoch; infinity if there is none."""
        with self._lock:
            at, heartbeat = self._newest.get((subid, worker, -1), (0.0, None))
        return time.monotonic() - at if heartbeat is not None and heartbeat.epoch == epoch else math.inf

    def of(self, subid: int) -> list[tuple[float, Heartbeat]]:
        """Return newest heartbeats of a subscription's workers, each with its age in seconds.

        A large table has thousands of chunks: those that were silent for :data:`CHUNK_SECONDS` are forgotten.
        """
        clock = time.monotonic()
        with self._lock:
            for key in [k for k, (at, _) in self._newest.items() if k[2] >= 0 and clock - at > CHUNK_SECONDS]:
                del self._newest[key]
            return [
                (clock - at, heartbeat) for (owner, _, _), (at, heartbeat) in self._newest.items() if owner == subid
            ]

    def forget(self, subid: int, worker: int) -> None:
        """Forget the heartbeats of a worker that ended."""
        with self._lock:
            for key in [k for k in self._newest if k[:2] == (subid, worker)]:
                del self._newest[key]
            self._senders.pop((subid, worker), None)
            heard = [self._heard.pop(key)[0] for key in [k for k in self._heard if k[:2] == (subid, worker)]]
            self._ended[subid, worker] = max([*heard, self._ended.get((subid, worker), -1)])

    def close(self) -> None:
        """Stop listening."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
