"""Hypothesis strategies for every message, and for whole sessions of a publisher that keeps the rules."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from hypothesis import strategies as st
from protocol.encoding import encode
from thorough import thorough

from pgsub.protocol.messages import (
    Begin,
    BeginPrepare,
    Change,
    Column,
    Commit,
    CommitPrepared,
    Control,
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
    Tuple,
    TypeName,
    Update,
)


def examples(count: int) -> int:
    """How many examples a property tries: half of ``count``, all of them in ``make thorough``.

    PGSUB_PROPERTY_SECS multiplies that for a longer search (default 1).
    """
    return (count if thorough([count]) else count // 2) * max(1, int(os.environ.get("PGSUB_PROPERTY_SECS", "1")))


XIDS = st.integers(1, 2**32 - 1)
OIDS = st.integers(0, 2**32 - 1)
LSNS = st.integers(1, 2**64 - 1)
ANY_LSN = st.integers(0, 2**64 - 1)
TIMES = st.integers(-(2**63), 2**63 - 1)
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=63)
NAMES = TEXTS.filter(bool)
NAMESPACES = TEXTS.map(lambda name: name or "pg_catalog")


@st.composite
def ordered_lsns(draw: st.DrawFn) -> tuple[int, int]:
    """A finish LSN and an end LSN that does not precede it."""
    first, second = sorted((draw(LSNS), draw(LSNS)))
    return first, second


@st.composite
def tuples(draw: st.DrawFn, kinds: str, width: int | None = None) -> Tuple:
    """A row whose columns are of the given kinds."""
    size = draw(st.integers(0, 6)) if width is None else width
    column_kinds = draw(st.lists(st.sampled_from(kinds), min_size=size, max_size=size))
    values = tuple(draw(st.binary(max_size=12)) if kind in "tb" else None for kind in column_kinds)
    return Tuple("".join(column_kinds).encode(), values)


@st.composite
def updates(draw: st.DrawFn, relids: st.SearchStrategy[int] = OIDS, width: int | None = None) -> Update:
    """An update with a key, a whole old row, or neither."""
    new = draw(tuples("nutb", width))
    old_kind = draw(st.sampled_from(["", "K", "O"]))
    allowed = {"K": "ntb", "O": "nutb"}.get(old_kind)
    old = draw(tuples(allowed, len(new.kinds))) if allowed else None
    return Update(draw(relids), old_kind, old, new)


def deletes(relids: st.SearchStrategy[int] = OIDS, width: int | None = None) -> st.SearchStrategy[Delete]:
    """A delete with a key or a whole old row."""
    by_key = st.builds(Delete, relids, st.just("K"), tuples("ntb", width))
    return by_key | st.builds(Delete, relids, st.just("O"), tuples("nutb", width))


def inserts(relids: st.SearchStrategy[int] = OIDS, width: int | None = None) -> st.SearchStrategy[Insert]:
    """An insert."""
    return st.builds(Insert, relids, tuples("ntb", width))


COLUMNS = st.lists(
    st.builds(Column, st.integers(0, 1), NAMES, OIDS, st.integers(-(2**31), 2**31 - 1)),
    max_size=6,
    unique_by=lambda column: column.name,
).map(tuple)
RELATIONS = st.builds(Relation, OIDS, NAMESPACES, NAMES, st.sampled_from("dnfi"), COLUMNS)
MESSAGES = st.builds(LogicalMessage, st.booleans(), ANY_LSN, TEXTS, st.binary(max_size=20))

CHANGES: dict[type[Any], st.SearchStrategy[Change]] = {
    Relation: RELATIONS,
    TypeName: st.builds(TypeName, OIDS, NAMESPACES, NAMES),
    Insert: inserts(),
    Update: updates(),
    Delete: deletes(),
    Truncate: st.builds(Truncate, st.lists(OIDS, max_size=4).map(tuple), st.booleans(), st.booleans()),
    LogicalMessage: MESSAGES,
}


def _stream_commit(xid: int, lsns: tuple[int, int], commit_ts: int) -> StreamCommit:
    return StreamCommit(xid, lsns[0], lsns[1], commit_ts)


CONTROLS: dict[type[Any], st.SearchStrategy[Control]] = {
    Begin: st.builds(Begin, LSNS, TIMES, OIDS),
    Commit: st.builds(lambda lsns, time: Commit(lsns[0], lsns[1], time), ordered_lsns(), TIMES),
    Origin: st.builds(Origin, ANY_LSN, TEXTS),
    StreamStart: st.builds(StreamStart, XIDS, st.booleans()),
    StreamStop: st.builds(StreamStop),
    StreamCommit: st.builds(_stream_commit, XIDS, ordered_lsns(), TIMES),
    StreamAbort: st.builds(StreamAbort, XIDS, XIDS, st.none(), st.none()),
    BeginPrepare: st.builds(lambda lsns, *rest: BeginPrepare(*lsns, *rest), ordered_lsns(), TIMES, XIDS, TEXTS),
    Prepare: st.builds(lambda lsns, *rest: Prepare(*lsns, *rest), ordered_lsns(), TIMES, XIDS, TEXTS),
    CommitPrepared: st.builds(lambda lsns, *rest: CommitPrepared(*lsns, *rest), ordered_lsns(), TIMES, XIDS, TEXTS),
    RollbackPrepared: st.builds(
        lambda lsns, *rest: RollbackPrepared(*lsns, *rest), ordered_lsns(), TIMES, TIMES, XIDS, TEXTS
    ),
    StreamPrepare: st.builds(lambda lsns, *rest: StreamPrepare(*lsns, *rest), ordered_lsns(), TIMES, XIDS, TEXTS),
}

EVERY: dict[type[Any], st.SearchStrategy[Any]] = {**CHANGES, **CONTROLS}

PARALLEL_ABORTS = st.builds(StreamAbort, XIDS, XIDS, ANY_LSN, TIMES)


class Step(NamedTuple):
    """One message of a session, and what the decoder must say about the stream after it."""

    message: Message
    payload: bytes
    stream_xid: int | None


class _Publisher:
    """Draws transactions one after the other, keeping the rules of the protocol."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.steps: list[Step] = []
        self.lsn = draw(st.integers(1, 2**40))
        self.xid = draw(st.integers(1, 2**30))
        self.stream_xid: int | None = None
        self.widths: dict[int, int] = {}

    def say(self, message: Message, xid: int | None = None) -> None:
        if isinstance(message, Relation):
            self.widths[message.relid] = len(message.columns)
        self.steps.append(Step(message, encode(message, xid), self.stream_xid))

    def lsns(self) -> tuple[int, int]:
        finish = self.lsn + self.draw(st.integers(0, 1000))
        self.lsn = finish + self.draw(st.integers(1, 1000))
        return finish, self.lsn

    def changes(self, subxids: list[int] | None = None) -> None:
        for _ in range(self.draw(st.integers(1, 4))):
            xid = self.draw(st.sampled_from(subxids)) if subxids else None
            relid = self.draw(st.integers(1, 3))
            if relid not in self.widths or self.draw(st.integers(0, 5)) == 0:
                self.say(self.draw(RELATIONS)._replace(relid=relid), xid)
            self.say(self.draw(self.change_of(relid)), xid)

    def change_of(self, relid: int) -> st.SearchStrategy[Message]:
        here, width = st.just(relid), self.widths[relid]
        truncate = st.builds(Truncate, st.just((relid,)), st.booleans(), st.booleans())
        return inserts(here, width) | updates(here, width) | deletes(here, width) | truncate | MESSAGES

    def new_xid(self) -> int:
        self.xid += 10
        return self.xid

    def plain(self) -> None:
        xid, (commit_lsn, end_lsn) = self.new_xid(), self.lsns()
        self.say(Begin(commit_lsn, 1, xid))
        if self.draw(st.booleans()):
            self.say(Origin(7, "elsewhere"))
        self.changes()
        self.say(Commit(commit_lsn, end_lsn, 1))

    def prepared(self) -> None:
        xid, lsns, commit_lsns = self.new_xid(), self.lsns(), self.lsns()
        gid = f"gid{xid}"
        if self.draw(st.booleans()):
            self.say(BeginPrepare(*lsns, 1, xid, gid))
            self.changes()
            self.say(Prepare(*lsns, 1, xid, gid))
        if self.draw(st.booleans()):
            self.say(CommitPrepared(*commit_lsns, 2, xid, gid))
        else:
            self.say(RollbackPrepared(*commit_lsns, 1, 2, xid, gid))

    def streamed(self) -> None:
        open_xids = [self.new_xid() for _ in range(self.draw(st.integers(1, 2)))]
        for first in (True, False):
            for xid in open_xids:
                self.stream_xid = xid
                self.say(StreamStart(xid, first))
                if first and self.draw(st.booleans()):
                    self.say(Origin(0, "elsewhere"))
                self.changes([xid, xid + 1, xid + 2])
                self.stream_xid = None
                self.say(StreamStop())
                if self.draw(st.booleans()):
                    self.say(StreamAbort(xid, xid + 1, None, None))
            if self.draw(st.booleans()):
                self.plain()
        for xid in open_xids:
            self.end_stream(xid)

    def end_stream(self, xid: int) -> None:
        lsns = self.lsns()
        ends: list[Message] = [
            StreamCommit(xid, *lsns, 1),
            StreamPrepare(*lsns, 1, xid, f"gid{xid}"),
            StreamAbort(xid, xid, None, None),
        ]
        self.say(self.draw(st.sampled_from(ends)))

    def outside(self) -> None:
        self.say(self.draw(MESSAGES)._replace(transactional=False))


@st.composite
def sessions(draw: st.DrawFn) -> list[Step]:
    """What a publisher sends over one connection: plain, prepared, streamed transactions and messages between them."""
    publisher = _Publisher(draw)
    acts = [publisher.plain, publisher.prepared, publisher.streamed, publisher.outside]
    for _ in range(draw(st.integers(1, 4))):
        draw(st.sampled_from(acts))()
    return publisher.steps
