"""Standbys and upgrades: what becomes of servers while subscriptions follow them.

The words are those of PostgreSQL::Test::Cluster (init_from_backup, set_standby_mode, promote).
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from embedded import Server

from pgsub.demo.binaries import environment, find_binaries, identity
from pgsub.demo.servers import Setting

if TYPE_CHECKING:
    from fix_servers import Database

#: ``make_server(setting=…)``: started, and destroyed at the end of the module.
MakeServer = Callable[..., Server]


def program(name: str, *words: str, folder: Path = Path("/")) -> str:
    """Run one of the server's programs as the servers' user.

    :return: what it printed.
    """
    command = [str(find_binaries() / name), *words]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder, env=environment(), **identity()
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def copied(server: Server) -> Server:
    """A base backup of a server, with a port of its own, not started."""
    copy = Server(fast=True)
    program("pg_basebackup", "-D", str(copy.data), "-d", server.conninfo(), "-c", "fast", "--no-sync")
    copy.append_conf({"port": copy.port, "unix_socket_directories": str(copy.folder)})
    return copy


def upgraded(old: Server, binaries: Path | None = None) -> Server:
    """A server that pg_upgrade made of one that is stopped; started.

    :param binaries: the old server's programs, the new one's by default.
    """
    new = Server(fast=True)
    new.init()
    if binaries is not None and binaries != find_binaries():  # 18 is the first version with checksums by default
        program("pg_checksums", "--disable", "-D", str(new.data))
    folders = {"-d": old.data, "-D": new.data, "-b": binaries or find_binaries(), "-B": find_binaries()}
    places = {**folders, "-s": new.folder, "-p": old.port, "-P": new.port}
    words = [str(word) for pair in places.items() for word in pair]
    program("pg_upgrade", "--no-sync", "-U", "postgres", *words, folder=new.folder)
    new.start()
    return new


@pytest.fixture(scope="module")
def make_server() -> Iterator[MakeServer]:
    """Make servers that the tests of a module may stop, promote and upgrade."""
    made: list[Server] = []

    def make(
        *,
        standby_of: Server | None = None,
        of: Server | None = None,
        binaries: Path | None = None,
        **settings: Setting,
    ) -> Server:
        """:param standby_of: a primary that it follows by a slot ``standby<n>``; ``of``: one that was made already."""
        if of is not None:
            made.append(of)
            return of
        if standby_of is None:
            made.append(Server(fast=True, binaries=binaries, settings=settings))
            made[-1].init()
        else:
            made.append(copied(standby_of))
            slot = f"standby{len(made)}"
            standby_of.query("SELECT pg_create_physical_replication_slot(%s, true)", params=(slot,))
            follow = {"primary_conninfo": standby_of.conninfo("postgres"), "primary_slot_name": slot}
            made[-1].append_conf({**follow, "hot_standby_feedback": True, **settings})
            (made[-1].data / "standby.signal").touch()
        made[-1].start()
        return made[-1]

    yield make
    for server in made:
        server.destroy()


def replayed(primary: Database, standby: Database) -> None:
    """Wait until a standby has replayed what its primary has written."""
    written = primary.value("SELECT pg_current_wal_flush_lsn()")
    standby.wait("SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", written)
