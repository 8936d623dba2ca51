"""Interrupted copies and hand-overs: every attempt either ends well or leaves what the next one needs.

Mirrors the crash matrix of tablesync.c's NOTES; kills of real processes are in tests/faults.
"""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path

import pytest
from fix_failpoints import At
from fix_pair import MakePair, Pair, elsewhere
from fix_servers import Database
from psycopg.conninfo import conninfo_to_dict
from thorough import long

from pgsub.apply.worker import worker
from pgsub.common.errors import ApplyError, Fenced, PgsubError, PublisherUnavailable, TargetUnavailable, WrongSystem
from pgsub.tablesync import copy_pool, sync_slots, sync_worker
from pgsub.tablesync.context import SyncContext
from pgsub.tablesync.coordinator import TableSync
from pgsub.tablesync.copy import plan
from pgsub.target.ledger.tables import subscription_tables

TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE u (id int PRIMARY KEY, v text)"
ROWS = "INSERT INTO t SELECT g, md5(g::text) FROM generate_series(1, 3000) g"
ELSEWHERE = f"{TABLE}; INSERT INTO t SELECT -g, 'theirs' FROM generate_series(1, 3000) g"
#: More than comes in the first burst: the sync worker looks before it has caught up, and claims.
MUCH = "UPDATE t SET v = v || 'x'"


