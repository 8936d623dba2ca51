"""The whole program between two databases with a writer on the publisher: what every fault test does its harm to."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import forked
import patience
import psycopg
import pytest
import shared_spark
from forked import Started
from psycopg import sql

from pgsub.common.failpoints import POINTS

if TYPE_CHECKING:
    from embedded import Server
    from fix_servers import Database

_ROOT = Path(__file__).parents[1]
_GID = f"writer {os.getpid()}"  #: of a writer that prepares
_INHERITED = ("PATH", "HOME", "LANG", "JAVA_HOME", "XDG_CACHE_HOME", "TMPDIR", "PGSUB_SET_BASED")


class Writer(threading.Thread):
    """Transactions over all tables of a site, until :meth:`stop`; a publisher that goes away is waited for.

    A transaction that is lost or repeated shows: ``audit`` tables have no key, ``counter`` tables count.

    :param tables: names that begin with ``audit``, ``counter`` or ``keyed``.
    :param pause: seconds between transactions.
    :param prepare: prepare each transaction first.
    """

    def __init__(
        self, database: Database, tables: Sequence[str], pause: float = 0.02, *, prepare: bool = False
    ) -> None:
        super().__init__(name="writer", daemon=True)
        self._database = database
        self._statements = sql.SQL("; ").join([_change(name) for name in tables])
        self._pause = pause
        self._prepare = prepare
        self._running = threading.Event()
        self._resting = threading.Event()
        self._ended = False
        self.written = 0

    def run(self) -> None:
        """Thread body."""
        while not self._ended:
            try:
                with self._database.connect() as connection:
                    self._write(connection)
            except psycopg.Error:
                time.sleep(0.05)

    def _write(self, connection: psycopg.Connection) -> None:
        if connection.execute("SELECT FROM pg_prepared_xacts WHERE gid = %s", (_GID,)).fetchone() is not None:
            connection.execute(sql.SQL("COMMIT PREPARED {}").format(sql.Literal(_GID)))  # from before a crash
        while not self._ended:
            if not self._running.is_set():
                self._resting.set()
                self._running.wait(0.1)
                continue
            if self._prepare:
                gid = sql.Literal(_GID)
                connection.execute(sql.SQL("BEGIN; {}; PREPARE TRANSACTION {}").format(self._statements, gid))
                connection.execute(sql.SQL("COMMIT PREPARED {}").format(gid))
            else:
                connection.execute(sql.SQL("BEGIN; {}; COMMIT").format(self._statements))
            self.written += 1
            time.sleep(self._pause)

    def resume(self) -> None:
        """Write from now on."""
        self._resting.clear()
        self._running.set()

    def rest(self) -> None:
        """Write no more for now; the last transaction has ended when this returns."""
        self._resting.clear()
        self._running.clear()
        assert self._resting.wait(patience.SECONDS), "the writer cannot reach the publisher"

    def some(self, count: int) -> None:
        """Wait until so many more transactions were written."""
        wanted = self.written + count
        until(lambda: self.written >= wanted, "the writer does not get on")

    def stop(self) -> None:
        """End the thread."""
        self._ended = True
        self._running.set()
        self.join()


def _change(name: str) -> sql.Composable:
    table = sql.Identifier(name)
    if name.startswith("audit"):
        return sql.SQL("INSERT INTO {} VALUES (txid_current(), repeat('x', 20))").format(table)
    if name.startswith("counter"):
        return sql.SQL("UPDATE {} SET n = n + 1 WHERE id = 1 + txid_current() % 5").format(table)
    return sql.SQL(
        "INSERT INTO {0} VALUES (1000000 + txid_current(), 0, 'new');"
        "UPDATE {0} SET n = n + 1 WHERE id = 1 + txid_current() % 100;"
        "DELETE FROM {0} WHERE id = 1000000 + txid_current() - 7"
    ).format(table)


def until(condition: Callable[[], bool], what: str | Callable[[], str], seconds: float | None = None) -> None:
    """Poll until it holds, the less often the longer that takes.

    :param what: what is wrong if it never does, or what says so then.
    """
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        assert waited < (seconds or patience.SECONDS), what if isinstance(what, str) else what()
        time.sleep(min(max(waited / 20, 0.01), 0.1))


class Site:
    """A subscription between two databases, served by ``python -m pgsub`` in processes of its own.

    :param folder: private; gets the state folder, marks of failpoints and outputs.
    :param name: of the subscription; unique on the publisher, as its slot has it too.
    """

    def __init__(self, pubdb: Database, subdb: Database, folder: Path, name: str) -> None:
        self.pubdb, self.subdb, self.name = pubdb, subdb, name
        self.own_spark = False  #: every command starts its own JVM (:mod:`shared_spark`), as in tests marked so
        self.target = subdb.conninfo  #: what ``create`` is given; a proxy may stand there
        self.state = folder / "state"
        self.points = folder / "points"
        self.launcher_pid = folder / "launcher.pid"
        self.jvm_pid = self.state / "run" / "jvm.pid"
        self.output = folder / "output"
        self.tables: list[str] = []
        self.processes: list[Started] = []
        self.writer: Writer | None = None
        self.points.mkdir()

    def make(self, *tables: str, rows: int = 300, pause: float = 0.02, prepare: bool = False) -> Writer:
        """Create tables on both sides, rows and a publication on the publisher, and start to write.

        :param tables: names that begin with audit (no key), counter or keyed; with ``big`` in them: 100 times the rows.
        """
        self.tables = list(tables)
        for name in tables:
            columns = "id bigint, pad text" if name.startswith("audit") else "id bigint PRIMARY KEY, n int, pad text"
            for database in (self.pubdb, self.subdb):
                database.execute(f"CREATE TABLE {name} ({columns})")
        self.pubdb.execute(f"CREATE PUBLICATION p FOR TABLE {', '.join(tables)}")
        self.fill(rows)
        self.writer = Writer(self.pubdb, tables, pause, prepare=prepare)
        self.writer.start()
        self.writer.resume()
        return self.writer

    def fill(self, rows: int) -> None:
        """Rows for every table on the publisher."""
        for name in self.tables:
            values = "g, repeat('y', 50)" if name.startswith("audit") else "g, 0, repeat('y', 50)"
            count = rows * 100 if "big" in name else rows
            self.pubdb.execute(f"INSERT INTO {name} SELECT {values} FROM generate_series(1, {count}) g")

    def make_ready(self, *tables: str, prepare: bool = False) -> Writer:
        """A subscription of tables that are ``r`` from the start, not served yet, with a writer at work.

        :param prepare: with two_phase, and a writer that prepares its transactions.
        """
        writer = self.make(*tables, rows=0, prepare=prepare)
        writer.rest()
        self.pubdb.execute(f"TRUNCATE {', '.join(tables)}")
        self.end(self.create("--no-wait", "--no-copy-data", *(["--two-phase"] if prepare else [])))
        self.fill(300)
        writer.resume()
        return writer

    # the program

    def start(
        self, *args: str, points: Mapping[str, str] | None = None, printed: Path | None = None, **env: str
    ) -> Started:
        """Start a command.

        :param points: failpoints and their actions; LAUNCHER and JVM stand for the pid files.
        :param printed: a file of its own for what it prints on standard output.
        """
        actions = {name: self._action(text) for name, text in (points or {}).items()}
        kept = {key: os.environ[key] for key in _INHERITED if key in os.environ}
        changed = {
            "PGSUB_FAILPOINTS": ";".join(f"{name}={action}" for name, action in actions.items()),
            "PGSUB_FAILPOINTS_DIR": str(self.points),
            "PGSUB_RETRY_SECONDS": "0.5",
            **env,
        }
        environment = {**kept, "PYTHONPATH": str(_ROOT), **changed}
        served = any(process.poll() is None for process in self.processes)
        joining = {} if self.own_spark else shared_spark.variables(args, changed, served=served)
        with self.output.open("ab") as output, (printed or self.output).open("ab" if printed is None else "wb") as out:
            output.write(f"\n$ pgsub {' '.join(args)} {actions}\n".encode())
            output.flush()
            words = ["--state-dir", str(self.state), *args]
            process = forked.start(words, {**environment, **joining}, out.fileno(), output.fileno())
        if joining:
            shared_spark.hold(process)
        self.processes.append(process)
        self.launcher_pid.write_text(str(process.pid))
        return process

    def _action(self, text: str) -> str:
        return text.replace("LAUNCHER", str(self.launcher_pid)).replace("JVM", str(self.jvm_pid))

    def create(self, *args: str, points: Mapping[str, str] | None = None, **env: str) -> Started:
        """Start ``pgsub create``."""
        ends = ("--connection", self.pubdb.conninfo, "--target", self.target, "--publication", "p")
        return self.start("create", self.name, *ends, *args, points=points, **env)

    def run(self, *args: str, points: Mapping[str, str] | None = None, **env: str) -> Started:
        """Start ``pgsub run``; without arguments until everything is caught up."""
        bound = args or ("--until-caught-up", *self._within(1))
        return self.start("run", self.name, *bound, points=points, **env)

    def serve(self, points: Mapping[str, str] | None = None, **env: str) -> Started:
        """Start ``pgsub run`` until it is ended, at the latest long after the test was killed."""
        return self.start("run", self.name, *self._within(6), points=points, **env)

    @staticmethod
    def _within(times: int) -> tuple[str, str]:
        return "--timeout", f"{times * patience.SECONDS:.0f}s"

    def end(self, process: Started, code: int = 0, timeout: float | None = None) -> None:
        """Wait for a command's end and check its exit code."""
        try:
            found = process.wait(timeout or patience.SECONDS)
        except subprocess.TimeoutExpired:
            found = None
        assert found == code, f"exit code {found}, not {code}:\n{self.said()}"

    def killed(self, process: Started) -> None:
        """Wait until a failpoint has killed the launcher."""
        self.end(process, -signal.SIGKILL)

    def terminate(self, process: Started) -> None:
        """End a launcher in order."""
        process.terminate()
        self.end(process)

    def note(self, text: str) -> None:
        """A line between what the commands print, for whoever reads a failure."""
        with self.output.open("a") as output:
            output.write(f"{datetime.now(UTC):%F %T.%f} test: {text}\n")

    def crash(self, server: Server) -> None:
        """Crash a server and start it again."""
        self.note(f"crash of the server on port {server.port}")
        server.stop("immediate")
        server.start()
        self.note("it runs again")

    def said(self) -> str:
        """The end of what all commands printed."""
        return self.output.read_text(errors="replace")[-6000:]

    # failpoints

    def disarm(self, *names: str) -> None:
        """Let these points be passed until they are armed."""
        for name in names:
            assert name in POINTS, name
            (self.points / name).write_text("not armed")

    def arm(self, name: str) -> None:
        """From now on the next one to reach the point runs its action."""
        (self.points / name).unlink()

    def fired(self, *names: str) -> bool:
        """Whether these points have run their actions."""
        return all((self.points / name).exists() and not (self.points / name).read_text() for name in names)

    def wait_fired(self, *names: str) -> None:
        """Wait until they have."""
        until(
            lambda: self.fired(*names),
            lambda: f"not reached: {[n for n in names if not self.fired(n)]}\n{self.said()}",
        )

    # what is there

    def digest(self, database: Database) -> dict[str, Any]:
        """Count and a hash of the rows of every table, blind for order and not for repetition."""
        query = "SELECT count(*)::text || ' ' || coalesce(sum(hashtextextended(t::text, 0)), 0) FROM {} t"
        return {name: database.value(query.format(name)) for name in self.tables}

    def states(self) -> str:
        """srsubstate of all tables, in the order of their oids."""
        query = "SELECT coalesce(string_agg(srsubstate::text, '' ORDER BY srrelid), '') FROM pgsub.subscription_rel"
        try:
            return str(self.subdb.value(query))
        except psycopg.errors.UndefinedTable:
            return ""

    def all_ready(self) -> bool:
        """Whether every table is ``r``."""
        return set(self.states()) == {"r"}

    def ledger(self, column: str) -> int:
        """A position of apply's progress row."""
        return int(self.subdb.value(f"SELECT ({column} - '0/0')::bigint FROM pgsub.progress WHERE worker = 0"))

    def epoch(self) -> int:
        """Apply's epoch."""
        return int(self.subdb.value("SELECT epoch FROM pgsub.control WHERE worker = 0"))

    def worker_pid(self) -> int:
        """Process id of the python worker that runs the apply task, once status shows a living one."""
        query = "SELECT max(pid) FROM pg_stat_subscription WHERE worker_type = 'apply'"
        found: list[int] = []

        def seen() -> bool:
            pid = self.sqlite(query)[0][0]
            found[:] = [pid] if pid and Path(f"/proc/{pid}").exists() else []
            return bool(found)

        until(seen, "status shows no apply worker")
        return found[0]

    def sqlite(self, query: str) -> list[tuple[Any, ...]]:
        """Rows of the state store, which is not made by looking."""
        import sqlite3

        connection = sqlite3.connect(f"file:{self.state / 'state.db'}?mode=rw", timeout=10, uri=True)
        try:
            return connection.execute(query).fetchall()
        finally:
            connection.close()

    def wait_ready(self) -> None:
        """Wait until every table is ``r`` and needs no slot any more: whoever dies between the two drops it later."""
        query = "SELECT count(coalesce(sync_slot, spare_slot)) FROM pgsub.subscription_rel"
        until(
            lambda: self.all_ready() and self.subdb.value(query) == 0,
            lambda: f"tables: {self.states()}\n{self.said()}",
        )

    def wait_equal(self) -> None:
        """With the writer at rest: wait until the target has what the publisher has."""
        assert self.writer is not None
        self.writer.rest()
        wanted = self.digest(self.pubdb)
        until(lambda: self.digest(self.subdb) == wanted, lambda: f"{self._difference()}\n{self.said()}")

    def _difference(self) -> str:
        return f"publisher {self.digest(self.pubdb)}\n   target {self.digest(self.subdb)}"

    def check(self) -> None:
        """With the writer at rest and the launcher gone: both sides are equal and nothing is left over."""
        assert self.digest(self.subdb) == self.digest(self.pubdb), f"{self._difference()}\n{self.said()}"
        assert self.all_ready(), self.states()
        slots = self.pubdb.rows("SELECT slot_name FROM pg_replication_slots WHERE database = current_database()")
        assert slots == [(self.name,)]
        assert self.subdb.value("SELECT count(*) FROM pgsub.copy_chunk") == 0
        assert set(self.sqlite("SELECT srsubstate FROM pg_subscription_rel")) == {("r",)}

    def close(self) -> None:
        """End what still runs."""
        if self.writer is not None and self.writer.is_alive():
            self.writer.stop()
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()


