"""Submitted, claimed and alive: what is shown of a worker that hangs, and what rests on the ledger alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fix_faults import Site, until

from pgsub.catalog.store import StateStore
from pgsub.cli.general_options import Settings, current
from pgsub.cli.main import run
from pgsub.launcher.heartbeat_receiver import HeartbeatReceiver
from pgsub.launcher.spark.driver import Engine

ROOT = Path(__file__).parents[2]


def _check(case: Site) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "pgsub", "--state-dir", str(case.state), "status", "--check", "--json", case.name]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    return done.returncode, json.loads(done.stdout)["subscriptions"][0]


@pytest.mark.long
def test_a_worker_whose_process_is_stopped_is_shown_within_seconds_and_taken_over(site: Callable[[], Site]) -> None:
    case = site()
    writer = case.make_ready("audit1", "counter1")
    process = case.serve(PGSUB_WORKER_TIMEOUT="15")
    writer.some(10)
    stopped, epoch = case.worker_pid(), case.epoch()
    until(lambda: _check(case)[1]["task"]["stage"] == "alive", "no sign of life is shown")
    os.kill(stopped, signal.SIGSTOP)
    until(lambda: case.sqlite("SELECT pid FROM pgsub_task WHERE waits_for IS NOT NULL") == [(stopped,)], case.said)
    os.kill(process.pid, signal.SIGSTOP)  # it would take the worker over while the command starts
    code, seen = _check(case)
    os.kill(process.pid, signal.SIGCONT)
    assert seen["state"] == "waiting"
    assert (code, seen["task"]["stage"], seen["task"]["pid"]) == (3, "alive", stopped)
    assert seen["task"]["waits_for"].startswith(f"a sign of life of PID {stopped} on ")
    assert seen["task"]["next"].startswith(f"pgsub status {case.name} --runbook")
    until(lambda: case.epoch() > epoch, case.said)
    case.wait_equal()
    until(lambda: _check(case)[1]["state"] == "running", case.said)
    assert _check(case)[1]["last_error"] is None
    said = case.output.read_text()
    assert "waits for a sign of life" in said and "gave no sign of life for" in said and "is alive" in said
    case.terminate(process)
    case.check()


@pytest.mark.long
@pytest.mark.parametrize("point", ["copy.middle", "copy.before_commit"])
def test_a_copy_whose_process_is_stopped_is_taken_over(site: Callable[[], Site], point: str) -> None:
    case = site()
    writer = case.make("audit1", "keyed1")
    process = case.create("--follow", points={point: "stop"}, PGSUB_WORKER_TIMEOUT="8", PGSUB_GROUP_TABLES="1")
    case.wait_fired(point)
    case.wait_ready()
    assert "a task that synchronizes tables gave no sign of life for" in case.output.read_text()
    writer.some(20)
    case.wait_equal()
    case.terminate(process)
    case.check()


@pytest.mark.long
def test_where_no_heartbeat_arrives_create_and_status_rest_on_the_ledger(
    site: Callable[[], Site], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(HeartbeatReceiver, "_keep", lambda *_: None)
    monkeypatch.setattr(Engine, "look", lambda self: 1 / 0)  # what Spark says of tasks is for display, too
    shown: set[tuple[str, int | None]] = set()
    put = StateStore.put_workers

    def seen(self: StateStore, subid: int, rows: Any) -> None:
        shown.update((row.worker_type, row.pid) for row in rows)
        put(self, subid, rows)
        if shown:
            copies_wait.rollback()

    monkeypatch.setattr(StateStore, "put_workers", seen)
    case = site()
    writer = case.make("audit1", "keyed1")
    writer.some(10)
    writer.rest()
    words = ["--connection", case.pubdb.conninfo, "--target", case.subdb.conninfo, "--publication", "p"]
    before = dict(vars(current))
    copies_wait = case.subdb.connect()
    copies_wait.execute("BEGIN; LOCK TABLE audit1 IN EXCLUSIVE MODE")  # else all may be over before the first look
    try:
        assert run(["--state-dir", str(case.state), "create", case.name, *words, "--timeout", "2m"]) == 0, capfd
    finally:
        vars(current).update(before or vars(Settings()))
        copies_wait.close()
    assert {pid is not None for kind, pid in shown if kind == "apply"} == {True}
    said = capfd.readouterr().err
    assert said.count("unexpected ZeroDivisionError") == 1 and "TypeError" not in said
    case.check()
