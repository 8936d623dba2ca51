"""pgsub status: documents, tables, views, and the verdict for monitoring."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pexpect
import pytest
from terminal import terminal

from pgsub.catalog.rows import CopyRow, ErrorRow, PreparedRow, SlotRow, TaskRow, WorkerRow
from pgsub.catalog.times import ago, utc_now
from pgsub.cli.output.live import sparkline
from pgsub.commands.status.status import PUBLISHER_VIEWS
from pgsub.common.errors import ApplyError, PublisherUnavailable, SlotLost, SparkUnusable, TargetUnavailable, WorkerDied


def _fail(store, cls=ApplyError, worker="apply"):
    error = cls('duplicate key value violates unique constraint "a_pkey"', detail="Key (id)=(7).", sqlstate="23505")
    if isinstance(error, ApplyError):
        error.relation, error.finish_lsn, error.xid, error.conflict = "public.a", "0/16", 733, "insert_exists"
    store.record_error(5, ErrorRow.of(error, worker))


def _apply_worker(received, reported, seconds_ago=0.0):
    then = (datetime.now(UTC) - timedelta(seconds=seconds_ago)).replace(tzinfo=None).isoformat() + "Z"
    return WorkerRow("apply", 4711, None, None, received, then, then, reported, then)


@pytest.fixture
def orders(pgsub, valid):
    """The subscription object of "orders"."""
    return lambda: valid("status", pgsub("status", "orders", "--json").stdout)["subscriptions"][0]


def test_a_subscription_object_has_the_columns_of_pg_subscription_and_its_parts(store, folder, orders, served):
    store.put_workers(5, [_apply_worker(0x20, 0x10)])
    store.put_origin(5, 0x10, None)
    store.put_slot(5, SlotRow("orders", active=True, wal_status="reserved", restart_lsn=1, taken_at=utc_now()))
    _fail(store)
    found = orders()
    with sqlite3.connect(folder / "state.db") as connection:
        columns = [row[1] for row in connection.execute("PRAGMA table_info(pg_subscription)")]
    parts = [
        "relations",
        "origin",
        "workers",
        "stats",
        "slot",
        "prepared",
        "held",
        "skipped",
        "copies",
        "state",
        "last_error",
        "blocked",
        "waits",
        "table_waits",
        "applying",
        "task",
        "sequences",
    ]
    assert list(found) == columns + parts
    assert found["subenabled"] is True and found["subpublications"] == ["pub", "other"] and found["subskiplsn"] == "0/0"
    assert [(row["relname"], row["srsubstate"], row["srsublsn"]) for row in found["relations"]] == [
        ("a", "r", "0/16"),
        ("b", "d", None),
    ]
    assert found["origin"]["remote_lsn"] == "0/10"
    assert [(row["worker_type"], row["received_lsn"]) for row in found["workers"]] == [("apply", "0/20")]
    assert found["slot"]["active"] is True and "subid" not in found["slot"]
    assert found["stats"]["stats_reset"] is None
    assert {
        key: found["last_error"][key] for key in ("class", "sqlstate", "relation", "conflict", "finish_lsn", "xid")
    } == {
        "class": "ApplyError",
        "sqlstate": "23505",
        "relation": "public.a",
        "conflict": "insert_exists",
        "finish_lsn": "0/16",
        "xid": 733,
    }


@pytest.mark.long
def test_a_running_copy_is_shown_with_totals_rate_and_time_left(store, orders, pgsub):
    then = utc_now()
    store.put_copy_progress(
        5,
        [
            CopyRow(
                *(101, "public", "b", 4711, 1, "db"),
                bytes_processed=30 << 20,
                bytes_total=120 << 20,
                tuples_processed=1000,
                tuples_total=4000,
                chunks_done=1,
                chunks_total=4,
                started_at=then,
                bytes_per_second=1 << 20,
            )
        ],
    )
    (copy,) = orders()["copies"]
    assert (copy["relname"], copy["bytes_processed"], copy["tuples_total"]) == ("b", 30 << 20, 4000)
    assert (copy["started_at"], copy["bytes_per_second"], copy["seconds_left"]) == (then, 1 << 20, 90)
    shown = pgsub("status", "orders").stdout.splitlines()[-2:]
    assert [line.split("\t") for line in shown] == [
        ["table", "done", "bytes", "rows", "chunks", "rate", "left"],
        ["public.b", "25%", "30 MB of 120 MB", "1000 of 4000", "1 of 4", "1024 kB/s", "1 min 30 s"],
    ]
    view = valid_rows(pgsub("status", "orders", "--view", "pg_stat_progress_copy", "--json"))
    assert [row["bytes_per_second"] for row in view] == [1 << 20]
    store.put_copy_progress(5, [CopyRow(101, "public", "b", bytes_per_second=0)])
    (copy,) = orders()["copies"]
    assert copy["seconds_left"] is None
    assert pgsub("status", "orders").stdout.splitlines()[-1].split("\t") == [
        *("public.b", "", "0 bytes", "0", "0 of 0", "0 bytes/s", "")
    ]


@pytest.mark.long
def test_what_is_prepared_is_counted_and_named(store, orders, pgsub):
    def shown():
        head, line = (row.split("\t") for row in pgsub("status", "orders").stdout.splitlines()[:2])
        return line[head.index("prepared")]

    assert (orders()["prepared"], shown()) == ([], "")
    store.alter(5, two_phase="p")
    assert (orders()["subtwophasestate"], shown()) == ("p", "two_phase is pending")
    store.alter(5, two_phase="e")
    assert shown() == "0"
    late = PreparedRow("pgsub_5_8_20", 8, 0x20, "2024-02-29T10:00:00.500000Z")
    early = PreparedRow("pgsub_5_9_10", 4000000000, 0x10, "2024-02-29T09:00:00.000000Z")
    store.put_prepared(5, [late, early])
    assert orders()["prepared"] == [
        dict(zip(("gid", "xid", "prepare_lsn", "prepared_at"), row, strict=True))
        for row in (
            ("pgsub_5_9_10", 4000000000, "0/10", early.prepared_at),
            ("pgsub_5_8_20", 8, "0/20", late.prepared_at),
        )
    ]
    assert shown() == "2"
    assert "prepared     | 2\n" in pgsub("status", "orders", "-x").stdout
    view = valid_rows(pgsub("status", "orders", "--view", "pgsub_prepared_pending", "--json"))
    assert [row["gid"] for row in view] == ["pgsub_5_8_20", "pgsub_5_9_10"]


def valid_rows(ended):
    """The rows of a view's document."""
    return json.loads(ended.stdout)["rows"]


