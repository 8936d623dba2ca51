"""kill -9 of launcher, python worker and JVM at every step of a commit; after each, both sides are equal again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from fix_faults import Site, until
from thorough import only_thorough, thorough

Make = Callable[[], Site]

TABLES = ("keyed1", "counter1", "audit1")
WORKER_POINTS = (
    "apply.before_target_commit",
    "apply.after_target_commit",  # between the target's commit and reported_lsn
    "apply.after_reported_lsn",  # before the feedback
    "apply.after_feedback",  # between the feedback and the state store
)
MIRROR = "mirror.before_state_db"


@pytest.mark.long
@pytest.mark.own_spark  # which ends with the launcher
def test_a_launcher_killed_at_any_step_of_a_commit_loses_and_repeats_nothing(site: Make) -> None:
    case = site()
    writer = case.make_ready(*TABLES)
    # workers die at every one of them below; of a launcher the first and the last are other cases
    points = (WORKER_POINTS[1], MIRROR, *thorough((WORKER_POINTS[0], *WORKER_POINTS[2:])))
    case.disarm(*points)
    for point in points:
        action = "kill" if point == MIRROR else "kill:LAUNCHER"
        process = case.serve(points={point: action})
        case.wait_equal()  # also: the kill before this one was survived
        writer.resume()
        case.arm(point)
        case.killed(process)
        assert case.fired(point)
    writer.some(20)
    writer.rest()
    case.end(case.run())
    case.check()


def test_a_python_worker_killed_at_any_step_of_a_commit_loses_and_repeats_nothing(site: Make) -> None:
    case = site()
    writer = case.make_ready(*TABLES)
    case.disarm(*WORKER_POINTS, MIRROR)
    release = case.points.parent / "release"
    actions = {**dict.fromkeys(WORKER_POINTS, "kill"), MIRROR: f"pause:{release}"}
    process = case.serve(points=actions)
    for point in (*WORKER_POINTS, MIRROR):
        case.wait_equal()
        writer.resume()
        epoch, worker = case.epoch(), case.worker_pid()
        case.arm(point)
        case.wait_fired(point)
        if point == MIRROR:
            os.kill(worker, signal.SIGKILL)
            release.touch()
        until(lambda before=epoch: case.epoch() > before, "the launcher started no other worker")
    case.wait_equal()
    case.terminate(process)
    case.check()


@only_thorough
def test_a_jvm_killed_at_any_step_of_a_commit_loses_and_repeats_nothing(site: Make) -> None:
    case = site()
    writer = case.make_ready(*TABLES)
    points = (WORKER_POINTS[1], MIRROR, *thorough((WORKER_POINTS[0], *WORKER_POINTS[2:])))
    case.disarm(*points)
    process = case.serve(points=dict.fromkeys(points, "kill:JVM"))
    for point in points:
        case.wait_equal()
        writer.resume()
        jvm = case.jvm_pid.read_text()
        case.arm(point)
        case.wait_fired(point)
        until(lambda before=jvm: _other(case, before), "the launcher started no other JVM")
    case.wait_equal()
    case.terminate(process)
    case.check()


def _other(case: Site, before: str) -> bool:
    return case.jvm_pid.exists() and case.jvm_pid.read_text() not in ("", before)


@pytest.mark.long
@pytest.mark.parametrize("point", ["create.after_ledger", "create.after_slot"])
def test_a_create_that_was_killed_half_way_can_be_repeated(site: Make, point: str) -> None:
    case = site()
    case.make(*TABLES)
    case.killed(case.create("--no-wait", points={point: "kill"}))
    assert case.fired(point)
    case.end(case.create("--no-wait"))
    assert case.pubdb.value("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == 1
    assert case.subdb.value("SELECT count(*) FROM pgsub.subscription") == 1
