"""Everything that the demo starts, and its end: two servers, the launcher, a folder.

The clean-up happens even after SIGKILL, because a watching shell reads a pipe, as for the servers themselves. Mirrors
the setup and the END block of ``src/test/perl/PostgreSQL/Test/Cluster.pm``.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from pgsub.catalog.locks import launcher_lock
from pgsub.common.errors import PgsubError
from pgsub.demo.binaries import dismiss, environment, find_binaries, identity, own_program, server_uid, start_watcher
from pgsub.demo.servers import Server, Setting

DATABASE = "demo"

_START_SECONDS = 60.0
_TIDY_SECONDS = 10.0
_STOP_SECONDS = 45.0  #: more than a launcher gives its workers

_SETTINGS: Mapping[str, Mapping[str, Setting]] = {
    # The minimum, so that all but tiny transactions are streamed before they commit.
    "publisher": {"logical_decoding_work_mem": "64kB"},
    "target": {"track_commit_timestamp": True},
}

#: Reads a pipe, to which only the demo writes, until its end. A line is the process to stop.
_WATCHER = """
while read -r line; do pid=$line; done
if [ -n "$pid" ]; then
    kill -TERM $pid 2>/dev/null
    n=0
    while kill -0 $pid 2>/dev/null && [ $n -lt 450 ]; do sleep 0.1; n=$((n+1)); done
    kill -KILL $pid 2>/dev/null