def test_without_workers_slot_and_errors_the_document_is_valid_too(store, orders):
    found = orders()
    assert (found["workers"], found["slot"], found["origin"], found["last_error"]) == ([], None, None, None)


def test_the_state_is_stopped_until_a_living_launcher_serves_it(store, orders):
    assert orders()["state"] == "stopped"
    store.put_server(5, 1, "here")
    assert orders()["state"] == "stopped"


def test_the_state_is_running_while_the_one_who_serves_holds_the_lock(store, orders, served):
    assert orders()["state"] == "running"


@pytest.mark.long
def test_an_error_of_apply_is_the_state_and_one_of_a_table_is_not(store, orders, served):
    _fail(store, worker="table synchronization 101")
    assert (orders()["state"], orders()["last_error"]["attempts"]) == ("running", 1)
    _fail(store)
    assert orders()["state"] == "error"
    store.alter(5, enabled=False)
    assert orders()["state"] == "disabled"


def test_all_subscriptions_come_by_name_and_an_empty_store_is_an_empty_list(pgsub, store, valid, tmp_path):
    found = valid("status", pgsub("status", "--json").stdout)["subscriptions"]
    assert [one["subname"] for one in found] == ["bills", "orders"]
    assert valid("status", pgsub("status", "--json", "--state-dir", str(tmp_path / "n")).stdout)["subscriptions"] == []


def test_off_a_terminal_the_table_is_tab_separated_and_complete(pgsub, store):
    _fail(store)
    head, bills, orders = pgsub("status").stdout.splitlines()
    assert head.split("\t")[:3] == ["subscription", "state", "tables"]
    assert bills.split("\t")[:3] == ["bills", "disabled", "none"]
    assert orders.split("\t")[:3] == ["orders", "error", "1 d, 1 r"]
    assert orders.endswith('duplicate key value violates unique constraint "a_pkey"')


def test_on_a_terminal_the_table_is_aligned_as_psql_does_it(environment, store):
    lines = terminal(["-m", "pgsub", "status"], environment, 200).read().splitlines()
    assert lines[1].startswith("-----") and "-+-" in lines[1]
    assert lines[2].startswith(" bills        | disabled ")
    assert lines[lines.index("(2 rows)") + 1 :][-1] == "pgsub run orders"


def test_expanded_has_a_line_for_each_column(pgsub, store):
    lines = pgsub("status", "orders", "-x").stdout.splitlines()
    assert lines[0].startswith("-[ RECORD 1 ]---")
    assert "subscription | orders" in lines and "state        | stopped" in lines


