"""The columnar decoder means what the message-wise one means, and what is made of its columns holds the same values."""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
import psycopg
import pytest
from embedded import Server
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol.encoding import encode
from protocol.message_strategies import CHANGES, deletes, examples, inserts, tuples, updates
from protocol.recorded_streams import Stream, history, live, replay, set_up
from protocol.test_hostile_bytes import mutate
from psycopg import pq

from pgsub.common.errors import ProtocolViolation
from pgsub.protocol import columnar, parse_changes
from pgsub.protocol.columnar import Changes, Messages, Rows
from pgsub.protocol.columnar_copy import array_parameter, copy_stream, formats
from pgsub.protocol.decoder import decode_change
from pgsub.protocol.messages import Change, Delete, Insert, Message, Tuple, Update

if TYPE_CHECKING:
    from fix_servers import Database

_HERE = st.sampled_from([1, 2, 0xFFFFFFFF])
#: Messages of few relations and widths, so that there are groups; wide and long ones among them.
ROWS = (
    inserts(_HERE, 3)
    | updates(_HERE, 3)
    | deletes(_HERE, 3)
    | st.builds(Insert, _HERE, tuples("nutb", 3))
    | updates(_HERE)
    | inserts(_HERE)
)
ANY = ROWS | st.one_of(*CHANGES.values())
XIDS = st.none() | st.integers(1, 2**32 - 1)


def _tuples(changes: Changes, rows: Rows | None) -> list[Tuple | None]:
    if rows is None:
        return [None] * len(changes.positions)
    found: list[Tuple | None] = []
    for at in range(len(changes.positions)):
        kinds = bytes(rows.kinds[:, at])
        ends = (rows.offsets[:, at] + rows.lengths[:, at]).tolist()
        slices = zip(kinds, rows.offsets[:, at].tolist(), ends, strict=True)
        found.append(Tuple(kinds, tuple(changes.buffer[a:b] if chr(k) in "tb" else None for k, a, b in slices)))
    return found


def _messages(changes: Changes) -> Iterator[tuple[int, Message]]:
    rows = zip(changes.positions.tolist(), _tuples(changes, changes.old), _tuples(changes, changes.new), strict=True)
    for at, old, new in rows:
        if changes.kind == "I":
            assert new is not None and old is None
            yield at, Insert(changes.relid, new)
        elif changes.kind == "U":
            assert new is not None
            yield at, Update(changes.relid, changes.old_kind, old, new)
        else:
            assert old is not None and new is None
            yield at, Delete(changes.relid, changes.old_kind, old)


def _decoded(payloads: Sequence[bytes], in_stream: bool, gaps: Sequence[int] = (0,)) -> list[Message]:
    """Through the columns and back, after a check of what else is said of each message."""
    groups, others = columnar.decode(_apart(payloads, gaps), in_stream)
    found = dict(others)
    for group in groups:
        found.update(_messages(group))
        slices = [group.buffer[a:b] for a, b in zip(group.starts.tolist(), group.ends.tolist(), strict=True)]
        assert slices == [payloads[at] for at in group.positions.tolist()] and sorted(group.positions) == [
            *group.positions
        ]
    assert len(found) == len(payloads)
    return [found[at] for at in range(len(payloads))]


def _outcome(payloads: Sequence[bytes], in_stream: bool, *, columns: bool) -> list[Message] | str:
    try:
        if columns:
            return _decoded(payloads, in_stream, (0, 5))
        return [decode_change(payload, in_stream) for payload in payloads]
    except ProtocolViolation as violation:
        return violation.message


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(ANY, max_size=20), XIDS, st.sampled_from([[0], [30], [1, 7]]))
def test_both_decoders_give_the_same_messages(messages: list[Change], xid: int | None, gaps: list[int]) -> None:
    payloads = [encode(message, xid) for message in messages]
    assert _decoded(payloads, xid is not None, gaps) == messages


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(ANY, min_size=1, max_size=8), XIDS, st.booleans(), st.integers(0, 2**32))
def test_both_decoders_refuse_the_same_messages_with_the_same_words(
    messages: list[Change], xid: int | None, in_stream: bool, seed: int
) -> None:
    chance = random.Random(seed)
    payloads = [encode(message, xid) for message in messages]
    for _ in range(chance.choice([1, 1, 3])):
        at = chance.randrange(len(payloads))
        payloads[at] = mutate(payloads[at], chance)
    assert _outcome(payloads, in_stream, columns=True) == _outcome(payloads, in_stream, columns=False)


