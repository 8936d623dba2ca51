"""Spark under a user without an entry in the user database, and under one who may have few processes."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from fix_spark import python

from pgsub.common.machine import process_limits

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root starts programs as other users")

#: A user id that has no entry, and of which nothing runs.
_NOBODY = 54_321
_ROOT = Path(__file__).parents[2]
_JOB = """
import sys
from pathlib import Path
from pgsub.common.errors import PgsubError
from pgsub.spark.jobs import Submitter
from pgsub.spark.session import close_context, open_context
from spark import task_functions as tasks

try:
    context = open_context(1, Path(sys.argv[1]))
    print(Submitter(context).submit("double", tasks.double, [21]).result(60))
    close_context(context, train=False)
except PgsubError as error:
    print(type(error).__name__, error.message, error.detail, error.hint, sep="\\n")
"""


@pytest.fixture
def run() -> Iterator[Callable[..., str]]:
    """Run a script as that user, with its folder as the argument."""
    folder = Path(tempfile.mkdtemp(prefix="pgsub-user-"))
    os.chown(folder, _NOBODY, _NOBODY)
    packages = Path(psycopg.__file__).parents[1]
    environment = {
        "HOME": str(folder),
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{_ROOT}:{_ROOT / 'tests'}:{packages}",
        "TMPDIR": str(folder),
    }

    def start(script: str, processes: int | None = None) -> str:
        def limit() -> None:
            if processes is not None:
                resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))

        ended = subprocess.run(
            [python(), "-c", script, str(folder / "state")],
            env=environment,
            cwd="/",
            user=_NOBODY,
            group=_NOBODY,
            extra_groups=[],
            preexec_fn=limit,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return ended.stdout

    yield start
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.long
def test_spark_runs_for_a_user_without_an_entry_in_the_user_database(run: Callable[..., str]) -> None:
    assert run(_JOB) == "[42]\n"


@pytest.mark.long
@pytest.mark.parametrize("processes", [12, 60])
def test_a_limit_of_processes_that_spark_reaches_is_named(run: Callable[..., str], processes: int) -> None:
    said = run(_JOB, processes)
    assert said.startswith("SparkUnusable\n"), said
    assert f"User id {_NOBODY} may have {processes} processes and threads (ulimit -u), and has " in said
    assert "Raise the limit of processes (ulimit -u, " in said


@pytest.mark.parametrize("version", ["0::/a.slice/b.service", "4:memory:/\n8:pids:/a.slice/b.service"])
def test_a_limit_of_a_control_group_or_of_one_above_it_is_named(tmp_path: Path, version: str) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(f"{version}\n")
    own = groups / ("pids" if "pids" in version else "") / "a.slice" / "b.service"
    own.mkdir(parents=True)
    for folder, most, used in ((own, "max", 30), (own.parent, "100", 98)):
        (folder / "pids.max").write_text(f"{most}\n")
        (folder / "pids.current").write_text(f"{used}\n")
    said = process_limits.near(proc, groups)
    assert said == 'Control group "/a.slice" may have 100 processes and threads (pids.max), and has 98.'
    (own.parent / "pids.max").write_text("10000\n")
    assert process_limits.near(proc, groups) is None
