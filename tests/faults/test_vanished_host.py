"""A host that vanishes without a word: packets are really lost, in a network namespace with a line for each server."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import patience
import pytest
from fix_program import ROOT, Cli, until
from fix_servers import Database
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from thorough import only_thorough

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="a network namespace needs root and iproute2"
    ),
]
#: What an impatient user gives in a conninfo; without it the same takes a minute.
_SOON = {
    "tcp_user_timeout": "2000",
    "keepalives_idle": "1",
    "keepalives_interval": "1",
    "keepalives_count": "2",
    "connect_timeout": "2",
}


def ip(*words: str) -> None:
    """Run iproute2."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Line:
    """A pair of virtual interfaces; on this end a relay to a server, for that listens on loopback only."""

    def __init__(self, namespace: str, number: int, conninfo: str) -> None:
        self.name = f"{namespace}{number}"
        self._net = f"10.{os.getpid() % 200 + 20}.{number}"
        ip("link", "add", self.name, "type", "veth", "peer", "name", f"{self.name}n", "netns", namespace)
        ip("addr", "add", f"{self._net}.1/24", "dev", self.name)
        ip("link", "set", self.name, "up")
        ip("-n", namespace, "addr", "add", f"{self._net}.2/24", "dev", f"{self.name}n")
        ip("-n", namespace, "link", "set", f"{self.name}n", "up")
        given = conninfo_to_dict(conninfo)
        self._server = (str(given["host"]), int(str(given["port"])))
        self._listener = socket.create_server((f"{self._net}.1", 0))
        port = self._listener.getsockname()[1]
        self.conninfo = make_conninfo(conninfo, host=f"{self._net}.1", port=port)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                # as the server's own end of the line would be: it has to notice, too
                client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT):
                    client.setsockopt(socket.IPPROTO_TCP, option, 1)
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 2000)
                server = socket.create_connection(self._server)
                for one, other in ((client, server), (server, client)):
                    threading.Thread(target=self._relay, args=(one, other), daemon=True).start()

    def _relay(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                other.sendall(data)
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """From now on every packet is lost, in both directions; nobody is told."""
        subprocess.run(["tc", "qdisc", "add", "dev", self.name, "root", "netem", "loss", "100%"], capture_output=True)
        ip("link", "set", self.name, "down")

    def mend(self) -> None:
        """Packets go through again."""
        ip("link", "set", self.name, "up")
        subprocess.run(["tc", "qdisc", "del", "dev", self.name, "root"], capture_output=True)

    def close(self) -> None:
        """Take it away."""
        self._listener.close()
        subprocess.run(["ip", "link", "del", self.name], capture_output=True)


class Away(Cli):
    """The program in the namespace, with a line to each server."""

    lines: tuple[Line, Line]
    namespace: str

    def run_there(self, *args: str, stderr: Path) -> subprocess.Popen[bytes]:
        """Start a command line; it ends with the test."""
        command = ["ip", "netns", "exec", self.namespace, str(ROOT / ".venv" / "bin" / "pgsub"), *args]
        with stderr.open("wb") as said:
            process = subprocess.Popen(command, env=self.environment, stderr=said, stdin=subprocess.DEVNULL)
        self._running.append(process)  # type: ignore[arg-type]
        return process


@pytest.fixture
def away(tables: tuple[Database, Database], tmp_path: Path) -> Iterator[Callable[..., Away]]:
    """Makes the program; the conninfos have these parameters more."""
    with contextlib.ExitStack() as stack:

        def make(more: dict[str, str]) -> Away:
            namespace = f"pg{os.getpid() % 100000}"
            try:
                ip("netns", "add", namespace)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespace can be made: {error.stderr.decode().strip()}")
            stack.callback(subprocess.run, ["ip", "netns", "del", namespace], capture_output=True)
            ip("-n", namespace, "link", "set", "lo", "up")
            lines = [Line(namespace, number, one.conninfo) for number, one in enumerate(tables, 1)]
            for line in lines:
                stack.callback(line.close)
            cli = Away(tmp_path / "state", tmp_path, *(make_conninfo(line.conninfo, **more) for line in lines))
            stack.callback(cli.close)
            cli.lines, cli.namespace = (lines[0], lines[1]), namespace
            return cli

        yield make


def _outlives(cli: Away, tables: tuple[Database, Database], log: Path) -> None:
    pubdb, subdb = tables
    created = cli.run_there(*cli.words("s"), stderr=log)
    assert created.wait(patience.SECONDS) == 0, log.read_text()
    running = cli.run_there("run", stderr=log)

    def arrives(number: int) -> None:
        pubdb.execute("INSERT INTO a VALUES (%s, 'x')", number)
        until(lambda: subdb.value("SELECT count(*) FROM a WHERE id = %s", number) == 1)

    arrives(1000)
    for number, (line, who) in enumerate(zip(cli.lines, ("publisher", "target"), strict=True), 1001):
        line.cut()
        pubdb.execute("INSERT INTO b VALUES (%s, 1)", number)  # there is something to be said to the target
        until(lambda who=who: f"could not connect to the {who}" in log.read_text())
        line.mend()
        arrives(number)
    cli.lines[1].cut()
    pubdb.execute("INSERT INTO a VALUES (2000, 'x')")
    running.terminate()
    assert running.wait(patience.SECONDS) == 0, log.read_text()
    assert "Traceback" not in log.read_text()


def test_a_server_that_vanishes_is_noticed_and_come_back_to_and_holds_up_no_stop(
    away: Callable[..., Away], tables: tuple[Database, Database], tmp_path: Path
) -> None:
    """The words of the conninfo go before: with them it takes seconds."""
    _outlives(away(_SOON), tables, tmp_path / "stderr")


@only_thorough
def test_without_a_word_in_the_conninfo_it_takes_a_minute(
    away: Callable[..., Away], tables: tuple[Database, Database], tmp_path: Path
) -> None:
    _outlives(away({}), tables, tmp_path / "stderr")
