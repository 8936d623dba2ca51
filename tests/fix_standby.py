"""A subscription whose connection string also leads to a standby, which answers when its primary is gone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from fix_clusters import MakeServer, replayed
from fix_program import Cli
from fix_servers import Database


@dataclass(frozen=True)
class Followed:
    """Subscription ``s``, which nobody serves, to the table a of a primary; b is not published.

    :ivar standby: follows the primary, and has replayed everything so far.
    """

    cli: Cli
    primary: Database
    standby: Database

    def end_primary(self) -> None:
        """Stop the primary, so that the standby answers."""
        self.primary.close()
        self.primary.server.stop()


@pytest.fixture
def followed(make_server: MakeServer, make_cli: Callable[[str, str], Cli], subdb: Database) -> Followed:
    """A subscription of a primary and its standby."""
    primary = Database(make_server(autovacuum=False), "app")
    standby = Database(make_server(standby_of=primary.server), "app", there=True)
    for one in (primary, subdb):
        one.execute("CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY)")
    primary.execute("CREATE PUBLICATION p FOR TABLE a")
    hosts = f"host=127.0.0.1,127.0.0.1 port={primary.server.port},{standby.server.port} dbname=app user=postgres"
    cli = make_cli(hosts, subdb.conninfo)
    assert cli.create("s").returncode == 0
    replayed(primary, standby)
    return Followed(cli, primary, standby)
