"""Whatever the bytes are, the outcome is a message or a protocol violation."""

from __future__ import annotations

import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol.encoding import encode, text_tuple
from protocol.message_strategies import CHANGES, EVERY, PARALLEL_ABORTS, Step, examples, sessions

from pgsub.common.errors import ProtocolViolation
from pgsub.protocol import decoder as decoder_module
from pgsub.protocol.decoder import Decoder, decode_change, message_xid
from pgsub.protocol.messages import (
    Begin,
    BeginPrepare,
    Column,
    Commit,
    CommitPrepared,
    Delete,
    Insert,
    LogicalMessage,
    Message,
    Origin,
    Prepare,
    Relation,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    Tuple,
    TypeName,
    Update,
)

ANY_MESSAGE = st.one_of(*EVERY.values())
ROW = text_tuple([b"1", None])
COLUMNS = (Column(1, "id", 23, -1), Column(0, "v", 25, -1))
RELATION = Relation(1, "public", "t", "d", COLUMNS)


def refused(payload: bytes, *, in_stream: bool = False, parallel: bool = False) -> bool:
    """Whether a message is a protocol violation; every other exception goes through."""
    try:
        decode_change(payload, in_stream, parallel)
    except ProtocolViolation:
        return True
    return False


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
@settings(max_examples=examples(15), deadline=None)
@given(st.data())
def test_a_truncated_message_is_a_protocol_violation(kind: type[Message], data: st.DataObject) -> None:
    payload = encode(data.draw(EVERY[kind]))
    assert [size for size in range(len(payload)) if not refused(payload[:size])] == []


@pytest.mark.parametrize("kind", CHANGES, ids=lambda kind: kind.__name__)
@settings(max_examples=examples(15), deadline=None)
@given(st.data())
def test_a_truncated_message_in_a_stream_is_a_protocol_violation(kind: type[Message], data: st.DataObject) -> None:
    payload = encode(data.draw(EVERY[kind]), 7)
    assert [size for size in range(len(payload)) if not refused(payload[:size], in_stream=True)] == []


@given(PARALLEL_ABORTS)
def test_a_truncated_parallel_stream_abort_is_a_protocol_violation(abort: Message) -> None:
    payload = encode(abort)
    assert all(refused(payload[:size], parallel=True) for size in range(len(payload)))


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
@settings(max_examples=examples(15))
@given(st.data(), st.binary(min_size=1, max_size=9))
def test_bytes_left_over_after_a_message_are_a_protocol_violation(
    kind: type[Message], data: st.DataObject, rest: bytes
) -> None:
    assert refused(encode(data.draw(EVERY[kind])) + rest)


def mutate(payload: bytes, rng: random.Random) -> bytes:
    """Spoil a message in one to four places: flipped, dropped, doubled or extreme bytes."""
    data = bytearray(payload)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(data) + 1)
        match rng.randrange(5):
            case 0 if place < len(data):
                data[place] ^= 1 << rng.randrange(8)
            case 1:
                del data[place : place + rng.randint(1, 4)]
            case 2:
                data[place:place] = rng.randbytes(rng.randint(1, 4))
            case 3:
                data[place : place + 4] = struct.pack(">i", rng.choice([-1, 0, 1, 2**31 - 1, -(2**31), 1600, 65536]))
            case _:
                data[place:place] = data[: rng.randint(0, 8)]
    return bytes(data)


@settings(max_examples=examples(300), deadline=None)
@given(ANY_MESSAGE, st.none() | st.just(7), st.booleans(), st.integers(0, 2**32))
def test_a_mutated_message_is_a_message_or_a_protocol_violation(
    message: Message, xid: int | None, parallel: bool, seed: int
) -> None:
    payload = mutate(encode(message, xid), random.Random(seed))
    try:
        decoded = decode_change(payload, xid is not None, parallel)
    except ProtocolViolation:
        return
    # What is accepted means exactly these bytes: pg_catalog alone has two spellings.
    in_stream_xid = message_xid(payload) if xid is not None and isinstance(decoded, tuple(CHANGES)) else None
    assert encode(decoded, in_stream_xid) == payload or getattr(decoded, "namespace", "") == "pg_catalog"


@settings(max_examples=examples(300))
@given(st.sampled_from(b"RYIUDTMBCOSEcAbPKrpX\0"), st.binary(max_size=60), st.booleans(), st.booleans())
def test_random_bytes_are_a_message_or_a_protocol_violation(
    kind: int, rest: bytes, in_stream: bool, parallel: bool
) -> None:
    refused(bytes([kind]) + rest, in_stream=in_stream, parallel=parallel)