class Child:
    """A worker's task in a process of its own, without Spark.

    :param function: ``module:name`` of the task function.
    :param spec: what it is called with; pickled.
    :param points: failpoints and their actions; their marks are files in ``folder``.
    """

    def __init__(self, folder: Path, function: str, spec: object, points: Mapping[str, str] | None = None) -> None:
        self._files = [Path(tempfile.mktemp(prefix=f"task-{end}-", dir=folder)) for end in ("spec", "result")]
        self._files[0].write_bytes(pickle.dumps(spec))
        self.process = subprocess.Popen(
            [sys.executable, "-c", _TASK, function, *map(str, self._files)],
            env={
                **os.environ,
                "PYTHONPATH": str(_ROOT),
                "PGSUB_FAILPOINTS": ";".join(f"{name}={action}" for name, action in (points or {}).items()),
                "PGSUB_FAILPOINTS_DIR": str(folder),
            },
        )

    def outcome(self, timeout: float | None = None) -> Any:
        """What the function returned, or the exception that it raised."""
        self.process.wait(timeout or patience.SECONDS)
        return pickle.loads(self._files[1].read_bytes())

    def close(self) -> None:
        """End it."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


_TASK = """
import importlib, pickle, sys
module, name = sys.argv[1].split(":")
try:
    result = getattr(importlib.import_module(module), name)(pickle.load(open(sys.argv[2], "rb")))
