"""pgsub wait: returns, fails and gives up at the right moments."""

import contextlib
import itertools
import os
import sqlite3
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import patience
import pytest
from fix_program import one_error, until

from pgsub.catalog.locks import launcher_lock, subscription_lock
from pgsub.catalog.rows import ErrorRow, HeldRow, RelationRow, WorkerRow
from pgsub.catalog.store import StateStore
from pgsub.catalog.times import ago
from pgsub.commands.status.wait import WaitOptions, wait
from pgsub.common.errors import (
    ApplyError,
    PublisherUnavailable,
    SchemaFault,
    SlotLost,
    SubscriptionNotFound,
    TimeoutExpired,
)
from pgsub.protocol.lsn import parse_lsn
from pgsub.target.session import connect as target

READY = [RelationRow(100, "r", 0x16, "public", "a"), RelationRow(101, "r", 0x16, "public", "b")]


def _until(folder, condition, lsn=None, timeout=0.3):
    wait(WaitOptions("orders", folder, condition, lsn, timeout))


def _fails(store, cls=ApplyError, worker="apply"):
    store.record_error(5, ErrorRow.of(cls("it failed"), worker))


@pytest.fixture
def soon():
    """Do something while the test waits."""
    threads = []

    def later(action):
        thread = threading.Timer(0.4, action)
        threads.append(thread)
        thread.start()

    yield later
    for thread in threads:
        thread.join()


def test_synced_returns_when_the_last_table_is_ready(store, folder, soon):
    soon(lambda: store.put_relations(5, READY))
    _until(folder, "synced", timeout=30)


def test_a_wait_that_is_given_up_by_another_thread_ends(store, folder, soon):
    given_up = threading.Event()
    soon(given_up.set)
    wait(WaitOptions("orders", folder, "synced"), given_up)


def test_synced_names_the_tables_that_are_not(store, folder):
    with pytest.raises(TimeoutExpired) as caught:
        _until(folder, "synced")
    assert '"public.b" (d)' in caught.value.detail and "public.a" not in caught.value.detail
    assert "No pgsub run serves the subscription." in caught.value.detail
    assert caught.value.hint.splitlines()[-1] == "pgsub status orders"


def test_a_timeout_names_what_is_waited_for_be_it_a_lock_or_a_launcher_that_stands_still(store, folder, served):
    lock = "a lock that PID 7 holds on table public.b"
    store.put_workers(5, [WorkerRow("table synchronization", None, relid=101, silent_since=ago(9), waits_for=lock)])
    with pytest.raises(TimeoutExpired) as caught:
        _until(folder, "synced")
    assert f"It waits for {lock} (public.b)." in caught.value.detail
    os.utime(served.path, (1000, 1000))
    with pytest.raises(TimeoutExpired) as caught:
        _until(folder, "synced")
    assert f"It waits for an answer of the target, or of pgsub run (PID {os.getpid()})." in caught.value.detail


def test_synced_names_ten_tables_and_counts_the_rest(store, folder):
    store.put_relations(5, [RelationRow(number, "i", None, "public", f"t{number}") for number in range(100, 130)])
    with pytest.raises(TimeoutExpired, match="timeout") as caught:
        _until(folder, "synced")
    assert "and 20 more" in caught.value.detail


def test_a_table_that_joins_later_does_not_move_the_goal(store, folder, soon):
    soon(lambda: store.put_relations(5, [*READY, RelationRow(102, "i", None, "public", "c")]))
    _until(folder, "synced", timeout=30)


@pytest.mark.parametrize("how", ["origin", "reported"])
def test_lsn_is_reached_by_what_the_ledger_says_and_not_by_a_heartbeat(store, folder, how):
    heard = WorkerRow("apply", 1, received_lsn=0x30, latest_end_lsn=0x30)
    store.put_workers(5, [heard, WorkerRow("table synchronization", 2, relid=101)])
    with pytest.raises(TimeoutExpired, match="lsn=0/20"):
        _until(folder, "lsn", 0x20)
    if how == "origin":
        store.put_origin(5, 0x20, None)
    else:
        store.put_origin(5, 0x10, None, 0x20)  # WAL without a transaction
    _until(folder, "lsn", 0x20)


def test_disabled_waits_for_the_workers_that_a_living_launcher_still_has(store, folder, served, soon):
    store.put_workers(5, [WorkerRow("apply", os.getpid())])
    with pytest.raises(TimeoutExpired):
        _until(folder, "disabled")
    store.alter(5, enabled=False)
    with pytest.raises(TimeoutExpired, match="disabled"):
        _until(folder, "disabled")
    soon(lambda: store.put_workers(5, []))
    _until(folder, "disabled", timeout=30)


