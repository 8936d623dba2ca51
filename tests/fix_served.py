"""A launcher that serves the subscriptions of all tests of a module: its Spark is started once."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from fix_program import Cli

if TYPE_CHECKING:
    from fix_servers import Database

_SLOTS = "SELECT slot_name FROM pg_replication_slots WHERE database = current_database()"
_names = (f"y{number}" for number in itertools.count(1))


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    """A program whose ``run`` serves the folder for all tests of the module; it must still run after the last one."""
    base = tmp_path_factory.mktemp("launcher")
    cli = Cli(base / "state", base, "", "")
    running = cli.running = cli.launcher(env={"PGSUB_RETRY_SECONDS": "0.5"})  # type: ignore[attr-defined]
    try:
        yield cli
        assert running.poll() is None, running.log.read_text()  # type: ignore[attr-defined]
        assert cli.stop(running) == 0
    finally:
        cli.close()


@pytest.fixture
def served(launcher: Cli, tables: tuple[Database, Database]) -> Iterator[tuple[Cli, str]]:
    """The launcher's program and the name of a subscription of the tables a and b, caught up.

    At the end every subscription is dropped, whatever the test called them, and no slot may be left.
    """
    launcher.connection, launcher.target = (database.conninfo for database in tables)
    name = next(_names)
    assert launcher.create(name, "--no-wait").returncode == 0
    assert launcher("wait", name, "--for", "caught-up", "--timeout", "2m").returncode == 0
    yield launcher, name
    for (subname,) in launcher.sql("SELECT subname FROM pg_subscription"):
        assert launcher("drop", subname, "--yes").returncode == 0
    assert tables[0].rows(_SLOTS) == []


@contextlib.contextmanager
def writing(database: Database, *statements: str) -> Iterator[list[int]]:
    """Run statements again and again meanwhile, each time with the next number for ``{}``; gives the last one."""
    done, enough = [0], threading.Event()

    def write() -> None:
        with contextlib.closing(database.connect()) as session:
            while not enough.wait(0.002):
                done[0] += 1
                for statement in statements:
                    session.execute(statement.replace("{}", str(done[0])).encode())

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield done
    finally:
        enough.set()
        writer.join()
