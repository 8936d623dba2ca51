"""pg_logical_emit_message() with ``messages``: of a transaction once, with its commit; any other before feedback."""

from __future__ import annotations

from typing import Any

import pytest
from embedded import Server
from fix_pair import MakePair, Pair
from fix_parallel import AT_ONCE, TABLE, Parallel, Replays, publishing, wait_open
from fix_servers import Database

from pgsub.apply.commit.ledger_commit import LedgerCommit
from pgsub.apply.execute import executor
from pgsub.apply.stream import assembler
from pgsub.apply.stream.spool import SpooledTransaction
from pgsub.apply.worker import feedback
from pgsub.common import failpoints
from pgsub.common.errors import PgsubError
from pgsub.protocol.frames import Segment
from pgsub.protocol.lsn import parse_lsn
from pgsub.target.ledger.progress import Progress

_PREPARED = "SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()"


def _emit(text: str = "", *, transactional: bool = True, prefix: str = "p", of: str = "") -> str:
    content = of or f"'{text}'"
    return f"SELECT pg_logical_emit_message({transactional}, '{prefix}', {content})"


def _contents(p: Pair) -> list[str]:
    return [event["content"] for event in p.events() if event["content"]]


def _dies(p: Pair, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """A worker that ends at a step, and then one that goes on."""
    with monkeypatch.context() as patch:
        patch.setenv("PGSUB_FAILPOINTS", f"{step}=error")
        patch.setattr(failpoints, "_counts", {})
        with pytest.raises(PgsubError, match=step):
            p.catch_up()
    p.apply()


def test_a_message_of_a_transaction_is_recorded_once_with_its_commit_and_only_if_asked_for(pair: MakePair) -> None:
    p = pair(TABLE, streaming="off")
    p.apply(_emit("not asked for"))
    assert p.events() == []
    p.set(messages=True)
    p.apply(
        f"BEGIN; INSERT INTO t VALUES (1, 'x'); {_emit('first')}; SAVEPOINT a; {_emit('taken back')};"
        f" ROLLBACK TO a; {_emit('second')}; COMMIT",
        f"BEGIN; INSERT INTO t VALUES (2, 'x'); {_emit('rolled back')}; ROLLBACK",
        _emit("nothing else"),
    )
    p.apply()
    assert _contents(p) == ["first", "second", "nothing else"]
    first, second, third = p.events()
    assert (first["kind"], first["prefix"], first["transactional"]) == ("message", "p", True)
    assert first["xid"] == second["xid"] != third["xid"]
    assert parse_lsn(first["lsn"]) < parse_lsn(second["lsn"]) < parse_lsn(third["lsn"]) <= p.progress()[0]
    p.set(messages=False)
    p.apply(_emit("no more"))
    assert len(p.events()) == 3


def test_what_cannot_be_shown_is_hexadecimal_and_what_is_long_is_cut_with_its_length(pair: MakePair) -> None:
    p = pair(TABLE, messages=True)
    for content in (
        r"'\xff00'::bytea",
        r"'\x610062'::bytea",
        "repeat('\u00e4', 40)",
        r"decode(repeat('ff', 100), 'hex')",
        "E'two\nlines'",
    ):
        p.pubdb.execute(_emit(of=content))
    p.apply(_emit("x", prefix="\u00e4" * 40))
    assert _contents(p) == [
        *(r"\xff00", r"\x610062", "\u00e4" * 32 + "... (80 bytes)", r"\x" + "ff" * 64 + "... (100 bytes)"),
        *("two\nlines", "x"),
    ]
    assert p.events()[-1]["prefix"] == "\u00e4" * 32 + "... (80 bytes)"


def test_a_target_whose_encoding_does_not_know_a_character_goes_on(
    pubdb: Database, target: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feedback, "MIRROR_SECONDS", 0.0)
    latin = Database(target, f"latin_{pubdb.name}", "LATIN1")
    pubdb.execute("CREATE PUBLICATION p FOR ALL TABLES")
    p = Pair(pubdb, latin, messages=True).subscribe("r", None)
    try:
        p.apply(_emit("\u0416", prefix="\u0416"), _emit("\u00fc", transactional=False), "CREATE TABLE t ()")
        assert {(e["prefix"], e["content"]) for e in p.events()} == {(r"\u0416", r"\u0416"), ("p", "\u00fc")}
    finally:
        p.close()
        latin.drop()


@pytest.mark.parametrize("step", ["apply.before_target_commit", "apply.commit_reply_lost", "apply.after_reported_lsn"])
def test_a_worker_that_dies_around_the_commit_records_each_message_once(
    pair: MakePair, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    p = pair(TABLE, messages=True)
    if step == "apply.after_reported_lsn":
        monkeypatch.setattr(Progress, "unmirrored_events", lambda self: None)  # as if a launcher had seen them
    p.pubdb.execute(f"BEGIN; INSERT INTO t VALUES (1, 'x'); {_emit('one')}; {_emit('two')}; COMMIT")
    _dies(p, monkeypatch, step)
    p.same("t")
    assert _contents(p) == ["one", "two"]


@pytest.mark.parametrize("streaming", ["off", "on"])
def test_very_many_messages_of_a_transaction_are_handed_on_in_parts(
    pair: MakePair, monkeypatch: pytest.MonkeyPatch, streaming: str
) -> None:
    parts: list[int] = []
    record = LedgerCommit.record

    def counted(self: LedgerCommit, records: Any) -> None:
        parts.append(len(records))
        record(self, records)

    monkeypatch.setattr(LedgerCommit, "record", counted)
    monkeypatch.setattr(executor, "RECORDS", 10)
    monkeypatch.setattr(assembler, "MEMORY_LIMIT", 1000)
    p = pair(TABLE, messages=True, streaming=streaming)
    p.pubdb.execute(f"ALTER DATABASE {p.pubdb.name} SET {AT_ONCE}")
    p.apply(f"BEGIN; INSERT INTO t VALUES (1, 'x'); {_emit(of='g::text')} FROM generate_series(1, 95) g; COMMIT")
    assert _contents(p) == [str(g) for g in range(1, 96)]
    assert max(parts) == 10 and len(parts) >= 10


@pytest.mark.parametrize("streaming", ["on", "parallel"])
def test_messages_of_a_streamed_transaction_show_with_its_commit_without_those_of_subtransactions_taken_back(
    parallel: Parallel, replays: Replays, monkeypatch: pytest.MonkeyPatch, streaming: str
) -> None:
    spooled: list[str] = []
    append = SpooledTransaction.append

    def noted(self: SpooledTransaction, messages: Segment) -> None:
        spooled.extend(messages.codes.decode())
        append(self, messages)

    monkeypatch.setattr(SpooledTransaction, "append", noted)
    p = parallel(messages=True)
    p.set(streaming=streaming)
    task = p.start()
    with publishing(p, "INSERT INTO t VALUES (1, 'x')", _emit("kept")) as session:
        for number, statement in enumerate(
            (
                *("SAVEPOINT a", "INSERT INTO t VALUES (2, 'a')", _emit("a"), "SAVEPOINT b", "DELETE FROM t"),
                *("RELEASE b", _emit("b"), "ROLLBACK TO a", _emit("kept too"), "SAVEPOINT c", _emit("of c")),
                *("INSERT INTO t VALUES (3, 'c')", "RELEASE c", _emit("last")),
            )
        ):
            session.execute(statement.encode())
            p.pubdb.execute(_emit())  # of a transaction of its own: all that stands before it has come
            p.until("SELECT count(*) FROM pgsub.event", value=number + 1, task=task)
        assert spooled.count("M") == 6 + number + 1 and _contents(p) == []
        session.execute("COMMIT")
    p.until("SELECT count(*) = 2 FROM t", task=task)
    p.stop(task)
    assert _contents(p) == ["kept", "kept too", "of c", "last"]
    assert not replays()


def test_more_messages_than_a_parallel_worker_keeps_are_recorded_by_the_replay(
    parallel: Parallel, replays: Replays, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "RECORDS", 10)
    p = parallel(messages=True)
    task = p.start()
    with publishing(p, "INSERT INTO t VALUES (1, 'x')") as session:
        wait_open(p, task)
        session.execute(f"{_emit(of='g::text')} FROM generate_series(1, 25) g".encode())
        session.execute("COMMIT")
    p.until("SELECT count(*) = 1 FROM t", task=task)
    p.stop(task)
    assert _contents(p) == [str(g) for g in range(1, 26)]
    assert "too many messages" in replays()[0]


@pytest.mark.parametrize("streaming", ["off", "parallel"])
def test_messages_of_a_prepared_transaction_show_when_it_is_committed_and_never_when_it_is_not(
    pair: MakePair, monkeypatch: pytest.MonkeyPatch, streaming: str
) -> None:
    p = pair(TABLE, messages=True, streaming=streaming, two_phase="p")
    p.pubdb.execute(f"ALTER DATABASE {p.pubdb.name} SET {AT_ONCE}")
    for number, gid in enumerate(("kept", "gone")):
        p.pubdb.execute(f"BEGIN; INSERT INTO t VALUES ({number}, 'x'); {_emit(gid)}; PREPARE TRANSACTION '{gid}'")
    _dies(p, monkeypatch, "apply.after_prepare")
    assert p.subdb.value(_PREPARED) == 2 and p.events() == []
    p.pubdb.execute("ROLLBACK PREPARED 'gone'")
    p.pubdb.execute("COMMIT PREPARED 'kept'")
    _dies(p, monkeypatch, "apply.after_finish_prepared")
    assert p.subdb.value(_PREPARED) == 0
    p.same("t")
    assert _contents(p) == ["kept"]


@pytest.mark.parametrize("mode", ["batched", "transactional"])
def test_a_message_of_no_transaction_is_recorded_before_the_ledger_passes_it(
    pair: MakePair, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    p = pair(TABLE, messages=True, apply_mode=mode)
    p.pubdb.execute(f"BEGIN; {_emit('of a rollback', transactional=False)}; ROLLBACK")
    p.pubdb.execute(f"BEGIN; INSERT INTO t VALUES (1, 'x'); {_emit('inside', transactional=False)}; COMMIT")
    _dies(p, monkeypatch, "apply.after_target_commit")
    p.same("t")
    assert set(_contents(p)) == {"of a rollback", "inside"}
    assert {(event["transactional"], event["xid"]) for event in p.events()} == {(False, None)}


def test_feedback_waits_for_a_message_of_no_transaction_and_no_longer_than_for_that(pair: MakePair) -> None:
    p = pair(TABLE, messages=True)
    p.apply("INSERT INTO t VALUES (0, 'x')")
    at = p.published()
    task = p.start()
    p.pubdb.execute(_emit("held", transactional=False))
    p.pubdb.execute("INSERT INTO t VALUES (1, 'x')")  # what is not transactional is flushed with what follows
    p.until("SELECT count(*) = 2 FROM t", task=task)
    p.until("SELECT pg_sleep(0.3) IS NOT NULL", task=task)
    assert _contents(p) == ["held"] and p.confirmed() <= at and p.progress()[1] <= at
    for number in range(2, 100):  # there is always something left, as there is when messages never cease
        p.pubdb.execute(f"BEGIN; INSERT INTO t VALUES ({number}, 'x'); {_emit(str(number))}; COMMIT")
        p.until("SELECT count(*) = %s FROM t", number + 1, task=task)
        p.subdb.execute("DELETE FROM pgsub.event WHERE id < (SELECT max(id) FROM pgsub.event)")
        p.until("SELECT pg_sleep(0.1) IS NOT NULL", task=task)
        if p.confirmed() > at:
            break
    assert p.confirmed() > at and len(p.events()) == 1
    assert p.progress()[1] < parse_lsn(p.events()[0]["lsn"])
    p.stop(task)