def test_error_returns_when_one_is_recorded(store, folder, soon):
    with pytest.raises(TimeoutExpired):
        _until(folder, "error")
    soon(lambda: _fails(store))
    _until(folder, "error", timeout=30)


@pytest.mark.parametrize("cls", [ApplyError, SlotLost])
def test_an_error_meanwhile_ends_the_wait_with_it(store, folder, served, soon, cls):
    soon(lambda: _fails(store, cls))
    with pytest.raises(cls, match="it failed"):
        _until(folder, "synced", timeout=30)


def test_an_error_of_a_table_concerns_who_waits_for_tables_only(store, folder, served):
    _fails(store, worker="table synchronization 101")
    with pytest.raises(ApplyError):
        _until(folder, "synced")
    with pytest.raises(TimeoutExpired):
        _until(folder, "lsn", 0x20)


def test_an_error_from_before_is_given_the_time_of_a_retry(store, folder, served, soon):
    _fails(store)

    def mended():
        store.put_relations(5, READY)
        store.clear_error(5, "apply")

    soon(mended)
    _until(folder, "synced", timeout=30)


def test_an_attempt_that_may_have_begun_before_the_wait_does_not_end_it(store, folder, served, soon):
    _fails(store)

    def fails_once_more():
        _fails(store)
        soon(lambda: (store.put_relations(5, READY), store.clear_error(5, "apply")))

    soon(fails_once_more)
    _until(folder, "synced", timeout=30)


def test_two_further_attempts_with_the_error_from_before_end_the_wait(store, folder, served, soon):
    _fails(store)
    soon(lambda: (_fails(store), _fails(store)))
    with pytest.raises(ApplyError, match="it failed"):
        _until(folder, "synced", timeout=1000)


@pytest.mark.long
def test_an_error_from_before_that_nobody_retries_ends_the_wait(store, folder):
    _fails(store)
    with pytest.raises(ApplyError):
        _until(folder, "synced", timeout=1000)


def test_an_error_from_before_does_not_end_the_wait_before_who_retries_it_has_begun(store, folder, soon):
    _fails(store)
    lock = subscription_lock(folder, 5)

    def begun():
        assert lock.acquire()
        store.put_server(5, os.getpid(), "here")
        soon(lambda: (store.put_relations(5, READY), store.clear_error(5, "apply")))

    soon(begun)
    _until(folder, "synced", timeout=30)
    lock.release()


def test_an_attempt_that_takes_long_is_waited_for(store, folder, served, soon, monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: 1000 * time.monotonic(), sleep=time.sleep)
    monkeypatch.setattr(sys.modules[WaitOptions.__module__], "time", clock)
    _fails(store)
    soon(lambda: (store.put_relations(5, READY), store.clear_error(5, "apply")))
    _until(folder, "synced", timeout=30_000)


def test_a_launcher_without_a_word_in_the_store_is_not_denied(store, folder):
    lock = launcher_lock(folder)
    assert lock.acquire()
    with pytest.raises(TimeoutExpired) as caught:
        _until(folder, "synced")
    assert "No pgsub run" not in caught.value.detail
    lock.release()


def test_an_error_that_a_retry_mends_is_waited_out(store, folder, served):
    _fails(store, PublisherUnavailable)
    with pytest.raises(TimeoutExpired) as caught:
        _until(folder, "synced")
    assert "it failed" in caught.value.detail


def test_who_waits_for_disabled_sees_disable_on_error_and_not_the_error(store, folder, served, soon):
    store.alter(5, disable_on_error=True)
    _fails(store)
    soon(lambda: store.alter(5, enabled=False))
    _until(folder, "disabled", timeout=30)


def test_a_recorded_error_keeps_its_place(store, folder):
    error = ApplyError("it failed", sqlstate="23505", detail="Key.", context="there")
    error.relation, error.finish_lsn, error.xid, error.conflict = "public.a", "0/16", 7, "insert_exists"
    store.record_error(5, ErrorRow.of(error, "apply"))
    with pytest.raises(ApplyError) as caught:
        _until(folder, "synced")
    found = caught.value
    assert (found.relation, found.finish_lsn, found.xid, found.conflict) == ("public.a", "0/16", 7, "insert_exists")
    assert (found.sqlstate, found.detail, found.context) == ("23505", "Key.", "there")


