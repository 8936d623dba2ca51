"""A real pgbouncer before either server, in session and in transaction mode: refused, and nothing of it is disturbed.

Why in session mode, too: which mode it is cannot be seen from a session, and it may change.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import servers
from fix_program import Cli, nothing_created, one_error, until
from fix_servers import Database
from psycopg.conninfo import make_conninfo
from servers_debian import NotAvailable, fetch_program
from thorough import only_thorough

from pgsub.demo.binaries import identity
from pgsub.demo.servers import free_port

pytestmark = only_thorough
_INI = """
[databases]
{databases}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = {mode}
default_pool_size = 1
ignore_startup_parameters = options, extra_float_digits
"""


@pytest.fixture(scope="module")
def program() -> tuple[str, dict[str, str]]:
    """Its path, and the environment that it runs in."""
    if found := shutil.which("pgbouncer"):
        return found, dict(os.environ)
    try:
        root = fetch_program("pgbouncer", servers.FOLDER)
    except NotAvailable as error:
        pytest.skip(f"NOT TESTED: there is no pgbouncer: {error}")
    libraries = os.pathsep.join({str(file.parent) for file in root.rglob("*.so.*")})
    return str(root / "usr" / "sbin" / "pgbouncer"), {**os.environ, "LD_LIBRARY_PATH": libraries}


@pytest.fixture(params=["session", "transaction"])
def pooled(
    request: pytest.FixtureRequest,
    program: tuple[str, dict[str, str]],
    tables: tuple[Database, Database],
    tmp_path: Path,
) -> Iterator[dict[Database, str]]:
    """Conninfos of both databases that lead through it."""
    port = free_port()
    lines = [f"{d.name} = host=127.0.0.1 port={d.server.port} user=postgres dbname={d.name}" for d in tables]
    ini = Path(tables[0].server.folder) / f"pgbouncer{port}.ini"
    ini.write_text(_INI.format(databases="\n".join(lines), port=port, mode=request.param))
    ini.chmod(0o644)
    path, environment = program
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([path, str(ini)], env=environment, stdout=log, stderr=log, cwd="/", **identity())
    conninfos = {d: make_conninfo(d.conninfo, port=port) for d in tables}

    def answers() -> bool:
        assert process.poll() is None, (tmp_path / "log").read_text()
        try:
            return [setting(conninfo, "server_version_num") for conninfo in conninfos.values()] != []
        except psycopg.OperationalError:
            return False

    try:
        until(answers)
        yield conninfos
    finally:
        process.terminate()
        process.wait()
        ini.unlink()


def setting(conninfo: str, name: str) -> str:
    """What a client of the pooler gets, on the only session that it has with the server."""
    with psycopg.connect(conninfo, autocommit=True) as session:
        row = session.execute("SELECT current_setting(%s)", (name,)).fetchone()
        assert row is not None
        return str(row[0])


def test_pgbouncer_is_refused_before_any_setting_of_its_sessions_is_changed(
    cli: Cli, tables: tuple[Database, Database], pooled: dict[Database, str]
) -> None:
    pubdb, subdb = tables
    before = setting(pooled[subdb], "search_path")
    cli.target = pooled[subdb]
    one_error(cli.create(), 3, "the target's connection goes through a connection pooler", "port of the server itself")
    assert setting(pooled[subdb], "search_path") == before
    assert setting(pooled[subdb], "session_replication_role") == "origin"
    cli.target, cli.connection = subdb.conninfo, pooled[pubdb]
    one_error(cli.create(), 3, "connection pooler", "port of the server itself")
    assert setting(pooled[pubdb], "search_path") == before
    nothing_created(cli, pubdb, subdb)


def test_pgbouncer_in_the_place_of_the_target_stops_a_subscription_clearly(
    cli: Cli, tables: tuple[Database, Database], pooled: dict[Database, str]
) -> None:
    pubdb, subdb = tables
    assert cli.create("s").returncode == 0
    pubdb.execute("INSERT INTO a VALUES (1000, 'x')")
    # behind the back of alter, which would refuse it: a name that leads elsewhere from now on
    one_error(cli("alter", "s", "--target", pooled[subdb]), 3, "goes through a connection pooler")
    service = cli.state.parent / "services"
    port = pooled[subdb].partition("port=")[2].split()[0]
    parameters = f"host=127.0.0.1\ndbname={subdb.name}\nuser=postgres\n"
    service.write_text(f"[led]\n{parameters}port={subdb.server.port}\n")
    env = {"PGSERVICEFILE": str(service)}
    assert cli("alter", "s", "--target", "service=led", env=env).returncode == 0
    service.write_text(f"[led]\n{parameters}port={port}\n")
    ended = cli("run", "--until-caught-up", "--timeout", "100s", env=env)
    one_error(ended, 3, "the target's connection goes through a connection pooler")
    service.write_text(f"[led]\n{parameters}port={subdb.server.port}\n")
    assert cli("run", "--until-caught-up", "--timeout", "100s", env=env).returncode == 0
    assert subdb.value("SELECT count(*) FROM a WHERE id = 1000") == 1