@settings(max_examples=examples(15), deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=3), XIDS, st.data())
def test_a_message_cut_anywhere_is_refused_by_both(
    messages: list[Change], xid: int | None, data: st.DataObject
) -> None:
    payloads = [encode(message, xid) for message in messages]
    at = data.draw(st.integers(0, len(payloads) - 1))
    for size in range(len(payloads[at])):
        cut = [*payloads[:at], payloads[at][:size], *payloads[at + 1 :]]
        refused = _outcome(cut, xid is not None, columns=True)
        assert isinstance(refused, str) and refused == _outcome(cut, xid is not None, columns=False)


_RELID = struct.pack(">I", 7)
_ONE = struct.pack(">H", 1)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"I",
        b"I" + _RELID + b"N",
        b"I" + _RELID + b"K" + _ONE + b"n",
        b"I" + _RELID + b"N" + _ONE + b"n" + b"x",
        b"I" + _RELID + b"N" + _ONE + b"?",
        b"I" + _RELID + b"N" + _ONE + b"t" + struct.pack(">I", 5) + b"four",
        b"I" + _RELID + b"N" + _ONE + b"t" + struct.pack(">I", 0xFFFFFFFF),
        b"I" + _RELID + b"N" + struct.pack(">H", 1601) + b"n" * 1601,
        b"I" + _RELID + b"N" + struct.pack(">H", 2) + b"n",
        b"D" + _RELID + b"N" + _ONE + b"n",
        b"D" + _RELID + b"K" + _ONE + b"u",
        b"U" + _RELID + b"K" + _ONE + b"u" + b"N" + _ONE + b"n",
        b"U" + _RELID + b"O" + _ONE + b"n" + b"K" + _ONE + b"n",
        b"U" + _RELID + b"O" + _ONE + b"n" + b"N" + struct.pack(">H", 2) + b"nn",
        b"U" + _RELID + b"O" + _ONE + b"n" + b"N",
        b"U" + _RELID + b"O" + _ONE + b"n",
        b"X",
    ],
)
def test_what_is_malformed_is_refused_with_the_same_words_wherever_it_stands(payload: bytes) -> None:
    good = [encode(message) for message in (Insert(7, Tuple(b"t", (b"x",))), Delete(7, "K", Tuple(b"b", (b"y",))))]
    for payloads in ([payload], [payload, *good], [*good, payload]):
        refused = _outcome(payloads, False, columns=True)
        assert isinstance(refused, str) and refused == _outcome(payloads, False, columns=False)


def test_a_change_of_no_transaction_is_refused_in_a_stream() -> None:
    payloads = [encode(Insert(7, Tuple(b"n", (None,))), xid) for xid in (5, 0)]
    assert "invalid transaction ID" in str(_outcome(payloads, True, columns=True))


def test_nothing_gives_nothing() -> None:
    assert columnar.decode([], False) == ([], [])


@pytest.fixture(scope="module")
def streams() -> list[Stream]:
    """Of a real walsender: finished transactions as text and binary, and transactions in progress."""
    with Server(fast=True, settings={"max_prepared_transactions": 10}) as server:
        set_up(server)
        history(server)
        plain = [replay(server.conninfo(), binary=binary) for binary in (False, True)]
        return [*plain, live(server, parallel=False)]


def test_recorded_streams_mean_the_same_to_both(streams: list[Stream]) -> None:
    seen: set[str] = set()
    for stream in streams:
        in_stream, blocks = False, {False: list[bytes](), True: list[bytes]()}
        for payload in stream.payloads():
            in_stream = (in_stream or payload[0] == ord("S")) and payload[0] != ord("E")
            if payload[0] in parse_changes.CHANGES:
                blocks[in_stream].append(payload)
        for inside, payloads in blocks.items():
            assert _outcome(payloads, inside, columns=True) == [decode_change(one, inside) for one in payloads]
            for group in columnar.decode(payloads, inside)[0]:
                seen.add(f"{group.kind}{group.old_kind}{'s' * inside}")
                seen.update(formats(rows) for rows in (group.old, group.new) if rows is not None)
    assert seen >= {"I", "Is", "U", "UK", "UO", "DK", "DO", "text", "binary"}


