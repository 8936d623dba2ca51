"""The two sides: CREATE SUBSCRIPTION on the target, and pgsub as its user runs it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from psycopg import sql

from benchmarks.arena import PUBLICATION, Arena, BenchmarkFailed, Database
from benchmarks.cases import Case
from benchmarks.sampling import Process, Processes, sessions

START_SECONDS = 120.0
_SYNCHRONIZED = "SELECT count(*) FROM {} WHERE srsubstate IN ('s', 'r')"


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the subscription, the same for both.

    :ivar apply_workers: of pgsub, where a case does not say how many; None for its default.
    """

    streaming: str = "parallel"
    binary: bool = False
    synchronous_commit: str = "off"
    apply_workers: str | None = None


class Subscriber(Protocol):
    """One side. Its name is that of its target database, its subscription and its slot.

    :ivar launched: seconds that its program needed until it could be given work, None where there is none.
    """

    name: str
    launched: float | None

    def create(self, connection: str, target: Database, case: Case, options: Options) -> None:
        """Create the subscription disabled, with its slot.

        :param connection: conninfo of the publisher.
        """

    def start_up(self, source: Database, target: Database, *, copy: bool) -> None:
        """What is not measured: returns when the work begins, or before it does."""

    def begin(self) -> None:
        """What is measured from its first moment; nothing where the work has begun already."""

    def synchronized(self, target: Database, tables: int) -> bool:
        """Whether that many tables are copied and handed over (``s`` or ``r``)."""

    def drop(self) -> None:
        """Remove the subscription and its slot."""

    def groups(self, processes: Processes) -> Mapping[str, list[Process]]:
        """Its processes by group."""

    def close(self) -> None:
        """End what it started."""


class Native:
    """The server's own subscriber.

    :param arena: both servers.
    """

    name = "native"
    launched: float | None = None

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._target: Database | None = None

    def create(self, connection: str, target: Database, case: Case, options: Options) -> None:
        """See :class:`Subscriber`."""
        self._target = target
        statement = sql.SQL(
            "CREATE SUBSCRIPTION {} CONNECTION {} PUBLICATION {} WITH (enabled = false, copy_data = {},"
            " streaming = {}, binary = {}, synchronous_commit = {})"
        )
        target.connection.execute(
            statement.format(
                sql.Identifier(self.name),
                sql.Literal(connection),
                sql.Identifier(PUBLICATION),
                sql.Literal(case.copy),
                sql.Literal(options.streaming),
                sql.Literal(options.binary),
                sql.Literal(case.synchronous_commit or options.synchronous_commit),
            )
        )

    def start_up(self, source: Database, target: Database, *, copy: bool) -> None:
        """Nothing: the start of its workers takes milliseconds and is part of its time."""

    def begin(self) -> None:
        """See :class:`Subscriber`."""
        self._execute("ALTER SUBSCRIPTION native ENABLE")

    def synchronized(self, target: Database, tables: int) -> bool:
        """See :class:`Subscriber`."""
        return target.value(_SYNCHRONIZED.format("pg_catalog.pg_subscription_rel")) == tables

    def drop(self) -> None:
        """See :class:`Subscriber`."""
        self._execute("ALTER SUBSCRIPTION native DISABLE")
        self._execute("DROP SUBSCRIPTION native")

    def groups(self, processes: Processes) -> Mapping[str, list[Process]]:
        """Walsenders, and the replication workers inside the target server."""
        return _servers(self._arena, processes)

    def close(self) -> None:
        """See :class:`Subscriber`."""

    def _execute(self, statement: str) -> None:
        assert self._target is not None
        self._target.execute(statement)


