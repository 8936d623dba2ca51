"""What a copy may take of the machine's memory, with rows as wide as PostgreSQL's users make them."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest
from fix_program import until
from thorough import thorough

pytestmark = pytest.mark.long

MB = 1_000_000
WIDTH = 50 * MB
ROWS = 8
LIMIT = 120 * MB + 4 * WIDTH


class Workers(threading.Thread):
    """Watches the Python processes below a JVM until :meth:`close`.

    :param jvm: its process id.
    :ivar peaks: the most that each was ever resident (VmHWM: the kernel's own mark, no sample is too late for it as
        long as the process lives), bytes by process id.
    """

    def __init__(self, jvm: int) -> None:
        super().__init__(daemon=True)
        self._jvm = jvm
        self._closing = threading.Event()
        self.peaks: dict[int, int] = {}
        self.start()

    def run(self) -> None:
        while not self._closing.wait(0.05):
            self._look()

    def _look(self) -> None:
        found = dict(filter(None, map(_status, Path("/proc").glob("[0-9]*/status"))))
        below = {self._jvm}
        while more := {pid for pid, (_, parent, _) in found.items() if parent in below} - below:
            below |= more
        for pid in below:
            name, _, peak = found.get(pid, ("", 0, 0))
            if name.startswith(("python", "pgsub")):
                self.peaks[pid] = max(peak, self.peaks.get(pid, 0))

    def close(self) -> None:
        self._closing.set()
        self.join()
        self._look()


def _status(file: Path) -> tuple[int, tuple[str, int, int]] | None:
    with contextlib.suppress(OSError, KeyError):
        fields = dict(line.split(":", 1) for line in file.read_text().splitlines())
        return int(file.parent.name), (
            fields["Name"].strip(),
            int(fields["PPid"]),
            int(fields["VmHWM"].split()[0]) * 1024,
        )
    return None  # it ended meanwhile, or is the kernel's own


@pytest.fixture
def wide(cli, tables):
    """Table a with rows of 50 MB on the publisher, each between rows of a few bytes."""
    tables[0].execute("TRUNCATE a")
    tables[0].execute(
        "INSERT INTO a SELECT g, repeat(chr(65 + g / 10), CASE mod(g, 10) WHEN 5 THEN %s ELSE 5 END)"
        " FROM generate_series(1, %s) g",
        WIDTH,
        10 * ROWS,
    )
    return cli


@pytest.mark.parametrize("binary", ["--no-binary", *thorough(["--binary"])])
def test_a_copy_takes_120_mb_and_four_times_the_widest_row_at_most(wide, tables, binary):
    launcher = wide.launcher()
    jvm = wide.state / "run" / "jvm.pid"
    until(jvm.exists)
    workers = Workers(int(jvm.read_text()))
    assert wide.create("s", "--no-wait", binary).returncode == 0
    copying = set()

    def synchronized():
        copying.update(pid for (pid,) in wide.sql("SELECT pid FROM pg_stat_progress_copy WHERE relname = 'a'"))
        return wide.states() == {"a": "r", "b": "r"}

    until(synchronized, 150)
    workers.close()
    assert wide.stop(launcher) == 0
    same = "SELECT count(*), sum(hashtextextended(t, 0)) FROM a"
    assert tables[1].rows(same) == tables[0].rows(same)
    measured = copying & workers.peaks.keys()
    assert measured, (copying, workers.peaks)
    assert {pid: peak // MB for pid, peak in workers.peaks.items() if peak > LIMIT} == {}