@settings(max_examples=examples(80), deadline=None)
@given(sessions(), st.integers(0, 2**32))
def test_a_session_in_disorder_ends_in_a_protocol_violation_or_goes_on(steps: list[Step], seed: int) -> None:
    rng = random.Random(seed)
    payloads = [step.payload for step in steps]
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(payloads))
        payloads[place:place] = rng.choice([[payloads[place]], [mutate(payloads[place], rng)], [rng.choice(payloads)]])
        del payloads[rng.randrange(len(payloads))]
    decoder = Decoder(parallel_streaming=rng.random() < 0.2)
    violations = 0
    for payload in payloads:
        try:
            decoder.decode(payload)
            assert violations == 0
        except ProtocolViolation:
            violations += 1


def tuple_bytes(kind: bytes, length: int, value: bytes) -> bytes:
    """An Insert of one column whose length field says what it likes."""
    return b"I\0\0\0\1N\0\1" + kind + struct.pack(">I", length) + value


UNCHANGED = Tuple(b"tu", (b"1", None))

MALFORMED: dict[str, bytes] = {
    "an empty message": b"",
    "an unknown message type": b"X",
    "a row of 1601 columns": b"I\0\0\0\1N" + struct.pack(">H", 1601) + b"n" * 1601,
    "a row whose number of columns is negative": b"I\0\0\0\1N\xff\xff",
    "a row with fewer columns than it says": b"I\0\0\0\1N\0\3nn",
    "a row with more columns than it says": b"I\0\0\0\1N\0\1nn",
    "an unknown kind of column value": b"I\0\0\0\1N\0\1x",
    "a negative length": tuple_bytes(b"t", 2**32 - 1, b"abc"),
    "the most negative length": tuple_bytes(b"b", 2**31, b"abc"),
    "a length one beyond the message": tuple_bytes(b"t", 4, b"abc"),
    "a length one short of the message": tuple_bytes(b"t", 2, b"abc"),
    "a length of two gigabytes": tuple_bytes(b"t", 2**31 - 1, b"abc"),
    "an unchanged value in the key of a delete": encode(Delete(1, "K", UNCHANGED)),
    "an unchanged value in the key of an update": encode(Update(1, "K", UNCHANGED, ROW)),
    "an insert with an old row": b"I\0\0\0\1O\0\0",
    "an update without a new row": b"U\0\0\0\1K\0\1n",
    "an update with an unknown action": b"U\0\0\0\1X\0\1n",
    "an update with two old rows": b"U\0\0\0\1K\0\1nO\0\1nN\0\1n",
    "an update whose rows differ in width": encode(Update(1, "O", text_tuple([b"1"]), ROW)),
    "a delete with a new row": b"D\0\0\0\1N\0\0",
    "a truncate of more relations than are there": b"T" + struct.pack(">IBI", 2, 0, 1),
    "a truncate of four thousand million relations": b"T" + struct.pack(">IBI", 2**32 - 1, 0, 1),
    "a truncate with an unknown option": b"T" + struct.pack(">IBI", 1, 4, 1),
    "a logical message with an unknown flag": b"M\2" + bytes(8) + b"p\0" + bytes(4),
    "a logical message longer than it is": b"M\1" + bytes(8) + b"p\0\0\0\0\2x",
    "a logical message of negative length": b"M\1" + bytes(8) + b"p\0\xff\xff\xff\xffx",
    "a name without its NUL": b"Y\0\0\0\1public\0mood",
    "a name that is not UTF-8": b"Y\0\0\0\1public\0m\xff\0",
    "a name with a surrogate": b"Y\0\0\0\1public\0\xed\xa0\x80\0",
    "an empty type name": encode(TypeName(1, "public", "")),
    "an empty relation name": encode(RELATION._replace(name="")),
    "an empty column name": encode(RELATION._replace(columns=(Column(0, "", 23, -1),))),
    "a name of 253 bytes": encode(RELATION._replace(name="n" * 253)),
    "a gid of 797 bytes": encode(CommitPrepared(1, 2, 0, 5, "g" * 797)),
    "an origin name of 2049 bytes": encode(Origin(1, "o" * 2049)),
    "an unknown replica identity": encode(RELATION._replace(replica_identity="x")),
    "two columns of one name": encode(RELATION._replace(columns=(COLUMNS[0], COLUMNS[0]))),
    "an unknown column flag": encode(RELATION._replace(columns=(Column(2, "id", 23, -1),))),
    "a relation of 1601 columns": encode(
        RELATION._replace(columns=tuple(Column(0, f"c{i}", 23, -1) for i in range(1601)))
    ),
    "a begin without final_lsn": encode(Begin(0, 1, 5)),
    "a commit without commit_lsn": encode(Commit(0, 2, 1)),
    "a commit without end_lsn": encode(Commit(2, 0, 1)),
    "a commit that ends before it begins": encode(Commit(3, 2, 1)),
    "a commit with flags": b"C\1" + encode(Commit(1, 2, 1))[2:],
    "a stream start without xid": encode(StreamStart(0, True)),
    "a stream start with an unknown flag": b"S\0\0\0\5\2",
    "a stream commit without xid": encode(StreamCommit(0, 1, 2, 1)),
    "a stream commit without commit_lsn": encode(StreamCommit(5, 0, 2, 1)),
    "a stream commit with flags": b"c\0\0\0\5\1" + encode(StreamCommit(5, 1, 2, 1))[6:],
    "a stream abort without xid": encode(StreamAbort(0, 5, None, None)),
    "a stream abort without subxid": encode(StreamAbort(5, 0, None, None)),
    "a stream abort with LSN and time that were not negotiated": encode(StreamAbort(5, 5, 1, 1)),
    "a begin prepare without prepare_lsn": encode(BeginPrepare(0, 2, 1, 5, "g")),
    "a begin prepare without end_lsn": encode(BeginPrepare(1, 0, 1, 5, "g")),
    "a begin prepare without xid": encode(BeginPrepare(1, 2, 1, 0, "g")),
    "a prepare without prepare_lsn": encode(Prepare(0, 2, 1, 5, "g")),
    "a prepare without xid": encode(Prepare(1, 2, 1, 0, "g")),
    "a prepare with flags": b"P\1" + encode(Prepare(1, 2, 1, 5, "g"))[2:],
    "a commit prepared without commit_lsn": encode(CommitPrepared(0, 2, 1, 5, "g")),
    "a commit prepared with flags": b"K\1" + encode(CommitPrepared(1, 2, 1, 5, "g"))[2:],
    "a rollback prepared without rollback_end_lsn": encode(RollbackPrepared(1, 0, 1, 1, 5, "g")),
    "a rollback prepared without xid": encode(RollbackPrepared(1, 2, 1, 1, 0, "g")),
    "a rollback prepared with flags": b"r\1" + encode(RollbackPrepared(1, 2, 1, 1, 5, "g"))[2:],
    "a stream prepare without end_lsn": encode(StreamPrepare(1, 0, 1, 5, "g")),
    "a stream prepare with flags": b"p\1" + encode(StreamPrepare(1, 2, 1, 5, "g"))[2:],
}


