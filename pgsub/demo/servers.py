"""Embedded PostgreSQL servers: a private publisher and target for the demo, which the tests extend.

The methods are those of the server's own test class, ``src/test/perl/PostgreSQL/Test/Cluster.pm``: init, start, stop,
append_conf. A server ends only processes that it started. It ends when the process that started it is killed, because a
watching shell then reads the end of a pipe.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import psycopg
from psycopg.abc import Params
from psycopg.conninfo import make_conninfo

from pgsub.common.errors import PgsubError
from pgsub.demo.binaries import dismiss, environment, find_binaries, identity, initdb, server_folder, start_watcher

StopMode = Literal["smart", "fast", "immediate"]
Setting = str | int | float | bool

#: pg_ctl.c, set_mode()
_SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}

_HOST = "127.0.0.1"
_DEFAULTS: dict[str, Setting] = {
    "listen_addresses": _HOST,
    "wal_level": "logical",
    "max_connections": 200,
    "max_wal_senders": 60,
    "max_replication_slots": 100,
    "max_prepared_transactions": 50,
    "shared_buffers": "64MB",
    "log_line_prefix": "%m [%p] %q%a ",
}

#: Runs as the server's user. Reads a pipe, to which only the starting process writes, until its end.
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
    """Find a free TCP port below the ephemeral range, so that it stays free while a server restarts."""
    for port in random.SystemRandom().sample(range(15000, 32000), 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise PgsubError("no free TCP port found")


def _follow_no_link(path: str, flags: int) -> int:
    """Open a file in a folder of the server's user, who could place a link there to misdirect root's writes."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o644)


class Server:
    """A private server: TCP only on the loopback address, superuser ``postgres``.

    :param folder: the folder of data, log and socket. Without it, a folder is made, and removed by :meth:`destroy`.
    :param port: 0 for a free one.
    :param settings: configuration in addition to what a publisher needs.
    :param fast: turn off fsync. A crash of the server is still safe, a crash of the machine is not.
    :param binaries: folder of the server's programs, None for :func:`find_binaries`.
    :param passfile: a private file that gets a line with the superuser's password, which every connection needs. With
        None, every user of this machine has full access, as in tests.
    """

    def __init__(
        self,
        folder: Path | None = None,
        port: int = 0,
        settings: Mapping[str, Setting] | None = None,
        *,
        fast: bool = False,
        binaries: Path | None = None,
        passfile: Path | None = None,
    ) -> None:
        self._binaries = binaries
        self._passfile = passfile
        self._own_folder = folder is None
        self.folder = server_folder() if folder is None else folder
        self.data = self.folder / "data"
        self.log = self.folder / "log"
        self.port = port or free_port()
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

    def __exit__(self, *exception: object) -> None:
        self.destroy()

    def init(self) -> None:
        """Make the cluster and its configuration."""
        self._make_cluster()
        self.append_conf({"port": self.port, "unix_socket_directories": str(self.folder), **self._settings})
        if self.version >= 18 and "max_active_replication_origins" not in self._settings:
            self.append_conf({"max_active_replication_origins": 100})

    def _make_cluster(self) -> None:
        password = None if self._passfile is None else secrets.token_urlsafe(24)
        initdb(find_binaries(self._binaries), self.data, password)
        if self._passfile is not None:
            with open(os.open(self._passfile, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a") as file:
                file.write(f"{_HOST}:{self.port}:*:postgres:{password}\n")

    @property
    def version(self) -> int:
        """The server's major version."""
        return int((self.data / "PG_VERSION").read_text())

    def append_conf(self, settings: Mapping[str, Setting]) -> None:
        """Add lines to postgresql.conf, which take effect after :meth:`reload` or :meth:`restart`.

        :param settings: booleans become on and off. Other values are quoted.
        """
        with open(self.data / "postgresql.conf", "a", opener=_follow_no_link) as file:
            for name, value in settings.items():
                text = ("off", "on")[value] if isinstance(value, bool) else str(value)
                file.write("{} = '{}'\n".format(name, text.replace("'", "''")))

    def start(self) -> None:
        """Start and wait until connections are accepted, like ``pg_ctl -w start``.

        :raises PgsubError: the server did not start. The detail is the end of its log.
        """
        if self.running:
            return
        offset = self.log.stat().st_size if self.log.exists() else 0
        with open(self.log, "ab", opener=_follow_no_link) as log:
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
        more = {"env": environment(), **identity()}
        self._watcher = start_watcher(_WATCHER, self._process.pid, *self._temporary(), **more)
        deadline = time.monotonic() + 60
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop("immediate")
                text = self.log.read_bytes()[offset:].decode(errors="replace")
                raise PgsubError("the embedded PostgreSQL server did not start", detail=text[-2000:].strip())
            time.sleep(0.01)

    def _ready(self) -> bool:
        """Read the state in postmaster.pid (pg_ctl.c, wait_for_postmaster_start())."""
        try:
            lines = (self.data / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        return len(lines) >= 8 and int(lines[0]) == self.pid and lines[7].strip() in ("ready", "standby")

    def _temporary(self) -> list[Path]:
        """Return the folders to remove when the process that started the server ends in any way."""
        return [self.folder] if self._own_folder else []

    def stop(self, mode: StopMode = "fast") -> None:
        """Stop and wait. Does nothing if the server does not run.

        :param mode: see ``pg_ctl stop``. ``immediate`` is a crash of the server.
        """
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(_SIGNALS[mode])
        self._reap()

    def _reap(self) -> None:
        assert self._process is not None
        self._process.wait()
        self._process = None
        if self._watcher is not None:
            dismiss(self._watcher)  # the PID that it watches is free now
            self._watcher = None

    def destroy(self) -> None:
        """Stop at once and remove everything that this object made."""
        self.stop("immediate")
        if self._own_folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def running(self) -> bool:
        """Whether the postmaster runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """The postmaster's process ID."""
        return None if self._process is None else self._process.pid

    def conninfo(self, dbname: str = "postgres", user: str = "postgres", **more: str) -> str:
        """Make a connection string for TCP. It names the password file, but does not contain the password."""
        if self._passfile is not None:
            more = {"passfile": str(self._passfile), **more}
        return make_conninfo("", host=_HOST, port=self.port, dbname=dbname, user=user, **more)

    def connect(self, dbname: str = "postgres", user: str = "postgres", **more: str) -> psycopg.Connection:
        """Open a session in autocommit mode."""
        return psycopg.connect(self.conninfo(dbname, user, **more), autocommit=True)

    def query(self, query: str, dbname: str = "postgres", params: Params | None = None) -> list[tuple[Any, ...]]:
        """Run one statement in its own session.

        :return: its rows, none for a statement that returns none.
        """
        with self.connect(dbname) as connection:
            cursor = connection.execute(query.encode(), params)
            return cursor.fetchall() if cursor.description else []
