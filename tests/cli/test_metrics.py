"""pgsub metrics: OpenMetrics from the state store, through a scene, and what contrib/ makes of them."""

import json
import re
import socket
import struct
import threading
import time
import urllib.request
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import patience
import pytest
from openmetrics import values

from pgsub.catalog.locks import UNRECORDED, Lock
from pgsub.catalog.rows import (
    CopyRow,
    ErrorRow,
    HeldRow,
    PreparedRow,
    RelationRow,
    SequenceRow,
    SkippedRow,
    SlotRow,
    WorkerRow,
)
from pgsub.catalog.times import ago, utc_now
from pgsub.cli.operate.metrics import Address, listen, parse_address
from pgsub.cli.operate.metrics_server import CONNECTIONS
from pgsub.common.errors import ApplyError, PgsubError

CONTRIB = Path(__file__).parents[2] / "contrib"
NAMES = re.compile(r"\bpgsub_[a-z_]+\b")


@pytest.fixture
def scrape(pgsub):
    """What is printed now."""

    def look():
        ended = pgsub("metrics")
        assert (ended.returncode, ended.stderr) == (0, "")
        return values(ended.stdout, "orders")

    return look


def test_metrics_follow_a_backlog_a_conflict_a_held_table_and_a_lost_slot(scrape, store, served, folder):
    then = (datetime.now(UTC) - timedelta(seconds=60)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    worker = WorkerRow("apply", 4711, None, None, 0x20, utc_now(), utc_now(), 0x20, utc_now())
    slot = SlotRow("orders", active=False, confirmed_flush_lsn=0x20, current_lsn=0x20, taken_at=utc_now())
    slot = replace(slot, retained_bytes=8)
    store.put_workers(5, [worker])
    store.put_slot(5, slot)
    quiet = scrape()
    assert quiet["pgsub_subscription_state", "running"] == 1 and quiet["pgsub_subscription_served",] == 1
    assert (quiet["pgsub_apply_lag_seconds",], quiet["pgsub_apply_lag_bytes",]) == (0, 0)
    assert (quiet["pgsub_tables", "r"], quiet["pgsub_tables", "d"]) == (1, 1)
    assert ("pgsub_slot_lost_in_seconds",) not in quiet and quiet["pgsub_slot_active",] == 0

    store.put_workers(5, [replace(worker, received_lsn=0x120, latest_end_time=then)])
    slot = replace(slot, active=True)
    store.put_slot(5, replace(slot, current_lsn=0x220, retained_bytes=520, safe_wal_size=100, wal_bytes_per_second=10))
    behind = scrape()
    assert behind["pgsub_apply_lag_seconds",] >= 60 and behind["pgsub_apply_lag_bytes",] == 0x200
    assert (behind["pgsub_received_lsn_bytes",], behind["pgsub_applied_lsn_bytes",]) == (0x120, 0x20)
    assert (behind["pgsub_slot_retained_bytes",], behind["pgsub_slot_safe_wal_bytes",]) == (520, 100)
    assert (behind["pgsub_slot_lost_in_seconds",], behind["pgsub_slot_active",]) == (10, 1)

    error = ApplyError("it failed")
    for _ in range(3):
        store.record_error(5, ErrorRow.of(error, "apply", 0x20))
    store.add_stats(5, apply_error_count=3, confl_insert_exists=3, set_fallbacks=2)
    store.put_slot(5, replace(slot, waiting_transactions=4))
    stuck = scrape()
    assert (stuck["pgsub_subscription_state", "blocked"], stuck["pgsub_subscription_state", "running"]) == (1, 0)
    assert (stuck["pgsub_errors_total", "apply"], stuck["pgsub_conflicts_total", "insert_exists"]) == (3, 3)
    assert (stuck["pgsub_worker_errors",], stuck["pgsub_waiting_transactions",]) == (1, 4)
    assert stuck["pgsub_set_fallbacks_total",] == 2

    store.clear_error(5, "apply")
    store.put_held(5, [HeldRow(100, "public", "a", utc_now(), False, 7, 70)])
    store.put_skipped(5, SkippedRow(2, 1, 30))
    store.put_copy_progress(5, [CopyRow(101, "public", "b", bytes_processed=30, bytes_total=120)])
    lock = "a lock that PID 7 holds on table public.b (app)"
    copying = WorkerRow("table synchronization", None, relid=101, silent_since=ago(70), waits_for=lock)
    store.put_workers(5, [replace(worker, silent_since=ago(90)), copying])
    store.put_prepared(5, [PreparedRow("pgsub_5_8_20", 8, 0x20, utc_now())])
    place = SequenceRow(102, "r", "public", "q", 40, True, 33, True, -7, None, utc_now())
    unread = replace(place, relname="r", target_value=None, ahead=None)
    store.alter(5, sequences=True)
    store.put_sequences(5, [place, unread])
    unwritten = Lock(folder / UNRECORDED)
    assert unwritten.acquire()
    kept = scrape()
    unwritten.release()
    assert (kept["pgsub_prepared_transactions",], kept["pgsub_not_written",]) == (1, 1)
    assert (kept["pgsub_held_changes", "a", "public"], kept["pgsub_held_bytes", "a", "public"]) == (7, 70)
    assert (kept["pgsub_skipped_changes", "waiting"], kept["pgsub_skipped_changes", "replayed"]) == (2, 1)
    assert (kept["pgsub_copy_bytes", "b", "public"], kept["pgsub_copy_size_bytes", "b", "public"]) == (30, 120)
    assert kept["pgsub_apply_silent_seconds",] >= 90 and kept["pgsub_table_waiting_seconds", "b", "public"] >= 70
    assert kept["pgsub_sequence_ahead", "public", "q"] == -7 and ("pgsub_sequence_ahead", "public", "r") not in kept

    store.put_slot(5, replace(slot, wal_status="lost"))
    store.put_relations(5, [RelationRow(100, "r", 0x16, "public", "a"), RelationRow(101, "r", 0x30, "public", "b")])
    store.put_origin(5, 0x30, 0x30)
    store.alter(5, enabled=False)
    served.release()
    lost = scrape()
    assert (lost["pgsub_tables", "r"], lost["pgsub_applied_lsn_bytes",]) == (2, 0x30)
    assert lost["pgsub_subscription_served",] == 0
    assert lost["pgsub_slot_lost",] == 1 and lost["pgsub_subscription_state", "disabled"] == 1
    moved = {key[0] for scene in (behind, stuck, kept, lost) for key in scene if scene[key] != quiet.get(key)}
    assert {key[0] for key in quiet} - moved == {"pgsub_build_info"}


def test_what_the_publisher_said_of_the_slot_is_no_metric_once_it_is_old(scrape, store, served):
    slot = SlotRow("orders", active=True, current_lsn=0x30, retained_bytes=8, safe_wal_size=100, taken_at=utc_now())
    slot = replace(slot, confirmed_flush_lsn=0x20, wal_bytes_per_second=10, waiting_transactions=2)
    store.put_slot(5, slot)
    said = {name for (name, *_) in scrape() if name.startswith(("pgsub_slot", "pgsub_waiting", "pgsub_apply_lag"))}
    assert len(said) == 7 and "pgsub_slot_lost" in said
    store.put_slot(5, replace(slot, taken_at=ago(61)))
    assert {name for (name, *_) in scrape()} & said == {"pgsub_slot_lost"}
    store.put_slot(5, slot)
    assert {name for (name, *_) in scrape()} >= said
    served.release()
    assert {name for (name, *_) in scrape()} & said == {"pgsub_slot_lost"}


def test_a_worker_that_nobody_serves_is_not_silent(scrape, store, served):
    store.put_workers(5, [WorkerRow("apply", 4711, silent_since=ago(90))])
    assert scrape()["pgsub_apply_silent_seconds",] >= 90
    served.release()  # as after kill -9, which leaves the row
    assert scrape()["pgsub_apply_silent_seconds",] == 0


def test_a_size_that_is_not_known_is_left_out(scrape, store, served):
    store.put_copy_progress(5, [CopyRow(101, "public", "b", bytes_processed=30)])
    assert scrape()["pgsub_copy_bytes", "b", "public"] == 30
    assert ("pgsub_copy_size_bytes", "b", "public") not in scrape()


def test_no_name_of_a_table_steers_a_terminal_that_shows_metrics(pgsub, store):
    store.put_held(5, [HeldRow(100, "public", "t\x1b[2J\u202e\x9b", utc_now(), False, 1, 2)])
    shown = pgsub("metrics").stdout
    assert "\\x1b[2J" in shown and not set(shown) & set("\x1b\u202e\x9b")


def test_a_state_folder_that_does_not_exist_has_no_subscription_and_is_not_created(scrape, folder):
    assert ("pgsub_build_info", "0.1.0") in scrape()
    assert not folder.exists()


@pytest.fixture
def server(store, folder):
    """A server of metrics that waits half a second for a request."""
    found = listen(parse_address("0"), folder)
    found.seconds = 0.5
    yield found
    found.shutdown()
    found.server_close()


def _ask(server, request="GET /metrics HTTP/1.0"):
    with socket.create_connection(server.server_address, timeout=10) as asking:
        asking.sendall(request.encode() + b"\r\n\r\n")
        return b"".join(iter(lambda: asking.recv(65536), b"")).decode()


def test_metrics_are_served_on_the_loopback_address_as_they_are_printed(server, folder):
    address = parse_address("0")
    assert address == Address("127.0.0.1", 0) and parse_address("[::1]:9187") == Address("::1", 9187)
    port = server.server_address[1]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert 'pgsub_tables{state="r",subscription="orders"} 1.0' in text
    with pytest.raises(PgsubError, match="could not listen on"):
        listen(Address("127.0.0.1", port), folder)


def test_connections_that_ask_nothing_or_too_slowly_are_ended_and_metrics_are_served_again(server):
    threads, began = threading.active_count(), time.monotonic()
    with ExitStack() as stack:
        for _ in range(CONNECTIONS + 3):
            silent = stack.enter_context(socket.create_connection(server.server_address, timeout=10))
            silent.sendall(b"GET /metrics HTTP/1.1\r\nHost: ")
        slow = stack.enter_context(socket.create_connection(server.server_address, timeout=10))
        with suppress(OSError):  # reset, or a broken pipe
            while time.monotonic() < began + patience.SECONDS:
                slow.sendall(b"G")
                time.sleep(0.05)
                assert threading.active_count() <= threads + CONNECTIONS
        assert time.monotonic() < began + patience.SECONDS
        assert "pgsub_build_info" in _ask(server)


def test_a_connection_that_is_reset_leaves_nothing_on_standard_error(server, capfd):
    for sent in b"", b"GET /metrics HTTP/1.0\r\n", b"GET /metrics HTTP/1.0\r\n\r\n", b"G" * 100_000:
        with socket.create_connection(server.server_address, timeout=10) as left:
            left.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with suppress(OSError):
                left.sendall(sent)
    assert "pgsub_build_info" in _ask(server)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ("HEAD /metrics HTTP/1.0", 200),
        ("GET /metrics HTTP/1.1\r\nHost: localhost:9187", 200),
        ("GET /metrics HTTP/1.1\r\nHost: [::1]:9187", 200),
        ("GET /metrics HTTP/1.1\r\nHost: rebound.example", 421),
        ("GET /metrics HTTP/1.0\r\nAccept: application/openmetrics-text; version=x", 400),
        ("GET / HTTP/1.0", 404),
        ("POST /metrics HTTP/1.0", 501),
    ],
)
def test_only_metrics_are_served_and_only_to_who_asks_for_this_machine(server, request_, status):
    answer = _ask(server, request_)
    assert answer.split()[1] == str(status)
    assert ("# TYPE" in answer) is (status == 200 and request_.startswith("GET"))


@pytest.mark.parametrize("address", ["x", "localhost:", "1:99999", ":-1"])
def test_what_is_no_address_is_refused(pgsub, address):
    ended = pgsub("run", "--metrics-listen", address)
    assert ended.returncode == 2 and "expected HOST:PORT or PORT" in ended.stderr


def test_alert_rules_and_dashboard_use_metrics_that_exist(pgsub, store):
    text = pgsub("metrics").stdout
    known = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    known |= {f"{name}_total" for name in known}
    rules = (CONTRIB / "pgsub-alerts.yml").read_text()
    expressions = [line for line in rules.splitlines() if line.strip().startswith("expr:")]
    board = json.loads((CONTRIB / "pgsub-dashboard.json").read_text())
    expressions += [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(expressions) > 20
    assert {name for line in expressions for name in NAMES.findall(line)} - known == set()