# what is made of the columns


def _apart(payloads: Sequence[bytes], gaps: Sequence[int]) -> Messages:
    """Messages with other bytes before them, so many in turn; whatever these are they must not matter."""
    parts, starts, ends = [], [], []
    size = 0
    for payload, gap in zip(payloads, itertools.cycle(gaps)):
        parts += [b"tbnu"[size % 4 : size % 4 + 1] * gap, payload]
        starts.append(size + gap)
        ends.append(size := size + gap + len(payload))
    return Messages(b"".join([*parts, columnar.PAD]), np.array(starts, np.int64), np.array(ends, np.int64))


#: Nothing between messages, as much between all, different, more than is left out with the rest.
_GAPS = st.sampled_from([[0], [30], [0, 3, 30], [30, 200]])


def _one_group(rows: Sequence[Tuple], xid: int | None, gaps: Sequence[int] = (0,)) -> Changes:
    payloads = [encode(Insert(7, row), xid) for row in rows]
    [group], _ = columnar.decode(_apart(payloads, gaps), xid is not None)
    return group


def _binary_stream(rows: Sequence[Tuple]) -> bytes:
    parts = [b"PGCOPY\n\xff\r\n\0" + bytes(8)]
    for row in rows:
        parts.append(struct.pack(">h", len(row.values)))
        parts += [struct.pack(">i", -1) if v is None else struct.pack(">i", len(v)) + v for v in row.values]
    return b"".join([*parts, b"\xff\xff"])


_ESCAPES = {b"\\": b"\\\\", b"\n": b"\\n", b"\r": b"\\r", b"\t": b"\\t"}


def _text_line(row: Tuple) -> bytes:
    values = [
        b"\\N" if v is None else b"".join(_ESCAPES.get(v[i : i + 1], v[i : i + 1]) for i in range(len(v)))
        for v in row.values
    ]
    return b"\t".join(values) + b"\n"


@st.composite
def _some_rows(draw: st.DrawFn, kinds: str) -> list[Tuple]:
    width = draw(st.integers(1, 4))
    values = st.binary(max_size=6) | st.text("\\\n\r\tNx.", max_size=6).map(str.encode)
    kind = st.sampled_from(kinds)
    column = kind.flatmap(lambda k: st.tuples(st.just(k), values if k in "tb" else st.none()))
    row = st.lists(column, min_size=width, max_size=width)
    rows = draw(st.lists(row, min_size=1, max_size=40))
    return [Tuple("".join(k for k, _ in one).encode(), tuple(v for _, v in one)) for one in rows]


@settings(max_examples=examples(50), deadline=None)
@given(_some_rows("nub"), XIDS, _GAPS)
def test_a_binary_stream_holds_the_rows(rows: list[Tuple], xid: int | None, gaps: list[int]) -> None:
    assert copy_stream(_one_group(rows, xid, gaps), binary=True) == _binary_stream(rows)


@settings(max_examples=examples(50), deadline=None)
@given(_some_rows("nut"), XIDS, _GAPS)
def test_a_text_stream_holds_the_rows(rows: list[Tuple], xid: int | None, gaps: list[int]) -> None:
    assert copy_stream(_one_group(rows, xid, gaps), binary=False) == b"".join(map(_text_line, rows))


@settings(max_examples=examples(40), deadline=None)
@given(_some_rows("ntb"), st.sampled_from("KO"), st.data())
def test_streams_of_updates_hold_their_new_rows(rows: list[Tuple], old_kind: str, data: st.DataObject) -> None:
    old = data.draw(st.lists(tuples("nt", len(rows[0].kinds)), min_size=len(rows), max_size=len(rows)))
    payloads = [encode(Update(7, old_kind, before, after)) for before, after in zip(old, rows, strict=True)]
    [group], _ = columnar.decode(payloads, False)
    assert copy_stream(group, binary=True) == _binary_stream(rows)
    plain = [Tuple(row.kinds.replace(b"b", b"t"), row.values) for row in rows]
    [group], _ = columnar.decode(
        [encode(Update(7, old_kind, before, after)) for before, after in zip(old, plain, strict=True)], False
    )
    assert copy_stream(group, binary=False) == b"".join(map(_text_line, plain))


