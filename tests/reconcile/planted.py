"""Every kind of published table, a writer of all of them, and faults that are planted in the target's rows.

Faults are planted in rows that the writer leaves alone. Beside them stand changes that make no row another one: values
with another text that the type takes for equal, and rows that are written anew as they are.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from fix_servers import Database

ROWS = 400
_WRITTEN = 1000  #: keys from here on are the writers'

#: Kind of a difference, and key.
Found = set[tuple[str, str]]


@dataclass(frozen=True)
class Kind:
    """A table on both sides.

    :ivar pub: its columns there, and what follows them; ``sub`` likewise.
    :ivar more: further statements, on both sides.
    :ivar published: as CREATE PUBLICATION takes it.
    :ivar every: rows whose key this divides are published.
    :ivar rows: what fills its columns but id, on both sides.
    :ivar other: assignments that make a row another one; ``same`` those that do not.
    :ivar parts: what the subscription has in its place: the partition of keys below 200, and the other one.
    """

    pub: str
    sub: str
    published: str = ""
    more: str = ""
    every: int = 1
    keyed: bool = True
    columns: str = "v"
    rows: str = "'row ' || g"
    other: tuple[str, ...] = ("v = 'planted'", "v = NULL", "v = v || ' '", "v = ''")
    same: tuple[str, ...] = ("v = v",)
    parts: tuple[str, ...] = ()

    def subscribed(self, name: str) -> tuple[str, ...]:
        """Names of the tables that the subscription has of it."""
        return self.parts or (name,)


_KEYED = "(id int PRIMARY KEY, v text)"
_TYPED = """(id int PRIMARY KEY, v text, m mood, ms mood[], p pair, n numeric, f float8, iv interval, j jsonb,
    r int4range, c char(6), b bytea, a numeric[], u uuid, ok boolean, d date, at timestamptz, i2 int2, i8 bigint, o oid,
    js json)"""
_TYPED_ROWS = """'row ' || g, 'good', '{good,bad}', ROW(g, 'x')::pair, g + 0.5, 0, '1 day', '{"a": 1.0}',
    int4range(g, g + 5), 'ab', decode(md5(g::text), 'hex'), '{1.0,NULL}', md5(g::text)::uuid, g % 2 = 0,
    date '2026-01-01' + g, timestamptz '2026-01-01 00:00+00' + g * interval '1 h',
    g % 99, g * 4294967296, g, '{"a":1}'"""
_TYPES = "CREATE TYPE mood AS ENUM ('good', 'bad'); CREATE TYPE pair AS (a int, b text)"
KINDS = {
    "plain": Kind(_KEYED, _KEYED),
    "reordered": Kind(
        "(id int PRIMARY KEY, v text, w text GENERATED ALWAYS AS (v || 'w') STORED)",
        "(mine text DEFAULT 'mine', v varchar, two bigint GENERATED ALWAYS AS (id * 2) STORED, id bigint PRIMARY KEY)",
        "(id, v)",
        same=("v = v", "mine = 'other'"),
    ),
    "listed": Kind(
        "(id int PRIMARY KEY, secret text DEFAULT 'pub', v text)",
        "(id int PRIMARY KEY, v text, secret text DEFAULT 'sub')",
        "(id, v)",
        same=("secret = 'other'",),
    ),
    "filtered": Kind(_KEYED, _KEYED, "WHERE (id % 2 = 0)", every=2),
    "keyless": Kind("(id int, v text)", "(v text, id int)", more="ALTER TABLE {} REPLICA IDENTITY FULL", keyed=False),
    "rooted": Kind(f"{_KEYED} PARTITION BY RANGE (id)", f"{_KEYED} PARTITION BY HASH (id)"),
    "decimal": Kind("(id numeric(20,2) PRIMARY KEY, v text)", "(id numeric PRIMARY KEY, v text)"),
    "indexed": Kind(
        "(id int NOT NULL UNIQUE, v text)",
        "(id int NOT NULL, v text, CONSTRAINT indexed_id_key UNIQUE (id))",
        more="ALTER TABLE {0} REPLICA IDENTITY USING INDEX {0}_id_key",
    ),
    "large": Kind(
        _KEYED,
        _KEYED,
        rows="(SELECT string_agg(md5((g * i)::text), '') FROM generate_series(1, 100) i)",
        other=("v = overlay(v PLACING 'x' FROM 2500)", "v = left(v, 3000)", "v = v || ' '"),
    ),
    "typed": Kind(
        _TYPED,
        _TYPED,
        columns="v, m, ms, p, n, f, iv, j, r, c, b, a, u, ok, d, at, i2, i8, o, js",
        rows=_TYPED_ROWS,
        other=(
            "v = 'planted'",
            "m = 'bad'",
            "ms = '{bad,good}'",
            "p = ROW((p).a, NULL)::pair",
            "p = NULL",
            "n = -n",
            "n = n + 0.0000001",
            "f = 'NaN'",
            "f = 4.9e-324",
            "iv = '1 day 1 us'",
            """j = '{"a": 2}'""",
            "r = int4range(id, id + 6)",
            "r = 'empty'",
            "c = 'abc'",
            r"b = '\x'",
            "a = '{1.0,2}'",
            "u = '00000000-0000-0000-0000-000000000000'",
            "ok = NOT ok",
            "ok = NULL",
            "d = d + 1",
            "at = at + interval '1 us'",
            "i2 = -i2 - 1",
            "i8 = i8 + 1",
            "i8 = -i8",
            "o = 0",
            """js = '{"a": 1}'""",
        ),
        same=("n = n * 1.000", "f = '-0'", "iv = '24 h'", """j = '{"a": 1.00}'""", "a = '{1.00,NULL}'", "c = 'ab  '"),
    ),
    "retyped": Kind(
        "(id int PRIMARY KEY, v text, n numeric(12,3), c char(4), i int, b boolean)",
        "(b text, i numeric(9,1), id bigint PRIMARY KEY, c text, n numeric(12,1), v varchar(100))",
        columns="v, n, c, i, b",
        rows="'row ' || g, g + 0.25, 'ab  ', g, 't'",
        other=("v = 'planted'", "n = n + 0.1", "c = 'ab'", "i = i + 0.1", "b = 'true'"),
        same=("n = n * 1.0",),
    ),
    "leaf": Kind(*[f"{_KEYED} PARTITION BY RANGE (id)"] * 2, parts=("leaf_low", "leaf_high")),
}
_PARTS = {
    "pub": """CREATE TABLE low PARTITION OF rooted FOR VALUES FROM (MINVALUE) TO (200);
        CREATE TABLE high PARTITION OF rooted FOR VALUES FROM (200) TO (MAXVALUE);
        CREATE TABLE leaf_low PARTITION OF leaf FOR VALUES FROM (MINVALUE) TO (200);
        CREATE TABLE leaf_high PARTITION OF leaf FOR VALUES FROM (200) TO (MAXVALUE)""",
    "sub": """CREATE TABLE even PARTITION OF rooted FOR VALUES WITH (MODULUS 2, REMAINDER 0);
        CREATE TABLE odd PARTITION OF rooted FOR VALUES WITH (MODULUS 2, REMAINDER 1);
        CREATE TABLE leaf_low PARTITION OF leaf FOR VALUES FROM (MINVALUE) TO (200);
        CREATE TABLE leaf_high PARTITION OF leaf FOR VALUES FROM (200) TO (MAXVALUE)""",
}
#: What was replaced or deleted, by table.
REPLACED = "SELECT relname, count(*) FROM pgsub.skipped_change WHERE body ->> 'reason' = 'repaired' GROUP BY 1"
#: Names of the tables that the subscription has.
TABLES = tuple(table for name, kind in KINDS.items() for table in kind.subscribed(name))
#: The publications, by name.
PUBLICATIONS = ("p", "leaves")


def made(side: str) -> str:
    """DDL of one side, pub or sub, and its rows: those of the target as if they had been copied."""
    statements = [_TYPES]
    for name, kind in KINDS.items():
        statements += [f"CREATE TABLE {name} {kind.sub if side == 'sub' else kind.pub}", kind.more.format(name)]
    statements.append(_PARTS[side])
    for name, kind in KINDS.items():
        where = f" WHERE g % {kind.every} = 0" if side == "sub" else ""
        statements.append(
            f"INSERT INTO {name} (id, {kind.columns}) SELECT g, {kind.rows} FROM generate_series(1, {ROWS}) g{where}"
        )
    if side == "pub":
        published = ", ".join(f"{name} {kind.published}" for name, kind in KINDS.items() if not kind.parts)
        statements.append(f"CREATE PUBLICATION p FOR TABLE {published} WITH (publish_via_partition_root)")
        leaves = ", ".join(name for name, kind in KINDS.items() if kind.parts)
        statements.append(f"CREATE PUBLICATION leaves FOR TABLE {leaves}")
    return ";".join(statements)


def plant(subdb: Database, name: str, chance: random.Random, number: int) -> Found:
    """Change rows of the target as nobody notices; return what must be found, by kind and key.

    :param number: of the time: no row is extra twice.
    """
    kind = KINDS[name]
    keys = chance.sample(range(kind.every, ROWS, kind.every), 24)
    gone, other, same = (keys[at : at + chance.randrange(9)] for at in (0, 8, 16))
    extra = [-(100 * number + n) for n in range(1, 1 + chance.randrange(6))]
    statements = ["SET session_replication_role = replica"]
    statements += [f"DELETE FROM {name} WHERE id = {key}" for key in gone]
    statements += [f"UPDATE {name} SET {chance.choice(kind.other)} WHERE id = {key}" for key in other]
    statements += [f"UPDATE {name} SET {chance.choice(kind.same)} WHERE id = {key}" for key in same]
    statements += [f"INSERT INTO {name} (id, v) VALUES ({key}, 'extra')" for key in extra]
    if not kind.keyed and same:  # a row that is there twice
        twice = same[0]
        statements.append(f"INSERT INTO {name} SELECT * FROM {name} WHERE id = {twice}")
        extra.append(twice)
    subdb.execute("; ".join([*statements, "RESET session_replication_role"]))
    found = {("missing", str(key)) for key in gone} | {("extra", str(key)) for key in extra}
    if kind.keyed:
        return found | {("different", str(key)) for key in other}
    return found | {(one, str(key)) for key in other for one in ("missing", "extra")}


def counts(found: Found) -> Counter[str]:
    """Count differences by their kind."""
    return Counter(kind for kind, _ in found)


class Writer(threading.Thread):
    """Changes rows of all tables beyond those that are planted in, as long as the block lasts.

    :param pause: seconds between its transactions.
    """

    def __init__(self, pubdb: Database, seed: int, pause: float = 0.005) -> None:
        super().__init__(daemon=True)
        self._pubdb, self._random, self._pause = pubdb, random.Random(seed), pause
        self._enough, self.transactions = threading.Event(), 0
        self._error: Exception | None = None

    def run(self) -> None:
        """Thread body."""
        try:
            with contextlib.closing(self._pubdb.connect()) as session:
                while not self._enough.wait(self._pause):
                    session.execute("BEGIN")
                    for _ in range(self._random.randrange(1, 6)):
                        session.execute(self._statement().encode())
                    session.execute(b"COMMIT" if self._random.random() < 0.8 else b"ROLLBACK")
                    self.transactions += 1
        except Exception as error:
            self._error = error

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._enough.set()
        self.join()
        assert self._error is None, self._error

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


def of_tables(planted: dict[str, Found], names: Sequence[str] = TABLES) -> dict[str, Found]:
    """Divide what was planted by the tables that the subscription has."""
    found: dict[str, Found] = {name: set() for name in names}
    for name, differences in planted.items():
        parts = KINDS[name].parts
        for kind, key in differences:
            found[parts[float(key) >= 200] if parts else name].add((kind, key))
    return found


def keyed(table: str) -> bool:
    """Return whether a row of one of :data:`TABLES` is known by a key."""
    return next(kind.keyed for name, kind in KINDS.items() if table in kind.subscribed(name))


def by_repair(found: Found) -> tuple[int, int, int]:
    """Return how many rows a repair inserts, updates and deletes."""
    of_kind = counts(found)
    return of_kind["missing"], of_kind["different"], of_kind["extra"]
