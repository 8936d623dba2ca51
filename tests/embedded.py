"""The demo's embedded servers with what tests ask of them: a password, a crash, a faster start, looks into the log.

The further verbs are those of the server's own test class, ``src/test/perl/PostgreSQL/Test/Cluster.pm``.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import signal
import subprocess
import time
from functools import cache
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from pgsub.common.errors import PgsubError
from pgsub.demo import servers
from pgsub.demo.binaries import find_binaries, initdb, run_program, server_folder

#: Small packages of the server lack it; then every server has an initdb of its own.
_RESET = "pg_resetwal"


class Server(servers.Server):
    """A server of the demo that can do more.

    :param password: of the superuser; with it TCP connections need ``scram-sha-256``, else they are trusted.
    """

    def __init__(self, *args: Any, password: str | None = None, binaries: Path | None = None, **more: Any) -> None:
        super().__init__(*args, binaries=binaries, **more)
        self.password = password
        self._template = template(binaries)

    def init(self) -> None:
        """Make the cluster and its configuration."""
        super().init()
        if self.password is not None:
            self.start()
            with psycopg.connect(make_conninfo("", host=str(self.folder), port=self.port, user="postgres")) as session:
                statement = sql.SQL("ALTER ROLE postgres PASSWORD {}").format(sql.Literal(self.password))
                session.execute(statement)
            self.stop()
            rules = [f"host {database} all 127.0.0.1/32 scram-sha-256" for database in ("all", "replication")]
            (self.data / "pg_hba.conf").write_text("\n".join(["local all all trust", *rules, ""]))

    def _make_cluster(self) -> None:
        self._template.copy_to(self.data)

    def _temporary(self) -> list[Path]:
        return [*([self._template.folder] if self._template.folder else []), *super()._temporary()]

    def conninfo(self, dbname: str = "postgres", user: str = "postgres", **more: str) -> str:
        """A connection string over TCP; it carries the superuser's password if there is one."""
        if self.password is not None and user == "postgres":
            more = {"password": self.password, **more}
        return super().conninfo(dbname, user, **more)

    def restart(self, mode: servers.StopMode = "fast") -> None:
        """Stop and start, on the same port."""
        self.stop(mode)
        self.start()

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

    def reload(self) -> None:
        """Have the configuration read again; returns when a new session sees it."""
        with self.connect() as connection:
            before = connection.execute("SELECT pg_conf_load_time()::text").fetchone()
            connection.execute("SELECT pg_reload_conf()")
            while connection.execute("SELECT pg_conf_load_time()::text").fetchone() == before:
                time.sleep(0.01)

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


class Template:
    """One initdb for all servers of a version in this process: a copy of its result costs a quarter of it.

    :param binaries: as of :func:`find_binaries`.
    """

    def __init__(self, binaries: Path | None = None) -> None:
        self._binaries = binaries
        self.folder: Path | None = None

    def copy_to(self, data: Path) -> None:
        """A new cluster with a system identifier of its own.

        :param data: the data folder to make; its parent belongs to the servers' user.
        """
        programs = find_binaries(self._binaries)
        if not (programs / _RESET).exists():
            initdb(programs, data)
            return
        if self.folder is None:
            folder = server_folder("pgsub-template-")
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            initdb(programs, folder / "data")
            for segment in (folder / "data" / "pg_wal").glob("0*"):
                segment.unlink()  # a copy's is written anew
            self.folder = folder
        run_program(["cp", "-a", str(self.folder / "data"), str(data)])
        _new_system_identifier(data / "global" / "pg_control")
        run_program([str(programs / _RESET), "-D", str(data)])


@cache
def template(binaries: Path | None = None) -> Template:
    """The one of this process."""
    return Template(binaries)


def _new_system_identifier(control: Path) -> None:
    """Make a copied cluster a cluster of its own, as pg_createsubscriber.c's modify_subscriber_sysid() does.

    The checksum is the last field of ControlFileData, whose length differs by version: it is found by its value.
    """
    content = bytearray(control.read_bytes())
    for end in range(128, 512, 4):
        if int.from_bytes(content[end : end + 4], "little") == _crc32c(content[:end]):
            now = time.time_ns()
            fraction = now % 10**9 // 1000 << 12 | os.getpid() & 0xFFF
            content[:8] = (now // 10**9 << 32 | fraction).to_bytes(8, "little")
            content[end : end + 4] = _crc32c(content[:end]).to_bytes(4, "little")
            control.write_bytes(content)
            return
    raise PgsubError("pg_control has an unknown layout")


def _crc32c(data: bytes | bytearray) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF
