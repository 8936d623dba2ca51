"""The order of messages over a connection: what ``worker.c`` calls sent out of order, and what is tolerated."""

from __future__ import annotations

from typing import TypeAlias

import pytest
from protocol.encoding import encode, text_tuple

from pgsub.common.errors import ProtocolViolation
from pgsub.protocol.decoder import Decoder
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
    StreamStop,
    Truncate,
    TypeName,
    Update,
)

Session: TypeAlias = list[Message]

BEGIN, COMMIT = Begin(100, 1, 5), Commit(100, 110, 1)
BEGIN_2, COMMIT_2 = Begin(200, 2, 6), Commit(200, 210, 2)
RELATION = Relation(1, "public", "t", "d", (Column(1, "id", 23, -1), Column(0, "v", 25, -1)))
ROW = text_tuple([b"1", b"x"])
NARROW = text_tuple([b"1"])
INSERT, UPDATE, DELETE = Insert(1, ROW), Update(1, "", None, ROW), Delete(1, "K", ROW)
TRUNCATE = Truncate((1,), False, False)
ORIGIN, TYPE = Origin(7, "elsewhere"), TypeName(20000, "public", "mood")
EMIT, EMIT_NOW = LogicalMessage(True, 1, "p", b""), LogicalMessage(False, 1, "p", b"")
START, GO_ON, STOP = StreamStart(9, True), StreamStart(9, False), StreamStop()
STREAM_COMMIT, STREAM_ABORT = StreamCommit(9, 300, 310, 1), StreamAbort(9, 9, None, None)
SUB_ABORT = StreamAbort(9, 10, None, None)
STREAM_PREPARE = StreamPrepare(300, 310, 1, 9, "g")
BEGIN_PREPARE, PREPARE = BeginPrepare(400, 410, 1, 7, "g"), Prepare(400, 410, 1, 7, "g")
COMMIT_PREPARED = CommitPrepared(500, 510, 2, 7, "g")
ROLLBACK_PREPARED = RollbackPrepared(410, 520, 1, 2, 7, "g")


def feed(session: Session, decoder: Decoder | None = None) -> Decoder:
    """Decode a session, with the top transaction's xid on the changes of its stream blocks."""
    decoder = decoder or Decoder()
    for message in session:
        assert decoder.decode(encode(message, decoder.stream_xid)) == message
    return decoder


