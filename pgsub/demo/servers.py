"""Embedded PostgreSQL servers: a private publisher and target for the demo and the tests.

The verbs are those of the server's own test class, ``src/test/perl/PostgreSQL/Test/Cluster.pm``: init, start, stop,
kill9, restart, append_conf, log_contains. A server ends only the processes it started, and ends itself when the
process that started it is killed: a watching shell reads a pipe and sees its end.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import psycopg
from psycopg import sql
from psycopg.abc import Params
from psycopg.conninfo import make_conninfo

from pgsub.common.errors import PgsubError
from pgsub.demo.binaries import environment, find_binaries, identity, server_folder, template

StopMode = Literal["smart", "fast", "immediate"]
Setting = str | int | float | bool

#: pg_ctl.c, set_mode()
_SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}

_DEFAULTS: dict[str, Setting] = {
    "listen_addresses": "127.0.0.1",
    "wal_level": "logical",
    "max_connections": 200,
    "max_wal_senders": 60,
    "max_replication_slots": 100,
    "max_prepared_transactions": 50,
    "shared_buffers": "64MB",
    "log_line_prefix": "%m [%p] %q%a ",
}

#: Runs as the server's user; reads to the end of a pipe that only the starting process writes to.
_WATCHER = """
read -r _
pid=$1
shift
kill -QUIT $pid 2>/dev/null
n=0
while kill -0 $pid 2>/dev/null && [ $n -lt 100 ]; do sleep 0.1; n=$((n+1)); done
rm -rf "$@"
"""


def free_port() -> int:
    """A free TCP port below the ephemeral range, so that it stays free while a server is restarted."""
    for port in random.SystemRandom().sample(range(15000, 32000), 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise PgsubError("no free TCP port found")


class Server:
    """One private server: TCP on the loopback only, superuser ``postgres``.

    :param folder: where data, log and socket live; made, and removed by :meth:`destroy`, if not given.
    :param port: 0 for a free one.
    :param settings: lines of its configuration, on top of what a publisher needs.
    :param fast: without fsync. Every crash of the server is safe with it, as long as the machine survives.
    :param password: of the superuser; with it TCP connections need ``scram-sha-256``, else they are trusted.
    :param binaries: folder of the server's programs; None: those that :func:`find_binaries` finds.
    """

    def __init__(
        self,
        folder: Path | None = None,
        port: int = 0,
        settings: Mapping[str, Setting] | None = None,
        *,
        fast: bool = False,
        password: str | None = None,
        binaries: Path | None = None,
    ) -> None:
        self._binaries = binaries
        self._template = template(binaries)
        self._own_folder = folder is None
        self.folder = server_folder() if folder is None else folder
        self.data = self.folder / "data"
        self.log = self.folder / "log"
        self.port = port or free_port()
        self.password = password
        self._settings = dict(_DEFAULTS, **({"fsync": False} if fast else {}), **(settings or {}))
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        try:
            self.init()
            self.start()
        except BaseException:
            self.destroy()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.destroy()

    def init(self) -> None:
        """initdb (or a copy of an earlier one with a system identifier of its own) and configuration."""
        self._template.copy_to(self.data)
        self.append_conf({"port": self.port, "unix_socket_directories": str(self.folder), **self._settings})
        if self.version >= 18 and "max_active_replication_origins" not in self._settings:
            self.append_conf({"max_active_replication_origins": 100})
        if self.password is not None:
            self.start()
            with self._connect_locally() as connection:
                statement = sql.SQL("ALTER ROLE postgres PASSWORD {}").format(sql.Literal(self.password))
                connection.execute(statement)
            self.stop()
            rules = [f"host {database} all 127.0.0.1/32 scram-sha-256" for database in ("all", "replication")]
            (self.data / "pg_hba.conf").write_text("\n".join(["local all all trust", *rules, ""]))

    @property
    def version(self) -> int:
        """The server's major version."""
        return int((self.data / "PG_VERSION").read_text())

    def append_conf(self, settings: Mapping[str, Setting]) -> None:
        """Add lines to postgresql.conf; they hold after :meth:`reload` or :meth:`restart`.

        :param settings: booleans become on and off; the rest is quoted.
        """
        with (self.data / "postgresql.conf").open("a") as file:
            for name, value in settings.items():
                text = ("off", "on")[value] if isinstance(value, bool) else str(value)
                file.write("{} = '{}'\n".format(name, text.replace("'", "''")))

    def start(self) -> None:
        """Start and wait until connections are accepted, as ``pg_ctl -w start``.

        :raises PgsubError: with the end of the server's log.
        """
        if self.running:
            return
        offset = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [str(find_binaries(self._binaries) / "postgres"), "-D", str(self.data)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=environment(),
                start_new_session=True,
                **identity(),
            )
        self._watch(self._process.pid)
        deadline = time.monotonic() + 60
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop("immediate")
                text = self.log.read_bytes()[offset:].decode(errors="replace")
                raise PgsubError("the embedded PostgreSQL server did not start", detail=text[-2000:].strip())
            time.sleep(0.01)

    def _ready(self) -> bool:
        """The last line of postmaster.pid says so (pg_ctl.c, wait_for_postmaster_start())."""
        try:
            lines = (self.data / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        return len(lines) >= 8 and int(lines[0]) == self.pid and lines[7].strip() in ("ready", "standby")

    def _watch(self, pid: int) -> None:
        temporary = [
            str(folder) for folder in (self._template.folder, self.folder if self._own_folder else None) if folder
        ]
        self._watcher = subprocess.Popen(
            ["/bin/sh", "-c", _WATCHER, "sh", str(pid), *temporary],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=environment(),
            start_new_session=True,
            **identity(),
        )

    def stop(self, mode: StopMode = "fast") -> None:
        """Stop and wait; nothing happens to a server that does not run.

        :param mode: as of ``pg_ctl stop``; ``immediate`` is a crash of the server.
        """
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(_SIGNALS[mode])
        self._reap()

    def kill9(self) -> None:
        """Kill the postmaster and everything below it, without a word; returns when all of it is gone."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGSTOP)  # or it would start new children meanwhile
        children = _children(self._process.pid)
        for pid in [*children, self._process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self._reap()
        while any(map(_runs, children)):  # a new postmaster would not start while one has the shared memory
            time.sleep(0.01)

    def _reap(self) -> None:
        assert self._process is not None
        self._process.wait()
        self._process = None
        if self._watcher is not None:
            self._watcher.kill()  # before its pipe is closed: the pid it knows is free now
            self._watcher.communicate()
            self._watcher = None

    def restart(self, mode: StopMode = "fast") -> None:
        """Stop and start, on the same port."""
        self.stop(mode)
        self.start()

    def reload(self) -> None:
        """Have the configuration read again; returns when a new session sees it."""
        with self.connect() as connection:
            before = connection.execute("SELECT pg_conf_load_time()").fetchone()
            connection.execute("SELECT pg_reload_conf()")
            while connection.execute("SELECT pg_conf_load_time()").fetchone() == before:
                time.sleep(0.01)

    def destroy(self) -> None:
        """Stop at once and remove what this object made."""
        self.stop("immediate")
        if self._own_folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def running(self) -> bool:
        """Whether the postmaster lives."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """The postmaster's process id."""
        return None if self._process is None else self._process.pid

    def conninfo(self, dbname: str = "postgres", user: str = "postgres", **more: str) -> str:
        """A connection string over TCP; it carries the superuser's password if there is one."""
        if self.password is not None and user == "postgres":
            more = {"password": self.password, **more}
        return make_conninfo("", host="127.0.0.1", port=self.port, dbname=dbname, user=user, **more)

    def connect(self, dbname: str = "postgres", user: str = "postgres", **more: str) -> psycopg.Connection:
        """A session in autocommit mode."""
        return psycopg.connect(self.conninfo(dbname, user, **more), autocommit=True)

    def _connect_locally(self) -> psycopg.Connection:
        return psycopg.connect(make_conninfo("", host=str(self.folder), port=self.port, user="postgres"))

    def query(self, query: str, dbname: str = "postgres", params: Params | None = None) -> list[tuple[Any, ...]]:
        """Run one statement in a session of its own.

        :return: its rows, none for a statement that returns none.
        """
        with self.connect(dbname) as connection:
            cursor = connection.execute(query.encode(), params)
            return cursor.fetchall() if cursor.description else []

    def log_contains(self, pattern: str, offset: int = 0) -> bool:
        """Whether the log holds a match.

        :param pattern: regular expression.
        :param offset: bytes of the log that do not count; ``log.stat().st_size`` of an earlier moment.
        """
        text = self.log.read_bytes()[offset:].decode(errors="replace")
        return re.search(pattern, text) is not None


def _children(parent: int) -> list[int]:
    """Child processes; /proc where there is one, as slim containers have no ps."""
    if Path("/proc/self/stat").exists():
        pairs = [_proc_pair(entry) for entry in Path("/proc").glob("[0-9]*/stat")]
        return [pid for pid, its_parent in pairs if its_parent == parent]
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    return [int(pid) for pid, its_parent in map(str.split, listing.splitlines()) if int(its_parent) == parent]


def _runs(pid: int) -> bool:
    """Whether it has not ended; one that has may wait for its new parent."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:  # no /proc, where nobody waits for long
        return not Path("/proc/self/stat").exists()


def _proc_pair(stat: Path) -> tuple[int, int]:
    try:
        after_name = stat.read_text(errors="replace").rpartition(")")[2].split()
    except OSError:  # ended meanwhile
        return 0, 0
    return int(stat.parent.name), int(after_name[1])