except Exception as error:
    result = error
pickle.dump(result, open(sys.argv[3], "wb"))
"""


@pytest.fixture
def child(tmp_path: Path, reached: Callable[[str], None]) -> Iterator[Callable[..., Child]]:
    """Makes children; their failpoints are counted as reached."""
    made: list[Child] = []

    def make(function: str, spec: object, points: Mapping[str, str] | None = None) -> Child:
        made.append(Child(tmp_path, function, spec, points))
        return made[-1]

    yield make
    for one in made:
        one.close()
    for point in POINTS:
        if (tmp_path / point).exists():
            reached(point)


@pytest.fixture
def site(
    request: pytest.FixtureRequest, tmp_path: Path, reached: Callable[[str], None]
) -> Iterator[Callable[..., Site]]:
    """Makes sites, by default between the shared servers; failpoints that fired are counted as reached."""
    made: list[Site] = []

    def make(pubdb: Database | None = None, subdb: Database | None = None) -> Site:
        folder = tmp_path / f"site{len(made)}"
        folder.mkdir()
        first = pubdb or request.getfixturevalue("pubdb")
        second = subdb or request.getfixturevalue("subdb")
        made.append(Site(first, second, folder, f"{first.name}_{len(made)}"))
        made[-1].own_spark = request.node.get_closest_marker("own_spark") is not None
        return made[-1]

    yield make
    for one in made:
        one.close()
        for point in POINTS:
            if one.fired(point):
                reached(point)
