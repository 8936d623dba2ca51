"""Random transactions: the target ends as the publisher is, and as a target of the server's own subscriber is."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from fix_pair import MakePair, Pair
from fix_servers import Database
from thorough import long

from pgsub.apply.rows import change_block
from pgsub.apply.sets import writer
from pgsub.apply.sets.writer import SetResult, SetWriter
from pgsub.apply.worker import start

if TYPE_CHECKING:
    from embedded import Server

#: More of them in a longer run.
SEEDS = range(int(os.environ.get("PGSUB_SEEDS", "3")))

PUBLISHER = """
CREATE TABLE k (id int PRIMARY KEY, a text, b numeric, big text);
CREATE TABLE f (a int, b text, big text); ALTER TABLE f REPLICA IDENTITY FULL;
CREATE TABLE x (id int, code text NOT NULL, v float8); CREATE UNIQUE INDEX x_code ON x (code);
ALTER TABLE x REPLICA IDENTITY USING INDEX x_code;
CREATE TABLE p (id int, k int, v text, PRIMARY KEY (id, k));
ALTER TABLE k ALTER big SET STORAGE EXTERNAL; ALTER TABLE f ALTER big SET STORAGE EXTERNAL;
"""
#: The same tables in other shapes.
TARGET = """
CREATE TABLE k (mine int DEFAULT 7, big text, b numeric, id int PRIMARY KEY, a varchar);
CREATE TABLE f (b text, big text, a int);
CREATE TABLE x (code text PRIMARY KEY, v float8, id int);
CREATE TABLE p (id int, k int, v text, PRIMARY KEY (k, id)) PARTITION BY RANGE (k);
CREATE TABLE p0 PARTITION OF p FOR VALUES FROM (MINVALUE) TO (50);
CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (50) TO (MAXVALUE);
"""
COLUMNS = {"k": "id, a, b, big", "f": "a, b, big", "x": "id, code, v", "p": "id, k, v"}


class Work:
    """Random transactions in one publisher session; a statement that its server refuses is none."""

    def __init__(self, session: psycopg.Connection, chance: random.Random) -> None:
        self._session, self._chance = session, chance

    def run(self, transactions: int) -> None:
        for _ in range(transactions):
            self._session.execute("BEGIN")
            for _ in range(self._chance.choice([1, 1, 2, 5, 12])):
                self._statement()
            self._session.execute(self._chance.choice([b"COMMIT"] * 9 + [b"ROLLBACK"]))

    def _statement(self) -> None:
        self._session.execute("SAVEPOINT s")
        try:
            self._session.execute(self._text().encode(), self._values())
        except (psycopg.errors.IntegrityError, psycopg.errors.CardinalityViolation):
            self._session.execute("ROLLBACK TO s")
            return
        self._session.execute(b"ROLLBACK TO s" if self._chance.random() < 0.1 else b"RELEASE s")

    def _values(self) -> dict[str, object]:
        chance = self._chance
        big = chance.choice([None, "", "x", "".join(chance.choices("abcdefgh\\\t\n", k=4000))])
        return {
            "n": chance.randrange(40),
            "m": chance.randrange(100),
            "v": chance.choice([None, "", "a", "\\N", "null", "tab\there", "ü", f"v{chance.randrange(5)}"]),
            "f": chance.choice(["NaN", "0.1", "-0", "1e300", "Infinity"]),
            "big": big,
        }

    def _text(self) -> str:
        return self._chance.choice(
            [
                "INSERT INTO k VALUES (%(n)s, %(v)s, %(m)s, %(big)s)",
                "INSERT INTO k SELECT g, %(v)s, g, NULL FROM generate_series(100 + %(m)s * 80, 170 + %(m)s * 80) g",
                "UPDATE k SET a = %(v)s WHERE id = %(n)s",
                "UPDATE k SET b = b + 1 WHERE id %% 10 = %(n)s %% 10",
                "UPDATE k SET id = id + 1000000 WHERE id = %(n)s",
                "UPDATE k SET big = %(big)s WHERE id < %(n)s",
                "DELETE FROM k WHERE id BETWEEN %(n)s AND %(n)s + 3",
                "DELETE FROM k WHERE id > 100 + %(m)s * 80",
                "INSERT INTO f SELECT %(n)s %% 5, %(v)s, %(big)s FROM generate_series(1, %(m)s %% 4)",
                "UPDATE f SET b = %(v)s WHERE a = %(n)s %% 5",
                "UPDATE f SET a = NULL WHERE ctid = (SELECT min(ctid) FROM f WHERE a = %(n)s %% 5)",
                "DELETE FROM f WHERE ctid IN (SELECT ctid FROM f WHERE a IS NULL LIMIT 2)",
                "DELETE FROM f WHERE ctid = (SELECT max(ctid) FROM f)",
                "INSERT INTO x VALUES (%(n)s, 'c' || %(m)s, %(f)s)",
                "UPDATE x SET v = %(f)s WHERE id = %(n)s",
                "UPDATE x SET code = code || 'x' WHERE id = %(n)s",
                "DELETE FROM x WHERE code < 'c' || %(n)s AND id = %(m)s",
                "INSERT INTO p VALUES (%(n)s, %(m)s, %(v)s)",
                "UPDATE p SET k = 100 - k WHERE id = %(n)s",
                "UPDATE p SET v = %(v)s WHERE k < %(m)s",
                "DELETE FROM p WHERE id = %(n)s",
                "TRUNCATE f, x" if self._chance.random() < 0.1 else "DELETE FROM p WHERE k = %(m)s",
            ]
        )


@pytest.fixture
def sets(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], None]]:
    """Says from how many changes of a relation on they are applied as sets; some are to be in the end.

    Now and then a block is full after a few rows.
    """
    applied = 0
    apply = SetWriter.apply

    def counted(*arguments: Any, **options: Any) -> SetResult:
        nonlocal applied
        outcome = apply(*arguments, **options)
        applied += outcome.changes
        return outcome

    monkeypatch.setattr(SetWriter, "apply", counted)

    def limit(pays_from: int, block_rows: int = change_block.BLOCK_ROWS) -> None:
        monkeypatch.setattr(writer, "PAYS_FROM", pays_from)
        monkeypatch.setattr(change_block, "BLOCK_ROWS", block_rows)

    yield limit
    assert applied > 0 or not start.SET_BASED


def _contents(database: Database, table: str) -> list[object]:
    return [row for (row,) in database.rows(f"SELECT r::text FROM (SELECT {COLUMNS[table]} FROM {table}) r ORDER BY 1")]


def _options(seed: int) -> dict[str, object]:
    return {
        "binary": seed % 2 == 1,
        "streaming": ("parallel", "off", "on")[seed % 3],
        "apply_mode": ("batched", "batched", "transactional")[seed % 3],
    }


def _work(p: Pair, seed: int) -> None:
    chance = random.Random(seed)
    if seed % 2:
        p.pubdb.execute(f"ALTER DATABASE {p.pubdb.name} SET debug_logical_replication_streaming = immediate")
    with closing(p.pubdb.connect()) as one, closing(p.pubdb.connect()) as two:
        for session in (one, two):
            session.execute("SET lock_timeout = '1s'")
        first, second = Work(one, chance), Work(two, chance)
        for _ in range(3):
            task = p.start() if chance.random() < 0.7 else None
            first.run(12)
            second.run(8)
            if task is not None:
                p.stop(task)
    p.apply()


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
def test_the_target_ends_as_the_publisher_is(pair: MakePair, sets: Callable[[int, int], None], seed: int) -> None:
    sets((3, 1, 50)[seed % 3], (50_000, 30, 10)[seed // 2 % 3])
    p = pair(pub=PUBLISHER, sub=TARGET, **_options(seed))
    _work(p, seed)
    for table in COLUMNS:
        assert _contents(p.subdb, table) == _contents(p.pubdb, table), table
    assert p.events() == []
    assert p.subdb.value("SELECT count(*) FROM k WHERE mine IS DISTINCT FROM 7") == 0


@pytest.fixture
def native(target: Server, subdb: Database) -> Iterator[Callable[[Pair, str], Database]]:
    """A second database on the target, which a subscription of the server itself fills."""
    made: list[Database] = []

    def make(p: Pair, tables: str) -> Database:
        database = Database(target, f"{subdb.name}_native")
        made.append(database)
        database.execute(tables)
        database.execute(
            f"CREATE SUBSCRIPTION {database.name} CONNECTION '{p.pubdb.conninfo}' PUBLICATION p"
            " WITH (copy_data = false)"
        )
        return database

    yield make
    for database in made:
        database.drop()


@pytest.mark.parametrize("seed", [117, 100, *long(100 + seed for seed in SEEDS[1:])])
def test_the_target_ends_as_one_of_the_servers_own_subscriber(
    pair: MakePair, native: Callable[[Pair, str], Database], sets: Callable[[int, int], None], seed: int
) -> None:
    """With rows missing here and there, which both have to leave out."""
    sets((3, 1, 50)[seed % 3], (50_000, 30, 10)[seed // 2 % 3])
    p = pair(pub=PUBLISHER, sub=TARGET, **_options(seed))
    _ends_as(native(p, TARGET), p, seed)


def test_row_by_row_the_target_ends_as_one_of_the_servers_own_subscriber_too(
    pair: MakePair, native: Callable[[Pair, str], Database], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(SetWriter, "apply")
    p = pair(pub=PUBLISHER, sub=TARGET, **_options(103))
    p.set_based = False
    _ends_as(native(p, TARGET), p, 103)


def _ends_as(server: Database, p: Pair, seed: int) -> None:
    with closing(p.pubdb.connect()) as session:
        Work(session, random.Random(-seed)).run(30)
    _both_are_there(p, server)
    for database in (p.subdb, server):
        database.execute(
            "DELETE FROM k WHERE id % 7 = 1; DELETE FROM x WHERE id % 5 = 1; DELETE FROM p WHERE id % 3 = 1"
        )
        database.execute("UPDATE k SET a = 'changed here' WHERE id % 7 = 2")
    _work(p, seed)
    _both_are_there(p, server)
    for table in COLUMNS:
        assert _contents(p.subdb, table) == _contents(server, table), table
    missing = Counter(event["conflict_type"] for event in p.events())
    for kind in "update_missing", "delete_missing":
        query = f"SELECT confl_{kind} FROM pg_stat_subscription_stats WHERE subname = %s"
        server.wait(f"SELECT ({query}) = %s", server.name, missing[kind])


def _both_are_there(p: Pair, server: Database) -> None:
    p.apply()
    query = "SELECT confirmed_flush_lsn - '0/0'::pg_lsn >= %s FROM pg_replication_slots WHERE slot_name = %s"
    p.pubdb.wait(query, p.published(), server.name)