@settings(max_examples=examples(50), deadline=None)
@given(_some_rows("nutb"), XIDS, st.data())
def test_an_array_holds_the_column(rows: list[Tuple], xid: int | None, data: st.DataObject) -> None:
    column = data.draw(st.integers(0, len(rows[0].kinds) - 1))
    values = [row.values[column] for row in rows] * data.draw(st.sampled_from([1, 30]))
    group = _one_group([Tuple(b"n" if v is None else b"b", (v,)) for v in values], xid)
    assert group.new is not None
    elements = [struct.pack(">i", -1) if v is None else struct.pack(">i", len(v)) + v for v in values]
    head = struct.pack(">iiIii", 1, None in values, 25, len(values), 1)
    assert array_parameter(group.buffer, group.new, 0, 25) == head + b"".join(elements)


def test_rows_that_a_stream_cannot_express_are_refused() -> None:
    with pytest.raises(ValueError, match="binary values"):
        copy_stream(_one_group([Tuple(b"b", (b"x",))], None), binary=False)
    with pytest.raises(ValueError, match="with columns"):
        copy_stream(_one_group([Tuple(b"", ())], None), binary=True)
    [deleted], _ = columnar.decode([encode(Delete(7, "K", Tuple(b"t", (b"1",))))], False)
    with pytest.raises(ValueError, match="new rows"):
        copy_stream(deleted, binary=True)


def test_the_server_reads_the_streams_and_arrays(pubdb: Database) -> None:
    texts = ["", "\\", "\\N", "\\.", "a\tb\nc\rd", "ünï", None, "x" * 3000]
    numbers = [None if number % 3 == 2 else number - 2**40 for number in range(len(texts))]
    text_rows = [
        Tuple(
            bytes(110 if v is None else 116 for v in (n, t)),
            (None if n is None else str(n).encode(), None if t is None else t.encode()),
        )
        for n, t in zip(numbers, texts, strict=True)
    ]
    binary_rows = [
        Tuple(
            bytes(110 if v is None else 98 for v in (n, t)),
            (None if n is None else struct.pack(">q", n), None if t is None else t.encode()),
        )
        for n, t in zip(numbers, texts, strict=True)
    ]
    pubdb.execute("CREATE TABLE t (at serial, n bigint, v text)")
    expected = list(zip(numbers, texts, strict=True))
    for rows, options in ((text_rows, ""), (binary_rows, "WITH (FORMAT binary)")):
        stream = copy_stream(_one_group(rows, None), binary=bool(options))
        with closing(pubdb.connect()) as session, session.cursor() as cursor:
            with cursor.copy(f"COPY t (n, v) FROM STDIN {options}".encode()) as copy:
                copy.write(stream)
        assert pubdb.rows("SELECT n, v FROM t ORDER BY at") == expected
        pubdb.execute("TRUNCATE t")
    group = _one_group(binary_rows, None)
    assert group.new is not None
    parameters = [array_parameter(group.buffer, group.new, column, oid) for column, oid in enumerate((20, 25))]
    with closing(pubdb.connect()) as session:
        assert _unnested(session, "bigint", "text", parameters) == expected
    group = _one_group(text_rows, None)
    assert group.new is not None
    parameters = [array_parameter(group.buffer, group.new, column, 25) for column in (0, 1)]
    with closing(pubdb.connect()) as session:
        assert _unnested(session, "text", "text", parameters) == expected


def _unnested(
    session: psycopg.Connection, first: str, second: str, parameters: list[bytes]
) -> list[tuple[object, ...]]:
    result = session.pgconn.exec_params(
        f"INSERT INTO t (n, v) SELECT a::bigint, b FROM unnest($1::{first}[], $2::{second}[])"
        " WITH ORDINALITY AS u (a, b, at) ORDER BY at RETURNING n, v".encode(),
        parameters,
        param_formats=[1, 1],
    )
    assert result.status == pq.ExecStatus.TUPLES_OK, result.error_message
    cells = [[result.get_value(row, column) for column in (0, 1)] for row in range(result.ntuples)]
    return [(None if n is None else int(n), None if v is None else v.decode()) for n, v in cells]