#: What must be refused: the session before, and the message that breaks it.
VIOLATIONS: dict[str, tuple[Session, Message]] = {
    "an insert outside of a transaction": ([BEGIN, RELATION, COMMIT], INSERT),
    "an update outside of a transaction": ([BEGIN, RELATION, COMMIT], UPDATE),
    "a delete outside of a transaction": ([BEGIN, RELATION, COMMIT], DELETE),
    "a truncate outside of a transaction": ([BEGIN, RELATION, COMMIT], TRUNCATE),
    "a relation outside of a transaction": ([], RELATION),
    "a type outside of a transaction": ([], TYPE),
    "a transactional message outside of a transaction": ([], EMIT),
    "an insert after the stream stop": ([START, RELATION, INSERT, STOP], INSERT),
    "a begin inside a transaction": ([BEGIN], BEGIN_2),
    "a begin inside a prepared transaction": ([BEGIN_PREPARE], BEGIN),
    "a begin inside a stream block": ([START], BEGIN),
    "a begin prepare inside a transaction": ([BEGIN], BEGIN_PREPARE),
    "a begin prepare inside a stream block": ([START], BEGIN_PREPARE),
    "a commit without begin": ([], COMMIT),
    "a second commit": ([BEGIN, COMMIT], COMMIT),
    "a commit that ends a begin prepare": ([BEGIN_PREPARE], COMMIT._replace(commit_lsn=400, end_lsn=410)),
    "a commit inside a stream block": ([START], COMMIT),
    "a commit LSN that differs from the begin": ([BEGIN], Commit(101, 110, 1)),
    "a transaction that ends where the one before ended": ([BEGIN, COMMIT, Begin(110, 1, 6)], Commit(110, 110, 1)),
    "a transaction that comes again": ([BEGIN, COMMIT, BEGIN], COMMIT),
    "a transaction older than the one before": ([BEGIN_2, COMMIT_2, BEGIN], COMMIT),
    "a stream commit older than the one before": ([Begin(400, 1, 5), Commit(400, 410, 1), START, STOP], STREAM_COMMIT),
    "a commit prepared older than the one before": ([Begin(600, 1, 5), Commit(600, 610, 1)], COMMIT_PREPARED),
    "a rollback prepared older than the one before": ([Begin(600, 1, 5), Commit(600, 610, 1)], ROLLBACK_PREPARED),
    "a prepare without begin prepare": ([], PREPARE),
    "a prepare that ends a begin": ([BEGIN], PREPARE),
    "a prepare LSN that differs from the begin prepare": ([BEGIN_PREPARE], PREPARE._replace(prepare_lsn=401)),
    "a prepare of another xid than its begin prepare": ([BEGIN_PREPARE], PREPARE._replace(xid=8)),
    "a prepare of another gid than its begin prepare": ([BEGIN_PREPARE], PREPARE._replace(gid="h")),
    "a prepare of another end LSN than its begin prepare": ([BEGIN_PREPARE], PREPARE._replace(end_lsn=411)),
    "a commit prepared inside a transaction": ([BEGIN], COMMIT_PREPARED),
    "a commit prepared inside a stream block": ([START], COMMIT_PREPARED),
    "a rollback prepared inside a transaction": ([BEGIN_PREPARE], ROLLBACK_PREPARED),
    "an origin outside of a transaction": ([], ORIGIN),
    "an origin after the first insert": ([BEGIN, RELATION, INSERT], ORIGIN),
    "an origin after the first update": ([BEGIN, RELATION, UPDATE], ORIGIN),
    "an origin after the first delete": ([BEGIN, RELATION, DELETE], ORIGIN),
    "an origin after the first truncate": ([BEGIN, RELATION, TRUNCATE], ORIGIN),
    "an origin after the commit": ([BEGIN, COMMIT], ORIGIN),
    "a stream start inside a stream block": ([START], START),
    "a stream start of another transaction inside a stream block": ([START], StreamStart(11, True)),
    "a stream start inside a transaction": ([BEGIN], START),
    "a stream that goes on without having started": ([], GO_ON),
    "a stream that starts twice": ([START, STOP], START),
    "a stream that goes on after its abort": ([START, STOP, STREAM_ABORT], GO_ON),
    "a stream that goes on after its commit": ([START, STOP, STREAM_COMMIT], GO_ON),
    "a stream stop without stream start": ([], STOP),
    "a stream stop inside a transaction": ([BEGIN], STOP),
    "a second stream stop": ([START, STOP], STOP),
    "a stream commit inside its block": ([START], STREAM_COMMIT),
    "a stream commit inside a transaction": ([START, STOP, BEGIN], STREAM_COMMIT),
    "a stream commit of which nothing was streamed": ([], STREAM_COMMIT),
    "a stream commit after its abort": ([START, STOP, STREAM_ABORT], STREAM_COMMIT),
    "a second stream commit": ([START, STOP, STREAM_COMMIT], STREAM_COMMIT._replace(commit_lsn=700, end_lsn=710)),
    "a stream prepare inside its block": ([START], STREAM_PREPARE),
    "a stream prepare of which nothing was streamed": ([], STREAM_PREPARE),
    "a stream abort inside a block": ([START], STREAM_ABORT),
    "a stream abort inside a transaction": ([BEGIN], STREAM_ABORT),
    "an insert into an unknown relation": ([BEGIN], INSERT),
    "an update of an unknown relation": ([BEGIN], UPDATE),
    "a delete from an unknown relation": ([BEGIN], DELETE),
    "a truncate of an unknown relation": ([BEGIN, RELATION], Truncate((1, 2), False, False)),
    "an inserted row narrower than its relation": ([BEGIN, RELATION], Insert(1, NARROW)),
    "an updated row narrower than its relation": ([BEGIN, RELATION], Update(1, "K", NARROW, NARROW)),
    "a deleted row narrower than its relation": ([BEGIN, RELATION], Delete(1, "K", NARROW)),
    "a row as wide as its relation was before": (
        [BEGIN, RELATION, INSERT, RELATION._replace(columns=RELATION.columns[:1])],
        INSERT,
    ),
}


@pytest.mark.parametrize(("before", "message"), VIOLATIONS.values(), ids=VIOLATIONS.keys())
def test_a_message_out_of_order_is_a_protocol_violation(before: Session, message: Message) -> None:
    decoder = feed(before)
    with pytest.raises(ProtocolViolation):
        decoder.decode(encode(message, decoder.stream_xid))


def test_an_unknown_relation_is_named_by_its_remote_id() -> None:
    with pytest.raises(ProtocolViolation, match=r"no relation map entry for remote relation ID 1$"):
        feed([BEGIN, INSERT])