def test_one_subscription_shows_its_tables(pgsub, store):
    assert "public\ta\tr\t0/16" in pgsub("status", "orders").stdout.splitlines()


def test_a_value_with_line_breaks_stays_in_its_line(pgsub, store):
    store.record_error(5, ErrorRow("apply", "ApplyError", "first\nsecond\tthird\x1b[31m"))
    assert pgsub("status").stdout.splitlines()[2].endswith("first\\nsecond\\tthird\\x1b[31m")


@pytest.mark.parametrize(
    "view", ["pg_subscription_rel", "pg_stat_subscription", "pgsub_journal", "pg_stat_progress_copy"]
)
def test_a_view_is_printed_with_its_columns(pgsub, store, folder, view):
    with sqlite3.connect(folder / "state.db") as connection:
        columns = [column[0] for column in connection.execute(f"SELECT * FROM {view}").description]
    assert pgsub("status", "--view", view).stdout.splitlines()[0].split("\t") == columns


def test_a_view_can_be_limited_to_a_subscription_and_be_a_document(pgsub, store, valid):
    document = valid("status", pgsub("status", "orders", "--view", "pg_subscription_rel", "--json").stdout)
    assert [row["relname"] for row in document["rows"]] == ["a", "b"]
    assert valid("status", pgsub("status", "bills", "--view", "pg_subscription_rel", "--json").stdout)["rows"] == []


@pytest.mark.long
@pytest.mark.parametrize("args", [["--watch", "0.1"], ["--watch=100ms"], ["--watch", "orders"]])
def test_watch_prints_one_document_a_line_until_it_is_interrupted(environment, store, valid, args):
    command = [sys.executable, "-m", "pgsub", "status", "--json", *args]
    watching = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for _ in range(2 if "orders" not in args else 1):
        valid("status", watching.stdout.readline())
    watching.send_signal(signal.SIGINT)
    assert watching.communicate()[1] == ""
    assert watching.returncode == 0


def test_reset_stats_starts_the_counters_again_and_is_in_the_journal(pgsub, store, orders):
    store.add_stats(5, apply_error_count=3)
    assert orders()["stats"]["apply_error_count"] == 3
    assert pgsub("status", "orders", "--reset-stats").returncode == 0
    stats = orders()["stats"]
    assert stats["apply_error_count"] == 0 and stats["stats_reset"] is not None
    assert [row.action for row in store.journal_rows(5)] == ["reset-stats"]


def test_check_of_a_healthy_subscription_is_0(pgsub, store, served):
    store.put_workers(5, [_apply_worker(0x20, 0x20, seconds_ago=600)])
    ended = pgsub("status", "orders", "--check", "--max-lag", "1s")
    assert (ended.returncode, ended.stderr) == (0, "")


def test_check_of_a_subscription_that_nobody_serves_is_3(pgsub, store):
    ended = pgsub("status", "orders", "--check")
    assert ended.returncode == 3
    warning, *hint = ended.stderr.splitlines()
    assert warning == 'pgsub: warning: subscription "orders" is not served by any pgsub run'
    assert hint == ["HINT:  The next command is:", "pgsub run orders"]


def test_status_of_a_subscription_that_nobody_serves_ends_with_the_next_command(pgsub, store):
    assert "next | pgsub run orders\n" in pgsub("status", "orders").stdout


def test_check_of_a_disabled_subscription_is_3(pgsub, store, served):
    store.alter(5, enabled=False)
    assert pgsub("status", "orders", "--check").returncode == 3


@pytest.mark.parametrize("worker", ["apply", "table synchronization 101"])
def test_check_after_an_error_is_6_also_when_it_disabled_the_subscription(pgsub, store, served, worker):
    _fail(store, worker=worker)
    assert pgsub("status", "orders", "--check").returncode == 6
    store.alter(5, enabled=False)
    assert pgsub("status", "orders", "--check").returncode == 6


def test_check_tells_a_publisher_and_a_target_that_are_down_from_a_conflict(pgsub, store, served):
    _fail(store, PublisherUnavailable, "table synchronization 101")
    assert pgsub("status", "orders", "--check").returncode == 4
    _fail(store, TargetUnavailable)
    assert pgsub("status", "orders", "--check").returncode == 5
    _fail(store, ApplyError)
    ended = pgsub("status", "orders", "--check")
    assert ended.returncode == 6 and "duplicate key" in ended.stderr


