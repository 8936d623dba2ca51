"""Whatever bytes come where a walsender's stream is expected, the outcome is messages or an error of pgsub's own."""

from __future__ import annotations

import contextlib
import os
import random
import re
import resource
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import hostile
import psycopg
import pytest
from hostile import frame, header

from pgsub.common.errors import PgsubError, ProtocolViolation
from pgsub.publisher.connect import Connection
from pgsub.publisher.stream import openssl
from pgsub.publisher.stream.channel import Refused, poll
from pgsub.publisher.stream.channel_socket import SocketChannel
from pgsub.publisher.stream.transport import PlainTransport, over, reachable

_BEGIN = frame(b"W", b"\0\0\0")
_DATA = frame(b"d", b"w" + bytes(24) + b"message")
_TRIALS = 3000 if os.environ.get("PGSUB_TEST_THOROUGH") else 300


@contextlib.contextmanager
def stream(sent: bytes, *, more: bool = False) -> Iterator[SocketChannel]:
    """A channel to somebody who sends this and hangs up; with ``more`` he says nothing more."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)

    def send() -> None:
        with contextlib.suppress(OSError):
            theirs.sendall(sent)
            if not more:
                theirs.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=send)
    thread.start()
    connection = SimpleNamespace(pgconn=SimpleNamespace(socket=ours.fileno()), info=SimpleNamespace(encoding="utf-8"))
    with theirs:
        with ours:
            transport = PlainTransport(cast(Any, connection.pgconn))
            yield SocketChannel(cast(Connection, connection), transport, send_timeout=30)
        thread.join()


def everything(channel: SocketChannel) -> list[bytes]:
    """What it gives until the end of the stream."""
    channel.start(b"START_REPLICATION")
    messages: list[bytes] = []
    while (frames := channel.receive(1000, 1 << 20)) is not None:
        messages += frames
        poll(channel._transport.fileno(), select.POLLIN, 0.01)
    return messages


def test_a_stream_that_is_well_formed_is_read_to_its_end() -> None:
    with stream(hostile.NOTICE + _BEGIN + _DATA + hostile.NOTICE + _DATA + frame(b"c", b"")) as channel:
        assert everything(channel) == [_DATA[5:]] * 2


@pytest.mark.parametrize("length", [0, 1, 2, 3, 0x40000004, 0x7FFFFFFF, 0x80000003, 0xFFFFFFFF])
@pytest.mark.parametrize("kind", [b"d", b"E", b"N", b"c", b"C", b"Z"])
@pytest.mark.parametrize("before", [b"", _BEGIN, _BEGIN + _DATA], ids=["start", "stream", "later"])
def test_an_impossible_length_is_a_protocol_violation(kind: bytes, length: int, before: bytes) -> None:
    with stream(before + header(kind, length) + hostile.SLED) as channel, pytest.raises(ProtocolViolation):
        everything(channel)


@pytest.mark.parametrize(("before", "may_follow"), [(b"", b"WEZNSA"), (_BEGIN, b"dEcCZNSA")], ids=["start", "stream"])
def test_a_message_of_a_kind_that_has_no_place_there_is_a_protocol_violation(before: bytes, may_follow: bytes) -> None:
    for kind in set(range(256)) - set(may_follow):
        with stream(before + frame(bytes([kind]), b"content")) as channel, pytest.raises(ProtocolViolation):
            everything(channel)


def test_random_bytes_in_a_stream_end_it_with_an_error_of_its_own_or_well() -> None:
    seed = int(os.environ.get("PGSUB_FUZZ_SEED") or random.SystemRandom().getrandbits(32))
    print(f"PGSUB_FUZZ_SEED={seed}")
    for number in range(_TRIALS):
        chance = random.Random(seed + number)
        sent = hostile.fuzzed(chance).replace(b"H", b"W", 1).replace(b"1\tx\n", _DATA[5:])
        with stream(sent) as channel, contextlib.suppress(PgsubError, psycopg.Error, Refused):
            everything(channel)


@pytest.fixture
def encrypted(tmp_path: Path) -> Iterator[hostile.Publisher]:
    """A publisher that encrypts what it sends."""
    with contextlib.closing(hostile.Publisher(tmp_path)) as publisher:
        yield publisher


def _follow(channel: SocketChannel, messages: list[bytes]) -> None:
    while (frames := channel.receive(1000, 1 << 20)) is not None:
        messages += frames
        if not channel.pending():
            poll(cast(Any, channel)._transport.fileno(), select.POLLIN, 1)


def cut_off(publisher: hostile.Publisher) -> tuple[list[bytes], BaseException]:
    """What comes of its answer to START_REPLICATION, and the error that this ends with."""
    messages: list[bytes] = []
    with contextlib.closing(psycopg.connect(publisher.conninfo, autocommit=True)) as connection:
        assert reachable(connection) and connection.pgconn.ssl_in_use
        channel = SocketChannel(connection, over(connection.pgconn), send_timeout=30)
        channel.start(b"START_REPLICATION")
        with pytest.raises((psycopg.OperationalError, ProtocolViolation)) as raised:
            _follow(channel, messages)
        with pytest.raises(psycopg.OperationalError):  # nor does it end well when it is asked again
            channel.receive(1000, 1 << 20)
    return messages, raised.value


@pytest.mark.parametrize("says_goodbye", [False, True], ids=["cut", "closed"])
@pytest.mark.parametrize("size", [0, 3, 25])
def test_an_encrypted_stream_that_is_cut_off_is_an_error_and_no_end(
    encrypted: hostile.Publisher, says_goodbye: bool, size: int
) -> None:
    encrypted.answer = _BEGIN + _DATA * 3 + _DATA[:size]
    encrypted.ends_tls = says_goodbye
    messages, error = cut_off(encrypted)
    assert messages == [_DATA[5:]] * 3
    assert re.search("closed the connection unexpectedly|SSL error: unexpected eof", str(error)), error


@pytest.mark.parametrize(
    "added", [_DATA + frame(b"c", b""), b"\x17\x03\x03\0\x40" + bytes(64)], ids=["plain", "record"]
)
def test_what_somebody_adds_to_an_encrypted_stream_is_no_message(encrypted: hostile.Publisher, added: bytes) -> None:
    encrypted.answer, encrypted.below_tls = _BEGIN + _DATA * 3, added
    messages, error = cut_off(encrypted)
    assert messages == [_DATA[5:]] * 3
    assert "SSL error" in str(error)


def test_random_bytes_in_an_encrypted_stream_end_it_with_an_error_of_its_own_or_well(
    encrypted: hostile.Publisher,
) -> None:
    seed = int(os.environ.get("PGSUB_FUZZ_SEED") or random.SystemRandom().getrandbits(32))
    print(f"PGSUB_FUZZ_SEED={seed}")
    for number in range(_TRIALS // 10):
        chance = random.Random(seed + number)
        encrypted.answer = hostile.fuzzed(chance).replace(b"H", b"W", 1).replace(b"1\tx\n", _DATA[5:])
        encrypted.pieces = lambda: chance.randrange(1, 5000)  # noqa: B023 - until the connection is closed
        with contextlib.closing(psycopg.connect(encrypted.conninfo, autocommit=True)) as connection:
            channel = SocketChannel(connection, over(connection.pgconn), send_timeout=30)
            with contextlib.suppress(PgsubError, psycopg.Error, Refused):
                everything(channel)


def test_a_session_that_was_closed_is_not_read(encrypted: hostile.Publisher) -> None:
    encrypted.answer = _BEGIN + _DATA
    connection = psycopg.connect(encrypted.conninfo, autocommit=True)
    channel = SocketChannel(connection, over(connection.pgconn), send_timeout=30)
    channel.start(b"START_REPLICATION")
    connection.close()
    transport = cast(Any, channel)._transport
    for use in (lambda: transport.write(memoryview(b"r")), transport.peek, lambda: transport.read(bytearray(9000))):
        with pytest.raises(psycopg.OperationalError):
            use()
    assert not transport.end()


_OTHER = """
import ctypes, ssl, sys
with open("/proc/self/maps") as maps:
    other = next((line.split()[-1] for line in maps if "/libssl" in line), None)
