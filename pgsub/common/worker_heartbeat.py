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
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

#: Bytes of a datagram at most, and of the code of authentication that it begins with. A heartbeat has some 700.
MAX_BYTES, CODE_BYTES = 4096, 16
NUMBER_BYTES = 8
#: After a failure to find the launcher's address by its name.
_UNKNOWN_SECONDS = 30.0
INTERVAL = 0.2  #: seconds between heartbeats of a worker


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
ANSWER: dict[str, type] = {"subid": int, "worker": int, "epoch": int, "shown_lsn": int}
#: Times that the publisher said, in microseconds since 2000.
_TIMES = ("last_msg_send_time", "latest_end_time")
FIELDS: dict[str, type] = {one.name: {"int": int, "str": str, "bool": bool}[str(one.type)] for one in fields(Heartbeat)}


def _code(key: str, body: bytes) -> bytes:
    return hashlib.blake2b(body, key=bytes.fromhex(key), digest_size=CODE_BYTES).digest()


def sealed(key: str, number: int, body: bytes) -> bytes:
    """Return the datagram of a body."""
    numbered = number.to_bytes(NUMBER_BYTES) + body
    return _code(key, numbered) + numbered


def unsealed(key: str, datagram: bytes, types: dict[str, type]) -> tuple[int, dict[str, Any]] | None:
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


def datagram_socket(host: str, port: int, use: Callable[[socket.socket, Any], object]) -> socket.socket:
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
        values = asdict(heartbeat)
        # a publisher's clock may say anything: a time before 2000 must not cost the sign of life
        values |= {name: max(values[name], 0) for name in _TIMES}
        body = json.dumps(values).encode()
        with contextlib.suppress(OSError):
            self._connected(self._address).send(sealed(self._address.key, self._number, body))

    def shown_lsn(self, heartbeat: Heartbeat) -> int | None:
        """Return the furthest position that answers since the last call name; None where none came.

        :param heartbeat: of the worker that asks; answers to an earlier epoch do not count.
        """
        furthest = None
        with contextlib.suppress(OSError):  # among them: no more is there
            while self._socket is not None and self._address is not None:
                opened = unsealed(self._address.key, self._socket.recv(MAX_BYTES + 1, socket.MSG_DONTWAIT), ANSWER)
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
            self._socket = datagram_socket(address.host, address.port, socket.socket.connect)
        return self._socket
