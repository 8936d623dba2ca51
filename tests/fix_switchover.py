"""A subscription whose writes move between two databases, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fix_program import Cli, until, valid
from forked import Started
from psycopg.conninfo import make_conninfo
from switching_clients import TABLE, Clients

if TYPE_CHECKING:
    from fix_servers import Database


class Mover:
    """A subscription whose writes move between two databases."""

    def __init__(self, cli: Cli, databases: tuple[Database, Database], name: str) -> None:
        self.cli = cli
        self.databases = databases
        self.name = name
        self.side = 0  #: where clients write

    def __call__(self, *options: str, code: int = 0, kill: str | None = None) -> dict[str, Any]:
        """Run ``switchover`` in the direction that is next; return its document.

        :param kill: the step at which it is killed.
        """
        back = ["--back"] if self.side else []
        env = {"PGSUB_FAILPOINTS": f"switchover.{kill}=kill"} if kill else None
        ended = self.cli("switchover", self.name, *back, "--yes", "--json", *options, env=env)
        assert ended.returncode == (-9 if kill else code), ended.stdout + ended.stderr
        return {} if kill else valid("switchover", ended.stdout)

    def held(self, step: str, folder: Path, *options: str, verify: bool = False) -> Started:
        """Start ``switchover``, which stands still behind a step until there is a file ``go``; return once it does."""
        env = {"PGSUB_FAILPOINTS": f"switchover.{step}=pause:{folder / 'go'}", "PGSUB_FAILPOINTS_DIR": str(folder)}
        words = [*(["--back"] if self.side else []), "--yes", *([] if verify else ["--no-verify"]), *options]
        started = self.cli.start("switchover", self.name, *words, env=env)
        until(lambda: (folder / f"switchover.{step}").exists())
        return started

    def rows(self, side: int, query: str) -> list[tuple[Any, ...]]:
        """Ask one side in a session of its own: fences end those that there are."""
        with self.databases[side].connect() as session:
            return session.execute(query).fetchall()

    def alone(self, side: int, statements: str) -> None:
        """Run statements on one side in a session of its own, outside a transaction."""
        with self.databases[side].connect() as session:
            session.autocommit = True
            session.execute(statements.encode())

    @property
    def conninfos(self) -> tuple[str, str]:
        """Connection strings of both sides, for clients."""
        return self.databases[0].conninfo, self.databases[1].conninfo

    @property
    def active(self) -> str:
        """The subscription that replicates now."""
        return f"{self.name}_back" if self.side else self.name

    def subscriptions(self) -> list[dict[str, Any]]:
        """Those that ``status`` shows."""
        ended = self.cli("status", "--json")
        assert ended.returncode == 0, ended.stderr
        return list(valid("status", ended.stdout)["subscriptions"])

    def audit(self, clients: Clients) -> None:
        """Check that everything that was acknowledged is on both sides, once."""
        self.caught_up()
        here, there = (dict(self.rows(side, "SELECT id, (client, number)::text FROM writes")) for side in (0, 1))
        assert here == there
        lost = [one for one in clients.acknowledged if here.get(one.id) != f"({one.client},{one.number})"]
        assert not lost and not clients.faults
        assert len(set(here.values())) == len(here)

    def plant(self, side: int, statement: str) -> None:
        """Change rows of one side whatever the fence, as nobody notices."""
        with self.databases[side].connect() as session:
            session.execute("SET default_transaction_read_only = off; SET session_replication_role = replica")
            session.commit()
            session.execute(statement)

    def caught_up(self) -> None:
        """Wait until the other side has everything."""
        ended = self.cli("wait", self.active, "--for", "caught-up", "--timeout", "2m", "--even-if-stopped")
        assert ended.returncode == 0, ended.stderr


def moving(
    cli: Cli, databases: tuple[Database, Database], ways: tuple[str, str] | None = None, more: Sequence[str] = ()
) -> Mover:
    """Subscribe, and wait until it is caught up; the target is read-only for clients, as it is to be.

    :param ways: connection strings of pgsub, where they are not those of the databases.
    :param more: tables that are there besides.
    """
    publisher, target = databases
    tables = ", ".join(["writes", *more])
    for database in databases:
        database.execute(TABLE)
    publisher.execute(f"CREATE PUBLICATION p FOR TABLE {tables}")
    target.execute(f"CREATE PUBLICATION moved_back FOR TABLE {tables}; {_read_only(target)}")
    cli.connection, cli.target = ways or (publisher.conninfo, target.conninfo)
    made = Mover(cli, databases, "moved")
    assert cli.create("moved", "--no-wait").returncode == 0
    made.caught_up()
    return made


def _read_only(database: Database) -> str:
    return f'ALTER DATABASE "{database.name}" SET default_transaction_read_only = on'


@pytest.fixture
def mover(launcher: Cli, pubdb: Database, subdb: Database, request: pytest.FixtureRequest) -> Iterator[Mover]:
    """A subscription that the module's launcher serves; a parameter is more of pgsub's connection strings."""
    more = getattr(request, "param", {})
    ways = (make_conninfo(pubdb.conninfo, **more), make_conninfo(subdb.conninfo, **more))
    yield moving(launcher, (pubdb, subdb), ways)
    for (name,) in launcher.sql("SELECT subname FROM pg_subscription"):
        assert launcher("drop", name, "--yes").returncode == 0
