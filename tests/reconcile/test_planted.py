"""Faults that are planted in every kind of published table are found at one point while the publisher is written to."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from fix_pair import MakePair, Pair
from verified import results

_ROWS = 400
_WRITTEN = 1000  #: keys from here on are the writers'

Found = set[tuple[str, str]]


@dataclass(frozen=True)
class Kind:
    """A table on both sides.

    :ivar pub: its columns there, and what follows them; ``sub`` likewise.
    :ivar more: further statements, on both sides.
    :ivar published: as CREATE PUBLICATION takes it.
    :ivar every: rows whose key this divides are published.
    """

    pub: str
    sub: str
    published: str = ""
    more: str = ""
    every: int = 1
    keyed: bool = True


_KEYED = "(id int PRIMARY KEY, v text)"
KINDS = {
    "plain": Kind(_KEYED, _KEYED),
    "reordered": Kind(
        "(id int PRIMARY KEY, v text, w text GENERATED ALWAYS AS (v || 'w') STORED)",
        "(mine text DEFAULT 'mine', v varchar, two bigint GENERATED ALWAYS AS (id * 2) STORED, id bigint PRIMARY KEY)",
        "(id, v)",
    ),
    "listed": Kind(
        "(id int PRIMARY KEY, secret text DEFAULT 'pub', v text)",
        "(id int PRIMARY KEY, v text, secret text DEFAULT 'sub')",
        "(id, v)",
    ),
    "filtered": Kind(_KEYED, _KEYED, "WHERE (id % 2 = 0)", every=2),
    "keyless": Kind("(id int, v text)", "(v text, id int)", more="ALTER TABLE {} REPLICA IDENTITY FULL", keyed=False),
    "rooted": Kind(
        f"{_KEYED} PARTITION BY RANGE (id)",
        f"{_KEYED} PARTITION BY HASH (id)",
    ),
    "loose": Kind("(id numeric(20,2) PRIMARY KEY, v text)", "(id numeric PRIMARY KEY, v text)"),
    "indexed": Kind(
        "(id int NOT NULL UNIQUE, v text)",
        "(id int NOT NULL, v text, CONSTRAINT indexed_id_key UNIQUE (id))",
        more="ALTER TABLE {0} REPLICA IDENTITY USING INDEX {0}_id_key",
    ),
}
_PARTS = {
    "pub": "CREATE TABLE low PARTITION OF rooted FOR VALUES FROM (MINVALUE) TO (200);"
    "CREATE TABLE high PARTITION OF rooted FOR VALUES FROM (200) TO (MAXVALUE)",
    "sub": "CREATE TABLE even PARTITION OF rooted FOR VALUES WITH (MODULUS 2, REMAINDER 0);"
    "CREATE TABLE odd PARTITION OF rooted FOR VALUES WITH (MODULUS 2, REMAINDER 1)",
}


def _made(side: str) -> str:
    made = [f"CREATE TABLE {name} {getattr(kind, side)}; {kind.more.format(name)}" for name, kind in KINDS.items()]
    filled = [
        f"INSERT INTO {name} (id, v) SELECT g, 'row ' || g FROM generate_series(1, {_ROWS}) g"
        f"{f' WHERE g % {kind.every} = 0' if side == 'sub' else ''}"
        for name, kind in KINDS.items()
    ]
    return ";".join([*made, _PARTS[side], *filled])


def _plant(p: Pair, name: str, chance: random.Random) -> Found:
    """Change rows of the target as nobody notices; return what must be found, by kind and key."""
    kind = KINDS[name]
    keys = chance.sample(range(kind.every, _ROWS, kind.every), 20)
    gone, other, extra = keys[:8], keys[8:15], [-key for key in keys[15:]]
    p.subdb.execute("SET session_replication_role = replica")
    p.subdb.execute(f"DELETE FROM {name} WHERE id = ANY (ARRAY{gone}::bigint[])")
    p.subdb.execute(f"UPDATE {name} SET v = 'planted' WHERE id = ANY (ARRAY{other}::bigint[])")
    p.subdb.execute(f"INSERT INTO {name} (id, v) SELECT g, 'extra' FROM unnest(ARRAY{extra}) g")
    p.subdb.execute("SET session_replication_role = origin")
    found = {("missing", str(key)) for key in gone} | {("extra", str(key)) for key in extra}
    if kind.keyed:
        return found | {("different", str(key)) for key in other}
    return found | {(one, str(key)) for key in other for one in ("missing", "extra")}


class Writer(threading.Thread):
    """Changes rows of all tables beyond :data:`_WRITTEN` until it is told to stop."""

    def __init__(self, p: Pair, seed: int) -> None:
        super().__init__(daemon=True)
        self._p, self._random = p, random.Random(seed)
        self.enough, self.transactions = threading.Event(), 0
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            with contextlib.closing(self._p.pubdb.connect()) as session:
                while not self.enough.wait(0.005):
                    session.execute("BEGIN")
                    for _ in range(self._random.randrange(1, 6)):
                        session.execute(self._statement().encode())
                    session.execute(b"COMMIT" if self._random.random() < 0.8 else b"ROLLBACK")
                    self.transactions += 1
        except Exception as error:
            self.error = error

    def _statement(self) -> str:
        name, key = self._random.choice(list(KINDS)), _WRITTEN + self._random.randrange(60)
        change = self._random.choice(("insert", "insert", "update", "delete", "move"))
        if change == "insert":
            value = self._random.random()
            return f"INSERT INTO {name} (id, v) SELECT {key}, '{value}' WHERE NOT EXISTS ({_of(name, key)})"
        if change == "delete":
            return f"DELETE FROM {name} WHERE id = {key}"
        moved = f", id = {key + 1}" if change == "move" else ""
        free = f" AND NOT EXISTS ({_of(name, key + 1)})" if moved else ""
        return f"UPDATE {name} SET v = '{self._random.random()}'{moved} WHERE id = {key}{free}"


def _of(name: str, key: int) -> str:
    return f"SELECT FROM {name} WHERE id = {key}"


@pytest.fixture
def writer() -> Iterator[list[Writer]]:
    """What a test appends ends with it."""
    made: list[Writer] = []
    yield made
    for one in made:
        one.enough.set()
        one.join(30)
        assert one.error is None, one.error


def _differences(p: Pair) -> dict[str, Found]:
    """Compare all tables at one point: kind and key of each row that differs."""
    found: dict[str, Found] = {}
    for result in results(p, [("public", name) for name in KINDS]):
        assert result.error is None, result.error
        name, both = result.table.target.name, result.table
        assert both.keyed == KINDS[name].keyed, name
        position = [column.name for column in both.columns].index("id")
        found[name] = {
            (one.kind, str((one.publisher or one.target or ())[position])) for one in result.differences.listed
        }
        assert sum(result.differences.counts.values()) == len(found[name]), name
    return found


@pytest.mark.parametrize("seed", range(2))
def test_planted_faults_are_all_found_and_nothing_else_while_the_publisher_is_written_to(
    pair: MakePair, writer: list[Writer], seed: int
) -> None:
    published = ", ".join(f"{name} {kind.published}" for name, kind in KINDS.items())
    p = pair(
        pub=f"{_made('pub')}; CREATE PUBLICATION p FOR TABLE {published} WITH (publish_via_partition_root)",
        sub=_made("sub"),
    )
    task = p.start()
    chance = random.Random(seed)
    writer.append(Writer(p, seed))
    assert _differences(p) == {name: set() for name in KINDS}
    planted = {name: _plant(p, name, chance) for name in KINDS}
    for _ in range(3):
        assert _differences(p) == planted
    assert writer[0].transactions > 20
    p.stop(task)
