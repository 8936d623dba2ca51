"""A launcher that serves the subscriptions of all tests of a module: its Spark is started once."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from fix_program import Cli, until

if TYPE_CHECKING:
    from fix_servers import Database

_SLOTS = "SELECT slot_name FROM pg_replication_slots WHERE database = current_database()"
_names = (f"y{number}" for number in itertools.count(1))


def pytest_configure(config: pytest.Config) -> None:
    """Make the marks known."""
    config.addinivalue_line("markers", "unserved_first: of a file; tests without the common launcher come first in it")
    config.addinivalue_line("markers", "follows(*families): metrics that change in this scene")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests without the common launcher first in their file: while it runs, their commands cannot join its JVM."""
    files = {path: number for number, path in enumerate(dict.fromkeys(item.path for item in items))}
    items.sort(key=lambda item: (files[item.path], _comes_later(item)))


def _comes_later(item: pytest.Item) -> bool:
    marked = item.get_closest_marker("unserved_first") is not None
    return marked and "launcher" in getattr(item, "fixturenames", ())


@contextlib.contextmanager
def serving(base: Path, *options: str, **more: str) -> Iterator[Cli]:
    """Let a program's ``run`` serve its folder; it must still run at the end.

    :param base: an empty folder.
    :param options: of ``run``; ``more`` are environment variables.
    """
    cli = Cli(base / "state", base, "", "")
    running = cli.launcher(*options, env={"PGSUB_RETRY_SECONDS": "0.5", **more})
    cli.running = running  # type: ignore[attr-defined]
    try:
        yield cli
        assert running.poll() is None, running.log.read_text()  # type: ignore[attr-defined]
        assert cli.stop(running) == 0
    finally:
        cli.close()


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    """A program whose ``run`` serves the folder for all tests of the module."""
    with serving(tmp_path_factory.mktemp("launcher")) as cli:
        yield cli


@pytest.fixture
def joined(launcher: Cli, tables: tuple[Database, Database]) -> Iterator[Cli]:
    """The launcher's program between the servers that have the tables a and b.

    At the end every subscription is dropped, whatever the test called them, and no slot may be left.
    """
    launcher.connection, launcher.target = (database.conninfo for database in tables)
    yield launcher
    for (subname,) in launcher.sql("SELECT subname FROM pg_subscription"):
        assert launcher("drop", subname, "--yes").returncode == 0
    assert tables[0].rows(_SLOTS) == []


@pytest.fixture
def served(joined: Cli) -> tuple[Cli, str]:
    """The launcher's program and the name of a subscription of the tables a and b, caught up."""
    name = next(_names)
    assert joined.create(name, "--no-wait").returncode == 0
    assert joined("wait", name, "--for", "caught-up", "--timeout", "2m").returncode == 0
    return joined, name


def lose(source: Database, slot: str) -> None:
    """Drop the slot of a running subscription."""
    of_it = "FROM pg_replication_slots WHERE slot_name = %s"
    source.wait(f"SELECT active {of_it}", slot)

    def gone() -> bool:
        source.execute(f"SELECT pg_terminate_backend(active_pid) {of_it}", slot)
        with contextlib.suppress(psycopg.Error):  # a worker was faster
            source.execute(f"SELECT pg_drop_replication_slot(slot_name) {of_it}", slot)
        return not source.rows(f"SELECT {of_it}", slot)

    until(gone)


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
