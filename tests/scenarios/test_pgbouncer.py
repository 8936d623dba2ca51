"""A real pgbouncer before either server, in session and in transaction mode: refused, and nothing of it is disturbed.

Why in session mode, too: which mode it is cannot be seen from a session, and it may change.
"""

from __future__ import annotations

import psycopg
import pytest
from fix_pooler import MakePooler
from fix_program import Cli, nothing_created, one_error
from fix_servers import Database
from psycopg.conninfo import make_conninfo
from thorough import only_thorough

pytestmark = only_thorough


@pytest.fixture(params=["session", "transaction"])
def pooled(
    request: pytest.FixtureRequest, make_pooler: MakePooler, tables: tuple[Database, Database]
) -> dict[Database, str]:
    """Conninfos of both databases that lead through it."""
    port = make_pooler(tables, request.param).port
    return {database: make_conninfo(database.conninfo, port=port) for database in tables}


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