@pytest.mark.parametrize("worker", ["apply", "table synchronization 101"])
def test_check_of_what_spark_cannot_run_is_13_and_hides_no_error_that_is_graver(pgsub, store, orders, served, worker):
    for cls in (SparkUnusable, WorkerDied):
        _fail(store, cls, worker)
        ended = pgsub("status", "orders", "--check")
        assert (ended.returncode, "duplicate key" in ended.stderr) == (13, True)
    assert orders()["state"] == ("error" if worker == "apply" else "running")
    _fail(store, PublisherUnavailable, "sequence synchronization")
    assert pgsub("status", "orders", "--check").returncode == 13
    _fail(store, ApplyError, "table synchronization 102")
    assert pgsub("status", "orders", "--check").returncode == 6


@pytest.mark.long
def test_a_worker_that_died_does_not_hide_what_the_next_one_waits_for(pgsub, store, orders, served):
    died = replace(ErrorRow.of(WorkerDied("the worker process died"), "apply"), position=16)
    for _ in range(4):
        store.record_error(5, died)
    assert (orders()["state"], pgsub("status", "orders", "--check").returncode) == ("blocked", 13)
    waits = "a free task slot: Spark has none yet"
    store.put_task(5, TaskRow("submitted", utc_now(), silent_since=utc_now(), waits_for=waits, next="start"))
    assert (orders()["state"], orders()["blocked"]) == ("waiting", None)
    ended = pgsub("status", "orders", "--check")
    assert (ended.returncode, f"waits for {waits}" in ended.stderr) == (3, True)
    _fail(store, worker="table synchronization 102")
    assert pgsub("status", "orders", "--check").returncode == 6
    _fail(store)
    assert orders()["state"] == "error"


def test_a_spark_that_does_not_start_blocks_nothing(pgsub, store, orders, served):
    unusable = replace(ErrorRow.of(SparkUnusable("Spark did not start"), "apply"), position=16)
    for _ in range(4):
        store.record_error(5, unusable)
    assert (orders()["state"], pgsub("status", "orders", "--check").returncode) == ("error", 13)


def test_check_of_a_subscription_without_tables_is_3(pgsub, store, served):
    store.put_relations(5, [])
    ended = pgsub("status", "orders", "--check")
    assert ended.returncode == 3 and 'subscription "orders" has no tables' in ended.stderr


def test_the_applied_position_is_known_before_the_first_transaction(pgsub, store):
    store.put_origin(5, 0, None)
    store.put_slot(5, SlotRow("orders", confirmed_flush_lsn=0x16))
    assert "applied_lsn  | 0/16\n" in pgsub("status", "orders", "-x").stdout
    store.put_workers(5, [_apply_worker(0x20, 0x20)])
    assert "applied_lsn  | 0/20\n" in pgsub("status", "orders", "-x").stdout


def test_the_applied_position_does_not_go_back_when_apply_ends(pgsub, store):
    store.put_origin(5, 0x10, None, 0x20)
    store.put_slot(5, SlotRow("orders", confirmed_flush_lsn=0x16))
    store.put_workers(5, [_apply_worker(0x20, 0x20)])
    assert "applied_lsn  | 0/20\n" in pgsub("status", "orders", "-x").stdout
    store.put_workers(5, [])
    assert "applied_lsn  | 0/20\n" in pgsub("status", "orders", "-x").stdout


def test_the_lag_of_a_subscription_that_nobody_serves_is_not_known(pgsub, store):
    store.put_workers(5, [_apply_worker(0x20, 0x20)])
    assert "lag          |\n" in pgsub("status", "orders", "-x").stdout


@pytest.mark.long
def test_a_terminal_shows_no_empty_columns_and_says_when_all_is_well(environment, store, served):
    def shown(*names):
        return terminal(["-m", "pgsub", "status", *names], environment, 80).read().splitlines()

    store.put_workers(5, [_apply_worker(0x20, 0x20)])
    lines = shown("orders")
    assert "prepared" not in lines[0] and "last_error" not in lines[0]
    assert 'Subscription "orders" is running: 1 of 2 tables synchronized, nothing is waiting.' in lines
    assert any(line.startswith("srsubstate: i initialize, d data copy") for line in lines)
    _fail(store)
    lines = shown("orders")
    assert not any("nothing is waiting" in line for line in lines)
    assert max(map(len, lines[:12])) <= 80 and lines[2].startswith(" orders       | error ") and "..." in lines[2]
    said = 'Subscription "orders" is in state error. The next command is:\r\npgsub status orders --runbook'
    assert "\r\n".join(shown()[-2:]) == said


