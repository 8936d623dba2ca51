"""What happens on a soak's publisher besides random transactions: bursts, huge rows, late rollbacks, new tables."""

from __future__ import annotations

import itertools
import os
import random
import signal
from contextlib import closing

from fix_faults import until
from soak_ground import LIMIT, NAME, Ground

#: One small transaction of a burst: an insert, an update of one of the last, a delete of an old one.
_SMALL = """
DO $$ BEGIN FOR i IN {first}..{last} LOOP
INSERT INTO load VALUES (i, 0, 'burst'); UPDATE load SET n = n + 1 WHERE id = i - i % 50;
DELETE FROM load WHERE id = i - 50000; INSERT INTO audit VALUES (i, 'burst'); COMMIT; END LOOP; END $$
"""
_LARGE = "INSERT INTO load SELECT -g, 0, repeat('x', 100) FROM generate_series(1, {rows}) g"
_MB = 2**20
#: Rows of tables that are copied; the last in pieces.
_SIZES = (0, 300, 300, 40_000)


class Scenes:
    """Each method is one.

    :param burst: small transactions of a burst; its large one has as many rows.
    """

    def __init__(self, ground: Ground, chance: random.Random, burst: int) -> None:
        self._ground, self._chance, self._burst = ground, chance, burst
        self._ids = itertools.count(1, burst)
        self._rows = itertools.count(1)

    def burst(self) -> None:
        """Small transactions and a large one."""
        first = next(self._ids)
        with closing(self._ground.pubdb.connect()) as session:
            session.execute("SET synchronous_commit = off")
            session.execute(_SMALL.format(first=first, last=first + self._burst - 1).encode())
            session.execute("DELETE FROM load WHERE id < 0")  # a crash may have taken back that of the last one
            session.execute(_LARGE.format(rows=self._burst).encode())
            session.execute("UPDATE load SET n = n + 1 WHERE id < 0")
            session.execute("DELETE FROM load WHERE id < 0")

    def huge(self) -> None:
        """Rows of up to 48 MB, changed with what is large in them left alone, one of them in a prepared transaction."""
        row, size = next(self._rows), self._chance.choice([1, 8, 48]) * _MB
        with closing(self._ground.pubdb.connect()) as session:
            session.execute("INSERT INTO huge VALUES (%s, 0, repeat('x', %s))", (row, size))
            session.execute("UPDATE huge SET n = n + 1 WHERE id > %s", (row - 3,))
            session.execute("INSERT INTO huge_full VALUES (%s, 0, repeat('y', %s))", (row, size // 4))
            session.execute(
                f"BEGIN; UPDATE huge_full SET n = n + 1 WHERE id = {row}; PREPARE TRANSACTION 'huge'".encode()
            )
            session.execute("COMMIT PREPARED 'huge'")
            session.execute("UPDATE huge SET id = -id WHERE id = %s", (row,))
            session.execute("DELETE FROM huge WHERE id < %s AND id > -%s", (row - 3, row - 3))
            session.execute("DELETE FROM huge_full WHERE id < %s", (row - 2,))

    def huge_missing(self) -> str:
        """A huge row that is looked for by all of its columns is not there any more; with nobody else at work."""
        ground, row = self._ground, next(self._rows)
        ground.pubdb.execute("INSERT INTO huge_full VALUES (%s, 0, repeat('z', %s))", row, 30 * _MB)
        ground.settle()
        for database in (ground.subdb, ground.native):
            database.execute("DELETE FROM huge_full WHERE id = %s", row)
        ground.pubdb.execute("UPDATE huge_full SET n = 7 WHERE id = %s", row)
        ground.pubdb.execute("DELETE FROM huge_full WHERE id = %s", row)
        ground.settle()
        return "a huge row is missing on the targets"

    def rolled_back_late(self) -> None:
        """A prepared transaction is rolled back before the walsender decodes it, and is larger than its memory."""
        row = 10_000 * next(self._rows)
        with closing(self._ground.pubdb.connect()) as session:
            session.execute("INSERT INTO holes VALUES (%s, 0, 'there')", (row,))
            found = session.execute(
                "SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s", (NAME,)
            ).fetchone()
            pid = found[0] if found else None
            if pid is not None:
                os.kill(pid, signal.SIGSTOP)
            try:
                for text in (
                    f"BEGIN; DELETE FROM holes WHERE id = {row}",
                    f"INSERT INTO holes SELECT {row} + g, 0, repeat('y', 500) FROM generate_series(1, 2000) g",
                    f"SAVEPOINT s; INSERT INTO holes VALUES ({row}, 0, 'again'); RELEASE SAVEPOINT s",
                    "PREPARE TRANSACTION 'holes'",
                    "ROLLBACK PREPARED 'holes'",
                    f"INSERT INTO holes VALUES ({row + 9999}, 0, 'after')",
                ):
                    session.execute(text.encode())
            finally:
                if pid is not None:
                    os.kill(pid, signal.SIGCONT)

    def looped(self) -> None:
        """Rows that would come back if pgsub wrote them without an origin."""
        for _ in range(5):
            self._ground.pubdb.execute("INSERT INTO looped VALUES (%s, 'there')", next(self._rows))

    # tables that are copied, by subscriptions that last only so long

    def subscribe(self) -> Copied:
        """New tables with rows, and subscriptions of both kinds that copy them."""
        return Copied(self._ground, next(self._rows))


class Copied:
    """Tables that are copied while they are written to, and their subscriptions."""

    def __init__(self, ground: Ground, number: int) -> None:
        self._ground, self.name = ground, f"copied_{number}"
        self.tables = [f"{self.name}_{place}" for place in range(len(_SIZES))]
        for database in (ground.pubdb, ground.subdb, ground.native):
            for table in self.tables:
                database.execute(f"CREATE TABLE {table} (id bigint PRIMARY KEY, n int, pad text)")
        for table, size in zip(self.tables, _SIZES):
            ground.pubdb.execute(f"INSERT INTO {table} SELECT g, 0, repeat('c', 300) FROM generate_series(1, {size}) g")
        ground.pubdb.execute(f"CREATE PUBLICATION {self.name} FOR TABLE {', '.join(self.tables)}")
        ground.native.execute(
            f"CREATE SUBSCRIPTION {self.name}_native CONNECTION '{ground.pubdb.conninfo}' PUBLICATION {self.name}"
        )

    def begin(self) -> None:
        """Have pgsub subscribe, too; the launcher knows of it then."""
        self._ground.create(self.name, self.name)
        query = "SELECT epoch > 0 FROM pgsub.control JOIN pgsub.subscription USING (subid) WHERE subname = %s"
        until(lambda: self._served(query), "the launcher does not serve a new subscription", LIMIT)

    def _served(self, query: str) -> bool:
        self._ground.alive()
        return bool(self._ground.subdb.value(query, self.name))

    def write(self) -> None:
        """Changes of every row, in the middle of the copy."""
        with closing(self._ground.pubdb.connect()) as session:
            for number in range(20):
                for table in self.tables:
                    session.execute(f"UPDATE {table} SET n = n + 1 WHERE id % 20 = {number}".encode())
                    session.execute(f"INSERT INTO {table} VALUES (-{number + 1}, 0, 'new')".encode())

    def with_one_locked(self) -> None:
        """Somebody has one of the small tables: the others do not wait for it."""
        with closing(self._ground.subdb.connect()) as session:
            session.execute(f"BEGIN; LOCK TABLE {self.tables[1]} IN SHARE MODE".encode())
            self.begin()
            others = [table for table in self.tables if table != self.tables[1]]
            until(lambda: all(self._states().get(t) == "r" for t in others), lambda: f"{self._states()}", LIMIT)
            session.execute("ROLLBACK")

    def _states(self) -> dict[str, str]:
        self._ground.alive()
        query = "SELECT relname, srsubstate::text FROM pgsub.subscription_rel WHERE relname = ANY (%s)"
        return dict(self._ground.subdb.rows(query, self.tables))

    def finish(self) -> list[str]:
        """Wait until both have everything, and drop it all; what is not equal."""
        ground = self._ground
        until(lambda: set(self._states().values()) == {"r"}, lambda: f"{self._states()}\n{ground.site.said()}", LIMIT)
        wrong = []
        for table in self.tables:
            query = f"SELECT count(*)::text || ' ' || coalesce(sum(hashtextextended(t::text, 0)), 0) FROM {table} t"
            wanted = ground.pubdb.value(query)
            for database in (ground.subdb, ground.native):
                try:
                    database.wait(query, value=wanted, seconds=LIMIT)
                except AssertionError as unlike:
                    wrong.append(f"{table} on {database.name}: {unlike}")
        ground.native.execute(f"DROP SUBSCRIPTION {self.name}_native")
        ground.alive()
        ground.ok("drop", self.name, "--yes")
        ground.pubdb.execute(f"DROP PUBLICATION {self.name}")
        for database in (ground.pubdb, ground.subdb, ground.native):
            database.execute(f"DROP TABLE {', '.join(self.tables)}")
        return wrong
