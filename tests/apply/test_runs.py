"""Many transactions at once are the same transactions that come out one by one: promises of runs and batches."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from fix_pair import MakePair
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol.encoding import encode, text_tuple

from pgsub.apply.rows import relation_cache
from pgsub.apply.rows.relation_cache import RelationCache
from pgsub.apply.stream import assembler, transactions
from pgsub.apply.stream import spool as spool_module
from pgsub.apply.stream.assembler import Assembler
from pgsub.apply.stream.spool import Spool
from pgsub.apply.stream.transaction_batch import Batch, Item, RunBounds, TransactionRun
from pgsub.apply.stream.transactions import RemoteTransaction
from pgsub.common.errors import ProtocolViolation, StreamsMustRestart
from pgsub.common.subscription import Subscription
from pgsub.protocol.frames import Frames
from pgsub.protocol.messages import (
    Begin,
    Column,
    Commit,
    Delete,
    Insert,
    LogicalMessage,
    Message,
    Origin,
    Relation,
    StreamStart,
    Truncate,
    TypeName,
    Update,
)
from pgsub.protocol.walsender_messages import Keepalive

_RELATION = Relation(7, "public", "t", "d", (Column(1, "id", 23, -1), Column(0, "v", 25, -1)))
_KEEPALIVE = b"k" + bytes(7) + b"\x09" + bytes(8) + b"\0"
Seen = tuple[int, int, int, int, str | None, tuple[bytes, ...]]


@pytest.fixture(scope="module")
def spool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spool]:
    folder: Path = tmp_path_factory.mktemp("runs")
    made = Spool(str(folder), "1-0")
    yield made
    made.close()


def _stream(chance: random.Random, count: int) -> list[bytes]:
    """CopyData contents of so many transactions, with everything between and in them that may be there."""
    contents: list[bytes] = []

    def say(*messages: Message) -> None:
        contents.extend(b"w" + bytes(24) + encode(message) for message in messages)

    lsn = 1000
    for number in range(count):
        if chance.random() < 0.3:
            contents.append(_KEEPALIVE)
        lsn += chance.randint(10, 100)
        say(Begin(lsn, number, 500 + number))
        if chance.random() < 0.1:
            say(Origin(5, "somewhere"))
        if number == 0 or chance.random() < 0.1:
            say(_RELATION)
        for _ in range(chance.randint(0, 3)):
            row = text_tuple([b"%d" % chance.randint(0, 9), b"x"])
            say(chance.choice([Insert(7, row), Update(7, "", None, row), Delete(7, "K", row)]))
        if chance.random() < 0.05:
            say(Truncate((7,), False, False))
        if chance.random() < 0.05:
            say(LogicalMessage(True, lsn, "p", b"c"))
        say(Commit(lsn, lsn + 8, number))
    return contents


def _seen(transaction: RemoteTransaction) -> Seen:
    one = transaction
    return one.xid, one.finish_lsn, one.end_lsn, one.commit_ts, one.origin, tuple(one.payloads())


def _received(contents: Sequence[bytes], pieces: int, spool: Spool) -> list[Item | Keepalive]:
    made = Assembler(spool, parallel_streaming=False)
    found: list[Item | Keepalive] = []
    for at in range(0, len(contents), pieces):
        found.extend(made.take(Frames.of(contents[at : at + pieces])))
    return found


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 60), st.sampled_from([1, 7, 50, 1000]))
def test_a_run_holds_the_transactions_that_come_one_by_one(spool: Spool, seed: int, count: int, pieces: int) -> None:
    contents = _stream(random.Random(seed), count)
    before, found = assembler.RUN_FROM, []
    try:
        for assembler.RUN_FROM in (2, 10**9):
            received = _received(contents, pieces, spool)
            items = [one for one in received if not isinstance(one, Keepalive)]
            found.append([_seen(one) for one in Batch(items).transactions()])
            if assembler.RUN_FROM == 2 and pieces == 1000 and count > 10:
                assert any(isinstance(one, TransactionRun) for one in received)
    finally:
        assembler.RUN_FROM = before
    assert found[0] == found[1] and len(found[0]) == count


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 60))
def test_a_batch_is_cut_anywhere_and_nothing_is_lost(spool: Spool, seed: int, at: int) -> None:
    received = _received(_stream(random.Random(seed), 60), 90, spool)
    batch = Batch([one for one in received if not isinstance(one, Keepalive)])
    whole = [_seen(one) for one in batch.transactions()]
    first, rest = batch.cut(at)
    assert (len(first), len(rest)) == (at, 60 - at)
    assert [_seen(one) for part in (first, rest) for one in part.transactions()] == whole
    if at:
        assert _seen(first.last) == whole[at - 1]


def test_a_run_ends_with_a_whole_transaction_wherever_the_received_bytes_end(spool: Spool) -> None:
    contents = _stream(random.Random(3), 60)
    ends = [number for number, content in enumerate(contents) if content[25:26] == b"C"]
    for cut in range(ends[20], len(contents) + 1):
        runs = [one for one in _received(contents[:cut], len(contents), spool) if isinstance(one, TransactionRun)]
        assert sum(map(len, runs)) == sum(end < cut for end in ends), f"{cut} messages"
        assert all(len(run.transactions()) == len(run) and run.segment.codes[-1:] == b"C" for run in runs)


def test_whole_transactions_end_where_a_reader_of_single_messages_says() -> None:
    def read(codes: bytes) -> int:
        inside, end, before = False, 0, 0
        for at, code in enumerate(codes):
            fits = code in b"OIC" if inside else code in b"B\0"
            if not fits or (code in b"O" and before not in b"B") or (at == 0 and code not in b"B"):
                break
            inside, before = code not in b"C\0", code
            end = at + 1 if code in b"C" else end
        return end

    for size in range(1, 8):
        for codes in map(bytes, itertools.product(b"BOIC\0", repeat=size)):
            if codes[0] in b"B":
                assert RunBounds(codes).end(0) == read(codes), codes
                assert RunBounds(b"SI" + codes).end(2) == 2 + read(codes), codes


@pytest.mark.parametrize(
    "kept",
    [
        pytest.param(slice(0, -1), id="the last has no end"),
        pytest.param(slice(1, None), id="the first has no beginning"),
        pytest.param(slice(0, -2), id="nothing of the last but its BEGIN"),
        pytest.param([0, 1, 3, 4, 5], id="two beginnings, one end"),
        pytest.param([0, 1, 2, 4, 5], id="one beginning, two ends"),
        pytest.param([0, 2, 2, 3, 3, 5], id="as many ends as beginnings, but not one after the other"),
        pytest.param([1, 4], id="neither"),
        pytest.param([], id="nothing"),
    ],
)
def test_messages_that_are_not_whole_transactions_are_no_run(kept: slice | list[int]) -> None:
    messages: list[Message] = []
    for lsn in (1000, 2000, 3000):
        messages += [Begin(lsn, 1, 500), Insert(7, text_tuple([b"1", b"x"])), Commit(lsn, lsn + 8, 1)]
    contents = [b"w" + bytes(24) + encode(message) for message in messages]
    found = TransactionRun.of(Frames.of(contents).all())
    assert found is not None and len(found) == 3
    some = contents[kept] if isinstance(kept, slice) else [contents[n] for n in kept]
    assert TransactionRun.of(Frames.of(some).all()) is None


def _bent(contents: list[bytes], kind: bytes, where: int, change: bytes) -> list[bytes]:
    """The last message of a type with other bytes at a place."""
    number = max(n for n, content in enumerate(contents) if content[:1] == b"w" and content[25:26] == kind)
    content = contents[number]
    contents[number] = content[:where] + change + content[where + len(change) :]
    return contents


@pytest.mark.parametrize(
    ("kind", "where", "change"),
    [
        pytest.param(b"B", 26, bytes(8), id="a begin without an LSN"),
        pytest.param(b"C", 26, b"\1", id="a commit with flags"),
        pytest.param(b"C", 27, bytes(7) + b"\1", id="a commit of another LSN"),
        pytest.param(b"C", 35, bytes(8), id="an end before the commit"),
        pytest.param(b"C", 51, b"more", id="a commit that is too long"),
    ],
)
def test_a_run_with_a_malformed_end_is_refused_as_the_transaction_is(
    spool: Spool, kind: bytes, where: int, change: bytes
) -> None:
    contents = _bent(_stream(random.Random(1), 40), kind, where, change)
    errors = []
    for pieces in (1, 1000):
        with pytest.raises(ProtocolViolation) as caught:
            _received(contents, pieces, spool)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


def test_runs_follow_each_other_only_forwards(spool: Spool) -> None:
    contents = _stream(random.Random(2), 40)
    with pytest.raises(ProtocolViolation, match="does not follow"):
        _received([*contents, *contents], 10_000, spool)


@pytest.mark.parametrize("recent", [0, 300, 1 << 20])
def test_who_follows_a_file_reads_what_is_in_it_whether_it_is_still_in_memory_or_not(
    spool: Spool, monkeypatch: pytest.MonkeyPatch, recent: int
) -> None:
    monkeypatch.setattr(spool_module, "_RECENT", recent)
    chance, made, marks = random.Random(recent), spool.open(4711 + recent), [0]
    for number in range(60):
        if number == 10:
            made.follow()
        if number == 50:
            made.unfollow()
        payloads = [encode(Insert(7, text_tuple([b"%d" % number, b"x" * chance.randint(0, 50)])), 1)]
        made.append(Frames.around(payloads * chance.randint(1, 3)).all())
        if chance.random() < 0.5:
            made.publish()
            marks.append(made.end)
            start = chance.choice(marks)
            read = b"".join(bytes(segment.wire) for segment in made.segments(start, made.end))
            assert len(read) == made.end - start
            made.publish()
    whole = b"".join(bytes(segment.wire) for segment in made.kept())
    assert len(whole) == made.size
    for start in marks:
        assert b"".join(bytes(segment.wire) for segment in made.segments(start, made.end)) == whole[start:]
    made.remove()


def _describing(relations: Sequence[Relation | TypeName]) -> list[bytes]:
    messages = [Begin(1000, 1, 500), *relations, Commit(1000, 1008, 1)]
    return [b"w" + bytes(24) + encode(message) for message in messages]


def test_what_is_remembered_of_a_publishers_relations_is_bounded(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembler, "MAX_DESCRIBED_BYTES", 10 * len(encode(_RELATION)))
    [transaction] = _received(_describing([_RELATION] * 1000), 100, spool)  # each replaces the one before
    assert isinstance(transaction, RemoteTransaction) and len(transaction.described()) == 1
    _received(_describing([_RELATION._replace(relid=relid) for relid in range(1, 11)]), 100, spool)
    with pytest.raises(ProtocolViolation, match="described its relations in more than") as violation:
        _received(_describing([_RELATION._replace(relid=relid) for relid in range(1, 12)]), 100, spool)
    assert "\npgsub reconcile NAME --force" in (violation.value.hint or "")


@pytest.mark.long
def test_one_transaction_may_describe_hundreds_of_the_widest_partitions_then_another_connection_is_wanted(
    spool: Spool,
) -> None:
    columns = tuple(Column(0, f"c{n:04}".ljust(63, "_"), 23, -1) for n in range(1600))
    widest = (_RELATION._replace(relid=relid, columns=columns) for relid in range(1, 621))
    assembler_ = Assembler(spool, parallel_streaming=False)
    described = Frames.around(encode(message) for message in (Begin(1000, 1, 500), *widest, Commit(1000, 1008, 1)))
    [transaction] = assembler_.take(described)
    transaction.release()  # type: ignore[union-attr]
    assert assembler_.crowded


def test_names_of_one_relation_and_types_are_remembered_only_to_a_bound(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in transactions, relation_cache:
        monkeypatch.setattr(module, "MAX_RELATIONS", 10)
    [transaction] = _received(_describing([_RELATION._replace(name=f"t{n}") for n in range(11)]), 100, spool)
    assert isinstance(transaction, RemoteTransaction)
    with pytest.raises(ProtocolViolation, match="more than 10 relations"):
        transaction.described()
    cache = RelationCache(None, Subscription(1, "s", "", "", (), None), replica=True)  # type: ignore[arg-type]
    for oid in range(1, 12):
        cache.learn(TypeName(oid, "public", f"t{oid}"))
    assert list(cache._types) == list(range(2, 12))


def test_tables_that_come_and_go_for_months_are_no_error(pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembler, "MAX_RELATIONS", 8)
    p = pair("CREATE TABLE t (id int PRIMARY KEY)")
    task, connections = p.start(), 1
    for number in range(20):
        p.ddl(f"CREATE TABLE come{number} (id int)")
        p.pubdb.execute(f"INSERT INTO come{number} VALUES (1)")
        p.pubdb.execute(f"INSERT INTO t VALUES ({number})")
        while not p.subdb.value("SELECT count(*) > 0 FROM t WHERE id = %s", number):
            if task.ends_within(0.02):
                with pytest.raises(StreamsMustRestart, match="described tables enough"):
                    task.result()
                task, connections = p.start(), connections + 1
        p.ddl(f"DROP TABLE come{number}")
    assert 3 <= connections <= 10
    p.same("t")


def test_a_change_of_a_stream_block_without_room_for_its_xid_is_a_protocol_violation(spool: Spool) -> None:
    start = encode(StreamStart(1000, True))
    with pytest.raises(ProtocolViolation, match="carries no transaction ID"):
        _received([b"w" + bytes(24) + message for message in (start, b"I")], 100, spool)
