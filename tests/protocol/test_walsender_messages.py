"""CopyData envelopes."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol.message_strategies import ANY_LSN, TIMES, examples

from pgsub.common.errors import ProtocolViolation
from pgsub.protocol.walsender_messages import Keepalive, XLogData, parse, standby_status

KEEPALIVE = b"k" + struct.pack(">QqB", 7, -1, 1)
WAL_DATA = b"w" + struct.pack(">QQq", 1, 2, 3)


@given(ANY_LSN, ANY_LSN, TIMES, st.binary(max_size=30))
def test_wal_data_keeps_its_positions_time_and_payload(start: int, end: int, time: int, payload: bytes) -> None:
    assert parse(b"w" + struct.pack(">QQq", start, end, time) + payload) == XLogData(start, end, time, payload)


@given(ANY_LSN, TIMES, st.booleans())
def test_a_keepalive_keeps_its_position_time_and_flag(end: int, time: int, reply: bool) -> None:
    assert parse(b"k" + struct.pack(">QqB", end, time, reply)) == Keepalive(end, time, reply)


def test_the_payload_of_a_memoryview_is_a_copy() -> None:
    buffer = bytearray(WAL_DATA + b"payload")
    envelope = parse(memoryview(buffer))
    buffer[-7:] = b"changed"
    assert isinstance(envelope, XLogData)
    assert type(envelope.payload) is bytes
    assert envelope.payload == b"payload"


@pytest.mark.parametrize("size", range(len(WAL_DATA)))
def test_truncated_wal_data_is_a_protocol_violation(size: int) -> None:
    with pytest.raises(ProtocolViolation):
        parse(WAL_DATA[:size])


@pytest.mark.parametrize("copydata", [KEEPALIVE[:size] for size in range(len(KEEPALIVE))] + [KEEPALIVE + b"\0"])
def test_a_keepalive_of_another_length_is_a_protocol_violation(copydata: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        parse(copydata)


@pytest.mark.parametrize("kind", sorted(set(range(256)) - set(b"wk")))
def test_any_other_kind_is_a_protocol_violation(kind: int) -> None:
    with pytest.raises(ProtocolViolation):
        parse(bytes([kind]) + WAL_DATA[1:])


@settings(max_examples=examples(200))
@given(st.binary(max_size=40))
def test_random_bytes_are_an_envelope_or_a_protocol_violation(copydata: bytes) -> None:
    try:
        envelope = parse(copydata)
    except ProtocolViolation:
        return
    assert isinstance(envelope, XLogData | Keepalive)


def test_a_standby_status_update_has_write_flush_apply_time_and_flag_in_this_order() -> None:
    status = standby_status(write=3, flush=1, apply=2, now_ts=-5, reply_requested=True)
    assert len(status) == 34
    assert struct.unpack(">cQQQqB", status) == (b"r", 3, 1, 2, -5, 1)


def test_a_standby_status_update_asks_for_no_reply_unless_told() -> None:
    assert standby_status(0, 0, 0, 0)[-1] == 0