@pytest.fixture(autouse=True)
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small chunks, one at a time, so that it is known which of them a failpoint meets."""
    monkeypatch.setattr(plan, "CHUNK_BYTES", 50_000)
    monkeypatch.setattr(plan, "CHUNKED_FROM_BYTES", 50_000)


def _attempts(p: Pair) -> int:
    return int(p.subdb.value("SELECT attempt FROM pgsub.subscription_rel WHERE relname = 't'"))


def _slots(p: Pair) -> int:
    return int(p.pubdb.value("SELECT count(*) FROM pg_replication_slots WHERE slot_name ~ '_sync_'"))


def _ends_well(p: Pair, rows: str = "t") -> None:
    p.sync("t")
    assert p.state("t") == "s" and _slots(p) == 0
    assert p.subdb.value("SELECT count(*) FROM pgsub.copy_chunk") == 0
    p.apply()
    p.same(rows)
    p.apply("UPDATE t SET v = 'streamed' WHERE id = 3; INSERT INTO t VALUES (4000, 'streamed')")
    p.same(rows)
    assert p.state("t") == "r" and p.events() == []


def _breaks(p: Pair, error: type[PgsubError] = TargetUnavailable) -> None:
    with pytest.raises(error):
        p.sync("t")


@pytest.mark.parametrize("adopt", [False, *long([True])])
def test_no_row_of_another_publisher_is_copied_and_no_slot_made_there(pair: MakePair, adopt: bool) -> None:
    p = pair(TABLE, pub=ROWS, state="i")
    if adopt:
        p.subdb.execute("INSERT INTO t SELECT g, 'ours' FROM generate_series(1, 10) g")
        p.subdb.execute("UPDATE pgsub.subscription_rel SET adopt = true")
    before = p.subdb.rows("SELECT * FROM t")
    with elsewhere(p, ELSEWHERE) as there:
        _breaks(p, WrongSystem)
        assert p.state("t") in "id" and p.subdb.rows("SELECT * FROM t") == before
        assert there.value("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == 0
    _ends_well(p)


def _service(file: Path, database: Database) -> None:
    words = conninfo_to_dict(database.conninfo)
    file.write_text("[there]\n" + "".join(f"{key}={value}\n" for key, value in words.items()))


@pytest.mark.parametrize(
    ("paused", "more"), [("sync.after_slot", ""), ("copy.before_commit", "copy.after_commit=error@1")]
)
def test_a_copy_whose_address_leads_elsewhere_meanwhile_reads_nothing_there(
    pair: MakePair, at: At, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paused: str, more: str
) -> None:
    p, services, go_on = pair(TABLE, pub=ROWS, state="i", copy_workers=1), tmp_path / "services", tmp_path / "go on"
    monkeypatch.setenv("PGSERVICEFILE", str(services))
    _service(services, p.pubdb)
    at(f"{paused}=pause:{go_on}@1;{more}")
    with elsewhere(p, ELSEWHERE) as there:
        p.set(connection="service=there")
        sync = p.submit("sync", lambda name: p.sync(name), ["t"])
        p.until("SELECT count(*) > 0 FROM pgsub.progress WHERE worker <> 0")
        if paused == "copy.before_commit":
            p.until(
                "SELECT count(*) = 1 FROM pg_stat_activity WHERE application_name ~ ' copy:' AND state ~ '^idle in'"
            )
        _service(services, there)
        go_on.touch()
        with pytest.raises(WrongSystem):
            sync.result()
    assert p.state("t") == "d" and p.subdb.value("SELECT count(*) FROM t WHERE v = 'theirs'") == 0
    _ends_well(p)


@pytest.mark.long
def test_a_slot_is_not_taken_for_dropped_on_another_server(pair: MakePair, at: At) -> None:
    p = pair(TABLE, pub=ROWS, state="i")
    at("sync.after_s=error@1")
    _breaks(p)
    named = "SELECT sync_slot FROM pgsub.subscription_rel WHERE relname = 't'"
    slot = p.subdb.value(named)
    assert p.state("t") == "s" and slot is not None
    with elsewhere(p, ELSEWHERE):
        _breaks(p, WrongSystem)
        assert p.subdb.value(named) == slot and _slots(p) == 1
    _ends_well(p)


@pytest.mark.parametrize("point", ["copy.middle", "copy.before_commit", "copy.after_commit"])
def test_a_chunk_that_fails_for_a_moment_is_tried_again_alone(pair: MakePair, at: At, point: str) -> None:
    p = pair(TABLE, pub=ROWS, state="i")
    at(f"{point}=error@2")
    _ends_well(p)
    assert _attempts(p) == 1


@pytest.mark.parametrize("point", ["sync.after_slot", "copy.middle", "copy.before_commit", "copy.after_commit"])
@pytest.mark.parametrize("mode", ["chunked", "atomic"])
def test_an_attempt_that_failed_is_made_good_by_the_next(
    pair: MakePair, at: At, monkeypatch: pytest.MonkeyPatch, point: str, mode: str
) -> None:
    monkeypatch.setattr(copy_pool, "TRIES", 1)
    p = pair(TABLE, pub=ROWS, state="i", copy_atomic=mode == "atomic", copy_workers=1)
    at(f"{point}=error@{'1' if mode == 'atomic' or point == 'sync.after_slot' else '3'}")
    _breaks(p)
    durable = mode == "atomic" and point == "copy.after_commit"
    assert p.state("t") == ("f" if durable else "d")
    assert _slots(p) == 1
    if mode == "chunked" and point.startswith("copy"):
        assert 0 < p.subdb.value("SELECT count(*) FROM t") < 3000
    p.pubdb.execute("INSERT INTO t VALUES (3500, 'between'); DELETE FROM t WHERE id = 10")
    _ends_well(p)
    assert _attempts(p) == (1 if durable else 2)


@pytest.mark.long
@pytest.mark.publishers(long=True)
def test_a_lost_snapshot_means_a_new_attempt(pair: MakePair, at: At, tmp_path: Path) -> None:
    p = pair(TABLE, pub=ROWS, state="i", copy_workers=1)
    go_on = tmp_path / "go on"
    at(f"copy.after_commit=pause:{go_on}@2")
    first = p.submit("sync", lambda name: p.sync(name), ["t"])
    p.until("SELECT count(xid) = 2 FROM pgsub.copy_chunk")
    p.pubdb.execute(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name ~ '_sync_'"
        " AND backend_type = 'walsender'"
    )
    go_on.touch()
    with pytest.raises(PublisherUnavailable, match="could not import the slot's snapshot"):
        first.result()
    assert p.state("t") == "d" and p.subdb.value("SELECT count(*) FROM t") > 0
    _ends_well(p)
    assert _attempts(p) == 2


def _half_a_copy(pair: MakePair, at: At, monkeypatch: pytest.MonkeyPatch, table: str = TABLE) -> Pair:
    monkeypatch.setattr(copy_pool, "TRIES", 1)
    p = pair(table, pub=ROWS, state="i", copy_workers=1)
    at("copy.before_commit=error@3")
    _breaks(p)
    p.set(copy_atomic=True)  # the next attempt begins again
    return p


def test_cleaning_up_removes_the_copys_own_rows_and_no_others(
    pair: MakePair, at: At, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = _half_a_copy(pair, at, monkeypatch)
    p.subdb.execute("INSERT INTO t SELECT -g, 'mine' FROM generate_series(1, 50) g")
    p.sync("t")
    p.same("(SELECT * FROM t WHERE id > 0)")
    assert p.subdb.value("SELECT count(*) FROM t WHERE v = 'mine'") == 50
    assert p.subdb.value("SELECT copy_mode FROM pgsub.subscription_rel WHERE relname = 't'") == "atomic"


def test_cleaning_up_of_a_partitioned_table(pair: MakePair, at: At, monkeypatch: pytest.MonkeyPatch) -> None:
    table = (
        "CREATE TABLE t (id int PRIMARY KEY, v text) PARTITION BY HASH (id);"
        "CREATE TABLE t0 PARTITION OF t FOR VALUES WITH (MODULUS 2, REMAINDER 0);"
        "CREATE TABLE t1 PARTITION OF t FOR VALUES WITH (MODULUS 2, REMAINDER 1)"
    )
    monkeypatch.setattr(copy_pool, "TRIES", 1)
    p = pair(
        pub=f"{table};{ROWS}; CREATE PUBLICATION p FOR TABLE t WITH (publish_via_partition_root)",
        sub=table,
        state="i",
        copy_workers=1,
    )
    at("copy.before_commit=error@3")
    _breaks(p)
    p.set(copy_atomic=True)
    p.subdb.execute("INSERT INTO t VALUES (-1, 'mine'), (-2, 'mine')")
    p.sync("t")
    p.same("(SELECT * FROM t WHERE id > 0)")
    assert p.subdb.value("SELECT count(*) FROM t WHERE v = 'mine'") == 2


def test_cleaning_up_under_a_name_that_needs_care(pair: MakePair, at: At, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_pool, "TRIES", 1)
    name = '"50% of %s {}"'
    p = pair(
        f"CREATE TABLE {name} (id int PRIMARY KEY, v text)",
        pub=ROWS.replace("t SELECT", f"{name} SELECT"),
        state="i",
        copy_workers=1,
    )
    [(relid,)] = p.subdb.rows("SELECT srrelid::bigint FROM pgsub.subscription_rel")
    at("copy.before_commit=error@3")
    with pytest.raises(TargetUnavailable):
        p.sync_oid(relid)
    p.set(copy_atomic=True)
    p.sync_oid(relid)
    p.same(name)


def test_a_writer_that_never_stops_loses_nothing(pair: MakePair, at: At, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_pool, "TRIES", 1)
    p = pair(TABLE, pub=ROWS, state="i", copy_workers=2)
    over, written = threading.Event(), []

    def write() -> None:
        with closing(p.subdb.connect()) as session:
            while not over.is_set():
                number = -1 - len(written)
                session.execute("BEGIN")
                session.execute("INSERT INTO t VALUES (%s, 'mine')", (number,))
                session.execute("UPDATE t SET v = 'changed' WHERE id = %s", (number,))
                session.execute("COMMIT")
                written.append(number)

    writer = threading.Thread(target=write)
    at("sync.after_slot=error@1;copy.middle=error@2")
    try:
        _breaks(p)
        writer.start()
        p.sync("t")
    finally:
        over.set()
        writer.join()
    p.same("(SELECT * FROM t WHERE id > 0)")
    assert p.subdb.value("SELECT count(*) FROM t WHERE id < 0 AND v = 'changed'") == len(written)


def test_rows_of_a_copy_that_were_changed_here_stop_the_next_attempt(
    pair: MakePair, at: At, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = _half_a_copy(pair, at, monkeypatch)
    before = p.subdb.value("SELECT count(*) FROM t")
    p.subdb.execute("UPDATE t SET v = 'changed here' WHERE id IN (1, 2)")
    for _ in range(2):
        with pytest.raises(ApplyError, match="could not remove the rows of an interrupted copy") as caught:
            p.sync("t")
        assert caught.value.relation == "public.t"
        assert f"{before} rows were copied, {before - 2} are unchanged" in (caught.value.detail or "")
        assert p.subdb.value("SELECT count(*) FROM t") == before and p.state("t") == "d"
    p.subdb.execute((caught.value.hint or "").splitlines()[-1])  # the command of the hint
    _ends_well(p)


@pytest.mark.publishers("19", long=True)
def test_what_is_copied_is_never_copied_again(pair: MakePair, at: At) -> None:
    p = pair(TABLE, pub=ROWS, state="i")
    at("sync.after_f=error")
    _breaks(p)
    assert p.state("t") == "f"
    query = "SELECT array_agg(xmin::text ORDER BY id) FROM t"
    before = p.subdb.value(query)
    p.pubdb.execute("INSERT INTO u VALUES (1, 'x')")
    p.sync("t")
    assert p.subdb.value(query) == before
    assert p.state("t") == "s"
    p.apply()
    p.same("t")


@pytest.mark.parametrize(
    ("point", "ahead"),
    [
        *[(point, False) for point in ("sync.before_s", "sync.after_s", "sync.before_slot_drop")],
        *[(point, True) for point in ("sync.before_s", "sync.after_claim", "sync.after_s", "sync.before_slot_drop")],
    ],
)
def test_a_hand_over_that_was_interrupted_is_finished(pair: MakePair, at: At, point: str, ahead: bool) -> None:
    p = pair(TABLE, pub=ROWS, state="i")
    at("sync.after_f=error")
    _breaks(p)
    if ahead:
        p.apply(MUCH, MUCH)
    at(f"{point}=error")
    _breaks(p)
    assert p.state("t") == ("s" if point in ("sync.after_s", "sync.before_slot_drop") else "f")
    assert _slots(p) == 1  # never before s is on disk
    if point == "sync.before_slot_drop":  # without a slot nobody would take the table up again for what is left of it
        assert p.subdb.value("SELECT count(*) FROM pgsub.copy_chunk") == 0
        assert p.subdb.value("SELECT count(*) FROM pgsub.progress WHERE worker <> 0") == 0
    _ends_well(p)


def test_apply_behind_hands_over_at_once_without_a_stream(pair: MakePair) -> None:
    p = pair(TABLE, pub=ROWS, state="i")
    names: list[str] = []
    submit = p.submit
    p.submit = lambda name, *rest: (names.append(name), submit(name, *rest))[1]  # type: ignore[method-assign, misc]
    p.sync("t")
    assert p.state("t") == "s" and names and set(names) == {"copy t"}
    p.apply()
    p.same("t")


@pytest.mark.publishers(long=True)
def test_apply_ahead_is_caught_up_with(pair: MakePair, at: At) -> None:
    p = pair(TABLE, pub=ROWS, state="i")
    p.sync("u")
    at("sync.after_f=error")
    _breaks(p)
    p.apply(*[f"INSERT INTO t VALUES ({n}, 'sync'); INSERT INTO u VALUES ({n}, 'apply')" for n in range(5000, 5050)])
    p.same("u")
    assert p.subdb.value("SELECT count(*) FROM t") == 3000
    ahead = p.progress()[0]
    p.sync("t")
    p.same("t", "u")
    assert p.subdb.value("SELECT srsublsn - '0/0' FROM pgsub.subscription_rel WHERE relname = 't'") >= ahead
    _ends_well(p)


def test_a_worker_far_behind_chases_before_it_claims(pair: MakePair, at: At, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_worker, "NEAR_BYTES", 100)
    monkeypatch.setattr(sync_worker, "CHASES", 3)
    monkeypatch.setattr(sync_worker, "_ATTEMPT_SECONDS", 0.01)
    p = pair(TABLE, pub=ROWS, state="i")
    at("sync.after_f=error")
    _breaks(p)
    p.apply(*[f"UPDATE t SET v = 'x{n}' WHERE id < 200" for n in range(20)])
    _ends_well(p)


def _writes(p: Pair, over: threading.Event) -> None:
    with closing(p.pubdb.connect()) as session:
        number = 10_000
        while not over.is_set():
            number += 1
            session.execute("INSERT INTO t VALUES (%s, 'w'), (%s, 'w')", (number, -number))
            session.execute("UPDATE t SET v = v || 'x' WHERE id IN (%s, %s)", (-number + 5, number % 3000))
            session.execute("DELETE FROM t WHERE id = %s", (-number + 3,))
            session.execute("INSERT INTO u VALUES (%s, 'w')", (number,))
            over.wait(0.002)  # or apply would have to run after it for ever on a busy machine


@pytest.mark.publishers("19", long=True)
@pytest.mark.parametrize("mode", ["batched", *long(["transactional"])])
@pytest.mark.parametrize("first", ["apply", "sync"])
def test_tables_change_hands_under_writes(pair: MakePair, first: str, mode: str) -> None:
    p = pair(TABLE, pub=ROWS, state="i", apply_mode=mode)
    over = threading.Event()
    writer = threading.Thread(target=_writes, args=(p, over))
    writer.start()
    try:
        task = p.start() if first == "apply" else None
        for table in ("t", "u"):
            p.sync(table)
        task = task or p.start()
        p.until("SELECT bool_and(srsubstate = 'r') FROM pgsub.subscription_rel", task=task)
    finally:
        over.set()
        writer.join()
    p.stop(task)
    p.apply()
    p.same("t", "u")
    assert p.events() == []


def test_a_claim_taken_back_is_claimed_again(pair: MakePair, at: At, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "CLAIM_PATIENCE", 0.1)
    p = pair(TABLE, pub=ROWS, state="i")
    at("sync.after_f=error")
    _breaks(p)
    p.apply(MUCH, MUCH)
    at("sync.after_claim=sleep:0.6@1")
    task = p.start()
    sync = p.submit("sync", lambda name: p.sync(name), ["t"])
    p.until("SELECT handover_lsn IS NOT NULL FROM pgsub.subscription_rel WHERE relname = 't'", task=task)
    for number in range(3502, 3512):
        p.pubdb.execute(f"INSERT INTO t VALUES ({number}, 'beyond the claim')")
    p.until("SELECT handover_lsn IS NULL FROM pgsub.subscription_rel WHERE relname = 't'", task=task)
    sync.result()
    p.until("SELECT srsubstate = 'r' FROM pgsub.subscription_rel WHERE relname = 't'", task=task)
    p.stop(task)
    p.apply()
    p.same("t")


@pytest.mark.long
def test_an_error_while_catching_up_is_located_and_stops_no_other_table(pair: MakePair, at: At) -> None:
    p = pair(TABLE, pub=ROWS, state="i")
    p.sync("u")
    at("sync.after_f=error")
    _breaks(p)
    p.subdb.execute("INSERT INTO t VALUES (3501, 'mine')")
    p.apply("INSERT INTO t VALUES (3501, 'theirs')")
    with pytest.raises(ApplyError, match="conflict=insert_exists") as caught:
        p.sync("t")
    assert caught.value.relation == "public.t" and caught.value.finish_lsn
    assert p.state("t") == "f"
    p.apply("INSERT INTO u VALUES (1, 'goes on')", "INSERT INTO t VALUES (3502, 'theirs')")
    p.same("u")
    p.subdb.execute("DELETE FROM t WHERE id = 3501")
    _ends_well(p)


@pytest.mark.publishers(long=True)
def test_a_sync_slot_that_was_lost_while_copying_is_made_again(pair: MakePair, at: At) -> None:
    p = pair(TABLE, pub=ROWS, state="i")
    at("sync.after_slot=error")
    _breaks(p)
    p.pubdb.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name ~ '_sync_'")
    _ends_well(p)


def test_stopping_ends_a_copy_between_its_chunks_and_a_catch_up_at_a_boundary(pair: MakePair, at: At) -> None:
    p = pair(TABLE, pub=ROWS, state="i")
    stopping = threading.Event()
    context = SyncContext(p.sub, "1", p.submit, stopping)
    stopping.set()
    with pytest.raises(Fenced, match="asked to stop"):
        TableSync(context, p.relid("t")).run()
    assert p.state("t") == "d"
    _ends_well(p)


def test_a_take_over_ends_the_sessions_of_the_attempt_before(pair: MakePair) -> None:
    p = pair(TABLE, pub=ROWS, state="i", copy_workers=1)
    with closing(p.subdb.connect()) as blocker:
        blocker.execute("BEGIN")
        blocker.execute("LOCK TABLE t IN SHARE MODE")
        p.set(copy_atomic=True)
        first = p.submit("sync", lambda name: p.sync(name), ["t"])
        waits = (
            "SELECT count(*) = 1 FROM pg_stat_activity WHERE application_name ~ 'copy:' AND wait_event_type = 'Lock'"
        )
        p.until(waits)
        claim = p.take_over("t")
        assert p.subdb.value("SELECT count(*) FROM pg_stat_activity WHERE application_name ~ 'copy:'") == 0
        assert claim.epoch > 1
        blocker.execute("COMMIT")
    with pytest.raises(PgsubError):
        first.result()
    _ends_well(p)


def test_rows_that_a_catch_up_brought_are_not_taken_for_a_clean_target(pair: MakePair, at: At) -> None:
    p = pair("CREATE TABLE t (id int, v text); ALTER TABLE t REPLICA IDENTITY FULL; CREATE TABLE u (id int)",
             pub="INSERT INTO t VALUES (1, 'x')", state="i")  # fmt: skip
    p.sync("u")
    at("sync.after_f=error")
    _breaks(p)
    p.apply("INSERT INTO u VALUES (1); INSERT INTO t VALUES (2, 'later')")
    at("apply.after_target_commit=error")
    _breaks(p)
    assert p.subdb.value("SELECT count(*) FROM t") == 2 and p.state("t") == "f"
    claim = p.take_over("t")  # a refresh that was to remove the table, and gave up
    subscription_tables.reset_to_datasync(p.session, [claim])
    sync_slots.release(p.session, p.sub, claim.worker, claims=[claim])
    with pytest.raises(ApplyError, match="could not remove the rows") as caught:
        p.sync("t")
    assert "catch-up" in (caught.value.detail or "")
    p.subdb.execute((caught.value.hint or "").splitlines()[-1])
    p.sync("t")
    p.apply()
    p.same("t")
