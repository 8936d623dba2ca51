"""kill -9 of launcher, python worker and JVM at every step of a table synchronization, with writes all the time.

A row that is lost or repeated is never mended later, so one subscription goes through many kills, each survived by
the next attempt, and is compared at the end.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fix_faults import Site
from forked import Started
from thorough import thorough

Make = Callable[[], Site]

TABLES = ("audit1", "keyed1", "counter1", "audit2", "keyed2", "audit3")
BIG = ("auditbig", "keyedbig")
#: In the order in which a table meets them; a claim is not always needed: the crash table has it.
STEPS = (
    "sync.after_slot",
    "copy.middle",
    "copy.before_commit",
    "copy.after_commit",
    "sync.after_f",
    "sync.before_s",
    "sync.after_s",
    "sync.before_slot_drop",
)
COPY_STEPS = ("copy.middle", "copy.before_commit", "copy.after_commit")
RESUME_STEPS = ("copy.middle", "resume.compared", "resume.before_commit", "resume.after_commit", "copy.before_commit")
#: Whoever kills the launcher kills the JVM, and whoever kills the JVM kills the workers: the steps at which something
#: of it lasts. A start of Spark each; every step with workers alone is in test_crash_table.py.
_LASTING = ("sync.after_slot", "sync.after_s")
OF_JVM = tuple(step for step in STEPS if step in (*_LASTING, *thorough(STEPS)))
#: Tables that share a slot are claimed before it exists, and catch up with nothing.
TOGETHER = ("sync.after_slot", "copy.before_commit", "sync.after_f", "sync.after_s")
ALONE = {"PGSUB_GROUP_TABLES": "1"}
#: Some ten chunks for each of the big tables.
CHUNKS = {"PGSUB_CHUNK_BYTES": str(256 << 10)}


def finish(case: Site) -> None:
    """The next run ends well, with both sides equal."""
    assert case.writer is not None
    case.writer.some(20)
    case.writer.rest()
    case.end(case.run())
    case.check()


def kill_launcher_at(case: Site, steps: tuple[str, ...], **env: str) -> None:
    """``create`` dies at the first step, each following run at the next one."""
    for number, step in enumerate(steps):
        start = case.create if number == 0 else case.run
        case.killed(start(points={step: "kill:LAUNCHER"}, **env))
        assert case.fired(step)


def chunks_done(case: Site) -> int:
    """Chunks that were copied before."""
    return int(case.subdb.value("SELECT count(xid) FROM pgsub.copy_chunk"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("steps", "env"), [pytest.param(OF_JVM, ALONE, id="alone"), *thorough([pytest.param(TOGETHER, {}, id="together")])]
)
def test_a_launcher_killed_at_any_step_of_a_synchronization_loses_and_repeats_nothing(
    site: Make, steps: tuple[str, ...], env: dict[str, str]
) -> None:
    case = site()
    case.make(*TABLES)
    kill_launcher_at(case, steps, **env)
    finish(case)


@pytest.mark.long
def test_a_launcher_killed_in_a_chunked_copy_loses_and_repeats_nothing(site: Make) -> None:
    case = site()
    case.make(*BIG)
    kill_launcher_at(case, ("copy.after_commit", "resume.removed", *thorough(RESUME_STEPS)), **CHUNKS)
    assert chunks_done(case) > 0
    assert case.subdb.value("SELECT count(*) FROM pgsub.subscription_rel WHERE copy_mode = 'chunked'") > 0
    finish(case)


def finish_following(case: Site, process: Started) -> None:
    """The launcher that lost its workers ends well, with both sides equal."""
    assert case.writer is not None
    case.writer.some(20)
    case.wait_ready()
    case.wait_equal()
    case.terminate(process)
    case.check()


@pytest.mark.long
@pytest.mark.parametrize(
    ("action", "steps", "env"),
    [
        pytest.param("kill", COPY_STEPS, {}, id="worker of several tables"),
        *thorough(
            [
                pytest.param("kill", COPY_STEPS, ALONE, id="worker"),
                pytest.param("kill:JVM", OF_JVM, ALONE, id="jvm"),
            ]
        ),
    ],
)
def test_a_worker_killed_at_any_step_of_a_synchronization_loses_and_repeats_nothing(
    site: Make, action: str, steps: tuple[str, ...], env: dict[str, str]
) -> None:
    case = site()
    case.make(*TABLES)
    process = case.create("--follow", points=dict.fromkeys(steps, action), **env)
    case.wait_fired(*steps)
    finish_following(case, process)


@pytest.mark.long
@pytest.mark.parametrize("victim", ["worker", *thorough(["jvm"])])
def test_a_worker_killed_in_a_chunked_copy_loses_and_repeats_nothing(site: Make, victim: str) -> None:
    case = site()
    case.make(*BIG)
    action = "kill:JVM" if victim == "jvm" else "kill@2"
    process = case.create("--follow", points=dict.fromkeys(COPY_STEPS, action), **CHUNKS)
    case.wait_fired(*COPY_STEPS)
    finish_following(case, process)
