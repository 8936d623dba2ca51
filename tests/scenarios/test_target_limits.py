"""A target that takes no writes for a while: its disk is full, it has no session to spare, it is a standby.

Each of them is real: the server itself says 53100, 53300 and 25006.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from fix_clusters import MakeServer, replayed
from fix_program import Cli, one_error, until
from fix_servers import Database
from psycopg.conninfo import make_conninfo

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")
#: Rows that a small file system has no room for.
_MANY = "INSERT INTO {} SELECT g, repeat('x', 1000) FROM generate_series(1000, 17000) g"


def subscribed(launcher: Cli, name: str, pubdb: Database, subdb: Database, *tables: str, target: str = "") -> None:
    """A subscription of tables with the columns of ``t``, which any error that counts would disable."""
    for table in tables:
        pubdb.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, v text); INSERT INTO {table} VALUES (1, 'copied')")
        if not subdb.value("SELECT to_regclass(%s) IS NOT NULL", table):
            subdb.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, v text)")
    pubdb.execute(f"CREATE PUBLICATION {name} FOR TABLE {tables[0]}")
    places = ["--connection", pubdb.conninfo, "--target", target or subdb.conninfo, "--publication", name]
    ended = launcher("create", name, *places, "--disable-on-error", "--timeout", "100s")
    assert ended.returncode == 0, ended.stderr


def told(launcher: Cli, name: str, sqlstate: str | None, *texts: str) -> None:
    """The error is shown with the server's own code and words, and disables nothing."""

    def shown() -> bool:
        found = launcher.status(name)["last_error"]
        return bool(found) and found["sqlstate"] == sqlstate and all(text in found["message"] for text in texts)

    until(shown)
    assert launcher.status(name)["subenabled"] is True


def goes_on(launcher: Cli, name: str, pubdb: Database, subdb: Database, *tables: str) -> None:
    """Everything arrives once, and the error is forgotten."""
    assert launcher("wait", name, "--for", "caught-up", "--timeout", "100s").returncode == 0
    for table in tables:
        query = f"SELECT count(*), sum(hashtextextended(x::text, 0)) FROM {table} x"
        assert subdb.rows(query) == pubdb.rows(query)
    until(lambda: launcher.status(name)["last_error"] is None)
    counted = launcher.sql("SELECT apply_error_count, sync_table_error_count FROM pgsub_stats")
    assert set(counted) <= {(0, 0)}


@contextlib.contextmanager
def small(folder: Path, owner: int) -> Iterator[Path]:
    """A file system of 8 MB; root's own way to make it larger is ``mount -o remount``."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size=8m,mode=0700,uid={owner}", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.long
@needs_root
def test_a_full_tablespace_stops_neither_subscription_nor_server_and_is_gone_on_with_once_there_is_room(
    launcher: Cli, pubdb: Database, make_server: MakeServer
) -> None:
    server = make_server(track_commit_timestamp=True)
    subdb = Database(server, "app")
    with small(server.folder / "small", server.data.stat().st_uid) as folder:
        subdb.execute(f"CREATE TABLESPACE small LOCATION '{folder}'")
        for table in ("t", "later"):
            subdb.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, v text) TABLESPACE small")
        subscribed(launcher, "cramped", pubdb, subdb, "t", "later")
        pubdb.execute("INSERT INTO t VALUES (2, 'there is room for it')")
        subdb.wait("SELECT count(*) = 2 FROM t")
        pubdb.execute(_MANY.format("t"))
        pubdb.execute("INSERT INTO t VALUES (3, 'behind it')")
        told(launcher, "cramped", "53100", "No space left on device")
        assert subdb.rows("SELECT id FROM t ORDER BY 1") == [(1,), (2,)]
        # a copy has no room either
        pubdb.execute(_MANY.format("later"))
        pubdb.execute("ALTER PUBLICATION cramped ADD TABLE later")
        assert launcher("refresh", "cramped", "--no-wait").returncode == 0
        until(lambda: server.log_contains(r"could not extend file[^\n]*No space(?s:.*)COPY later"))
        assert launcher.states()["later"] != "r"
        assert subdb.value("SELECT count(*) FROM later") == 0
        subprocess.run(["mount", "-o", "remount,size=128m", folder], check=True)
        goes_on(launcher, "cramped", pubdb, subdb, "t", "later")
        assert launcher("drop", "cramped", "--yes").returncode == 0
        subdb.close()
        server.stop()


def hogged(database: Database) -> list[psycopg.Connection]:
    """Sessions of others until the server has none to spare, and none of pgsub either."""
    taken = [database.connect()]
    ending = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name LIKE 'pgsub %'"
    while True:
        try:
            taken.append(database.connect())
        except psycopg.OperationalError as error:
            if "too many clients" not in str(error):
                raise
            if not taken[0].execute(ending.encode()).fetchall():
                return taken


@pytest.mark.long
def test_a_target_without_a_session_to_spare_is_tried_again_until_it_has_one(
    launcher: Cli, pubdb: Database, make_server: MakeServer
) -> None:
    few = {"max_connections": 12, "max_wal_senders": 2, "log_line_prefix": "%e "}
    subdb = Database(make_server(track_commit_timestamp=True, **few), "app")
    subscribed(launcher, "crowded", pubdb, subdb, "t")
    subdb.close()
    taken = hogged(subdb)
    pubdb.execute("INSERT INTO t VALUES (2, 'nobody can write it')")
    told(launcher, "crowded", None, "too many clients")  # libpq keeps the code to itself
    assert subdb.server.log_contains("53300 FATAL:  sorry, too many clients already")
    places = ["--connection", pubdb.conninfo, "--target", subdb.conninfo, "--publication", "crowded"]
    one_error(launcher("create", "other", *places), 5, "too many clients")
    for session in taken:
        session.close()
    goes_on(launcher, "crowded", pubdb, subdb, "t")
    assert launcher("drop", "crowded", "--yes").returncode == 0


@pytest.mark.long
def test_a_standby_in_the_place_of_the_target_is_waited_for_until_it_is_promoted(
    launcher: Cli, pubdb: Database, make_server: MakeServer
) -> None:
    primary = Database(make_server(track_commit_timestamp=True), "app")
    standby = Database(make_server(standby_of=primary.server), "postgres", there=True)
    both = {"host": "127.0.0.1,127.0.0.1", "port": f"{primary.server.port},{standby.server.port}"}
    subscribed(launcher, "led", pubdb, primary, "t", target=make_conninfo(primary.conninfo, **both))
    pubdb.execute("INSERT INTO t VALUES (2, 'of the primary')")
    primary.wait("SELECT count(*) = 2 FROM t")
    assert launcher("wait", "led", "--for", "caught-up", "--timeout", "100s").returncode == 0
    replayed(primary, standby)
    primary.close()
    primary.server.kill9()
    pubdb.execute("INSERT INTO t VALUES (3, 'while there is none')")
    told(launcher, "led", None, "a standby of the target answers")
    standby.close()
    promoted = Database(standby.server, "app", there=True)
    assert promoted.rows("SELECT id FROM t ORDER BY 1") == [(1,), (2,)]
    standby.server.query("SELECT pg_promote()")
    goes_on(launcher, "led", pubdb, promoted, "t")
    assert launcher("drop", "led", "--yes").returncode == 0
    promoted.close()