@pytest.mark.parametrize("looks", [1, 2, 3])
@pytest.mark.parametrize("condition", ["synced", "error", "disabled"])
def test_a_subscription_that_is_dropped_meanwhile_ends_the_wait(store, folder, monkeypatch, condition, looks):
    own, left = StateStore.subscription, itertools.count(looks - 1, -1)

    def looked_up_and_dropped(self, name):
        found = own(self, name)
        if self is not store and next(left) == 0:
            store.remove_subscription(5)
        return found

    monkeypatch.setattr(StateStore, "subscription", looked_up_and_dropped)
    with pytest.raises(SubscriptionNotFound, match='subscription "orders" does not exist'):
        _until(folder, condition, timeout=30)


@pytest.mark.parametrize("condition", ["synced", "lsn=0/20", "error"])
def test_a_disabled_subscription_is_not_waited_for(pgsub, store, served, condition):
    store.alter(5, enabled=False)
    ended = pgsub("wait", "orders", "--for", condition)
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (3, "pgsub enable orders")
    assert pgsub("wait", "orders", "--for", condition, "--even-if-stopped", "--timeout", "100ms").returncode == 8


@pytest.mark.long
def test_a_subscription_that_nothing_serves_is_not_waited_for(pgsub, store, folder):
    ended = pgsub("wait", "orders", "--for", "synced")
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (3, "pgsub run orders")
    assert '"public.b" (d)' in ended.stderr
    assert pgsub("wait", "orders", "--for", "disabled", "--timeout", "100ms").returncode == 8


@pytest.mark.long
def test_exit_codes_are_8_for_a_timeout_and_6_for_a_conflict(pgsub, store):
    assert pgsub("wait", "orders", "--for", "synced", "--timeout", "100ms").returncode == 8
    _fails(store)
    ended = pgsub("wait", "orders", "--for", "lsn=0/20")
    assert (ended.returncode, ended.stderr) == (6, "pgsub: error: it failed\n")


@pytest.mark.long
def test_caught_up_asks_the_publisher_once_and_waits_for_that_position(environment, pubdb, store, folder, soon):
    pubdb.execute("CREATE PUBLICATION pub; CREATE PUBLICATION other")
    store.alter(5, connection=pubdb.conninfo)
    store.put_relations(5, READY)
    command = [sys.executable, "-m", "pgsub", "wait", "orders", "--for", "caught-up", "--even-if-stopped"]
    behind = subprocess.run([*command, "--timeout", "200ms"], env=environment, capture_output=True, text=True)
    assert behind.returncode == 8
    awaited = behind.stderr.partition("awaited is ")[2].partition(".")[0]
    assert parse_lsn(awaited) > 0
    waiting = subprocess.Popen([*command, "--timeout", "1m"], env=environment)
    now = parse_lsn(pubdb.value("SELECT pg_current_wal_flush_lsn()"))
    store.put_origin(5, now + (1 << 30), None)
    assert waiting.wait(patience.SECONDS) == 0


def test_caught_up_with_a_publisher_that_is_away_is_code_4(pgsub, store):
    store.alter(5, connection="host=127.0.0.1 port=1 dbname=x")
    assert pgsub("wait", "orders", "--for", "caught-up").returncode == 4
    store.alter(5, enabled=False)
    ended = pgsub("wait", "orders", "--for", "caught-up")
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (3, "pgsub enable orders")
    assert "The publisher cannot be reached." in ended.stderr
    assert pgsub("wait", "orders", "--for", "caught-up", "--even-if-stopped").returncode == 4


@pytest.fixture
def reached(store, pubdb):
    """Subscription 5 is synchronized, and beyond every position that its publisher will have."""
    pubdb.execute("CREATE PUBLICATION pub; CREATE PUBLICATION other")
    store.alter(5, connection=pubdb.conninfo)
    store.put_relations(5, READY)
    store.put_origin(5, parse_lsn("FF/0"), None)


def test_a_subscription_with_a_held_table_is_not_caught_up_before_it_is_released(pgsub, store, served, reached):
    words = ("wait", "orders", "--timeout", "100ms", "--for")
    assert pgsub(*words, "caught-up").returncode == 0
    held = HeldRow(101, "public", "b", "2026-01-01T00:00:00Z", releasing=False, kept_changes=0, kept_bytes=0)
    store.put_held(5, [held])
    ended = pgsub(*words, "caught-up")
    assert ended.returncode == 3 and 'table "public.b" of subscription "orders" is held' in ended.stderr
    assert ended.stderr.splitlines()[-1] == "pgsub alter orders --release public.b"
    ended = pgsub(*words, "caught-up", "--even-if-stopped")
    assert ended.returncode == 8 and '1 table held: "public.b".' in ended.stderr
    assert pgsub(*words, "synced").returncode == pgsub(*words, "lsn=FE/0").returncode == 0
    store.put_held(5, [replace(held, releasing=True)])
    assert pgsub(*words, "caught-up").returncode == 0


