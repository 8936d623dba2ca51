"""What is shown of a subscription that a cluster serves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from fix_faults import Site, until

ROOT = Path(__file__).parents[2]


def status(case: Site, *words: str, name: str | None = None) -> subprocess.CompletedProcess[str]:
    """``pgsub status`` of the site's subscription, or of another one."""
    command = [sys.executable, "-m", "pgsub", "--state-dir", str(case.state), "status", name or case.name, *words]
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )


def shown(case: Site) -> dict[str, Any]:
    """The document of the subscription."""
    found: dict[str, Any] = json.loads(status(case, "--json").stdout)["subscriptions"][0]
    return found


def stored(case: Site, column: str) -> object:
    """What the state store has of apply's task; a command that shows it takes longer than the state lasts."""
    rows = case.sqlite(f"SELECT {column} FROM pgsub_task")
    return rows[0][0] if rows else None


def begins(case: Site, what: str, beyond: int) -> None:
    """Wait until apply was started again, and is alive."""
    until(lambda: case.epoch() > beyond, lambda: f"{what}\n{case.said()}")
    until(lambda: stored(case, "stage") == "alive", case.said)


def spark_pages(case: Site, what: str) -> list[dict[str, Any]]:
    """What Spark's own pages list of the launcher's application, found by the address that status shows."""
    pages = f"{shown(case)['task']['ui']}/api/v1/applications"
    with urllib.request.urlopen(pages) as answer:
        [application] = json.load(answer)
    with urllib.request.urlopen(f"{pages}/{application['id']}/{what}") as answer:
        found: list[dict[str, Any]] = json.load(answer)
    return found


def running_on(case: Site, job: str) -> set[str]:
    """Hosts on which tasks of jobs of this name run now; none while the launcher has no pages yet."""
    if stored(case, "ui") is None:
        return set()
    stages = [stage for stage in spark_pages(case, "stages?details=true") if stage["name"] == job]
    return {task["host"] for stage in stages for task in stage["tasks"].values() if task["status"] == "RUNNING"}
