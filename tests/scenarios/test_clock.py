"""The clock is set forth and back by a day while a subscription runs; no system clock is touched.

Every process that is started with a :class:`Clock` reads its offset from a file, at every look: by libfaketime pgsub,
Spark's Java process with its workers, and in a second test both servers; where that is not to be had, what is Python.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import servers
from fix_program import ROOT, Cli, until
from fix_servers import Database, Pair
from servers_debian import NotAvailable, fetch_program
from thorough import only_thorough

from pgsub.demo import servers as demo_servers
from pgsub.demo.servers import Server

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

    :param folder: that whoever follows it may read.
    :param library: libfaketime, None for a clock of Python alone.
    :ivar environment: of a process that is to follow it.
    """

    def __init__(self, folder: Path, library: Path | None) -> None:
        self._file = folder / "offset"
        self.set(0)
        if library is None:
            (folder / "sitecustomize.py").write_text(_OF_PYTHON)
            self.environment = {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "TEST_CLOCK": str(self._file)}
            return
        copy = folder / library.name
        copy.write_bytes(library.read_bytes())
        copy.chmod(0o755)
        self.environment = {
            "LD_PRELOAD": str(copy),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DONT_RESET": "1",
        }

    def set(self, seconds: int) -> None:
        """Jump to so many seconds after or before the machine's own time."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{seconds:+d}\n")
        new.chmod(0o644)
        new.rename(self._file)


def libfaketime() -> Path:
    try:
        root = fetch_program("libfaketime", servers.FOLDER)
    except NotAvailable as error:
        pytest.skip(f"NOT TESTED: there is no libfaketime: {error}")
    return next(root.rglob("libfaketimeMT.so.1"))


@pytest.fixture(params=["python", pytest.param("libc", marks=only_thorough)])
def clock(request: pytest.FixtureRequest, tmp_path: Path) -> Clock:
    """Of pgsub and Spark."""
    folder = tmp_path / "clock"
    folder.mkdir()
    return Clock(folder, libfaketime() if request.param == "libc" else None)


@pytest.fixture
def servers_clock(publisher: Server) -> Iterator[Clock]:
    """Of servers."""
    folder = publisher.folder / "clock"
    folder.mkdir()
    folder.chmod(0o755)
    yield Clock(folder, libfaketime())
    shutil.rmtree(folder)


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


def test_a_clock_that_jumps_by_a_day_under_pgsub_and_spark_is_not_even_noticed(
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


@only_thorough
def test_clocks_of_the_servers_that_jump_lose_and_repeat_nothing(
    make_cli: Callable[[str, str], Cli],
    own_pair: Callable[..., Pair],
    servers_clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A walsender whose clock goes forth ends by its own timeout: it is come back to."""
    usual = demo_servers.environment
    monkeypatch.setattr(demo_servers, "environment", lambda: {**usual(), **servers_clock.environment})
    pair = own_pair()
    pubdb, subdb = pair.pubdb, pair.subdb
    for database in (pubdb, subdb):
        database.execute("CREATE TABLE a (id int PRIMARY KEY, t text); CREATE TABLE b (id int)")
    pubdb.execute("CREATE PUBLICATION p FOR TABLE a, b")
    it = Subscribed(make_cli(pubdb.conninfo, subdb.conninfo), pubdb, subdb, {})
    for offset in (DAY, -DAY, 0):
        servers_clock.set(offset)
        for database in (pubdb, subdb):
            database.wait("SELECT abs(extract(epoch FROM clock_timestamp()) - %s) < 600", time.time() + offset)
        for number in range(5):
            it.applied()
            pubdb.execute("INSERT INTO b VALUES (%s)", number)
    for table in ("a", "b"):
        query = f"SELECT count(*), sum(hashtextextended(x::text, 0)) FROM {table} x"
        subdb.wait(f"SELECT ({query.replace('count(*), ', '')}) = %s", pubdb.rows(query)[0][1])
        assert subdb.rows(query) == pubdb.rows(query)
    assert it.cli.status()["subenabled"] is True
    assert it.cli.stop(it.running) == 0
