"""Kills while several sessions apply: of any session, of worker, launcher and target, between their commits."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from counted import SESSIONS, Counted
from fix_faults import Site, until
from fix_servers import Pair
from forked import Started
from thorough import thorough

pytestmark = pytest.mark.long

Make = Callable[..., Site]

#: Of the worker's own session, which commits the first unit: before that, for which the others wait, and after it.
OWN = ("apply.before_target_commit", "apply.commit_reply_lost")
#: Of another: before and after its commit.
OTHERS = ("apply.unit_executed", "apply.unit_reply_lost")
POINTS = (*OWN, *OTHERS)
MODES = ("batched", "transactional")


class Steps:
    """A site whose worker stands still at a named step of a batch that several sessions apply."""

    def __init__(self, case: Site, mode: str) -> None:
        self.case = case
        self.counted = Counted(case, "--apply-workers", "4", "--apply-mode", mode)
        self._release = case.points.parent / "release"
        case.disarm(*POINTS)

    def run(self) -> Started:
        """Start the launcher."""
        return self.case.serve(points=dict.fromkeys(POINTS, f"pause:{self._release}"))

    @contextmanager
    def at(self, point: str) -> Iterator[list[tuple[int, str, str]]]:
        """Let the worker stand there; yields pid and state of its sessions, and what they wait for.

        When the harm is done it may go on, if it still can, and everything is applied.
        """
        case = self.case
        self.counted.write(10, apart=True)
        self.counted.applied()
        while not self._stands(point):  # until it knows how slow the target is, one session applies
            case.disarm(point)
            self._release.touch()
            self.counted.applied()
        yield case.subdb.rows(SESSIONS)
        case.disarm(point)
        self._release.touch()
        self.counted.applied()

    def worker(self) -> int:
        """Process id of the python worker that applies."""
        return int(self.case.subdb.value("SELECT claimed_pid FROM pgsub.control WHERE worker = 0"))

    def _stands(self, point: str) -> bool:
        """Have it apply much at once; return whether it stands there now, and others work beside its own session."""
        worker = self.worker()
        self._release.unlink(missing_ok=True)
        os.kill(worker, signal.SIGSTOP)
        self.counted.write(120)
        self.case.arm(point)
        os.kill(worker, signal.SIGCONT)
        until(lambda: self.case.fired(point) or not self.counted.waiting(), self.case.said)
        return self.case.fired(point) and (point in OTHERS or self._several(point))

    def _several(self, point: str) -> bool:
        left = self.counted.waiting()
        for _ in range(50):
            waiting = any(event == "advisory" for _, _, event in self.case.subdb.rows(SESSIONS))
            if waiting if point == OWN[0] else self.counted.waiting() < left:
                return True
            time.sleep(0.02)
        return False

    def ended(self, process: Started) -> None:
        """End the launcher in order, and look at everything."""
        self.case.terminate(process)
        self.counted.check()


@pytest.mark.parametrize("mode", MODES)
def test_a_worker_killed_between_the_commits_of_several_sessions_loses_and_repeats_nothing(
    site: Make, mode: str
) -> None:
    steps = Steps(site(), mode)
    process = steps.run()
    for point in POINTS:
        with steps.at(point):
            os.kill(steps.worker(), signal.SIGKILL)
    steps.ended(process)


def test_a_launcher_killed_between_the_commits_of_several_sessions_loses_and_repeats_nothing(site: Make) -> None:
    steps = Steps(site(), "transactional")
    process = steps.run()
    for point in POINTS:
        with steps.at(point):
            process.kill()
            steps.case.killed(process)
            process = steps.run()
    steps.ended(process)


@pytest.mark.parametrize("mode", ["transactional", *thorough(["batched"])])
def test_a_target_that_crashes_between_the_commits_of_several_sessions_gets_all_of_it_once(
    own_pair: Callable[..., Pair], site: Make, mode: str
) -> None:
    pair = own_pair(target={"wal_writer_delay": "10s"})  # what was not flushed is lost
    steps = Steps(site(pair.pubdb, pair.subdb), mode)
    process = steps.run()
    for point in POINTS:
        with steps.at(point):
            steps.case.crash(pair.target)
    steps.ended(process)


def test_any_of_several_sessions_ended_at_any_step_loses_and_repeats_nothing(site: Make) -> None:
    steps = Steps(site(), "transactional")
    process = steps.run()
    ended = set()
    for point in POINTS:
        for which in ("own", "idle in transaction", "advisory"):
            with steps.at(point) as sessions:
                own, *others = sessions
                found = [own] if which == "own" else [one for one in others if which in one[1:]]
                for pid, _, _ in found[:1]:
                    steps.case.subdb.rows("SELECT pg_terminate_backend(%s)", pid)
                    ended.add((point, which))
    assert ended >= {(point, "own") for point in POINTS} | {(OWN[0], "advisory"), (OTHERS[0], "idle in transaction")}
    steps.ended(process)
