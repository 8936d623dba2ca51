"""Heartbeats: anybody on the machine may send to the port, and only the launcher's own workers are heard."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from fix_failpoints import At

from pgsub.common import worker_heartbeat
from pgsub.common.worker_heartbeat import Heartbeat, HeartbeatAddress, HeartbeatSender
from pgsub.launcher.heartbeat_receiver import HeartbeatReceiver


@pytest.fixture
def ear() -> Iterator[HeartbeatReceiver]:
    """A launcher's end that listens."""
    with contextlib.closing(HeartbeatReceiver()) as receiver:
        receiver.start()
        yield receiver


def until(condition: Callable[[], object]) -> None:
    """Datagrams and threads take a moment."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def heard(ear: HeartbeatReceiver, worker: int) -> bool:
    """Whether a heartbeat of this worker comes through, and all that were sent before are dealt with."""
    HeartbeatSender(ear.address).send(Heartbeat(1, worker), now=True)
    until(lambda: ear.newest(1, worker))
    return True


def test_a_datagram_that_nobody_of_the_launchers_own_sent_is_not_even_parsed(
    ear: HeartbeatReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[bytes] = []
    whole = json.dumps({**asdict(Heartbeat(1, 7)), "key": "0" * 32}).encode()
    forged = worker_heartbeat.sealed("0" * 32, 1, whole)
    with monkeypatch.context() as patched, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        patched.setattr(json, "loads", lambda text: parsed.append(text))
        for data in (b"", b"[" * 60_000, b"\xff" * 1000, b"{}", whole, forged, b'{"key": 1}', bytes(65_000)):
            stranger.sendto(data, (ear.address.host, ear.address.port))
        HeartbeatSender(ear.address).send(Heartbeat(1, 5), now=True)
        until(lambda: parsed)
    assert parsed == [json.dumps(asdict(Heartbeat(1, 5))).encode()]
    assert heard(ear, 6) and ear.newest(1, 7) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"subid": "1"},
        {"worker": 7.0},
        {"position": None},
        {"position": True},
        {"position": -2},
        {"position": 1 << 64},
        {"state": 1},
        {"untagged": 0},
        {"chunk": []},
        {"more": 1},
    ],
)
def test_a_heartbeat_with_a_value_of_another_type_is_dropped(ear: HeartbeatReceiver, wrong: dict[str, object]) -> None:
    body = json.dumps({**asdict(Heartbeat(1, 7)), **wrong}).encode()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(worker_heartbeat.sealed(ear.address.key, 1, body), (ear.address.host, ear.address.port))
    assert heard(ear, 6) and ear.newest(1, 7) is None


def test_a_heartbeat_with_the_longest_values_has_room_in_a_datagram(ear: HeartbeatReceiver) -> None:
    longest = replace(
        Heartbeat(1, 8), **{one: (1 << 64) - 1 for one, kind in worker_heartbeat.FIELDS.items() if kind is int}
    )
    longest = replace(longest, subid=1, worker=8, chunk=-1, state="c")
    HeartbeatSender(ear.address).send(longest, now=True)
    until(lambda: ear.newest(1, 8))
    assert ear.newest(1, 8) == longest


def test_a_publisher_whose_clock_is_before_2000_does_not_silence_its_worker(ear: HeartbeatReceiver) -> None:
    HeartbeatSender(ear.address).send(Heartbeat(1, 9, last_msg_send_time=-5, latest_end_time=-(1 << 63)), now=True)
    until(lambda: ear.newest(1, 9))
    assert ear.newest(1, 9) == Heartbeat(1, 9)  # which has neither


@pytest.fixture
def recorded(ear: HeartbeatReceiver) -> Iterator[Callable[[Heartbeat], bytes]]:
    """What somebody between worker and launcher records, and delivers when he likes."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as middle:
        middle.bind(("127.0.0.1", 0))
        sender = HeartbeatSender(HeartbeatAddress("127.0.0.1", middle.getsockname()[1], ear.address.key))

        def record(heartbeat: Heartbeat) -> bytes:
            sender.send(heartbeat, now=True)
            return middle.recv(worker_heartbeat.MAX_BYTES)

        yield record


def test_a_heartbeat_that_somebody_recorded_and_repeats_is_no_sign_of_life(
    ear: HeartbeatReceiver, recorded: Callable[[Heartbeat], bytes]
) -> None:
    first, second = (recorded(Heartbeat(1, 0, epoch=3, position=position)) for position in (10, 20))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as somebody:
        somebody.connect((ear.address.host, ear.address.port))
        somebody.send(second)
        until(lambda: ear.newest(1, 0))
        heard_at, news = ear._newest[1, 0, -1], ear.news(1)
        news.clear()
        for repeated in (second, first, second):
            somebody.send(repeated)
        assert heard(ear, 6) and ear._newest[1, 0, -1] == heard_at and not news.is_set()
        ear.forget(1, 0)  # the worker has ended
        somebody.send(first)
        somebody.send(second)
        assert heard(ear, 7) and ear.newest(1, 0) is None
        somebody.send(recorded(Heartbeat(1, 0, epoch=4)))  # the next one
        until(lambda: ear.newest(1, 0))
        somebody.send(recorded(Heartbeat(1, 0, epoch=3)))  # and again the one that was taken over
        assert heard(ear, 8) and ear.seconds_since(1, 0, 4) < 30


