"""What the ledger says and what the publisher is told: record before report, and no write for nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from fix_pair import MakePair, Pair

from pgsub.apply.stream import assembler
from pgsub.apply.stream.receiver import Timing
from pgsub.apply.stream.spool import SpooledTransaction
from pgsub.apply.worker import committer, start, worker
from pgsub.apply.worker.loop import WorkerResult
from pgsub.apply.worker.worker import ApplyPolicy
from pgsub.common.errors import Fenced, StateForbids, StreamsMustRestart
from pgsub.protocol.frames import Segment
from pgsub.protocol.lsn import parse_lsn
from pgsub.target.ledger import subscriptions, worker_takeover

TABLES = "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE other (id int PRIMARY KEY)"
T = [("public", "t")]


def _row_version(p: Pair) -> object:
    return p.subdb.rows("SELECT xmin::text, ctid::text FROM pgsub.progress WHERE worker = 0")


def _other_wal(p: Pair, kilobytes: int = 100) -> int:
    """WAL of which nothing is sent, as that of other databases; gives where it ends."""
    for _ in range(kilobytes // 100):
        p.pubdb.execute("SELECT pg_logical_emit_message(true, 'noise', repeat('x', 100000))")
    return p.published()


def _replayed(p: Pair, position: int) -> None:
    """Wait until the publisher was told that everything up to here is applied."""
    query = "SELECT replay_lsn - '0/0'::pg_lsn >= %s FROM pg_stat_replication WHERE application_name = %s"
    p.pubdb.wait(query, position, p.sub.name)


def test_a_transaction_without_applied_changes_moves_the_ledger(pair: MakePair) -> None:
    p = pair(TABLES, names=T)
    p.apply("INSERT INTO t VALUES (1, 'x')")
    before = p.progress()[0]
    p.pubdb.execute("INSERT INTO other VALUES (1)")
    end = p.published()
    p.pubdb.execute("INSERT INTO other VALUES (2)")
    assert p.catch_up().remote_lsn == p.progress()[0] > end > before
    assert p.subdb.value("SELECT count(*) FROM other") == 0


def test_many_filtered_transactions_share_a_commit(pair: MakePair) -> None:
    p = pair(TABLES, names=T)
    for number in range(50):
        p.pubdb.execute(f"INSERT INTO other VALUES ({number})")
    before = p.subdb.value("SELECT pg_current_xact_id()::text::bigint")
    p.apply()
    assert p.subdb.value("SELECT pg_current_xact_id()::text::bigint") - before < 20


def test_keepalives_are_told_at_once_and_recorded_at_the_stop(pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "_timing", lambda *_: Timing(idle_interval=3600))
    p = pair(TABLES)
    task = p.start()
    p.pubdb.execute("INSERT INTO t VALUES (1, 'x')")
    p.until("SELECT reported_lsn >= remote_lsn AND remote_lsn > '0/0' FROM pgsub.progress WHERE worker = 0", task=task)
    version = _row_version(p)
    remote, reported = p.progress()
    position = _other_wal(p)
    _replayed(p, position)
    _replayed(p, _other_wal(p))
    assert _row_version(p) == version  # two subscriptions that feed each other stay asleep
    assert p.confirmed() <= reported
    p.stop(task)
    assert p.progress()[0] == remote  # moves with transactions only
    assert p.progress()[1] >= position
    assert p.confirmed() >= position


def test_a_position_that_somebody_waits_for_is_recorded_at_once_and_only_once(
    pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "_timing", lambda *_: Timing(idle_interval=3600))
    p = pair(TABLES)
    task = p.start()
    p.pubdb.execute("INSERT INTO t VALUES (1, 'x')")
    p.until("SELECT reported_lsn >= remote_lsn AND remote_lsn > '0/0' FROM pgsub.progress WHERE worker = 0", task=task)
    position = _other_wal(p)
    _replayed(p, position)
    assert p.progress()[1] < position
    with closing(p.subdb.connect()) as session:
        worker_takeover.ask_to_record(session, p.sub.subid, position)
    recorded = "SELECT reported_lsn - '0/0'::pg_lsn >= {} FROM pgsub.progress WHERE worker = 0"
    p.until(recorded.format(position), task=task)
    version = _row_version(p)
    _replayed(p, _other_wal(p))
    assert _row_version(p) == version
    p.stop(task)


def test_an_idle_subscription_frees_wal_after_a_while(pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "_timing", lambda *_: Timing(idle_interval=0.5))
    p = pair(TABLES)
    task = p.start()
    confirmed = "SELECT confirmed_flush_lsn - '0/0'::pg_lsn >= %s FROM pg_replication_slots WHERE slot_name = %s"
    for _ in range(2):
        p.pubdb.wait(confirmed, _other_wal(p), p.sub.slot_name)
    p.stop(task)
    assert p.progress()[0] == 0


def test_the_write_position_does_not_wait_for_apply(pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "_timing", lambda *_: Timing(status_interval=3600))
    p = pair(TABLES)
    task = p.start()
    p.pubdb.execute("INSERT INTO t VALUES (1, 'x')")
    p.until("SELECT count(*) FROM t", value=1, task=task)
    query = "SELECT {} - '0/0'::pg_lsn >= %s FROM pg_stat_replication WHERE application_name = %s"
    with closing(p.subdb.connect()) as session:
        session.execute("BEGIN; LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
        for number in (2, 3):
            p.pubdb.execute(f"INSERT INTO t VALUES ({number}, 'x')")
            p.subdb.wait("SELECT count(*) > 0 FROM pg_locks WHERE NOT granted")
            p.pubdb.wait(query.format("write_lsn"), p.published(), p.sub.name)
        assert not p.pubdb.value(query.format("replay_lsn"), p.published(), p.sub.name)
        session.execute("COMMIT")
    _replayed(p, p.published())
    p.stop(task)


def test_an_unfinished_stream_does_not_hold_the_slot_back(pair: MakePair) -> None:
    p = pair(TABLES, streaming="on")
    p.pubdb.execute(f"ALTER DATABASE {p.pubdb.name} SET debug_logical_replication_streaming = immediate")
    task = p.start()
    with closing(p.pubdb.connect()) as session:
        session.execute("BEGIN")
        session.execute("INSERT INTO t SELECT g, 'x' FROM generate_series(1, 500) g")
        position = _other_wal(p)
        _replayed(p, position)
        p.stop(task)
        assert p.confirmed() >= position
        task = p.start()
        session.execute("COMMIT")
    p.until("SELECT count(*) = 500 FROM t", task=task)
    p.stop(task)


def test_the_flush_position_is_never_ahead_of_the_ledger(pair: MakePair) -> None:
    p = pair(TABLES, synchronous_commit="off")
    ahead: list[tuple[int, int]] = []
    over = threading.Event()

    # the server has slots of other databases, too
    slot = "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE database = current_database()"

    def sample() -> None:
        with closing(p.pubdb.connect()) as source, closing(p.subdb.connect()) as target:
            while not over.is_set():
                flushed = source.execute(slot).fetchone()
                recorded = target.execute("SELECT reported_lsn::text FROM pgsub.progress WHERE worker = 0").fetchone()
                seen.append(flushed)
                if parse_lsn(flushed[0]) > parse_lsn(recorded[0]):
                    ahead.append((flushed[0], recorded[0]))

    seen: list[object] = []
    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        for round_ in range(3):
            task = p.start()
            for number in range(60):
                p.pubdb.execute(f"INSERT INTO t VALUES ({round_ * 1000 + number}, 'x')")
                if number % 10 == 0:
                    _other_wal(p)
            p.until("SELECT count(*) = %s FROM t", (round_ + 1) * 60, task=task)
            p.stop(task)
    finally:
        over.set()
        sampler.join()
    assert ahead == []
    assert len(set(seen)) > 3  # the flush position moved under the sampler's eyes


def test_rows_carry_the_publishers_commit_time_and_an_origin(pair: MakePair) -> None:
    p = pair(TABLES)
    task = p.start()
    seen = []
    for number in range(3):
        p.pubdb.execute(f"INSERT INTO t VALUES ({number}, 'x')")
        p.until("SELECT count(*) = 1 FROM t WHERE id = %s", number, task=task)
        seen += p.subdb.rows("SELECT remote_commit_ts FROM pgsub.progress WHERE worker = 0")
    p.stop(task)
    found = p.subdb.rows("SELECT (pg_xact_commit_timestamp_origin(xmin)).* FROM t ORDER BY id")
    assert [(at,) for at, _ in found] == seen and len(set(seen)) == 3
    [(name,)] = p.subdb.rows("SELECT roname FROM pg_replication_origin WHERE roident = %s", found[0][1])
    assert name == f"pgsub_{p.subid}"


def test_a_ledger_that_moved_restarts_both_streams(pair: MakePair) -> None:
    p = pair(TABLES)
    task = p.start()
    p.pubdb.execute("INSERT INTO t VALUES (1, 'x')")
    p.until("SELECT count(*) = 1 FROM t", task=task)
    p.subdb.execute("UPDATE pgsub.progress SET remote_lsn = remote_lsn - 1 WHERE worker = 0")
    p.pubdb.execute("INSERT INTO t VALUES (2, 'x')")
    with pytest.raises(StreamsMustRestart):
        task.result()
    assert p.subdb.value("SELECT count(*) FROM t") == 1


def test_a_worker_whose_epoch_was_raised_commits_nothing_more(pair: MakePair) -> None:
    p = pair(TABLES)
    task = p.start()
    p.pubdb.execute("INSERT INTO t VALUES (1, 'x')")
    p.until("SELECT count(*) = 1 FROM t", task=task)
    p.subdb.execute("UPDATE pgsub.control SET epoch = epoch + 1 WHERE worker = 0")  # and nobody ended its session
    p.pubdb.execute("INSERT INTO t VALUES (2, 'x')")
    with pytest.raises((Fenced, StreamsMustRestart)):
        task.result()
    assert p.subdb.value("SELECT count(*) FROM t") == 1
    p.apply()
    p.same("t")


def test_the_same_task_run_twice_ends_at_once(pair: MakePair) -> None:
    p = pair(TABLES)
    spec = p.spec(p.take_over())
    task = p.submit("apply", worker.run, [spec])
    p.until("SELECT claimed_by IS NOT NULL FROM pgsub.control WHERE worker = 0", task=task)
    with pytest.raises(Fenced):
        worker.run(spec)
    p.pubdb.execute("INSERT INTO t VALUES (1, 'x')")
    p.until("SELECT count(*) = 1 FROM t", task=task)
    p.stop(task)


def test_until_lsn_ends_before_the_first_transaction_at_or_beyond_it(pair: MakePair) -> None:
    p = pair(TABLES)
    p.pubdb.execute("INSERT INTO t VALUES (1, 'x')")
    until = p.published()
    p.pubdb.execute("INSERT INTO t VALUES (2, 'x')")
    [result] = p.start(until_lsn=until).result()
    assert isinstance(result, WorkerResult) and result.outcome == "reached" and result.remote_lsn <= until
    assert p.subdb.rows("SELECT id FROM t") == [(1,)]
    p.apply()
    p.same("t")


def test_a_stop_while_a_claim_keeps_changes_back_loses_none(pair: MakePair) -> None:
    # what waits for a hand-over was received and is not applied: no position may pass it
    p = pair(TABLES)
    p.apply("INSERT INTO t VALUES (1, 'x')", "INSERT INTO other VALUES (1)")
    remote, reported = p.progress()
    p.subdb.execute(
        "UPDATE pgsub.subscription_rel SET srsubstate = 'f', handover_lsn = (SELECT remote_lsn FROM pgsub.progress)"
        " WHERE relname = 'other'; UPDATE pgsub.progress SET states_version = states_version + 1"
    )
    task = p.start()
    p.pubdb.execute("INSERT INTO t VALUES (2, 'x')")
    p.until("SELECT count(*) = 2 FROM t", task=task)
    p.pubdb.execute("INSERT INTO other VALUES (2)")
    p.pubdb.execute("INSERT INTO t VALUES (3, 'x')")
    at = p.published()
    _other_wal(p)
    p.pubdb.execute("INSERT INTO t VALUES (4, 'x')")
    p.pubdb.wait("SELECT sent_lsn - '0/0'::pg_lsn > %s FROM pg_stat_replication", at)
    p.stop(task)
    assert p.subdb.value("SELECT count(*) FROM t") == 2
    assert reported < p.confirmed() <= p.progress()[1] < at
    p.subdb.execute(
        "UPDATE pgsub.subscription_rel SET srsubstate = 'r', handover_lsn = NULL;"
        "UPDATE pgsub.progress SET states_version = states_version + 1"
    )
    p.apply()
    p.same("t", "other")
    assert p.progress()[0] > remote


def test_apply_takes_a_claim_back_that_nobody_redeems(pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "CLAIM_PATIENCE", 0.3)
    p = pair(TABLES, state="r")
    p.apply("INSERT INTO t VALUES (1, 'x')", "INSERT INTO other VALUES (1)")
    p.subdb.execute(
        "UPDATE pgsub.subscription_rel SET srsubstate = 'f', handover_lsn = (SELECT remote_lsn FROM pgsub.progress)"
        " WHERE relname = 'other'; UPDATE pgsub.progress SET states_version = states_version + 1"
    )
    p.apply("INSERT INTO t VALUES (2, 'x')", "INSERT INTO other VALUES (2)", "INSERT INTO t VALUES (3, 'x')")
    p.same("t")
    assert p.subdb.value("SELECT count(*) FROM other") == 1  # its sync worker's business
    assert p.subdb.value("SELECT count(*) FROM pgsub.subscription_rel WHERE handover_lsn IS NOT NULL") == 0


def test_a_long_transaction_that_waits_for_a_claim_is_not_read_again_and_again(
    pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    looks: list[ApplyPolicy] = []
    original, refused = SpooledTransaction.kept, ApplyPolicy.refused

    def kept(self: SpooledTransaction) -> Iterator[Segment]:
        read.append(self.size)
        return original(self)

    monkeypatch.setattr(SpooledTransaction, "kept", kept)
    monkeypatch.setattr(ApplyPolicy, "refused", lambda self: looks.append(self) or refused(self))
    monkeypatch.setattr(assembler, "MEMORY_LIMIT", 1000)
    p = pair(TABLES)
    p.apply("INSERT INTO other VALUES (1)")
    p.subdb.execute(
        "UPDATE pgsub.subscription_rel SET srsubstate = 'f', handover_lsn = (SELECT remote_lsn FROM pgsub.progress)"
        " WHERE relname = 'other'; UPDATE pgsub.progress SET states_version = states_version + 1"
    )
    task = p.start()
    p.pubdb.execute("INSERT INTO other SELECT generate_series(2, 501)")
    while not read:
        assert not task.done(), task.error
        time.sleep(0.02)
    while len(looks) < 3:
        p.until("SELECT pg_sleep(0.02) IS NOT NULL", task=task)
    p.subdb.execute(
        "UPDATE pgsub.subscription_rel SET srsubstate = 'r', handover_lsn = NULL;"
        "UPDATE pgsub.progress SET states_version = states_version + 1"
    )
    p.until("SELECT count(*) = 501 FROM other", task=task)
    p.stop(task)
    assert len(read) == 2  # to be looked at, and to be applied


def test_a_batch_that_waited_for_a_claim_still_goes_as_a_batch(pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    # each look at the claim ends in a ROLLBACK, after which psycopg deallocates what the pipeline had prepared
    serial: list[object] = []
    monkeypatch.setattr(committer.Committer, "_serially", lambda self, batch: serial.append(batch) or len(batch))
    p = pair(TABLES)
    p.pubdb.execute("INSERT INTO other VALUES (0)")
    task = p.start()
    for number in range(10):  # psycopg prepares what it has sent five times
        p.pubdb.execute(f"INSERT INTO t VALUES ({number}, 'x'); UPDATE t SET v = 'y' WHERE id = {number}")
        p.until("SELECT v = 'y' FROM t WHERE id = %s", number, task=task)
    p.subdb.execute(
        "UPDATE pgsub.subscription_rel SET srsubstate = 'f', handover_lsn = (SELECT remote_lsn FROM pgsub.progress)"
        " WHERE relname = 'other'; UPDATE pgsub.progress SET states_version = states_version + 1"
    )
    p.pubdb.execute("INSERT INTO other VALUES (1); INSERT INTO t VALUES (100, 'x'); UPDATE t SET v = 'y' WHERE id = 5")
    p.pubdb.execute("UPDATE t SET v = 'z' WHERE id = 100")
    p.until("SELECT pg_sleep(0.1) IS NOT NULL", task=task)
    assert p.subdb.value("SELECT count(*) FROM t") == 10
    p.subdb.execute(
        "UPDATE pgsub.subscription_rel SET srsubstate = 'r', handover_lsn = NULL;"
        "UPDATE pgsub.progress SET states_version = states_version + 1"
    )
    p.until("SELECT count(*) = 1 FROM t WHERE v = 'z'", task=task)
    p.stop(task)
    p.same("t", "other")
    assert serial == []


@pytest.mark.parametrize(("state", "taken"), [("i", False), ("d", False), ("f", False), ("s", True), ("r", True)])
def test_apply_takes_changes_in_s_and_r_only(pair: MakePair, state: str, taken: bool) -> None:
    p = pair(TABLES, state=state, names=T)
    p.apply("INSERT INTO t VALUES (1, 'x')")
    assert p.subdb.value("SELECT count(*) FROM t") == taken


@pytest.mark.parametrize("state", ["s", "r"])
def test_what_srsublsn_covers_is_left_out_and_what_it_does_not_cover_is_taken(pair: MakePair, state: str) -> None:
    p = pair(TABLES)
    p.pubdb.execute("INSERT INTO t VALUES (1, 'covered')")
    with closing(p.pubdb.connect()) as session:
        session.execute("BEGIN")
        session.execute("INSERT INTO t VALUES (2, 'at it')")
        finish = session.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()[0]
        session.execute("COMMIT")
    p.subdb.execute(
        f"UPDATE pgsub.subscription_rel SET srsubstate = '{state}', srsublsn = %s WHERE relname = 't'", finish
    )
    p.apply("INSERT INTO t VALUES (3, 'beyond')")
    assert p.subdb.rows("SELECT id FROM t ORDER BY id") == [(2,), (3,)]
    assert p.state("t") == "r"
    kept = p.subdb.value("SELECT srsublsn = %s::pg_lsn FROM pgsub.subscription_rel WHERE relname = 't'", finish)
    assert kept  # it stays


def test_a_table_in_s_becomes_ready_on_an_idle_publisher(pair: MakePair) -> None:
    p = pair(TABLES, state="s")
    p.subdb.execute("UPDATE pgsub.subscription_rel SET srsublsn = %s::pg_lsn", _text(_other_wal(p)))
    task = p.start()
    p.until("SELECT bool_and(srsubstate = 'r') FROM pgsub.subscription_rel", task=task)
    p.stop(task)
    assert p.progress()[0] == 0


def _text(position: int) -> str:
    return f"{position >> 32:X}/{position & 0xFFFFFFFF:X}"


def test_a_state_changed_behind_applys_back_counts_for_the_next_batch(pair: MakePair) -> None:
    p = pair(TABLES, names=T)
    task = p.start()
    p.pubdb.execute("INSERT INTO t VALUES (1, 'x')")
    p.until("SELECT count(*) = 1 FROM t", task=task)
    p.add("other")
    p.pubdb.execute("INSERT INTO other VALUES (1)")
    p.until("SELECT count(*) = 1 FROM other", task=task)
    p.stop(task)


def test_a_subscription_removed_from_the_ledger_ends_its_worker(pair: MakePair) -> None:
    p = pair(TABLES)
    task = p.start()
    p.pubdb.execute("INSERT INTO t VALUES (1, 'x')")
    p.until("SELECT count(*) = 1 FROM t", task=task)
    subscriptions.forget(p.session, p.subid)
    with pytest.raises(Fenced):
        task.result()


def test_apply_writes_only_where_clients_do_not(pair: MakePair) -> None:
    """By the journal of switchovers, of the subscription that ends and of the one that leads back."""
    p = pair(TABLES, names=T)
    p.subdb.execute(
        "INSERT INTO pgsub.switchover (id, side, subid, subname, back_name, phase, fence) VALUES"
        f" ('00000000-0000-0000-0000-000000000001', 'taking', {p.subid}, 's', 's_back', 'prepared', 'read-only')"
    )
    p.apply("INSERT INTO t VALUES (1, 'x')")
    for side, phase, said in (
        ("taking", "taken", "was switched over"),
        ("taking", "done", "was switched over"),
        ("giving", "fenced", "has not moved the writes"),
        ("giving", "released", "has not moved the writes"),
    ):
        p.subdb.execute(f"UPDATE pgsub.switchover SET side = '{side}', phase = '{phase}'")
        with pytest.raises(StateForbids, match=said):
            p.catch_up()
    p.subdb.execute("UPDATE pgsub.switchover SET phase = 'given'")
    p.apply("INSERT INTO t VALUES (2, 'x')")
    p.same("t")
