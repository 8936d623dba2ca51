"""Who may use the demo's servers: whoever may, runs programs as their user."""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgsub.demo import stage
from pgsub.demo.binaries import identity, own_program, server_uid
from pgsub.demo.servers import Server


def test_nobody_connects_to_a_server_of_the_demo_without_the_password(tmp_path: Path) -> None:
    passfile = tmp_path / "passfile"
    with Server(fast=True, passfile=passfile) as server:
        assert server.query("SELECT 1") == [(1,)]
        assert stat.S_IMODE(passfile.stat().st_mode) == 0o600 and passfile.stat().st_uid == os.geteuid()
        words = {**conninfo_to_dict(server.conninfo()), "passfile": os.devnull}
        for host in ("127.0.0.1", str(server.folder)):
            with pytest.raises(psycopg.OperationalError, match="no password supplied"):
                psycopg.connect(make_conninfo("", **{**words, "host": host}))
        rules = [line for line in (server.data / "pg_hba.conf").read_text().split("\n") if line and line[0] != "#"]
        assert rules and all(line.split()[-1] == "scram-sha-256" for line in rules)
        assert "password" not in words
        secret = passfile.read_text().strip().rpartition(":")[2]
        assert [str(file) for file in server.folder.iterdir() if file.is_file() and secret in file.read_text()] == []


@pytest.mark.long
def test_the_demo_runs_nothing_that_others_left_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "pgsub").mkdir()
    for name in ("pgsub/__init__.py", "pgsub/__main__.py", "psycopg.py", "typer.py"):
        (tmp_path / name).write_text(f"open({str(mark)!r}, 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    with stage.Stage() as one:
        one.start_launcher()
        one.await_launcher()
    done = subprocess.run(**own_program("version"), capture_output=True, text=True)
    assert done.stdout.startswith("pgsub") and not mark.exists()


@pytest.mark.long
def test_the_servers_of_a_stage_have_their_passwords_in_a_file_of_the_caller() -> None:
    with stage.Stage() as one:
        one.start_servers()
        for side in one.servers:
            assert conninfo_to_dict(one.conninfo(side))["passfile"] == str(one.folder / "passfile")
            with one.connect(side) as session:
                assert session.execute("SELECT current_database()::text").fetchone() == (stage.DATABASE,)
        assert len((one.folder / "passfile").read_text().splitlines()) == 2


#: Nothing is killed by a test of what would be killed.
_RECORD = 'kill() {{ echo "$*" >>{}; return 1; }}\n'


def _killed(folder: Path, pid: str, uid: int) -> list[str]:
    data = folder / "servers" / "target" / "data"
    data.mkdir(parents=True)
    (data / "postmaster.pid").write_text(f"{pid}\nrest\n")
    calls = folder / "calls"
    script = stage._STOP_SCRIPT.format(folder=shlex.quote(str(folder / "servers")), uid=uid)
    record = _RECORD.format(shlex.quote(str(calls)))
    subprocess.run(["/bin/sh", "-c", record + script], check=True, timeout=60)
    assert not (folder / "servers").exists()
    return calls.read_text().splitlines() if calls.exists() else []


@pytest.mark.parametrize("pid", ["-1", "0", "1", "-INT -1", "", "x", "00002", "99999999999999999999", "2 3"])
def test_a_file_of_the_servers_user_has_the_stop_script_kill_nothing_else(tmp_path: Path, pid: str) -> None:
    assert _killed(tmp_path, pid, server_uid()) == []


def test_the_stop_script_ends_processes_of_the_servers_user_alone(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"], cwd="/", **identity()) as process:
        try:
            assert _killed(tmp_path / "other", str(process.pid), server_uid() + 1) == []
            assert _killed(tmp_path / "own", str(process.pid), server_uid()) == [f"-INT {process.pid}"]
        finally:
            process.kill()
