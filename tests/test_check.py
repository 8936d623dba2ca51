"""What continuous integration runs: on which interpreters, and what its last line says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import pythons

_RUN = Path(__file__).parent.parent / ".ci" / "run"
Check = Callable[[dict[str, str]], "subprocess.CompletedProcess[str]"]


def _python(folder: Path, name: str, said: str) -> str:
    made = folder / name
    made.write_text(f"#!/bin/sh\n{said}\n")
    made.chmod(0o755)
    return str(made)


def test_the_oldest_of_each_minor_version_is_found_and_what_cannot_be_used_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = list(sys.version_info[:3])
    answers = {
        "newer": '[[3, 12, 8], "cpython", "final", true]',
        "older": '[[3, 12, 0], "cpython", "final", true]',
        "oldest": '[[3, 11, 0], "cpython", "final", true]',
        "too_old": '[[3, 10, 9], "cpython", "final", true]',
        "unfinished": '[[3, 15, 0], "cpython", "beta", true]',
        "another": '[[3, 11, 0], "pypy", "final", true]',
        "without_venv": '[[3, 13, 0], "cpython", "final", false]',
        "own": f'[{own}, "cpython", "final", true]',
    }
    named = [_python(tmp_path, name, f"echo '{text}'") for name, text in answers.items()]
    named += [_python(tmp_path, "shim", "echo 'not installed' >&2; exit 127"), str(tmp_path / "nowhere")]
    monkeypatch.setenv("PGSUB_TEST_PYTHONS", os.pathsep.join(named))
    assert pythons.found() == {(3, 11, 0): tmp_path / "oldest", (3, 12, 0): tmp_path / "older"}


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Run ``.ci/run`` where make does as it is told, by target."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(_RUN, tmp_path / ".ci")
    there = _python(tmp_path, "harness", "exit 0")

    def run(targets: dict[str, str]) -> subprocess.CompletedProcess[str]:
        made = "".join(f"{name}:\n\t@{does}\n" for name, does in {"lint": "true", "long": "true", **targets}.items())
        (tmp_path / "Makefile").write_text(made)
        environment = {**os.environ, "COMPAT": there if "compat" in targets else str(tmp_path / "nowhere")}
        return subprocess.run([tmp_path / ".ci" / "run"], env=environment, capture_output=True, text=True, check=False)

    return run


_GOOD = "echo '===== 2990 passed, 5 skipped, 2 xfailed in 830.21s (0:13:50) ====='"
_OLDEST = "echo '22 passed in 13.80s'"


def test_the_last_line_of_the_check_has_the_counts_of_all_stages(check: Check) -> None:
    foreign = "echo 'tap: 35/35 scripts, 523/523 subtests'"
    ended = check({"test": _GOOD, "long": "echo '=== 200 passed in 9.10s ==='", "compat": foreign, "oldest": _OLDEST})
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (0, "3735 passed, 0 failed")


def test_a_lost_subtest_a_failed_test_and_a_stage_that_counts_nothing_fail_the_check(check: Check) -> None:
    lost = "echo 'tap: 34/35 scripts, 520/523 subtests'; exit 1"
    failed = "echo 'FAILED a.py::b'; echo '=== 2 failed, 20 passed, 1 error in 9.10s ==='; exit 1"
    for targets, last in (
        ({"test": _GOOD, "compat": lost, "oldest": _OLDEST}, "3532 passed, 3 failed"),
        ({"test": _GOOD, "compat": "kill -9 $$PPID", "oldest": _OLDEST}, "3012 passed, 1 failed"),
        ({"test": failed, "again": failed, "oldest": _OLDEST}, "62 passed, 3 failed"),
        ({"test": failed, "again": "exit 1", "oldest": _OLDEST}, "42 passed, 1 failed"),
        ({"test": "echo '=== 11 failed, 20 passed in 9.10s ==='; exit 1", "oldest": _OLDEST}, "42 passed, 11 failed"),
        ({"test": "exit 1", "oldest": _OLDEST}, "22 passed, 1 failed"),
        ({"lint": "exit 1", "test": _GOOD, "oldest": _OLDEST}, "3012 passed, 1 failed"),
        ({"test": _GOOD, "long": failed, "again": failed, "oldest": _OLDEST}, "3052 passed, 3 failed"),
        ({"test": f"{_GOOD}; exit 1", "again": "echo again", "oldest": _OLDEST}, "3012 passed, 1 failed"),
    ):
        ended = check(targets)
        assert (ended.returncode, ended.stdout.splitlines()[-1]) == (1, last)
    assert "again" not in ended.stdout  # no test failed


def test_a_test_that_passes_alone_counts_as_passed_and_is_named(check: Check) -> None:
    first = "echo 'FAILED tests/a.py::b - it was late'; echo '=== 1 failed, 20 passed in 9.10s ==='; exit 1"
    ended = check({"test": first, "again": "echo '1 passed in 2.00s'", "oldest": _OLDEST})
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (0, "43 passed, 0 failed")
    assert "ci: 2nd try: FAILED tests/a.py::b" in ended.stdout
    ended = check({"test": _GOOD, "long": first, "again": "echo '1 passed in 2.00s'", "oldest": _OLDEST})
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (0, "3033 passed, 0 failed")


def test_a_check_runs_one_part_of_the_long_tests_or_the_part_that_is_named(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    shows = {"test": _GOOD, "long": 'echo "these: $(PART)"', "oldest": _OLDEST}
    assert "\nthese: 1/60\n" in check(shows).stdout  # outside a checkout no commit decides
    for part in ("2/60", ""):
        monkeypatch.setenv("PART", part)
        assert f"\nthese: {part}\n" in check(shows).stdout


def test_a_check_without_the_foreign_suite_says_so(check: Check) -> None:
    ended = check({"test": _GOOD, "oldest": _OLDEST})
    assert ended.returncode == 0 and "compat: left out, there is no" in ended.stdout