class Pgsub:
    """pgsub through its command line, with one ``pgsub run`` that is warm before anything is measured.

    :param name: of the side.
    :param one_jvm: whatever master a case names.
    :param one_session: one session applies, whatever a case says.
    """

    def __init__(self, arena: Arena, name: str = "pgsub", *, one_jvm: bool = False, one_session: bool = False) -> None:
        self._arena = arena
        self.name = name
        self._one_jvm = one_jvm
        self._one_session = one_session
        self._folder = Path(tempfile.mkdtemp(prefix="pgsub-bench-"))
        self._run: subprocess.Popen[bytes] | None = None
        self._served: tuple[str | None, str | None] = (None, None)  #: heap and master
        self._enabling: subprocess.Popen[bytes] | None = None
        self.launched: float | None = None

    def create(self, connection: str, target: Database, case: Case, options: Options) -> None:
        """See :class:`Subscriber`."""
        self.serve(case.heap, None if self._one_jvm else case.master)
        applying = "1" if self._one_session else case.apply_workers or options.apply_workers
        self.command(
            *("create", self.name, "--connection", connection, "--target", target.conninfo),
            *("--publication", PUBLICATION, "--streaming", options.streaming, "--no-wait", "--no-enabled"),
            *("--synchronous-commit", case.synchronous_commit or options.synchronous_commit),
            "--copy-data" if case.copy else "--no-copy-data",
            "--binary" if options.binary else "--no-binary",
            *(("--copy-workers", str(case.copy_workers)) if case.copy_workers else ()),
            *(("--apply-workers", applying) if applying else ()),
            *(("--apply-mode", case.apply_mode) if case.apply_mode else ()),
        )

    def start_up(self, source: Database, target: Database, *, copy: bool) -> None:
        """From ``pgsub enable`` until the apply worker streams; with a copy, until the synchronization has begun.

        The launcher sees the change before the command has ended, so nobody may wait for that end first.
        """
        enabling = self.begin_command("enable", self.name)
        deadline = time.monotonic() + START_SECONDS
        while not self._begun(source, target, copy=copy):
            if time.monotonic() > deadline or enabling.poll():
                raise BenchmarkFailed(f"no worker started: {self._log_end()}")
            time.sleep(0.003)
        self._enabling = enabling

    def _begun(self, source: Database, target: Database, *, copy: bool) -> bool:
        if copy:
            return bool(target.value("SELECT bool_or(srsubstate <> 'i') FROM pgsub.subscription_rel"))
        return bool(source.value(f"SELECT active FROM pg_replication_slots WHERE slot_name = '{self.name}'"))

    def begin(self) -> None:
        """Nothing: the worker is at work."""

    def synchronized(self, target: Database, tables: int) -> bool:
        """See :class:`Subscriber`."""
        return target.value(_SYNCHRONIZED.format("pgsub.subscription_rel")) == tables

    def drop(self) -> None:
        """See :class:`Subscriber`."""
        if self._enabling is not None:
            self._enabling.wait()
        self.command("drop", self.name, "--yes")

    def groups(self, processes: Processes) -> Mapping[str, list[Process]]:
        """Both servers' sessions, the launcher, its JVM and the python workers below the JVM."""
        found = dict(_servers(self._arena, processes))
        if self._run is None:
            return found
        below = list(processes.below(self._run.pid))
        jvm = [process for process in below if process.name == "java"]
        workers = [process for process in below if process.name.startswith(("python", "pgsub"))]
        launcher = processes.by_pid.get(self._run.pid)
        return {**found, "launcher": [launcher] if launcher else [], "JVM": jvm, "python workers": workers}

    def restart(self) -> None:
        """Begin again from nothing, after a failure."""
        self.stop()
        shutil.rmtree(self._folder / "state", ignore_errors=True)

    def close(self) -> None:
        """End the launcher, and remove its folder."""
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def stop(self) -> None:
        """End the launcher in order; kill it when it does not end."""
        if self._run is None:
            return
        try:
            self._run.send_signal(signal.SIGTERM)
            self._run.wait(60)
        except subprocess.TimeoutExpired:
            self._run.kill()
            self._run.wait()
        self._run = None

    def kill(self) -> None:
        """End the launcher without a word, and with it whatever it started."""
        if self._run is not None:
            self._run.kill()
            self._run.wait()
            self._run = None

    def serve(self, heap: str | None = None, master: str | None = None) -> None:
        """Start ``pgsub run`` unless it runs with such a heap and master, and wait until its Spark is there."""
        if self._run is not None and self._run.poll() is None:
            if (heap, master) == self._served:
                return
            self.stop()
        self._served = (heap, master)
        asked = time.monotonic()
        self.begin_run(heap, master)
        while not self.jvm_started():
            if self._run is None or self._run.poll() is not None or time.monotonic() > asked + START_SECONDS:
                raise BenchmarkFailed(f"pgsub run did not start: {self._log_end()}")
            time.sleep(0.05)
        self.launched = time.monotonic() - asked

    def begin_run(self, heap: str | None = None, master: str | None = None) -> None:
        """Start ``pgsub run`` and wait for nothing."""
        submit = {"PYSPARK_SUBMIT_ARGS": f"--driver-memory {heap} pyspark-shell"} if heap else {}
        with (self._folder / "run.log").open("ab") as log:
            self._run = subprocess.Popen(
                [*self._program(), "run", *(("--master", master) if master else ())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **submit},
            )

    def jvm_started(self) -> bool:
        """Whether a program that serves the folder has its JVM."""
        return (self._folder / "state" / "run" / "jvm.pid").exists()

    def begin_command(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a command of pgsub, without what it prints, and wait for nothing."""
        quiet = subprocess.DEVNULL
        return subprocess.Popen([*self._program(), *arguments], stdin=quiet, stdout=quiet, stderr=quiet)

    def command(self, *arguments: str, code: int = 0) -> str:
        """Run a command of pgsub to its end; return what it printed.

        :raises BenchmarkFailed: it did not end with this code.
        """
        done = subprocess.run([*self._program(), *arguments], capture_output=True, text=True, check=False)
        if done.returncode != code:
            raise BenchmarkFailed(f"pgsub {arguments[0]} ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def _program(self) -> list[str]:
        return [sys.executable, "-m", "pgsub", "--state-dir", str(self._folder / "state")]

    def _log_end(self) -> str:
        log = self._folder / "run.log"
        return log.read_text(errors="replace")[-1000:].strip() if log.exists() else "no log"


def _servers(arena: Arena, processes: Processes) -> Mapping[str, list[Process]]:
    ignored = arena.own_backends()
    link = processes.by_pid.get(arena.link_pid or 0)
    return {
        **({"link": [link]} if link else {}),
        "publisher": sessions(processes, arena.publisher.pid, ignored),
        "target": sessions(processes, arena.target.pid, ignored),
    }
