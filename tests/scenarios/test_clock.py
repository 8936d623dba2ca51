"""The clock of pgsub, launcher and workers, is set forth and back by a day while a subscription runs.

No system clock is touched: each of its processes reads an offset from a file at every look. Neither the servers nor
Spark's Java process follow it.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from fix_program import ROOT, Cli, until
from fix_servers import Database

DAY = 86_400

#: What Python imports first of all.
_OF_PYTHON = """
import datetime, os, time
real = time.time
def now():
    with open(os.environ["TEST_CLOCK"]) as file:
        return real() + int(file.read())
time.time, time.time_ns = now, lambda: int(now() * 1e9)
class Datetime(datetime.datetime):
    @classmethod
    def now(cls, tz=None): return cls.fromtimestamp(now(), tz)
datetime.datetime = Datetime
"""


class Clock:
    """What the processes take for the time.

    :ivar environment: of a process that is to follow it.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "offset"
        self.set(0)
        (folder / "sitecustomize.py").write_text(_OF_PYTHON)
        self.environment = {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "TEST_CLOCK": str(self._file)}

    def set(self, seconds: int) -> None:
        """Jump to so many seconds after or before the machine's own time."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{seconds:+d}\n")
        new.chmod(0o644)
        new.rename(self._file)


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    folder = tmp_path / "clock"
    folder.mkdir()
    return Clock(folder)


class Subscribed:
    """A subscription of tables a and b whose launcher follows the clock."""

    def __init__(self, cli: Cli, pubdb: Database, subdb: Database, environment: Mapping[str, str]) -> None:
        self.cli, self.pubdb, self.subdb = cli, pubdb, subdb
        self._numbers = iter(range(1000, 2000))
        assert cli.create("s", "--no-wait").returncode == 0
        self.running = cli.launcher(env={**environment, "PGSUB_RETRY_SECONDS": "0.5"})
        self.applied()

    def applied(self) -> None:
        """What is written now arrives."""
        number = next(self._numbers)
        self.pubdb.execute("INSERT INTO a VALUES (%s, 'x')", number)
        self.subdb.wait("SELECT count(*) = 1 FROM a WHERE id = %s", number)

    def epoch(self) -> int:
        """Of the apply worker: another one than before has begun anew."""
        return int(self.subdb.value("SELECT epoch FROM pgsub.control WHERE worker = 0"))

    def now(self) -> float:
        """The launcher's time, by a conflict that it records."""
        number = next(self._numbers)
        self.pubdb.execute("INSERT INTO a VALUES (%s, 'x')", number)
        self.subdb.wait("SELECT count(*) = 1 FROM a WHERE id = %s", number)
        self.subdb.execute("DELETE FROM a WHERE id = %s", number)
        self.pubdb.execute("DELETE FROM a WHERE id = %s", number)

        def recorded() -> float | None:
            with sqlite3.connect(f"file:{self.cli.state / 'state.db'}?mode=ro", uri=True) as store:
                query = "SELECT strftime('%s', last_at) FROM pgsub_conflict WHERE key LIKE ?"
                row = store.execute(query, (f"%{number}%",)).fetchone()
            return float(row[0]) if row else None

        return float(until(recorded))


@pytest.mark.long
def test_a_clock_that_jumps_by_a_day_under_launcher_and_workers_is_not_even_noticed(
    cli: Cli, tables: tuple[Database, Database], clock: Clock
) -> None:
    pubdb, subdb = tables
    it = Subscribed(cli, pubdb, subdb, clock.environment)
    epoch = it.epoch()
    for offset in (DAY, -DAY):
        clock.set(offset)
        it.applied()
        assert abs(it.now() - time.time() - offset) < 600  # it did jump
        subdb.execute(f"CREATE TABLE later{offset + DAY} (id int)")
        pubdb.execute(f"CREATE TABLE later{offset + DAY} (id int); INSERT INTO later{offset + DAY} VALUES (1)")
        pubdb.execute(f"ALTER PUBLICATION p ADD TABLE later{offset + DAY}")
        ended = cli("refresh", "s", "--timeout", "100s", env=clock.environment)
        assert ended.returncode == 0, ended.stderr
        assert subdb.value(f"SELECT count(*) FROM later{offset + DAY}") == 1
        shown = cli.status()
        assert (shown["last_error"], shown["subenabled"]) == (None, True)
        assert cli("status", "s", "--check", env=clock.environment).returncode == 0
    assert it.epoch() == epoch
    assert cli.stop(it.running) == 0