SESSIONS: dict[str, Session] = {
    "transactions one after the other": [BEGIN, RELATION, INSERT, COMMIT, BEGIN_2, UPDATE, DELETE, TRUNCATE, COMMIT_2],
    "a transaction without changes": [BEGIN, COMMIT],
    "an origin before the first change": [BEGIN, ORIGIN, TYPE, RELATION, INSERT, COMMIT],
    "an origin after the relation": [BEGIN, RELATION, ORIGIN, INSERT, COMMIT],
    "an origin in every block of a stream": [START, ORIGIN, RELATION, INSERT, STOP, GO_ON, INSERT, ORIGIN, STOP],
    "messages inside a transaction": [BEGIN, EMIT, EMIT_NOW, COMMIT],
    "a message that is not transactional outside of transactions": [EMIT_NOW, BEGIN, COMMIT, EMIT_NOW],
    "a stream in two blocks": [START, RELATION, INSERT, STOP, GO_ON, INSERT, STOP, STREAM_COMMIT],
    "a transaction between two blocks of a stream": [START, RELATION, STOP, BEGIN, INSERT, COMMIT, GO_ON, INSERT, STOP],
    "two streams in turns": [START, STOP, StreamStart(11, True), STOP, GO_ON, STOP, StreamStart(11, False), STOP],
    "a stream that loses a subtransaction": [START, STOP, SUB_ABORT, GO_ON, STOP, STREAM_COMMIT],
    "a stream that is aborted": [START, STOP, STREAM_ABORT],
    "a stream of the same xid after its abort": [START, STOP, STREAM_ABORT, START, STOP, STREAM_COMMIT],
    "a stream that is prepared": [START, STOP, STREAM_PREPARE, COMMIT_PREPARED._replace(xid=9)],
    "a prepared transaction": [BEGIN_PREPARE, ORIGIN, RELATION, INSERT, PREPARE, COMMIT_PREPARED],
    "a prepared transaction that is rolled back": [BEGIN_PREPARE, PREPARE, ROLLBACK_PREPARED],
    "a prepare that is sent late with its old LSNs": [
        Begin(450, 1, 5),
        Commit(450, 460, 1),
        BEGIN_PREPARE,
        PREPARE,
        COMMIT_PREPARED,
    ],
    "commit prepared without prepare": [COMMIT_PREPARED],
    "rollback prepared without prepare": [ROLLBACK_PREPARED],
    "a stream abort although nothing is streamed": [STREAM_ABORT, SUB_ABORT, BEGIN, COMMIT],
    "a relation that changes its columns in mid-transaction": [
        BEGIN,
        RELATION,
        INSERT,
        RELATION._replace(columns=RELATION.columns[:1]),
        Insert(1, NARROW),
        COMMIT,
    ],
    "a truncate of no relation": [BEGIN, Truncate((), False, False), COMMIT],
}


@pytest.mark.parametrize("session", SESSIONS.values(), ids=SESSIONS.keys())
def test_a_session_that_a_server_may_send_is_accepted(session: Session) -> None:
    feed(session)


def test_a_parallel_stream_abort_may_come_without_an_abort_lsn() -> None:
    feed([START, STOP, StreamAbort(9, 9, 0, 0)], Decoder(parallel_streaming=True))


@pytest.mark.parametrize("parallel", [False, True])
def test_a_stream_abort_in_the_layout_of_the_other_negotiation_is_a_protocol_violation(parallel: bool) -> None:
    abort = STREAM_ABORT if parallel else StreamAbort(9, 9, 1, 1)
    with pytest.raises(ProtocolViolation):
        Decoder(parallel_streaming=parallel).decode(encode(abort))


@pytest.mark.parametrize("cause", [b"", b"X", encode(INSERT), encode(BEGIN)[:-1]])
def test_after_a_violation_everything_is_refused_and_the_first_cause_is_named(cause: bytes) -> None:
    decoder = Decoder()
    with pytest.raises(ProtocolViolation) as first:
        decoder.decode(cause)
    for message in (BEGIN, EMIT_NOW, COMMIT):
        with pytest.raises(ProtocolViolation, match="refused before") as later:
            decoder.decode(encode(message))
        assert first.value.message in (later.value.detail or "")


def test_the_decoder_says_whose_block_is_open() -> None:
    decoder = Decoder()
    seen = []
    for payload in (
        encode(START),
        encode(ORIGIN),
        encode(RELATION, 9),
        encode(INSERT, 10),
        encode(STOP),
        encode(SUB_ABORT),
    ):
        decoder.decode(payload)
        seen.append(decoder.stream_xid)
    assert seen == [9, 9, 9, 9, None, None]
