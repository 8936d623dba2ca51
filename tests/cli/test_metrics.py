"""pgsub metrics: OpenMetrics from the state store, through a scene, and what contrib/ makes of them."""

import json
import re
import urllib.request
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parsed

from pgsub.catalog.rows import CopyRow, ErrorRow, HeldRow, SkippedRow, SlotRow, WorkerRow
from pgsub.catalog.times import ago, utc_now
from pgsub.cli.operate.metrics import Address, listen, parse_address
from pgsub.common.errors import ApplyError, PgsubError

CONTRIB = Path(__file__).parents[2] / "contrib"
NAMES = re.compile(r"\bpgsub_[a-z_]+\b")


def _values(text):
    """Sample values by name and labels but the subscription, of "orders" and of the program."""
    found = {}
    for family in parsed(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            if labels.pop("subscription", "orders") == "orders":
                found[sample.name, *sorted(labels.values())] = sample.value
    return found


@pytest.fixture
def scrape(pgsub):
    """What is printed now."""

    def look():
        ended = pgsub("metrics")
        assert (ended.returncode, ended.stderr) == (0, "")
        return _values(ended.stdout)

    return look


def test_metrics_follow_a_backlog_a_conflict_a_held_table_and_a_lost_slot(scrape, store, served):
    then = (datetime.now(UTC) - timedelta(seconds=60)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    worker = WorkerRow("apply", 4711, None, None, 0x20, utc_now(), utc_now(), 0x20, utc_now())
    slot = SlotRow("orders", active=True, confirmed_flush_lsn=0x20, current_lsn=0x20, retained_bytes=8)
    store.put_workers(5, [worker])
    store.put_slot(5, slot)
    quiet = scrape()
    assert quiet["pgsub_subscription_state", "running"] == 1 and quiet["pgsub_subscription_served",] == 1
    assert (quiet["pgsub_apply_lag_seconds",], quiet["pgsub_apply_lag_bytes",]) == (0, 0)
    assert (quiet["pgsub_tables", "r"], quiet["pgsub_tables", "d"]) == (1, 1)
    assert ("pgsub_slot_lost_in_seconds",) not in quiet

    store.put_workers(5, [replace(worker, received_lsn=0x120, latest_end_time=then)])
    store.put_slot(5, replace(slot, current_lsn=0x220, retained_bytes=520, safe_wal_size=100, wal_bytes_per_second=10))
    behind = scrape()
    assert behind["pgsub_apply_lag_seconds",] >= 60 and behind["pgsub_apply_lag_bytes",] == 0x200
    assert (behind["pgsub_received_lsn_bytes",], behind["pgsub_applied_lsn_bytes",]) == (0x120, 0x20)
    assert (behind["pgsub_slot_retained_bytes",], behind["pgsub_slot_safe_wal_bytes",]) == (520, 100)
    assert behind["pgsub_slot_lost_in_seconds",] == 10

    error = ApplyError("it failed")
    for _ in range(3):
        store.record_error(5, ErrorRow.of(error, "apply", 0x20))
    store.add_stats(5, apply_error_count=3, confl_insert_exists=3)
    stuck = scrape()
    assert (stuck["pgsub_subscription_state", "blocked"], stuck["pgsub_subscription_state", "running"]) == (1, 0)
    assert (stuck["pgsub_errors_total", "apply"], stuck["pgsub_conflicts_total", "insert_exists"]) == (3, 3)
    assert stuck["pgsub_worker_errors",] == 1

    store.clear_error(5, "apply")
    store.put_held(5, [HeldRow(100, "public", "a", utc_now(), False, 7, 70)])
    store.put_skipped(5, SkippedRow(2, 1, 30))
    store.put_copy_progress(5, [CopyRow(101, "public", "b", bytes_processed=30, bytes_total=120)])
    store.put_workers(5, [replace(worker, silent_since=ago(90))])
    kept = scrape()
    assert (kept["pgsub_held_changes", "a", "public"], kept["pgsub_held_bytes", "a", "public"]) == (7, 70)
    assert (kept["pgsub_skipped_changes", "waiting"], kept["pgsub_skipped_changes", "replayed"]) == (2, 1)
    assert (kept["pgsub_copy_bytes", "b", "public"], kept["pgsub_copy_size_bytes", "b", "public"]) == (30, 120)
    assert kept["pgsub_apply_silent_seconds",] >= 90

    store.put_slot(5, replace(slot, wal_status="lost"))
    store.alter(5, enabled=False)
    lost = scrape()
    assert lost["pgsub_slot_lost",] == 1 and lost["pgsub_subscription_state", "disabled"] == 1


def test_a_state_folder_that_does_not_exist_has_no_subscription_and_is_not_created(scrape, folder):
    assert ("pgsub_build_info", "0.1.0") in scrape()
    assert not folder.exists()


def test_metrics_are_served_on_the_loopback_address_as_they_are_printed(scrape, store, folder):
    address = parse_address("0")
    assert address == Address("127.0.0.1", 0) and parse_address("[::1]:9187") == Address("::1", 9187)
    server = listen(address, folder)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        assert 'pgsub_tables{state="r",subscription="orders"} 1.0' in text
        with pytest.raises(PgsubError, match="could not listen on"):
            listen(Address("127.0.0.1", server.server_port), folder)
    finally:
        server.shutdown()
        server.server_close()


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
