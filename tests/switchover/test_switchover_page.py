"""The page of docs/tasks that moves a database is what happens, from PostgreSQL 15 to 18 and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest
import task_pages
from embedded import Server
from fix_pooler import MakePooler
from fix_program import Cli, until
from fix_servers import Database
from fix_switchover import moving

from pgsub.demo.binaries import find_binaries

pytestmark = pytest.mark.long

Accounting = tuple[Database, Database]
_CREATE = "CREATE DATABASE accounting TEMPLATE template0 ENCODING 'UTF8' LOCALE 'C.UTF-8'"


@pytest.fixture
def accounting(publisher: Server, target: Server) -> Iterator[Accounting]:
    """The database that moves, which the old server has with a role for pgsub, and where it is to be on the new one."""
    publisher.query(_CREATE)
    publisher.query("CREATE ROLE pgsub LOGIN")
    old, new = (Database(server, "accounting", there=True) for server in (publisher, target))
    yield old, new
    for database in (new, old):
        with suppress(psycopg.errors.InvalidCatalogName):  # the page has not come so far
            database.drop()
        database.server.query("DROP ROLE IF EXISTS pgsub")


@pytest.mark.own_spark  # its workers read the page's services
@pytest.mark.publishers("15")
def test_the_commands_of_the_page_that_moves_a_database_show_what_it_shows(
    make_cli: Callable[[str, str], Cli], accounting: Accounting
) -> None:
    old, new = accounting
    cli = make_cli(old.conninfo, new.conninfo)
    running = cli.launcher()
    task_pages.run(cli, {"old": old, "new": new}, [task_pages.MOVE])
    assert cli.stop(running) == 0
    owner = "SELECT datdba::regrole::text FROM pg_database WHERE datname = current_database()"
    assert new.value(owner) == "pgsub"
    for database in accounting:
        database.close()  # whose session was ended
        assert database.value("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == 0


def test_the_pages_script_leads_the_clients_of_a_pooler_over_and_back(
    launcher: Cli, accounting: Accounting, make_pooler: MakePooler, tmp_path: Path
) -> None:
    old, new = accounting
    new.server.query(_CREATE)
    mover = moving(launcher, accounting)
    pooler = make_pooler([old], "session")
    script = _script(pooler.ini, pooler.port, tmp_path)

    def wrote_to() -> int | None:
        """The port of the server that a client has written to; none where it has to try again."""
        with suppress(psycopg.OperationalError, psycopg.errors.ReadOnlySqlTransaction):
            with psycopg.connect(pooler.conninfo("accounting"), autocommit=True) as session:
                insert = "INSERT INTO writes (client, number) VALUES (0, 0) RETURNING inet_server_port()"
                row = session.execute(insert).fetchone()
                assert row is not None
                return int(row[0])
        return None

    assert wrote_to() == old.server.port
    for taking in (new, old):
        mover("--no-verify", "--promote-command", str(script))
        assert until(wrote_to) == taking.server.port
        mover.side = 1 - mover.side
    assert launcher("drop", "moved", "--yes").returncode == 0


def _script(ini: Path, port: int, folder: Path) -> Path:
    """Write the page's script, with the places of the pooler that is here."""
    [text] = [text for language, text in task_pages.blocks(task_pages.MOVE) if language == "sh"]
    for there, here in (
        ("/etc/pgbouncer/pgbouncer.ini", str(ini)),
        ("psql -p 6432", f"psql -h 127.0.0.1 -p {port}"),
        ("psql ", f"{find_binaries() / 'psql'} "),
    ):
        assert there in text
        text = text.replace(there, here)
    script = folder / "lead-over"
    script.write_text(text)
    script.chmod(0o755)
    return script
