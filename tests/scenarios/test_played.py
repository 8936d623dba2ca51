"""What others make a publisher do, played to pgsub and to the server's own subscriber at once: both end alike.

The plots are those of PostgreSQL's contrib/test_decoding and of the regression tests of pglogical and spock, in words
of our own: ``plots/*.sql``, with the scripts that they come after. A plot begins with tables on all sides; an act that
the publisher plays is one transaction.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import patience
import pytest
from fix_engine import Task
from fix_pair import Pair
from fix_servers import Database, Servers

from pgsub.apply.rows import relation_cache
from pgsub.apply.worker import feedback

PLOTS = {file.stem: file.read_text() for file in sorted((Path(__file__).parent / "plots").glob("*.sql"))}
COUNTED = ("update_missing", "delete_missing")


@dataclass(frozen=True)
class Plot:
    """A script: tables whose rows are compared, and acts, each with who plays it."""

    tables: tuple[str, ...]
    acts: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, name: str) -> Plot:
        head, *acts = re.split(r"^--- (\w+)\n", PLOTS[name], flags=re.MULTILINE)
        compared = re.search(r"^-- compare: (.*)$", head, re.MULTILINE)
        assert compared is not None and "-- after: " in head, name
        return cls(tuple(compared[1].split(", ")), tuple(zip(acts[::2], acts[1::2], strict=True)))


class Stage:
    """A publisher, pgsub's target, and one of the server's own subscriber."""

    def __init__(self, pubdb: Database, subdb: Database, native: Database) -> None:
        self.pubdb, self.subdb, self.native = pubdb, subdb, native
        self.sides = {"everywhere": (pubdb, subdb, native), "targets": (subdb, native)}
        for database in self.sides["everywhere"]:
            database.execute("CREATE TABLE marker (n serial)")
        pubdb.execute(f"ALTER DATABASE {pubdb.name} SET logical_decoding_work_mem = '64kB'")
        pubdb.execute("CREATE PUBLICATION p FOR TABLE marker")
        native.execute(
            f"CREATE SUBSCRIPTION native CONNECTION '{pubdb.conninfo}' PUBLICATION p"
            f" WITH (slot_name = {pubdb.name}_native, copy_data = false, streaming = parallel)"
        )
        self.pair = Pair(pubdb, subdb, streaming="parallel").subscribe("r", None)
        self.task: Task | None = None
        self._counted: Counter[str] = Counter()

    def publish(self, plot: Plot) -> None:
        """Let both subscribe to the tables that are on the publisher."""
        for name in plot.tables:
            if self.pubdb.value("SELECT relkind FROM pg_class WHERE oid = to_regclass(%s)", name) == "r":
                rest = self.pubdb.value("SELECT obj_description(to_regclass(%s))", name) or ""
                self.pubdb.execute(f"ALTER PUBLICATION p ADD TABLE {name} {rest}")
                self.pair.add(name)
        self.native.execute("ALTER SUBSCRIPTION native REFRESH PUBLICATION WITH (copy_data = false)")

    def act(self, side: str, statements: str) -> None:
        """Play an act; what the targets are to do, they do at the same position."""
        if side == "publisher":
            with self.pubdb.connect() as session, session.transaction():
                session.execute(statements.encode())
            return
        self.together()
        for database in self.sides[side]:
            database.execute(statements)

    def together(self) -> None:
        """Wait until both have applied everything."""
        number = self.pubdb.value("INSERT INTO marker DEFAULT VALUES RETURNING n")
        deadline = time.monotonic() + patience.SECONDS
        for database in (self.native, self.subdb):
            while not database.value("SELECT count(*) FROM marker WHERE n = %s", number):
                assert time.monotonic() < deadline, f"{database.name} is behind"
                if self.task is not None and self.task.error is not None:
                    raise self.task.error
                self.task = self.task if self.task is not None and not self.task.done() else self.pair.start()
                time.sleep(0.01)

    def missed(self) -> tuple[dict[str, int], dict[str, int]]:
        """Changes whose row was not there, counted by pgsub and by the server since the last time."""
        query = "SELECT body ->> 'conflict_type', count(*) FROM pgsub.event GROUP BY 1"
        found = dict.fromkeys(COUNTED, 0) | dict(self.subdb.rows(query))
        self.subdb.execute("DELETE FROM pgsub.event")
        return found, self._native_missed(found)

    def _native_missed(self, wanted: dict[str, int]) -> dict[str, int]:
        columns = ", ".join(f"confl_{kind}" for kind in COUNTED)
        deadline = time.monotonic() + patience.SECONDS
        while True:  # it writes its counts once in a while
            [row] = self.native.rows(f"SELECT {columns} FROM pg_stat_subscription_stats WHERE subname = 'native'")
            since = {kind: row[n] - self._counted[kind] for n, kind in enumerate(COUNTED)}
            if since == wanted or time.monotonic() > deadline:
                self._counted.update(since)
                return since
            time.sleep(0.1)

    def close(self) -> None:
        self.pair.close()
        self.native.execute("DROP SUBSCRIPTION native")


@pytest.fixture(scope="module")
def stage(shared_servers: Servers) -> Iterator[Stage]:
    publisher, target = shared_servers("publisher", None), shared_servers("target", None)
    databases = [Database(server, f"played{n}") for n, server in enumerate((publisher, target, target))]
    before = feedback.MIRROR_SECONDS, relation_cache.CHECK_SECONDS
    # nobody mirrors, and triggers that the targets get are noticed by the next batch and not within a second
    feedback.MIRROR_SECONDS = relation_cache.CHECK_SECONDS = 0.0
    made = Stage(*databases)
    yield made
    made.close()
    feedback.MIRROR_SECONDS, relation_cache.CHECK_SECONDS = before
    for database in databases:
        database.drop()


@pytest.mark.parametrize("plot", PLOTS)
def test_both_subscribers_end_alike(stage: Stage, plot: str) -> None:
    played = Plot.of(plot)
    (side, tables), *acts = played.acts
    stage.act(side, tables)
    while acts and acts[0][0] == "targets":  # what they have beyond it from the start
        stage.act(*acts.pop(0))
    stage.publish(played)
    for act in acts:
        stage.act(*act)
    stage.together()
    for table in played.tables:
        query = f"SELECT t::text FROM {table} t ORDER BY 1"
        assert stage.subdb.rows(query) == stage.native.rows(query), table
    found, counted = stage.missed()
    assert found == counted
