"""Promises of ``pgsub demo``, held by the real program with real servers and Spark."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import patience
import psycopg
import pytest
from manual_pages import examples
from thorough import only_thorough, thorough

ROOT = Path(__file__).parents[2]
#: The examples of the manual page.
SHOW, KEPT = examples(ROOT / "man" / "pgsub-demo.1")
#: What suffices where it is about something else.
FEW = ["demo", "--rows", "1000"]


class Run:
    """``pgsub demo`` in a process of its own. All processes it starts, but the servers, inherit a mark.

    :param words: of the command line.
    :ivar stderr: lines so far.
    """

    def __init__(self, folder: Path, *words: str) -> None:
        self.mark = f"DEMO_TEST={uuid.uuid4()}"
        self.stderr: list[str] = []
        self._stdout = folder / "stdout"
        name, _, value = self.mark.partition("=")
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("PGSUB_", "PG"))}
        with self._stdout.open("wb") as stdout:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pgsub", *words],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=subprocess.PIPE,
                text=True,
                cwd=folder,
                env={**environment, "PYTHONPATH": str(ROOT), name: value},
            )

    def until(self, pattern: str) -> None:
        """Read stderr up to a line that matches."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.stderr.append(line.rstrip("\n"))
            if re.search(pattern, line):
                return
        pytest.fail(f"no {pattern!r} in:\n" + "\n".join(self.stderr))

    def end(self) -> int:
        """Read to the end."""
        assert self.process.stderr is not None
        self.stderr += self.process.stderr.read().splitlines()
        return self.process.wait()

    def found(self, pattern: str) -> str:
        """The group of the first match in stderr."""
        match = re.search(pattern, "\n".join(self.stderr), re.MULTILINE)
        assert match, "\n".join(self.stderr)
        return match[1]

    @property
    def folder(self) -> Path:
        """Where servers and state are."""
        return Path(self.found(r"servers in (\S+)"))

    def conninfo(self, side: str) -> str:
        """The connection string that was shown."""
        return self.found(rf"{side} +\(PostgreSQL \d+\): (.*)")

    def stdout(self) -> str:
        """All of it."""
        return self._stdout.read_text()

    def compared(self) -> dict[str, tuple[int, int, str]]:
        """The table of the comparison."""
        rows = self.stdout().partition("table\tpublisher\ttarget\tresult\n")[2].splitlines()
        return {name: (int(ours), int(theirs), result) for name, ours, theirs, result in (r.split("\t") for r in rows)}

    def processes(self) -> list[str]:
        """Command lines of what is left of it."""
        return [text for text in map(self._of_ours, Path("/proc").glob("[0-9]*")) if text]

    def _of_ours(self, process: Path) -> str:
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            marked = self.mark.encode() in (process / "environ").read_bytes()
        except OSError:  # ended meanwhile
            return ""
        return command if marked or str(self.folder) in command else ""

    def assert_nothing_left(self) -> None:
        """No process and no file."""
        deadline = time.monotonic() + patience.SECONDS
        while (self.processes() or self.folder.exists()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert self.processes() == []
        assert not self.folder.exists()


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Start a demo; whatever happens to the test, it ends."""
    runs: list[Run] = []

    def start(*words: str) -> Run:
        runs.append(Run(tmp_path, *words))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()
            run.end()
        stop = run.folder / "stop"
        if stop.exists():
            subprocess.run(["sh", str(stop)], check=True)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("words", [FEW, *thorough([SHOW])], ids=" ".join)
def test_the_demo_ends_with_equal_tables_and_leaves_nothing_behind(demo, words):
    run = demo(*words)
    assert run.end() == 0, "\n".join(run.stderr)
    compared = run.compared()
    assert len(compared) == 11
    assert all(ours == theirs > 0 and result == "equal" for ours, theirs, result in compared.values()), compared
    assert "\ndemo\trunning\t11 r\t" in run.stdout()
    steps = [line for line in run.stderr if re.match(r"\d\. ", line)]
    assert [int(step[0]) for step in steps] == list(range(1, len(steps) + 1))
    run.assert_nothing_left()


@only_thorough
def test_a_row_changed_behind_its_back_is_named_and_the_kept_servers_can_be_used_until_they_are_stopped(demo):
    run = demo(*KEPT)
    run.until("Apply live changes")
    with psycopg.connect(run.conninfo("target"), autocommit=True) as target:
        target.execute(
            "UPDATE ops.log SET message = 'tampered with' WHERE ctid = (SELECT ctid FROM ops.log WHERE level = 'ERROR'"
            " LIMIT 1)"
        )
    assert run.end() == 1
    assert run.found(r"^pgsub: error: (.*)") == "1 of 11 tables differ"
    assert run.found(r"(ops\.log: on the publisher: \(.*ERROR.*\))$")
    assert run.found(r"(ops\.log: on the target: \(.*tampered with.*\))$")
    compared = run.compared()
    assert compared.pop("ops.log")[2] == "2 rows differ"
    assert {result for _, _, result in compared.values()} == {"equal"}
    _assert_usable(run)
    assert subprocess.run(shlex.split(_command(run, "stop the servers")), check=False).returncode == 0
    run.assert_nothing_left()


def _command(run: Run, purpose: str) -> str:
    """What is printed to paste."""
    return run.found(rf"^   To {purpose}.*:\n +(\S.*)$")


def _assert_usable(run: Run) -> None:
    for side in ("publisher", "target"):
        with psycopg.connect(run.found(rf"^   {side}: (.*)")) as connection:
            assert connection.execute("SELECT count(*) > 0 FROM ops.log").fetchone() == (True,)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def paste(purpose: str, more: str = "") -> str:
        command = shlex.split(_command(run, purpose) + more)
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert "demo\tstopped\t11 r" in paste("see where it stands")
    with psycopg.connect(run.conninfo("publisher"), autocommit=True) as publisher:
        publisher.execute("INSERT INTO ops.log (message) VALUES ('by hand')")
    paste("serve the subscription again", " --until-caught-up --timeout 60s")
    with psycopg.connect(run.conninfo("target")) as target:
        assert target.execute("SELECT count(*) FROM ops.log WHERE message = 'by hand'").fetchone() == (1,)
    paste("drop the subscription")
    with psycopg.connect(run.conninfo("publisher")) as publisher:
        assert publisher.execute("SELECT slot_name FROM pg_replication_slots").fetchall() == []


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_an_interrupted_and_even_a_killed_demo_leaves_nothing_behind(demo, number, code):
    run = demo(*FEW)
    run.until("created replication slot")
    assert run.processes()
    run.process.send_signal(number)
    assert run.end() == code
    run.assert_nothing_left()
