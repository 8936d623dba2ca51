"""What the launcher sees of the slot through sessions of its own, and what it says once it gets none any more."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from fix_failpoints import At, WithoutThreads
from fix_pair import MakePair, Pair
from fix_program import until
from fix_servers import Database

from pgsub.catalog.store import StateStore
from pgsub.common.errors import ApplyError, Log
from pgsub.launcher import recorder
from pgsub.launcher.error_handling import APPLY, SLOT, ErrorReporter, sync_name
from pgsub.launcher.heartbeat_receiver import HeartbeatReceiver
from pgsub.launcher.mirror import slot_watch
from pgsub.launcher.mirror.backlog import Backlog
from pgsub.launcher.mirror.mirror import Mirror
from pgsub.launcher.mirror.slot_watch import SlotWatch
from pgsub.launcher.recorder import Recorder
from pgsub.target.ledger import subscriptions


@contextmanager
def _closed_to_new_sessions(database: Database) -> Iterator[None]:
    """Let the sessions that are there live, and no further one in."""
    alter = f'ALTER DATABASE "{database.name}" ALLOW_CONNECTIONS'
    database.server.query(f"{alter} false")
    try:
        yield
    finally:
        database.server.query(f"{alter} true")


@contextmanager
def _watch(p: Pair, folder: Path, tell: Log) -> Iterator[tuple[StateStore, ErrorReporter, SlotWatch]]:
    with StateStore.open(folder) as store:
        store.add_subscription(p.sub)
        records = Recorder(store, tell)
        errors = ErrorReporter(store, p.sub, tell, records)
        known = subscriptions.identity(p.session, p.subid)
        backlog = Backlog(p.sub, records.current, known, must_use_password=False)
        watch = SlotWatch(p.sub, store, backlog, records.run, errors, tell)
        try:
            yield store, errors, watch
        finally:
            watch.close()


def test_a_slot_that_is_not_seen_any_more_is_an_error_with_the_reason_and_since_when(
    pair: MakePair, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its figures stood still without a word while the stream that apply reads lived on."""
    monkeypatch.setattr(slot_watch, "SECONDS", 0.05)
    monkeypatch.setattr(slot_watch, "SLOT_SECONDS", 0.5)
    p = pair("CREATE TABLE t (id int PRIMARY KEY)")
    log: list[str] = []

    def tell(level: str, text: str) -> None:
        log.append(f"{level}: {text.splitlines()[0]}")

    with _watch(p, state_dir, tell) as (store, errors, watch):

        def seen(condition: Callable[[], object]) -> None:
            def look() -> object:
                watch.tick()
                return condition()

            until(look)

        seen(lambda: store.slot(p.subid))
        with _closed_to_new_sessions(p.pubdb):
            seen(lambda: store.errors(p.subid))
            [row] = store.errors(p.subid)
            assert (row.worker, row.class_) == (SLOT, "PublisherUnavailable")
            assert "has not been seen since 20" in row.message and "not currently accepting connections" in row.message
            old = store.slot(p.subid)
        seen(lambda: not store.errors(p.subid))
        assert store.slot(p.subid) != old
        errors.report(APPLY, ApplyError("a conflict"))
        with _closed_to_new_sessions(p.pubdb):  # apply is started again and again, and meets the same
            seen(lambda: watch._failure is not None and time.monotonic() - watch._unseen_since[0] > 1)
            assert [row.worker for row in store.errors(p.subid)] == [APPLY]
    slot = [text for text in log if "slot" in text]
    assert len(slot) == 2 and slot[0].startswith(f'ERROR: replication slot "{p.sub.slot_name}" has not been seen since')
    assert slot[1] == f'LOG: the publisher says again where the slot of "{p.sub.name}" is'


