"""The page of docs/tasks that moves a database is what happens, from PostgreSQL 15 to 18 and back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import task_pages
from fix_program import Cli
from fix_servers import Database

pytestmark = pytest.mark.long


@pytest.mark.own_spark  # its workers read the page's services
@pytest.mark.publishers("15")
def test_the_commands_of_the_page_that_moves_a_database_show_what_it_shows(
    make_cli: Callable[[str, str], Cli], pubdb: Database, subdb: Database
) -> None:
    cli = make_cli(pubdb.conninfo, subdb.conninfo)
    running = cli.launcher()
    task_pages.run(cli, {"old": pubdb, "new": subdb}, [task_pages.MOVE])
    assert cli.stop(running) == 0
    for database in (pubdb, subdb):
        database.close()  # whose session was ended
        assert database.value("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == 0
