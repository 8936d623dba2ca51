"""Whatever a publisher can say is understood: every message, alone and in whole sessions."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol.encoding import encode
from protocol.message_strategies import CHANGES, CONTROLS, EVERY, PARALLEL_ABORTS, XIDS, Step, examples, sessions

from pgsub.protocol.decoder import Decoder, decode_change, message_xid
from pgsub.protocol.messages import Change, Control, Message, Origin, Relation, StreamStop


def test_every_message_type_is_tried() -> None:
    assert set(CHANGES) == set(get_args(Change))
    assert set(CONTROLS) == set(get_args(Control))
    assert set(EVERY) == set(get_args(Message))


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
@settings(max_examples=examples(60))
@given(st.data())
def test_a_message_is_decoded_as_it_was_encoded(kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(EVERY[kind])
    decoded = decode_change(encode(message), in_stream=False)
    assert decoded == message
    assert type(decoded) is kind


@pytest.mark.parametrize("kind", CHANGES, ids=lambda kind: kind.__name__)
@settings(max_examples=examples(60))
@given(st.data(), XIDS)
def test_a_change_in_a_stream_block_is_decoded_with_its_xid(kind: type[Change], data: st.DataObject, xid: int) -> None:
    change = data.draw(CHANGES[kind])
    payload = encode(change, xid)
    assert decode_change(payload, in_stream=True) == change
    assert message_xid(payload) == xid


@given(CONTROLS[Origin] | CONTROLS[StreamStop])
def test_origin_and_stream_stop_carry_no_xid_in_a_stream_block(message: Message) -> None:
    assert decode_change(encode(message), in_stream=True) == message


@given(PARALLEL_ABORTS)
def test_a_stream_abort_carries_lsn_and_time_with_parallel_streaming(abort: Message) -> None:
    assert decode_change(encode(abort), in_stream=False, parallel_streaming=True) == abort


def test_an_empty_namespace_means_pg_catalog() -> None:
    relation = decode_change(b"R\0\0\0\1\0name\0d\0\0", in_stream=False)
    assert isinstance(relation, Relation)
    assert relation.namespace == "pg_catalog"


@settings(max_examples=examples(60), deadline=None)
@given(sessions())
def test_a_whole_session_is_decoded_with_the_transaction_of_every_block(steps: list[Step]) -> None:
    decoder = Decoder()
    for step in steps:
        assert decoder.decode(step.payload) == step.message
        assert decoder.stream_xid == step.stream_xid