if other is None:
    sys.exit(77)
ctypes.CDLL(other, mode=ctypes.RTLD_GLOBAL)
from pgsub.publisher.stream import openssl
sys.exit(openssl.loaded() is not None)
"""


def test_where_the_program_brings_another_openssl_libpq_does_everything() -> None:
    ended = subprocess.run([sys.executable, "-c", _OTHER], check=False).returncode
    if ended == 77:
        pytest.skip("Python's ssl module has no library of its own here")
    assert ended == 0


def test_a_module_without_openssl_is_not_used_as_one() -> None:
    with pytest.raises(AttributeError):
        openssl.Library(str(sys.modules["numpy._core._multiarray_umath"].__file__))


def test_an_announced_size_takes_no_memory_before_its_bytes_come() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()

    if sys.platform != "linux":
        pytest.skip("reads /proc")
    with stream(_BEGIN + header(b"d", 0x3FFFFFFF) + b"w", more=True) as channel:
        before = resident()
        channel.start(b"START_REPLICATION")
        for _ in range(5):
            received = channel.receive(1000, 1 << 20)
            assert received is not None and not len(received)
            channel.fill()
        assert len(cast(Any, channel)._buffer) <= 2 << 20
        assert resident() - before < 100 << 20


def test_a_message_of_many_megabytes_comes_whole_however_slowly() -> None:
    body = b"w" + os.urandom(1 << 16) * 100
    with stream(_BEGIN + _DATA + frame(b"d", body) + _DATA + frame(b"c", b"")) as channel:
        assert everything(channel) == [_DATA[5:], body, _DATA[5:]]