def test_all_subscriptions_are_shown_with_the_next_command_of_those_in_trouble_once(environment, store, served):
    _fail(store)
    for more in ([], ["--check"]):
        listed = terminal(["-m", "pgsub", "status", *more], environment, 80).read()
        assert listed.count("pgsub status orders --runbook") == 1


def test_check_of_a_lost_slot_is_7_by_error_and_by_what_the_publisher_said(pgsub, store, served):
    store.put_slot(5, SlotRow("orders", wal_status="lost"))
    assert pgsub("status", "orders", "--check").returncode == 7
    store.put_slot(5, None)
    _fail(store, SlotLost)
    assert pgsub("status", "orders", "--check").returncode == 7


def test_a_subscription_of_which_a_table_has_lost_its_slot_is_not_running(pgsub, store, orders, served):
    _fail(store, worker="table synchronization 101")
    assert orders()["state"] == "running"
    _fail(store, SlotLost, worker="table synchronization 101")
    assert orders()["state"] == "error" and pgsub("status", "orders", "--check").returncode == 7
    assert "pgsub reconcile" not in pgsub("status", "orders", "--runbook").stdout  # apply has its slot


def test_check_over_the_threshold_is_8_and_under_it_0(pgsub, store, served):
    store.put_workers(5, [_apply_worker(0x20, 0x10, seconds_ago=60)])
    assert pgsub("status", "orders", "--check", "--max-lag", "30s").returncode == 8
    assert pgsub("status", "orders", "--check", "--max-lag", "10m").returncode == 0


def test_a_walsender_that_says_nothing_while_its_wal_goes_on_is_a_lag(pgsub, store, orders, served):
    def lag(silent, current, taken):
        store.put_workers(5, [_apply_worker(0x20, 0x20, seconds_ago=silent)])
        store.put_slot(5, SlotRow("orders", current_lsn=current, taken_at=ago(taken)))
        return pgsub("status", "orders", "--check", "--max-lag", "30s").returncode

    assert lag(60, 0x30, 1) == 8
    assert lag(60, 0x20, 1) == 0  # there is nothing to say
    assert lag(60, 0x30, 61) == 0  # what it said came later
    assert lag(5, 0x30, 1) == 0


def test_the_lag_is_not_0_where_the_clock_here_is_behind_the_publishers(pgsub, store, orders, served):
    worker = _apply_worker(0x20, 0x10)
    sent, received = ago(-3540), ago(60)  # an hour from each other
    store.put_workers(
        5, [replace(worker, latest_end_time=sent, last_msg_send_time=sent, last_msg_receipt_time=received)]
    )
    assert pgsub("status", "orders", "--check", "--max-lag", "30s").returncode == 8
    store.put_workers(5, [replace(worker, latest_end_time=ago(5), last_msg_send_time=received)])
    assert pgsub("status", "orders", "--check", "--max-lag", "30s").returncode == 0


def test_check_objects_to_a_lag_that_is_not_known_only_when_that_has_lasted_as_long(pgsub, store, served):
    assert pgsub("status", "orders", "--check", "--max-lag", "30s").returncode == 0  # its launcher has just begun
    for stage, worker in (("none", []), ("submitted", []), ("alive", [_apply_worker(0, 0)])):
        store.put_workers(5, worker)
        for seconds, code in ((1, 0), (60, 8)):
            store.put_task(5, TaskRow(stage, ago(seconds)))
            ended = pgsub("status", "orders", "--check", "--max-lag", "30s")
            assert ended.returncode == code and ("lag is not known" in ended.stderr) is bool(code)


def test_a_launcher_does_not_show_the_lag_of_the_one_that_was_killed_before_it(pgsub, store, served):
    store.put_server(5, 1, "here")
    store.put_task(5, TaskRow("alive", ago(600)))
    store.put_workers(5, [_apply_worker(0x20, 0x10, seconds_ago=600)])
    store.put_server(5, os.getpid(), "here")
    assert pgsub("status", "orders", "--check", "--max-lag", "30s").returncode == 0
    assert (store.workers(5), store.task(5)) == ([], None)


def test_a_launcher_that_is_silent_is_noticed_though_its_host_has_another_name_now(pgsub, store, orders, served):
    """The host was renamed meanwhile, or ``status`` runs in another container on the same volume."""
    store.put_task(5, TaskRow("alive", ago(600)))
    store.put_workers(5, [_apply_worker(0x20, 0x20)])
    store.put_server(5, os.getpid(), "former-name")
    assert pgsub("status", "orders", "--check").returncode == 0
    os.utime(served.path, (time.time() - 60,) * 2)
    assert pgsub("status", "orders", "--check").returncode == 3
    assert orders()["state"] == "waiting"
    assert pgsub("status", "orders", "--check", "--max-lag", "30s").returncode == 3


