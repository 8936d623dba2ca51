"""A subscription whose way back meets no obstacle, and what is planted on its servers."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from fix_pair import MakePair, Pair
from fix_servers import Database

from pgsub.commands.switchover.obstacles.obstacle import Obstacle, Way
from pgsub.commands.switchover.obstacles.search import find
from pgsub.target.session import connect as target

if TYPE_CHECKING:
    from fix_servers import Servers

DDL = """CREATE TABLE t (id int PRIMARY KEY, v text, n int DEFAULT 1 CHECK (n > 0));
    CREATE TABLE parts (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);
    CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (0) TO (100);
    CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
    CREATE TABLE s (id serial PRIMARY KEY, o int REFERENCES t)"""
TABLES = "t, parts, s"
#: Tests connect as a superuser.
_OURS = "superuser"


@dataclass
class Scene:
    """A subscription of some tables, whose way back meets no obstacle."""

    pair: Pair
    way: Way
    roles: list[str] = field(default_factory=list)

    def look(self, giving: str | None = None, taking: str | None = None, **way: Any) -> list[Obstacle]:
        """Look for obstacles.

        :param giving: role of the session on the publisher; ``taking`` of that on the target.
        """
        return self.look_as(self.pair.sub, giving, taking, **way)

    def look_as(self, sub: Any, giving: str | None = None, taking: str | None = None, **way: Any) -> list[Obstacle]:
        """Look for obstacles of another definition."""
        with (
            contextlib.closing(session(self.pair.pubdb, giving)) as there,
            contextlib.closing(session(self.pair.subdb, taking)) as here,
        ):
            found = find(there, here, sub, replace(self.way, **way))
            assert there.info.transaction_status == here.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        return [one for one in found if not one.message.startswith(_OURS)]

    def database(self, server: str) -> Database:
        """The database on a server: giving or taking."""
        return self.pair.pubdb if server == "giving" else self.pair.subdb

    def role(self, name: str, *databases: Database, attributes: str = "LOGIN") -> str:
        """Create a role that is dropped at the end."""
        for database in databases or (self.pair.pubdb, self.pair.subdb):
            database.execute(f"CREATE ROLE {name} {attributes}")
        self.roles.append(name)
        return name


def session(database: Database, role: str | None = None) -> psycopg.Connection:
    """A session as the command opens it."""
    name = "" if role is None else f" user={role}"
    return target.connect(database.conninfo + name, "pgsub switchover", replica=False)


def paste(scene: Scene, one: Obstacle) -> list[str]:
    """Run the statements of a hint where it says."""
    assert one.hint is not None
    database, statements = scene.database(one.server), []
    for line in one.hint.split("\n"):
        if said := re.search(r"[Rr]un (?:this|one of these) on the (publisher|target)", line):
            database = scene.database({"publisher": "giving", "target": "taking"}[said[1]])
        if line.endswith(";"):
            database.execute(line)
            statements.append(line)
    return statements


@pytest.fixture
def scene(pair: MakePair) -> Iterator[Scene]:
    """A scene between the shared servers."""
    made = pair(
        DDL,
        pub=f"CREATE PUBLICATION p FOR TABLE {TABLES} WITH (publish_via_partition_root)",
        sub=f"CREATE PUBLICATION s_back FOR TABLE {TABLES} WITH (publish_via_partition_root)",
        origin="none",
    )
    found = Scene(made, Way("s_back", ("s_back",), made.subdb.conninfo))
    yield found
    for name in found.roles:
        for database in (made.pubdb, made.subdb):
            if database.value("SELECT true FROM pg_roles WHERE rolname = %s", name):
                database.execute(f"DROP OWNED BY {name} CASCADE")
                database.execute(f"DROP ROLE {name}")


def both(scene: Scene) -> tuple[Database, Database]:
    """The databases on the publisher and on the target."""
    return scene.pair.pubdb, scene.pair.subdb


@contextlib.contextmanager
def between(shared_servers: Servers, giving: str | None, taking: str | None, encoding: str = "UTF8") -> Iterator[Scene]:
    """A scene between servers of these versions.

    :param encoding: of the target.
    """
    publisher, target = shared_servers("publisher", giving), shared_servers("target", taking)  # skips before it creates
    pubdb, subdb = Database(publisher, "obstacles_of"), Database(target, "obstacles_to", encoding)
    with contextlib.ExitStack() as stack:
        for database in (pubdb, subdb):
            stack.callback(database.drop)
        for database, name in ((pubdb, "p"), (subdb, "s_back")):
            tables = f"FOR TABLE {TABLES} WITH (publish_via_partition_root)"
            database.execute(f"{DDL}; CREATE PUBLICATION {name} {tables}")
        pair = Pair(pubdb, subdb, origin="none")
        stack.callback(pair.close)
        yield Scene(pair.subscribe("r", None), Way("s_back", ("s_back",), subdb.conninfo))
