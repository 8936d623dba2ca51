"""Rare branches that the fault tests must have reached, counted over all processes of a run.

After FoundationDB's "sometimes" rule: a test that waits for a rare branch proves nothing on the day the branch is no
longer taken. ``reached("claim")`` is called where the evidence was asserted; the end of the run prints how often each
was reached, and fails when these folders ran whole and one was not. ``make test`` and ``make long`` are halves of such
a run; a part of ``make long`` need not reach anything.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pgsub.common.failpoints import POINTS

#: What a run of apply, commands, faults and launcher has to reach, besides every failpoint.
BRANCHES = (
    "hand-over with apply behind",
    "hand-over with the sync worker behind",
    "claim",
    "un-claim",
    "compare-and-set failed",
    "duplicate attempt refused",
    "duplicate copy chunk found done",
    "zombie evicted",
    "commit reply lost",
    "commit never arrived",
    "unflushed tail lost by the target",
    "slot position lost by the publisher",
    "PREPARE sent again: prepared anew",
    "PREPARE sent again: found",
    "COMMIT PREPARED sent again",
    "COMMIT PREPARED without PREPARE",
    "prepared before two_phase was enabled",
    "applied while it arrives",
    "a parallel worker gave way",
    "states_version re-decision",
    "subtransactions in an order that savepoints do not allow",
    "subtransaction abort in a spool",
    "barrier: TRUNCATE inside a batch",
    "barrier: new columns inside a batch",
)
#: What the random workload of tests/apply/test_differential.py has to reach, which it asserts itself.
WORKLOAD = (
    "streamed commit",
    "streamed abort",
    "subtransaction abort in a stream",
    "applied while it arrived",
    "prepare",
    "streamed prepare",
    "commit prepared",
    "rollback prepared",
)
_FOLDERS = [Path(__file__).parent / name for name in ("apply", "commands", "faults", "launcher")]
_VARIABLE = "PGSUB_TEST_BRANCHES"
#: The two halves of the tests, by pytest's -m, each with the other one; together they have to reach everything.
_HALVES = {"long": "not long", "not long": "long"}
_CACHED = "pgsub/branches reached by {}"


def pytest_configure(config: pytest.Config) -> None:
    """The registry is a folder that the controller makes and its workers inherit."""
    if not hasattr(config, "workerinput"):
        os.environ[_VARIABLE] = tempfile.mkdtemp(prefix="pgsub-branches-")


def _add(kind: str, name: str) -> None:
    folder = os.environ[_VARIABLE]
    os.close(tempfile.mkstemp(prefix=f"{kind}={name.replace('/', ' ')}=", dir=folder)[0])


def _found(kind: str) -> Counter[str]:
    names = (file.split("=") for file in os.listdir(os.environ[_VARIABLE]))
    return Counter(name for which, name, _ in names if which == kind)


@pytest.fixture
def reached() -> Callable[[str], None]:
    """Say that a branch was reached."""

    def call(name: str) -> None:
        assert name in (*BRANCHES, *WORKLOAD, *POINTS), name
        _add("branch", name)

    return call


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Which files of the folders are part of the run."""
    for file in {item.path for item in items if item.path.parent in _FOLDERS}:
        _add("collected", file.name)


def pytest_deselected(items: list[pytest.Item]) -> None:
    """A run with ``-k`` need not reach everything."""
    if any(item.path.parent in _FOLDERS for item in items):
        _add("deselected", "some")


def _complete(config: pytest.Config) -> bool:
    chosen = any("::" in argument for argument in config.args)
    files = {file.name for folder in _FOLDERS for file in folder.glob("test_*.py")}
    return not chosen and (_half(config) or not _found("deselected")) and files <= set(_found("collected"))


def _half(config: pytest.Config) -> bool:
    whole = not config.option.keyword and not getattr(config.option, "splits", None)
    return config.option.markexpr in _HALVES and whole


def _reached(config: pytest.Config) -> set[str] | None:
    """What was reached, in a half also by the last run of the other one; None where there was none."""
    found = set(_found("branch"))
    if not _half(config):
        return found
    assert config.cache is not None
    others = config.cache.get(_CACHED.format(_HALVES[config.option.markexpr]), None)
    return None if others is None else found | set(others)


def _missing(config: pytest.Config) -> list[str]:
    reached = _reached(config) if _complete(config) else None
    return [] if reached is None else [name for name in (*BRANCHES, *POINTS) if name not in reached]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A branch that was not reached fails a run that would have passed."""
    config = session.config
    if hasattr(config, "workerinput"):
        return
    if _half(config) and _complete(config) and config.cache is not None:
        config.cache.set(_CACHED.format(config.option.markexpr), sorted(_found("branch")))
    if exitstatus == 0 and _missing(config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """What was reached, and what was not."""
    found = _found("branch")
    if not found:
        return
    terminalreporter.section("rare branches reached")
    for name in (*BRANCHES, *WORKLOAD, *POINTS):
        if found[name] or (name not in WORKLOAD and _complete(config) and not _half(config)):
            terminalreporter.line(f"{found[name]:5d}  {name}", red=not found[name])
    if missing := _missing(config):
        terminalreporter.line(f"NOT REACHED: {', '.join(missing)}", red=True)


def pytest_unconfigure(config: pytest.Config) -> None:
    """The registry goes with the run."""
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(_VARIABLE), ignore_errors=True)
