"""What a scraper sees of a launcher that runs, through a backlog, a conflict, a held table and a lost slot."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable

import pytest
from fix_program import Cli, until
from fix_served import lose
from fix_servers import Database
from openmetrics import values

from pgsub.demo.servers import free_port

Samples = dict[tuple[str, ...], float]
_ACCEPT = "application/openmetrics-text; version=1.0.0"  #: of Prometheus
_STATE = "pgsub_subscription_state"


@pytest.mark.long
def test_the_metrics_of_a_launcher_follow_what_happens_to_its_subscription(
    cli: Cli, tables: tuple[Database, Database]
) -> None:
    pubdb, subdb = tables
    address = f"127.0.0.1:{free_port()}"
    assert cli.create("s", "--no-wait").returncode == 0
    running = cli.launcher("--metrics-listen", address, env={"PGSUB_RETRY_SECONDS": "0.5"})

    def scraped() -> Samples:
        asked = urllib.request.Request(f"http://{address}/metrics", headers={"Accept": _ACCEPT})
        with urllib.request.urlopen(asked) as answer:
            return values(answer.read().decode(), "s")

    def shows(condition: Callable[[Samples], bool]) -> Samples:
        return until(lambda: (seen := scraped()) and condition(seen) and seen)

    quiet = shows(lambda seen: seen["pgsub_tables", "r"] == 2 and seen[_STATE, "running"] == 1)
    assert (quiet["pgsub_subscription_served",], quiet["pgsub_worker_errors",]) == (1, 0)

    with subdb.connect() as blocker, blocker.transaction():
        blocker.execute("LOCK TABLE a")
        pubdb.execute("INSERT INTO a SELECT g, repeat('x', 1000) FROM generate_series(101, 2100) g")
        behind = shows(
            lambda seen: seen["pgsub_apply_lag_seconds",] > 0 and seen.get(("pgsub_apply_lag_bytes",), 0) > 1_000_000
        )
        assert behind["pgsub_slot_active",] == 1
        shows(lambda seen: seen["pgsub_slot_retained_bytes",] > 1_000_000)
    shows(lambda seen: seen["pgsub_apply_lag_seconds",] == 0)

    subdb.execute("INSERT INTO b VALUES (1, 1.5)")
    pubdb.execute("INSERT INTO b VALUES (1, 1)")
    stuck = shows(lambda seen: seen["pgsub_conflicts_total", "insert_exists"] > 0 and seen[_STATE, "running"] == 0)
    assert stuck["pgsub_worker_errors",] == 1 and stuck["pgsub_errors_total", "apply"] >= 1

    assert cli("alter", "s", "--hold", "public.b").returncode == 0
    held = shows(lambda seen: seen.get(("pgsub_held_changes", "b", "public")) == 1 and seen[_STATE, "running"] == 1)
    assert held["pgsub_held_bytes", "b", "public"] > 0 and held["pgsub_worker_errors",] == 0

    lose(pubdb, "s")
    shows(lambda seen: seen["pgsub_slot_lost",] == 1 and seen[_STATE, "running"] == 0)
    assert cli("drop", "s", "--yes").returncode == 0
    shows(lambda seen: (_STATE, "running") not in seen and ("pgsub_not_written",) in seen)
    assert cli.stop(running) == 0
