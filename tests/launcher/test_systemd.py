"""What the launcher tells systemd, and the unit that waits for it."""

import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from pgsub.launcher.systemd import ServiceManager

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(params=["path", "abstract"])
def manager(request, tmp_path, monkeypatch):
    """The socket of a service manager whose watchdog waits an hour."""
    path = str(tmp_path / "notify") if request.param == "path" else f"@{tmp_path.name}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(path.replace("@", "\0"))
        bound.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", path)
        monkeypatch.setenv("WATCHDOG_USEC", "3600000000")
        yield bound


def test_it_is_ready_alive_and_stopping(manager):
    told = ServiceManager()
    told.ready()
    told.alive()
    told.alive()  # the watchdog is fed twice in its time, not in every round
    told.stopping()
    assert [manager.recv(100) for _ in range(3)] == [b"READY=1", b"WATCHDOG=1", b"STOPPING=1"]
    with pytest.raises(BlockingIOError):
        manager.recv(100)


def test_children_do_not_speak_for_the_service(manager, monkeypatch):
    ServiceManager()
    assert "NOTIFY_SOCKET" not in os.environ and "WATCHDOG_USEC" not in os.environ


def test_without_a_service_manager_or_with_a_dead_one_nothing_happens(monkeypatch, tmp_path):
    for path in ("", str(tmp_path / "none")):
        monkeypatch.setenv("NOTIFY_SOCKET", path)
        monkeypatch.setenv("WATCHDOG_USEC", "x")
        told = ServiceManager()
        told.ready()
        told.alive()
        told.stopping()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_the_unit_is_accepted_by_systemd(tmp_path):
    unit = (EXAMPLES / "pgsub.service").read_text().replace("/usr/local/bin/pgsub", shutil.which("true") or "")
    (tmp_path / "pgsub.service").write_text(unit.replace("User=pgsub", "User=root"))
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "pgsub.service")]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, [line for line in ended.stderr.splitlines() if "pgsub.service" in line]) == (0, [])
