"""Heartbeats from workers to the launcher, and its answers: small datagrams, which may be lost.

What a worker does between two commits (positions, bytes of a running copy) is only for display. It must not be written
to the target: two subscriptions that feed each other would keep each other awake. Whatever must not be lost goes
through the ledger. A datagram has an authentication code (BLAKE2b, RFC 7693, with a random key of the launcher), a
number that increases with every datagram of the sender (as in RFC 4303, section 3.4.3), and JSON. Nothing is parsed
before the code is verified, because any user of the machine may send to the port. Repeated and older datagrams are
dropped, so recorded heartbeats cannot make a hanging worker seem alive. An answer says how far the state store shows
the worker's progress, in the same format.
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

#: Maximum bytes of a datagram, and bytes of the authentication code at its start. A heartbeat has some 700.
MAX_BYTES, CODE_BYTES = 4096, 16
NUMBER_BYTES = 8
#: Seconds before the launcher's host name is looked up again after a failure.
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

    Positions are LSNs as integers; timestamps are microseconds since 2000-01-01 UTC. Both are 0 while unknown.
    """

    subid: int
    worker: int  #: 0 apply, else the table's oid
    chunk: int = -1  #: chunk of a copy, else -1
    epoch: int = 0
    pid: int = field(default_factory=os.getpid)
    state: str = ""  #: live srsubstate of a sync worker, including w and c
    received_lsn: int = 0
    last_msg_send_time: int = 0
    last_msg_receipt_time: int = 0
    latest_end_lsn: int = 0
    latest_end_time: int = 0
    position: int = 0  #: everything before is applied or needs no applying, including idle stretches
    reported_lsn: int = 0  #: as the ledger has it
    #: changes by method since the worker began: see the row of pg_stat_subscription_stats
    changes_in_sets: int = 0
    changes_folded: int = 0
    serial_relations: int = 0
    set_fallbacks: int = 0
    parallel: int = 0  #: number of transactions in progress that are being applied
    sessions: int = 1  #: target sessions that apply, and a sentence why if apply chose the number
    sessions_why: str = ""
    untagged: bool = False  #: its changes carry no replication origin
    bytes_done: int = 0
    rows_done: int = 0


#: Fields of an answer: a worker's identity, and up to where the state store shows its progress.
ANSWER: dict[str, type] = {"subid": int, "worker": int, "epoch": int, "shown_lsn": int}
#: Times reported by the publisher, in microseconds since 2000.
_TIMES = ("last_msg_send_time", "latest_end_time")
FIELDS: dict[str, type] = {one.name: {"int": int, "str": str, "bool": bool}[str(one.type)] for one in fields(Heartbeat)}


def _code(key: str, body: bytes) -> bytes:
    return hashlib.blake2b(body, key=bytes.fromhex(key), digest_size=CODE_BYTES).digest()


def sealed(key: str, number: int, body: bytes) -> bytes:
    """Return the datagram for a body."""
    numbered = number.to_bytes(NUMBER_BYTES) + body
    return _code(key, numbered) + numbered


def unsealed(key: str, datagram: bytes, types: dict[str, type]) -> tuple[int, dict[str, Any]] | None:
    """Parse number and values of a datagram; return None unless the launcher or one of its workers sent it."""
    code, numbered = datagram[:CODE_BYTES], datagram[CODE_BYTES:]
    if len(datagram) > MAX_BYTES or not hmac.compare_digest(code, _code(key, numbered)):
        return None
    try:
        values = json.loads(numbered[NUMBER_BYTES:])
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or values.keys() != types.keys():
        return None  # from another version, or of another kind
    fit = all(type(values[name]) is kind for name, kind in types.items())
    if not fit or not all(-1 <= v < 1 << 64 for v in values.values() if type(v) is int):
        return None
    return int.from_bytes(numbered[:NUMBER_BYTES]), values


def datagram_socket(host: str, port: int, use: Callable[[socket.socket, Any], object]) -> socket.socket:
    """Return a socket that is connected or bound to the first usable address of a host.

    :param host: a name or an address; version 6 may be in brackets, as in Spark.
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
        """Send if it is time, or ``now``; an unreachable launcher is not an error of the worker."""
        clock = time.monotonic()
        if self._address is None or (not now and clock < self._next):
            return
        self._next = clock + INTERVAL
        # must increase over the attempts of a chunk, too, which only this clock does on two machines
        self._number = max(self._number + 1, time.time_ns())
        values = asdict(heartbeat)
        # a publisher's clock may be wrong: a time before 2000 must not suppress the heartbeat
        values |= {name: max(values[name], 0) for name in _TIMES}
        body = json.dumps(values).encode()
        with contextlib.suppress(OSError):
            self._connected(self._address).send(sealed(self._address.key, self._number, body))

    def shown_lsn(self, heartbeat: Heartbeat) -> int | None:
        """Return the furthest position in the answers since the last call; None without answers.

        :param heartbeat: heartbeat of the worker; answers to an earlier epoch are ignored.
        """
        furthest = None
        with contextlib.suppress(OSError):  # also raised when no datagram is left
            while self._socket is not None and self._address is not None:
                opened = unsealed(self._address.key, self._socket.recv(MAX_BYTES + 1, socket.MSG_DONTWAIT), ANSWER)
                mine = (heartbeat.subid, heartbeat.worker, heartbeat.epoch)
                if opened is not None and (*opened[1].values(),)[:3] == mine:
                    furthest = max(furthest or 0, opened[1]["shown_lsn"])
        return furthest

    def _connected(self, address: HeartbeatAddress) -> socket.socket:
        """Return the socket, which is connected to the launcher's address and ignores all others.

        An unknown name is not looked up again immediately, because each lookup may delay apply by seconds.
        """
        if self._socket is None:
            if time.monotonic() < self._not_before:
                raise OSError(errno.EHOSTUNREACH, "the launcher's name was not found a moment ago")
            self._not_before = time.monotonic() + _UNKNOWN_SECONDS
            self._socket = datagram_socket(address.host, address.port, socket.socket.connect)
        return self._socket