#: A machine that was started a minute later: its monotonic clock is behind.
_YOUNGER = ("unshare", "--time", "--monotonic", "-60")


def _other_clocks() -> bool:
    try:
        return subprocess.run([*_YOUNGER, "true"], capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not _other_clocks(), reason="no time namespace can be made here")
def test_a_chunk_that_another_machine_tries_again_is_heard_whichever_was_started_first(ear: HeartbeatReceiver) -> None:
    first, again = Heartbeat(1, 5, 3, epoch=2), Heartbeat(1, 5, 3, epoch=2, rows_done=7)
    HeartbeatSender(ear.address).send(first, now=True)
    until(lambda: ear.of(1))
    program = (
        "from pgsub.common.worker_heartbeat import Heartbeat, HeartbeatAddress, HeartbeatSender\n"
        f"HeartbeatSender({ear.address!r}).send({again!r}, now=True)"
    )
    words = [*_YOUNGER, sys.executable, "-c", program]
    subprocess.run(words, check=True, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})
    until(lambda: [heartbeat.rows_done for _, heartbeat in ear.of(1)] == [7])


def test_a_worker_sends_from_an_address_that_only_its_launcher_can_answer(ear: HeartbeatReceiver) -> None:
    sender = HeartbeatSender(ear.address)
    sender.send(Heartbeat(1, 5), now=True)
    assert sender._socket is not None
    assert sender._socket.getsockname()[0] == "127.0.0.1"
    assert sender._socket.getpeername() == (ear.address.host, ear.address.port)


def test_a_launcher_that_went_deaf_hears_again(ear: HeartbeatReceiver, at: At) -> None:
    at("thread.heartbeats=die")
    HeartbeatSender(ear.address).send(Heartbeat(1, 5), now=True)
    until(lambda: ear._thread is not None and not ear._thread.is_alive())
    ended = ear.start()
    assert ended is not None and "SystemExit" in ended.message
    assert heard(ear, 6)
    assert ear.start() is None


def test_apply_that_gets_further_is_news_and_apply_that_stands_still_is_not(ear: HeartbeatReceiver) -> None:
    sender, news = HeartbeatSender(ear.address), ear.news(1)
    sender.send(Heartbeat(1, 0, position=100), now=True)
    until(news.is_set)
    news.clear()
    for still in (
        Heartbeat(1, 0, position=100, sessions=5),
        Heartbeat(1, 7, position=200),
        Heartbeat(2, 0, position=200),
    ):
        sender.send(still, now=True)
    assert heard(ear, 9) and not news.is_set()
    sender.send(Heartbeat(1, 0, position=101), now=True)
    until(news.is_set)


def test_an_answer_reaches_the_worker_that_was_heard_and_counts_for_its_epoch_only(ear: HeartbeatReceiver) -> None:
    sender, heartbeat, found = HeartbeatSender(ear.address), Heartbeat(1, 0, epoch=2), [None]
    ear.answer(1, 0, 600)  # nobody was heard yet
    sender.send(heartbeat, now=True)
    until(lambda: ear.newest(1, 0))
    for position in (700, 800, 750):
        ear.answer(1, 0, position)
    until(lambda: found.append(sender.shown_lsn(heartbeat)) or found[-1])
    assert found[-1] == 800
    ear.answer(1, 0, 900)
    assert sender.shown_lsn(replace(heartbeat, epoch=3)) is None and sender.shown_lsn(heartbeat) is None
    ear.forget(1, 0)
    ear.answer(1, 0, 1000)
    assert sender.shown_lsn(heartbeat) is None


def test_nobody_else_can_answer_a_worker(ear: HeartbeatReceiver) -> None:
    sender, heartbeat = HeartbeatSender(ear.address), Heartbeat(1, 0, epoch=2)
    sender.send(heartbeat, now=True)
    until(lambda: ear.newest(1, 0))
    place = sender._socket.getsockname()
    body = json.dumps({"subid": 1, "worker": 0, "epoch": 2, "shown_lsn": 900}).encode()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.sendto(worker_heartbeat.sealed(ear.address.key, 0, body), place)  # from another port
    for forged in (b"", worker_heartbeat.sealed("0" * 32, 0, body), worker_heartbeat.sealed(ear.address.key, 0, b"[]")):
        ear._socket.sendto(forged, place)
    assert sender.shown_lsn(heartbeat) is None