def test_a_subscription_whose_sequences_do_not_follow_is_not_caught_up(pgsub, store, served, reached, soon):
    words = ("wait", "orders", "--for", "caught-up", "--timeout")
    _fails(store, SchemaFault, "sequence synchronization")
    assert pgsub(*words, "100ms").returncode == 0  # no sequence is to follow
    store.alter(5, sequences=True)
    ended = pgsub(*words, "100ms")
    assert (ended.returncode, ended.stderr) == (6, "pgsub: error: it failed\n")
    assert pgsub("wait", "orders", "--for", "lsn=FE/0").returncode == 0
    _fails(store, PublisherUnavailable, "sequence synchronization")  # what passes by itself is waited for
    ended = pgsub(*words, "100ms")
    assert ended.returncode == 8 and "Sequences do not follow: it failed." in ended.stderr
    soon(lambda: store.clear_error(5, "sequence synchronization"))
    assert pgsub(*words, "1m").returncode == 0


def _in_store(cli, statement, *params):
    with contextlib.closing(sqlite3.connect(cli.state / "state.db")) as store, store:
        store.execute(statement, params)


def _stands_at(cli, subdb, lsn):
    """Set the subscription's position, in the ledger and in the state store."""
    positions = f"SET remote_lsn = '{lsn}', reported_lsn = '{lsn}'"
    subdb.execute(f"UPDATE pgsub.progress {positions}")
    _in_store(cli, f"UPDATE pgsub_origin {positions}")


def _stands_at_the_end(cli, tables):
    """Set it to the end of the publisher's WAL, which may be farther a moment later: autovacuum writes, too."""
    pubdb, subdb = tables
    (lsn,) = pubdb.rows("SELECT pg_current_wal_flush_lsn()::text")[0]
    _stands_at(cli, subdb, lsn)
    return lsn


@pytest.mark.long
@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ("another server", "is a different database system"),
        ("one that went back in time", "is behind the subscription"),
    ],
)
def test_what_is_no_publisher_of_the_subscription_any_more_is_not_called_caught_up_with(cli, tables, answers, said):
    _, subdb = tables
    assert cli.create("s").returncode == 0
    words = ("wait", "s", "--for", "caught-up", "--even-if-stopped", "--timeout", "1s")
    until(lambda: _stands_at_the_end(cli, tables) and cli(*words).returncode == 0)
    _stands_at(cli, subdb, "FF/0")  # both servers are behind that
    if answers == "another server":
        _in_store(cli, "UPDATE pg_subscription SET subconninfo = ?", subdb.conninfo)
    one_error(cli(*words), 7, said)


@pytest.mark.long
def test_caught_up_is_found_out_in_one_session_of_the_target(cli, tables, monkeypatch):
    assert cli.create("s").returncode == 0
    opened, connect = [], target.connect
    monkeypatch.setattr(target, "connect", lambda *given, **more: opened.append(given) or connect(*given, **more))

    def caught_up() -> bool:
        _stands_at_the_end(cli, tables)
        opened.clear()
        with contextlib.suppress(TimeoutExpired):  # the publisher writes WAL by itself, too
            wait(WaitOptions("s", cli.state, "caught-up", timeout=0))
            return True
        return False

    until(caught_up)
    assert len(opened) == 1


@pytest.mark.long
def test_what_a_restored_target_has_lost_is_not_reported_as_reached(cli, tables):
    _, subdb = tables
    assert cli.create("s").returncode == 0
    words = ("wait", "s", "--even-if-stopped", "--timeout", "100ms", "--for")

    def all_reached():
        named = ("synced", f"lsn={_stands_at_the_end(cli, tables)}", "caught-up")
        return [cli(*words, one).returncode for one in named] == [0, 0, 0]

    until(all_reached)
    lsn = _stands_at_the_end(cli, tables)
    _stands_at(cli, subdb, "FFFF/0")  # the state store's stays so, whatever the publisher writes meanwhile
    subdb.execute("UPDATE pgsub.progress SET remote_lsn = '0/10', reported_lsn = '0/20'")
    for one in (f"lsn={lsn}", "caught-up"):
        one_error(cli(*words, one), 8, "ledger is at 0/20", "may have been restored")
    one_error(cli("wait", "s", "--for", f"lsn={lsn}"), 3, "is not served", "ledger is at 0/20")
    subdb.execute("UPDATE pgsub.subscription_rel SET srsubstate = 'd' WHERE relname = 'a'")
    one_error(cli(*words, "synced"), 8, 'not show as synchronized: "public.a"', "may have been restored")