fi
n=0
until rm -rf "$1" 2>/dev/null || [ $n -ge 100 ]; do sleep 0.1; n=$((n+1)); done
"""

_STOP_SCRIPT = """#!/bin/sh
# Stops the servers that "pgsub demo --keep" left running, and removes all their files.
cd / || exit 1
# Files of the servers' user say which processes these are: none but its own are believed.
owner() {{
    if [ -d /proc/self ]; then stat -c %u "/proc/$1" 2>/dev/null; else ps -o uid= -p "$1" | tr -d ' '; fi
}}
pids=
for file in {folder}/*/data/postmaster.pid; do
    [ -f "$file" ] || continue
    pid=$(head -n 1 "$file")
    case $pid in '' | 0* | 1 | *[!0-9]*) continue ;; esac
    [ "$(owner "$pid")" = {uid} ] && kill -INT "$pid" 2>/dev/null && pids="$pids $pid"
done
for pid in $pids; do
    n=0
    while kill -0 "$pid" 2>/dev/null && [ $n -lt 600 ]; do sleep 0.1; n=$((n+1)); done
done
rm -rf {folder}
"""


class Stage:
    """A context that leaves nothing behind, unless :meth:`keep` was called.

    :ivar folder: this run's folder. The servers' user may enter it, only the caller may write to it.
    :ivar state_dir: the state folder of the demo's subscription.
    :ivar log: the launcher's log.
    """

    def __init__(self) -> None:
        self.servers: dict[str, Server] = {}
        self._launcher: subprocess.Popen[bytes] | None = None
        # /tmp instead of TMPDIR, because a socket's path is limited to about a hundred bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="pgsub-demo-", dir="/tmp"))
        self.folder.chmod(0o755)
        self.state_dir = self.folder / "state"
        self.log = self.folder / "pgsub.log"
        self._watcher = start_watcher(_WATCHER, self.folder)
        self._kept = False

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._kept:
            return
        self.stop_launcher()
        for server in self.servers.values():
            server.destroy()
        self._remove()
        dismiss(self._watcher)

    def _remove(self) -> None:
        """Remove the folder. Spark's JVM, which ends after the launcher, may still be cleaning up in it."""
        deadline = time.monotonic() + _TIDY_SECONDS
        while self.folder.exists() and time.monotonic() < deadline:
            shutil.rmtree(self.folder, ignore_errors=True)
            time.sleep(0.05)

    def conninfo(self, side: str) -> str:
        """Return the connection string of the demo's database.

        :param side: ``publisher`` or ``target``.
        """
        return self.servers[side].conninfo(DATABASE)

    # servers

    def start_servers(self) -> None:
        """Start both servers and make an empty database on each."""
        for side, settings in _SETTINGS.items():
            folder = self.folder / side
            folder.mkdir(mode=0o755)
            if os.geteuid() == 0:
                os.chown(folder, server_uid(), server_uid())
            server = self.servers[side] = Server(
                folder, settings=settings, fast=True, passfile=self.folder / "passfile"
            )
            server.init()
            server.start()
            with server.connect() as connection:
                connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(DATABASE)))

    def connect(self, side: str) -> psycopg.Connection:
        """Open a session in autocommit mode.

        :param side: ``publisher`` or ``target``.
        """
        return self.servers[side].connect(DATABASE)

    # launcher

    def start_launcher(self) -> None:
        """Start ``pgsub run``, which initializes Spark while others work."""
        command = own_program("run", "--state-dir", str(self.state_dir), "--log-file", str(self.log))
        with (self.folder / "launcher").open("wb") as errors:
            self._launcher = subprocess.Popen(
                **command,
                stdout=errors,
                stderr=errors,
                start_new_session=True,  # this process handles an interrupt from the terminal
            )
        assert self._watcher.stdin is not None
        self._watcher.stdin.write(f"{self._launcher.pid}\n".encode())
        self._watcher.stdin.flush()

    def await_launcher(self) -> None:
        """Wait until the launcher serves the state folder.

        :raises PgsubError: the launcher does not serve it in time.
        """
        lock = launcher_lock(self.state_dir)
        deadline = time.monotonic() + _START_SECONDS
        while lock.holder() is None:
            self.check_launcher()
            if time.monotonic() > deadline:
                raise PgsubError(f"pgsub run did not start within {_START_SECONDS:g} s", detail=self._last_words())
            time.sleep(0.05)

    def check_launcher(self) -> None:
        """Check that the launcher has not ended.

        :raises PgsubError: the launcher has ended. The detail is the end of its log.
        """
        if self._launcher is not None and self._launcher.poll() is not None:
            raise PgsubError(f"pgsub run has ended with {self._launcher.returncode}", detail=self._last_words())

    def _last_words(self) -> str | None:
        files = [file for file in (self.log, self.folder / "launcher") if file.exists()]
        text = "".join(file.read_text(errors="replace")[-2000:] for file in files)
        return text.strip() or None

    def stop_launcher(self) -> None:
        """Stop the launcher with SIGTERM, and wait."""
        if self._launcher is None:
            return
        self._launcher.terminate()
        try:
            self._launcher.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._launcher.kill()
            self._launcher.wait()
        self._launcher = None

    # Keeping the servers.

    def keep(self) -> Path:
        """Let the servers run without this process.

        :return: a script that stops and removes everything.
        :raises PgsubError: a server does not restart.
        """
        self.stop_launcher()
        script = self.folder / "stop"
        script.write_text(_STOP_SCRIPT.format(folder=shlex.quote(str(self.folder)), uid=server_uid()))
        try:
            for server in self.servers.values():
                server.stop()  # it is a child of this process, unlike pg_ctl's daemon
                _start_daemon(server)
        except BaseException:
            subprocess.run(["/bin/sh", str(script)], check=False)
            raise
        self._kept = True
        dismiss(self._watcher)
        return script


def _start_daemon(server: Server) -> None:
    log = server.folder / "log.kept"
    command = [str(find_binaries() / "pg_ctl"), "-D", str(server.data), "-l", str(log), "-w", "start"]
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "cwd": "/"}
    # An interrupt from the terminal must not reach the server.
    done = subprocess.run(command, env=environment(), check=False, start_new_session=True, **options, **identity())
    if done.returncode != 0:
        text = log.read_text(errors="replace")[-2000:].strip() if log.exists() else None
        raise PgsubError("pg_ctl could not start a server again", detail=text)
