"""A real PgBouncer before servers of the tests, where it is installed or may be fetched."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
import servers
from fix_faults import until
from servers_debian import NotAvailable, fetch_program

from pgsub.demo.binaries import identity
from pgsub.demo.servers import free_port

if TYPE_CHECKING:
    from fix_servers import Database

_INI = """
[databases]
{databases}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = trust
auth_file = {users}
admin_users = pgbouncer
pool_mode = {mode}
default_pool_size = 1
ignore_startup_parameters = options, extra_float_digits
"""
_USERS = '"postgres" ""\n"pgbouncer" ""\n'


@dataclass
class Pooler:
    """A PgBouncer that runs.

    :ivar ini: its configuration.
    :ivar port: where it listens, on the loopback.
    """

    ini: Path
    port: int

    def conninfo(self, name: str) -> str:
        """How a client of its reaches a database."""
        return f"host=127.0.0.1 port={self.port} dbname={name} user=postgres"

    def answers(self, name: str) -> bool:
        """Whether a client of its gets a session of the server."""
        try:
            with psycopg.connect(self.conninfo(name), autocommit=True) as session:
                return session.execute("SELECT true").fetchone() == (True,)
        except psycopg.OperationalError:
            return False


#: ``pooler([database, …], mode)``
MakePooler = Callable[[Sequence["Database"], str], Pooler]


@pytest.fixture(scope="session")
def pgbouncer() -> tuple[str, dict[str, str]]:
    """Its path, and the environment that it runs in."""
    if found := shutil.which("pgbouncer"):
        return found, dict(os.environ)
    if not servers.may_fetch_more():
        pytest.skip("NOT TESTED: there is no pgbouncer; make thorough fetches it on Debian")
    try:
        root = fetch_program("pgbouncer", servers.FOLDER)
    except NotAvailable as error:
        pytest.skip(f"NOT TESTED: there is no pgbouncer: {error}")
    libraries = os.pathsep.join({str(file.parent) for file in root.rglob("*.so.*")})
    return str(root / "usr" / "sbin" / "pgbouncer"), {**os.environ, "LD_LIBRARY_PATH": libraries}


@pytest.fixture
def make_pooler(pgbouncer: tuple[str, dict[str, str]], tmp_path: Path) -> Iterator[MakePooler]:
    """Start poolers that lead to databases by their names."""
    with ExitStack() as stack:
        yield lambda databases, mode: stack.enter_context(_running(pgbouncer, databases, mode, tmp_path))


@contextmanager
def _running(
    program: tuple[str, dict[str, str]], databases: Sequence[Database], mode: str, folder: Path
) -> Iterator[Pooler]:
    port = free_port()
    ini, users = (Path(databases[0].server.folder) / f"pgbouncer{port}.{kind}" for kind in ("ini", "users"))
    lines = "\n".join(f"{one.name} = host=127.0.0.1 port={one.server.port}" for one in databases)
    for file, text in ((ini, _INI.format(databases=lines, port=port, mode=mode, users=users)), (users, _USERS)):
        file.write_text(text)
        file.chmod(0o644)
    path, environment = program
    pooler = Pooler(ini, port)
    with (folder / f"pgbouncer{port}.log").open("wb") as log:
        process = subprocess.Popen([path, str(ini)], env=environment, stdout=log, stderr=log, cwd="/", **identity())

    def answers() -> bool:
        assert process.poll() is None, Path(log.name).read_text()
        return all(pooler.answers(one.name) for one in databases)

    try:
        until(answers, lambda: Path(log.name).read_text())
        yield pooler
    finally:
        process.terminate()
        process.wait()
        ini.unlink()
        users.unlink()