def test_the_lag_of_a_worker_that_gives_no_sign_of_life_goes_on_and_why_is_told(pgsub, store, orders, served):
    """It waits for a lock on the target, say: all that it told was that nothing was left to do."""
    row = replace(_apply_worker(0x20, 0x20, seconds_ago=60), silent_since=ago(60), waits_for="a lock that PID 7 holds")
    store.put_workers(5, [row])
    ended = pgsub("status", "orders", "--check", "--max-lag", "30s")
    assert ended.returncode == 8 and "it waits for a lock that PID 7 holds" in ended.stderr
    assert pgsub("status", "orders", "--check", "--max-lag", "10m").returncode == 0
    ended = pgsub("status", "orders", "--check")
    assert ended.returncode == 8 and "given no sign of life for 6" in ended.stderr
    assert "waits_for" in ended.stdout and orders()["waits"]["for"] == "a lock that PID 7 holds"


def test_the_runbook_names_the_session_that_apply_waits_for_and_ends_it(pgsub, store, served):
    """It said that nothing is to be done, beside a status that named the holder of the lock."""
    lock = 'a lock that PID 7 holds on table "x that PID 8 y" (app, psql, idle in transaction): LOCK TABLE public.a'
    store.put_workers(5, [replace(_apply_worker(0x20, 0x20), silent_since=ago(6), waits_for=lock)])
    shown = pgsub("status", "orders", "--runbook").stdout
    assert f" for {lock}." in shown and "SELECT pg_terminate_backend(7);" in shown
    standby = "a synchronous standby of the target to confirm a commit"
    store.put_workers(5, [replace(_apply_worker(0x20, 0x20), silent_since=ago(6), waits_for=standby)])
    shown = pgsub("status", "orders", "--runbook").stdout
    assert f" for {standby}." in shown and "pg_terminate_backend" not in shown


def test_a_standby_that_the_publisher_waits_for_is_shown_with_its_slot_and_is_no_health(pgsub, store, orders, served):
    slot = 'slot "standby1" of synchronized_standby_slots is inactive'
    away = f"a standby of the publisher to receive the changes ({slot})"
    row = replace(_apply_worker(0x20, 0x20), silent_since=ago(60), waits_for=away)
    store.put_workers(5, [row])
    checked = pgsub("status", "orders", "--check")
    assert checked.returncode == 8
    hint = "\nHINT:  The next command is:\npgsub status orders --runbook\n"
    assert re.search(rf"apply has waited for [0-9]+ s for {re.escape(away)}{hint}", checked.stderr), checked.stderr
    assert pgsub("status", "orders", "--check", "--max-lag", "30s").returncode == 8
    assert away in checked.stdout and orders()["waits"]["for"] == away
    shown = pgsub("status", "orders", "--runbook").stdout
    assert f" for {away}." in shown and "Start the standby again" in shown and "FROM pg_replication_slots" in shown
    store.put_workers(5, [replace(row, silent_since=ago(6))])
    assert pgsub("status", "orders", "--check").returncode == 0


def test_a_table_whose_copy_waits_for_a_lock_is_shown_with_its_holder_and_is_no_health(pgsub, store, orders, served):
    """It waited without a word while apply went on."""
    lock = "a lock that PID 7 holds on table public.b (app, psql, idle in transaction): LOCK TABLE b"
    row = WorkerRow("table synchronization", None, relid=101, silent_since=ago(60), waits_for=lock)
    store.put_workers(5, [_apply_worker(0x20, 0x20), row])
    checked = pgsub("status", "orders", "--check")
    assert checked.returncode == 8
    assert re.search(rf'table "public.b" has waited for [0-9]+ s for {re.escape(lock)}', checked.stderr)
    assert re.search(r"table\twaits_since\twaits_for\npublic.b\t[-0-9]+ [:0-9]+ UTC\ta lock that PID 7", checked.stdout)
    [waits] = orders()["table_waits"]
    assert (waits["relname"], waits["for"]) == ("b", lock)
    shown = pgsub("status", "orders", "--runbook").stdout
    assert f" for {lock}." in shown and "SELECT pg_terminate_backend(7);" in shown
    prepared = "a lock that a prepared transaction holds on table public.b"
    store.put_workers(5, [_apply_worker(0x20, 0x20), replace(row, silent_since=ago(6), waits_for=prepared)])
    assert pgsub("status", "orders", "--check").returncode == 0
    assert "FROM pg_prepared_xacts" in pgsub("status", "orders", "--runbook").stdout
    served.release()
    assert orders()["table_waits"] == []


