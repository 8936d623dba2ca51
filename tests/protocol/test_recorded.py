"""Streams of a real walsender: every byte of them is understood, and whatever becomes of the bytes is met well."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from embedded import Server
from fix_proxy import Proxy
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol.encoding import encode
from protocol.message_strategies import examples
from protocol.recorded_streams import EVERY_KIND, Stream, history, live, replay, set_up
from protocol.test_hostile_bytes import mutate

from pgsub.apply.stream.assembler import Assembler
from pgsub.apply.stream.spool import Spool
from pgsub.apply.stream.transaction_batch import Batch
from pgsub.common.errors import ProtocolViolation
from pgsub.protocol import walsender_messages
from pgsub.protocol.decoder import Decoder, decode_change, message_xid
from pgsub.protocol.frames import Frames
from pgsub.protocol.messages import Change
from pgsub.protocol.walsender_messages import Keepalive


@pytest.fixture(scope="module")
def walsenders() -> Iterator[Server]:
    """A publisher with a slot before changes of every kind."""
    with Server(fast=True, settings={"max_prepared_transactions": 10}) as server:
        set_up(server)
        history(server)
        yield server


@pytest.fixture(scope="module")
def streams(walsenders: Server) -> list[Stream]:
    """Finished transactions as text and binary, and transactions in progress in both layouts."""
    plain = [replay(walsenders.conninfo(), binary=binary) for binary in (False, True)]
    return [*plain, live(walsenders, parallel=False), live(walsenders, parallel=True)]


@pytest.fixture(scope="module")
def spool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spool]:
    """Where transactions wait that are not finished."""
    folder: Path = tmp_path_factory.mktemp("spool")
    made = Spool(str(folder), "1-0")
    yield made
    made.close()


def test_the_recordings_hold_every_message_type(streams: list[Stream]) -> None:
    assert set().union(*[stream.kinds() for stream in streams]) == EVERY_KIND
    assert "A" in streams[2].kinds() & streams[3].kinds()


def test_every_recorded_message_means_exactly_its_bytes(streams: list[Stream]) -> None:
    for stream in streams:
        decoder = Decoder(stream.parallel)
        for payload in stream.payloads():
            in_stream = decoder.stream_xid is not None
            message = decoder.decode(payload)
            xid = message_xid(payload) if in_stream and isinstance(message, Change) else None
            assert encode(message, xid) == payload


@settings(max_examples=examples(600), deadline=None)
@given(st.integers(0, 2**32))
def test_a_spoiled_message_is_a_message_or_a_protocol_violation_and_takes_little_memory(
    streams: list[Stream], seed: int
) -> None:
    chance = random.Random(seed)
    stream = chance.choice(streams)
    copydata = chance.choice(stream.copydata)
    spoiled = copydata[: chance.randrange(len(copydata))] if chance.random() < 0.3 else mutate(copydata, chance)
    tracemalloc.start()
    try:
        opened = walsender_messages.parse(spoiled)
        if isinstance(opened, walsender_messages.XLogData):
            decode_change(opened.payload, chance.random() < 0.5, stream.parallel)
    except ProtocolViolation:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 100_000 + 100 * len(spoiled)


def _disorder(streams: list[Stream], chance: random.Random) -> tuple[bool, list[bytes]]:
    """Parts of recorded streams, joined where they never were, with some messages moved, lost, doubled or spoiled."""
    stream = chance.choice(streams)
    payloads = stream.payloads()
    if chance.random() < 0.5:
        other = chance.choice(streams).payloads()
        payloads = payloads[: chance.randrange(len(payloads))] + other[chance.randrange(len(other)) :]
    for _ in range(chance.randrange(4)):
        place, to = chance.randrange(len(payloads)), chance.randrange(len(payloads))
        match chance.randrange(4):
            case 0:
                payloads[place], payloads[to] = payloads[to], payloads[place]
            case 1:
                del payloads[place]
            case 2:
                payloads.insert(to, payloads[place])
            case _:
                payloads[place] = mutate(payloads[place], chance)
    return stream.parallel, payloads


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(0, 2**32))
def test_a_stream_in_disorder_is_refused_from_the_first_violation_on(streams: list[Stream], seed: int) -> None:
    parallel, payloads = _disorder(streams, random.Random(seed))
    decoder, refused = Decoder(parallel), False
    for payload in payloads:
        try:
            decoder.decode(payload)
            assert not refused
        except ProtocolViolation:
            refused = True


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 3, 1000]))
def test_of_a_stream_in_disorder_whole_transactions_come_or_a_protocol_violation(
    streams: list[Stream], spool: Spool, seed: int, pieces: int
) -> None:
    parallel, payloads = _disorder(streams, random.Random(seed))
    assembler = Assembler(spool, parallel_streaming=parallel)
    try:
        for number in range(0, len(payloads), pieces):
            for received in assembler.take(Frames.around(payloads[number : number + pieces])):
                assert not isinstance(received, Keepalive)
                for transaction in Batch([received]).transactions():
                    transaction.relids(), transaction.described()
                    for change in transaction.payloads():
                        decode_change(change, transaction.in_stream)
                    transaction.release()
    except ProtocolViolation:
        pass


@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
@pytest.mark.parametrize("largest", [1, 7, 1500])
def test_however_the_bytes_come_the_messages_are_the_same(
    walsenders: Server, streams: list[Stream], proxy: Callable[[str], Proxy], largest: int, binary: bool
) -> None:
    between, chance = proxy(walsenders.conninfo()), random.Random(largest)
    between.slice = lambda: chance.randint(1, largest)
    assert replay(between.conninfo, binary=binary).payloads() == streams[binary].payloads()
