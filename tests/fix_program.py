"""Fixtures of the commands' tests: the program as it is installed, in processes of its own, between real servers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import forked
import patience
import pytest
import shared_spark
from forked import Started
from jsonschema import Draft202012Validator

if TYPE_CHECKING:
    from fix_servers import Database

ROOT = Path(__file__).parents[1]
_REMOVED = ("PGSUB_", "PG", "SPARK_", "NO_COLOR", "CLICOLOR", "FORCE_COLOR", "CI", "PYTEST_")
_KEPT = ("PGSUB_SET_BASED",)  #: of make serial
_TABLES = "CREATE TABLE a (id int PRIMARY KEY, t text); CREATE TABLE b (id int PRIMARY KEY, n numeric);"


class Cli:
    """The program with a state folder of its own.

    :ivar connection: conninfo of the publisher, given with every :meth:`create`; ``target`` likewise.
    :ivar own_spark: every command starts its own JVM (:mod:`shared_spark`), as in tests marked so.
    """

    def __init__(self, state: Path, home: Path, connection: str, target: str) -> None:
        self.state = state
        self.connection = connection
        self.target = target
        self.own_spark = False
        kept = {key: value for key, value in os.environ.items() if key in _KEPT or not key.startswith(_REMOVED)}
        self._usual = {**kept, "PYTHONPATH": str(ROOT), "PGSUB_STATE_DIR": str(state), "HOME": str(home)}
        self.environment = dict(self._usual)
        self._running: list[Started] = []

    def __call__(
        self, *args: str, env: dict[str, str] | None = None, stdin: str = "", timeout: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command line to its end."""
        variables = self._variables(args, env)
        try:
            return forked.run(args, variables, stdin, timeout or patience.SECONDS)
        finally:
            if "PYSPARK_GATEWAY_PORT" in variables:
                shared_spark.ended()

    def _variables(self, args: Sequence[str], env: dict[str, str] | None) -> dict[str, str]:
        changed = {**dict(self.environment.items() - self._usual.items()), **(env or {})}
        served = any(process.poll() is None for process in self._running)
        joining = {} if self.own_spark else shared_spark.variables(args, changed, served=served)
        return {**self.environment, **joining, **(env or {})}

    def words(self, name: str, *options: str, publication: str | None = "p") -> list[str]:
        """The words of ``create`` between this object's servers."""
        words = ["create", name, "--connection", self.connection, "--target", self.target]
        return [*words, *(["--publication", publication] if publication else []), *options]

    def create(self, name: str = "s", *options: str, **more: Any) -> subprocess.CompletedProcess[str]:
        """``create`` between this object's servers."""
        return self(*self.words(name, *options), **more)

    def start(self, *args: str, env: dict[str, str] | None = None, printed: Path | None = None) -> Started:
        """Start a command line; killed at the end of the test if it still runs. stderr goes to a file.

        :param printed: a file for what it prints on standard output.
        """
        log = self.state.parent / f"stderr.{len(self._running)}"
        with log.open("w") as stderr, open(printed or os.devnull, "w") as stdout:
            variables = self._variables(args, env)
            process = forked.start(args, variables, stdout.fileno(), stderr.fileno())
        if "PYSPARK_GATEWAY_PORT" in variables:
            shared_spark.hold(process)
        self._running.append(process)
        process.log = log  # type: ignore[union-attr]
        return process

    def launcher(self, *args: str, env: dict[str, str] | None = None) -> Started:
        """Start ``pgsub run`` and wait until it holds its lock."""
        process = self.start("run", *args, env=env)
        until(lambda: (self.state / "launcher.lock").exists() and (self.state / "launcher.lock").read_text().strip())
        return process

    def stop(self, process: Started, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end.

        :return: the exit code.
        """
        process.send_signal(number)
        return process.wait(patience.SECONDS)

    def status(self, name: str = "s") -> dict[str, Any]:
        """The subscription's object in the document of ``status``, validated."""
        ended = self("status", name, "--json")
        assert ended.returncode == 0, ended.stderr
        return valid("status", ended.stdout)["subscriptions"][0]

    def sql(self, query: str, *params: Any) -> list[tuple[Any, ...]]:
        """Read the state store as any SQLite program would."""
        with contextlib.closing(sqlite3.connect(f"file:{self.state / 'state.db'}?mode=ro", uri=True)) as store:
            return store.execute(query, params).fetchall()

    def states(self) -> dict[str, str]:
        """srsubstate by table."""
        return dict(self.sql("SELECT relname, srsubstate FROM pg_subscription_rel"))

    def close(self) -> None:
        """Kill what still runs; its JVM ends with it."""
        for process in self._running:
            if process.poll() is None:
                process.kill()
            process.wait()


def until(condition: Callable[[], Any], seconds: float | None = None) -> Any:
    """Poll until the condition gives something true; one that takes long is asked less often."""
    deadline = time.monotonic() + (seconds or patience.SECONDS)
    while True:
        asked = time.monotonic()
        if result := condition():
            return result
        assert asked < deadline, f"{condition}: still {result!r}"
        time.sleep(max(0.05, time.monotonic() - asked))


def valid(schema: str, text: str) -> dict[str, Any]:
    """Parse a document and validate it against a schema of the project."""
    rules = json.loads((ROOT / "pgsub" / "cli" / "schema" / f"{schema}.schema.json").read_text())
    document: dict[str, Any] = json.loads(text)
    Draft202012Validator(rules, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(document)
    return document


def one_error(ended: subprocess.CompletedProcess[str], code: int, *texts: str, hint: bool = True) -> str:
    """Check that a command ended with this code and one clear error that holds these texts.

    :return: what it said on stderr.
    """
    said = ended.stderr
    assert ended.returncode == code, said
    assert said.count("pgsub: error: ") == 1, said
    assert "Traceback" not in said and "unexpected" not in said, said
    assert ("HINT:  " in said[said.index("pgsub: error: ") :]) is hint, said  # the log before it may have others
    assert ended.stdout == "", ended.stdout
    for text in texts:
        assert text in said, f"{text!r} is not in {said!r}"
    return said


def nothing_created(cli: Cli, pubdb: Database, subdb: Database) -> None:
    """Check that neither server nor the state folder has anything of a subscription."""
    assert pubdb.rows("SELECT slot_name FROM pg_replication_slots WHERE database = current_database()") == []
    if subdb.value("SELECT to_regclass('pgsub.subscription') IS NOT NULL"):
        assert subdb.rows("SELECT subname FROM pgsub.subscription") == []
    if (cli.state / "state.db").exists():
        assert cli.sql("SELECT subname FROM pg_subscription") == []
    assert [path.name for path in cli.state.glob("passfiles/*")] == []
    assert [path.name for path in cli.state.glob("subscription-*.lock")] == []


def pytest_configure(config: pytest.Config) -> None:
    """Make the mark known."""
    config.addinivalue_line("markers", "own_spark: commands start a JVM of their own")


def pytest_unconfigure() -> None:
    """End what the commands shared."""
    shared_spark.end()


@pytest.fixture
def tables(pubdb: Database, subdb: Database) -> tuple[Database, Database]:
    """The tables a, with 100 rows, and b on both sides, and publication p of both."""
    for database in (pubdb, subdb):
        database.execute(_TABLES)
    pubdb.execute("INSERT INTO a SELECT g, 'row ' || g FROM generate_series(1, 100) g")
    pubdb.execute("CREATE PUBLICATION p FOR TABLE a, b")
    return pubdb, subdb


@pytest.fixture
def make_cli(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[str, str], Cli]]:
    """Make a :class:`Cli` between two servers."""
    made: list[Cli] = []

    def make(connection: str, target: str) -> Cli:
        base = tmp_path / f"cli{len(made)}"
        base.mkdir()
        made.append(Cli(base / "state", base, connection, target))
        made[-1].own_spark = request.node.get_closest_marker("own_spark") is not None
        return made[-1]

    yield make
    for cli in made:
        cli.close()


@pytest.fixture
def cli(make_cli: Callable[[str, str], Cli], tables: tuple[Database, Database]) -> Cli:
    """The program between the test's two databases, which have tables and a publication."""
    return make_cli(tables[0].conninfo, tables[1].conninfo)