def test_figures_of_a_slot_that_nobody_sees_any_more_are_shown_as_of_then_with_the_reason(pgsub, store, served):
    slot = SlotRow("orders", active=True, wal_status="reserved", retained_bytes=8, taken_at=ago(5))
    store.put_slot(5, slot)
    assert "\treserved\t" in pgsub("status", "orders").stdout
    store.put_slot(5, replace(slot, taken_at=ago(120)))
    assert re.search(r"\treserved at [-0-9]+ [:0-9]+ UTC\t", pgsub("status", "orders").stdout)
    message = 'replication slot "orders" has not been seen since 2026-11-25 13:37:42 UTC: too many connections'
    store.record_error(
        5, ErrorRow.of(PublisherUnavailable(message, detail="Apply goes on.", hint="Look."), "replication slot")
    )
    checked = pgsub("status", "orders", "--check")
    assert (checked.returncode, message in checked.stderr) == (4, True)
    shown = pgsub("status", "orders", "--runbook").stdout
    assert f"1. {message}. Apply goes on.\n2. Look.\n" in shown


def test_how_many_sessions_apply_is_told_with_the_reason_unless_it_is_one(pgsub, store, orders, served):
    why = "Apply waited for the target 93% of the time, with more transactions at hand."
    for sessions in (1, 4):
        store.put_workers(5, [replace(_apply_worker(0x20, 0x20), sessions=sessions, sessions_why=why)])
        assert (why in " ".join(pgsub("status", "orders").stdout.split())) is (sessions > 1)
        assert orders()["applying"] == {"sessions": sessions, "why": why}


def test_check_of_several_gives_the_gravest_code_and_names_each(pgsub, store, valid, served):
    _fail(store, PublisherUnavailable)
    ended = pgsub("status", "--check", "--json")
    assert ended.returncode == 4
    assert len(valid("status", ended.stdout)["subscriptions"]) == 2
    assert ended.stderr.count("pgsub: warning: ") == 2


def test_the_document_is_read_from_the_store_alone_while_another_writes(pgsub, store):
    with store.batch():
        store.add_stats(5, apply_error_count=1)
        assert (
            json.loads(pgsub("status", "orders", "--json").stdout)["subscriptions"][0]["stats"]["apply_error_count"]
            == 0
        )


@pytest.mark.long
def test_a_task_without_a_slot_or_a_sign_of_life_is_waiting_and_no_health(pgsub, store, orders, served):
    store.put_task(5, TaskRow("submitted", utc_now()))
    assert (orders()["state"], orders()["task"]["stage"], pgsub("status", "orders", "--check").returncode) == (
        "running",
        "submitted",
        0,
    )
    start = '"$SPARK_HOME"/sbin/start-worker.sh spark://h:7077'
    waits = "a free task slot: Spark has none yet"
    store.put_task(5, TaskRow("submitted", utc_now(), silent_since=utc_now(), waits_for=waits, next=start))
    assert orders()["state"] == "waiting"
    checked = pgsub("status", "orders", "--check")
    assert (checked.returncode, f'subscription "orders" waits for {waits}' in checked.stderr) == (3, True)
    assert start in checked.stdout
    assert start in pgsub("status", "orders", "--runbook").stdout
    waited = pgsub("wait", "orders", "--for", "synced", "--timeout", "200ms")
    assert (waited.returncode, f"It waits for {waits}." in waited.stderr) == (8, True)


def test_the_page_of_spark_is_named_where_there_is_one(pgsub, store, served):
    waits = "a free task slot: Spark has 55 in all"
    task = TaskRow(
        "submitted", utc_now(), silent_since=utc_now(), waits_for=waits, next="pgsub status orders --runbook"
    )
    store.put_task(5, task)
    shown = pgsub("status", "orders", "--runbook").stdout
    assert waits in shown and "pgsub run orders" in shown and "executors" not in shown
    store.put_task(5, replace(task, ui="http://h:4040"))
    assert "Give Spark more executors or cores; http://h:4040 shows" in pgsub("status", "orders", "--runbook").stdout