@pytest.mark.parametrize("payload", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_message_is_a_protocol_violation(payload: bytes) -> None:
    assert refused(payload)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a name without its NUL", "string is not terminated within the message"),
        ("a negative length", "column value does not fit into its message"),
        ("an unknown kind of column value", "unrecognized data representation type 0x78"),
        ("an unknown message type", "invalid logical replication message type 0x58"),
    ],
)
def test_a_violation_says_what_is_wrong(name: str, text: str) -> None:
    with pytest.raises(ProtocolViolation) as caught:
        decode_change(MALFORMED[name], in_stream=False)
    assert caught.value.message == text


@pytest.mark.parametrize(
    "message",
    [Begin(1, 1, 5), Commit(1, 2, 1), StreamCommit(5, 1, 2, 1), CommitPrepared(1, 2, 1, 5, "g")],
)
def test_a_delimiter_of_another_transaction_inside_a_stream_block_is_a_protocol_violation(message: Message) -> None:
    assert not refused(encode(message))
    assert refused(encode(message), in_stream=True)


@pytest.mark.parametrize("payload", [encode(Insert(1, ROW), 0), encode(Begin(1, 1, 5)), b"", b"I", b"I\0\0\0"])
def test_a_message_without_a_valid_xid_has_none_to_read(payload: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        message_xid(payload)


def test_a_change_in_a_stream_block_with_xid_zero_is_a_protocol_violation() -> None:
    assert refused(encode(Insert(1, ROW), 0), in_stream=True)


def test_names_of_the_longest_length_possible_are_accepted() -> None:
    name = "\N{GRINNING FACE}" * 63
    assert not refused(encode(RELATION._replace(name=name, namespace=name)))


def test_a_row_of_1600_columns_is_accepted() -> None:
    assert not refused(encode(Insert(1, text_tuple([None] * 1600))))


def test_a_message_longer_than_a_server_can_build_is_a_protocol_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    message = encode(LogicalMessage(False, 1, "p", b"x" * 100))
    monkeypatch.setattr(decoder_module, "MAX_MESSAGE_BYTES", len(message))
    Decoder().decode(message)
    monkeypatch.setattr(decoder_module, "MAX_MESSAGE_BYTES", len(message) - 1)
    with pytest.raises(ProtocolViolation, match="too long"):
        Decoder().decode(message)


def test_more_relations_than_can_be_remembered_are_a_protocol_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_module, "MAX_RELATIONS", 3)
    decoder = Decoder()
    decoder.decode(encode(Begin(1, 1, 5)))
    for relid in (1, 2, 3, 3, 1):
        decoder.decode(encode(RELATION._replace(relid=relid)))
    with pytest.raises(ProtocolViolation, match="more than 3 relations"):
        decoder.decode(encode(RELATION._replace(relid=4)))
