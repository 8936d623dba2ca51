"""Spark under a user without an entry in the user database."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from fix_spark import python

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

    def start(script: str) -> str:
        ended = subprocess.run(
            [python(), "-c", script, str(folder / "state")],
            env=environment,
            cwd="/",
            user=_NOBODY,
            group=_NOBODY,
            extra_groups=[],
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