def test_tables_without_a_slot_are_no_health_though_apply_is_alive(pgsub, store, orders, served):
    waits = "a free task slot for its tables: Spark has 1 in all, and 2 are needed"
    more = "pgsub run --conf spark.cores.max=2"
    task = TaskRow("alive", utc_now(), "h", 1, silent_since=utc_now(), waits_for=waits, next=more, ui="http://h:4040")
    store.put_task(5, task)
    assert orders()["state"] == "waiting"
    checked = pgsub("status", "orders", "--check")
    assert (checked.returncode, f'subscription "orders" waits for {waits}' in checked.stderr) == (3, True)
    assert more in checked.stdout
    shown = pgsub("status", "orders", "--runbook").stdout
    assert more in shown and "End pgsub run" in shown and "taken over" not in shown
    store.put_task(5, replace(task, next="pgsub status orders --runbook"))
    assert "Give Spark more executors or cores; http://h:4040 shows" in pgsub("status", "orders", "--runbook").stdout


def test_nobody_who_serves_no_more_is_waiting(store, orders):
    store.put_task(5, TaskRow("alive", utc_now(), silent_since=utc_now(), waits_for="a sign of life"))
    assert (orders()["state"], orders()["task"]) == ("stopped", None)


def test_columns_and_order_of_a_table_can_be_chosen(pgsub, store, valid):
    assert pgsub("status", "--columns", "state,subscription", "--sort", "-subscription").stdout == (
        "state\tsubscription\nstopped\torders\ndisabled\tbills\n"
    )
    rows = pgsub("status", "--view", "pg_subscription_rel", "--columns", "relname", "--sort", "srsublsn", "--json")
    assert [list(row.values()) for row in valid("status", rows.stdout)["rows"]] == [["a"], ["b"]]  # NULL comes last
    ended = pgsub("status", "--sort", "relnam")
    assert ended.returncode == 2 and 'column "relnam" does not exist' in ended.stderr
    assert pgsub("status", "--json", "--columns", "state").returncode == 2


@pytest.mark.parametrize("view", PUBLISHER_VIEWS)
def test_views_of_the_publisher_are_read_live_with_the_newest_columns(pgsub, store, pubdb, valid, view):
    store.alter(5, connection=pubdb.conninfo)
    pubdb.execute("SELECT pg_create_logical_replication_slot('orders', 'pgoutput')")
    shown = pgsub("status", "orders", "--view", view)
    assert shown.returncode == 0, shown.stderr
    query = f"SELECT attname FROM pg_attribute WHERE attrelid = '{view}'::regclass AND attnum > 0 ORDER BY attnum"
    theirs = [name for (name,) in pubdb.rows(query)]
    columns = shown.stdout.splitlines()[0].split("\t")
    assert columns[0] == "subname" and [name for name in columns if name in theirs] == theirs
    rows = valid("status", pgsub("status", "orders", "--view", view, "--json").stdout)["rows"]
    assert [row.get("slot_name") for row in rows] == ([] if view == "pg_stat_replication" else ["orders"])
    store.alter(5, connection="host=127.0.0.1 port=1 dbname=x")
    assert pgsub("status", "orders", "--view", view).returncode == 4


def test_watch_on_a_terminal_is_a_screen_of_80_columns(environment, store, served):
    worker = _apply_worker(0x120, 0x10, seconds_ago=30)
    store.put_workers(
        5, [replace(worker, silent_since=ago(6), waits_for="a lock that PID 7 holds on table public.a (app)")]
    )
    store.put_slot(5, SlotRow("orders", wal_status="reserved", retained_bytes=520, confirmed_flush_lsn=0x10))
    copy = CopyRow(101, "public", "b", bytes_processed=30, bytes_total=120, bytes_per_second=10)
    store.put_copy_progress(5, [copy])
    _fail(store)
    child = terminal(["-m", "pgsub", "status", "--watch", "0.1", "orders"], environment, lines=24)
    child.expect("next: pgsub status orders --runbook")
    child.expect("next: pgsub status orders --runbook")
    screen = re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", child.before)
    child.sendintr()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    facts = ("1 of 2 tables ready, slot reserved", "25% 10 bytes/s", "waits for a lock")
    for text in ("orders  error  applied 0/10", "lag 3", "█", *facts):
        assert text in screen
    lines = [line for frame in screen.split("pgsub status  ") for line in frame.splitlines()]
    assert max(map(len, lines)) <= 80


def test_a_small_line_of_the_lag_is_scaled_to_its_maximum():
    assert sparkline([0.0, None, 4.0, 8.0]) == "▁ ▅█"
    assert sparkline([0.1, 0.2]) == "▂▂" and sparkline([]) == ""