def test_a_slot_is_watched_while_the_state_store_hangs(
    pair: MakePair, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch waited for a disk, and after a minute the publisher was said not to answer."""
    monkeypatch.setattr(slot_watch, "SECONDS", 0.05)
    monkeypatch.setattr(recorder, "PATIENCE", 0.1)
    p = pair("CREATE TABLE t (id int PRIMARY KEY)")
    with _watch(p, state_dir, lambda level, text: None) as (store, _, watch):

        def seen_after(moment: object) -> object:
            watch.tick()
            return watch._seen and watch._unseen_since != moment

        until(lambda: seen_after(None))
        with store._database._lock:  # as the thread has it that waits for the disk
            for _ in range(2):
                before = watch._unseen_since
                until(lambda before=before: seen_after(before))


def test_a_watch_that_gets_no_thread_ends_nothing_and_is_an_error_as_long_as_it_lasts(
    pair: MakePair, state_dir: Path, monkeypatch: pytest.MonkeyPatch, without_threads: WithoutThreads
) -> None:
    """The launcher stopped all workers of the subscription, and began them anew again and again."""
    monkeypatch.setattr(slot_watch, "SECONDS", 0.05)
    monkeypatch.setattr(slot_watch, "SLOT_SECONDS", 0.5)
    p = pair("CREATE TABLE t (id int PRIMARY KEY)")
    with _watch(p, state_dir, lambda level, text: None) as (store, _, watch):

        def ticked(condition: Callable[[], object]) -> object:
            watch.tick()
            return condition()

        with without_threads("slot_watch"):
            until(lambda: ticked(lambda: store.errors(p.subid)))
            [row] = store.errors(p.subid)
            assert row.worker == SLOT and ": could not start a thread: too many processes" in row.message
            assert row.hint is not None and "ulimit -u" in row.hint
            watch.close()
        until(lambda: ticked(lambda: store.slot(p.subid) and not store.errors(p.subid)))


def test_a_slot_that_synchronizes_no_table_is_told_once(
    pair: MakePair, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_watch, "SECONDS", 0.05)
    p = pair("CREATE TABLE t (id int PRIMARY KEY)", state="f")
    log: list[str] = []
    named, unnamed, late = (f"pgsub_{p.subid}_sync_{what}_7" for what in ("g1", "g2", "g3"))
    p.session.execute("UPDATE pgsub.subscription_rel SET sync_slot = %s", (named,))
    for name in (named, unnamed):
        p.pubdb.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", name)
    with _watch(p, state_dir, lambda level, text: log.append(f"{level}: {text}")) as (_, _, watch):

        def told(name: str) -> bool:
            watch.tick(subscriptions.relations(p.session, p.subid))
            return any(f'replication slot "{name}"' in text for text in log)

        until(lambda: told(unnamed))
        p.pubdb.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", late)
        until(lambda: told(late))
    first, second = log
    assert first.startswith(f'WARNING: replication slot "{unnamed}" on the publisher synchronizes no table of')
    assert f"SELECT pg_drop_replication_slot('{unnamed}');" in first and late in second


def test_the_lost_slot_of_a_table_is_told_before_its_worker_needs_it_and_until_it_has_another(
    pair: MakePair, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_watch, "SECONDS", 0.05)
    p = pair("CREATE TABLE t (id int PRIMARY KEY)", state="f")
    slot, worker, log = f"pgsub_{p.subid}_sync_g1_7", sync_name(p.relid("t")), []
    p.session.execute("UPDATE pgsub.subscription_rel SET sync_slot = %s", (slot,))
    p.pubdb.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", slot)
    with _watch(p, state_dir, lambda level, text: log.append(text)) as (store, _, watch):

        def looked() -> int:
            """Number of reads that were handled."""
            watch.tick(subscriptions.relations(p.session, p.subid))
            return watch._table_slots.looks

        def told() -> list[str]:
            looks = looked()
            until(lambda: looked() > looks + 2)
            return [row.message for row in store.errors(p.subid) if (row.worker, row.class_) == (worker, "SlotLost")]

        assert told() == []
        p.pubdb.execute("SELECT pg_drop_replication_slot(%s)", slot)
        message = f'replication slot "{slot}" of table "public.t" does not exist'
        assert (told(), told()) == ([message], [message])
        assert [text.splitlines()[0] for text in log] == [message]  # once, as long as it is the same slot
        assert "--resync public.t --adopt" in log[0]
        p.session.execute("UPDATE pgsub.subscription_rel SET srsubstate = 'd'")  # it may be about to be made
        p.pubdb.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", slot)
        assert told() == []


def test_a_publisher_cannot_fill_the_log_with_names_of_slots(
    pair: MakePair, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_watch, "_MOST_WARNED", 2)
    monkeypatch.setattr(slot_watch, "SECONDS", 0.05)
    p = pair("CREATE TABLE t (id int PRIMARY KEY)")
    log: list[str] = []
    for number in range(3):
        p.pubdb.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", f"pgsub_{p.subid}_sync_{number}_7")
    with _watch(p, state_dir, lambda level, text: log.append(text)) as (_, _, watch):
        until(lambda: watch.tick() or log)  # all that two reads have seen are told at once
        assert len(watch._unnamed) == 3 and len(log) == 2


@pytest.mark.long
@pytest.mark.parametrize("names", ["a", "ab"], ids=["alone", "together"])
def test_a_table_whose_copy_waits_for_a_lock_of_the_publisher_is_shown_with_the_holder(
    pair: MakePair, state_dir: Path, monkeypatch: pytest.MonkeyPatch, at: At, tmp_path: Path, names: str
) -> None:
    monkeypatch.setattr(slot_watch, "SECONDS", 0.05)
    p = pair("CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY)", state="i")
    relids, gate = {p.relid(name) for name in names}, tmp_path / "gate"
    at(f"sync.after_slot=pause:{gate}")
    with (
        closing(HeartbeatReceiver()) as heartbeats,
        _watch(p, state_dir, lambda level, text: None) as (store, _, watch),
        closing(p.pubdb.connect(application_name="psql")) as holder,
    ):
        mirror = Mirror(p.session, store, p.sub, heartbeats)
        task = p.submit("sync", lambda _: p.sync(*names), [None])
        p.until("SELECT count(*) FROM pgsub.progress WHERE worker <> 0", value=len(names), task=task)
        holder.execute("BEGIN; LOCK TABLE a")  # before, the creation of the slot would have waited for it
        gate.touch()

        def look() -> list[str]:
            watch.tick()
            mirror.refresh(apply_alive=True, syncing=relids, publisher_waits=watch.publisher_waits)
            assert task.error is None, task.error
            return [row.waits_for for row in store.workers(p.subid) if row.waits_for is not None]

        found = until(look)
        pid = holder.info.backend_pid
        wanted = f"a lock of the publisher that PID {pid} holds on table public.a (postgres, psql, idle"
        assert len(found) == len(names) and all(text.startswith(wanted) for text in found), found
        holder.execute("ROLLBACK")
        task.result()
