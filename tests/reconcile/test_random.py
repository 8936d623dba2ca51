"""Tables, values and faults at random: each planted fault is found, and nothing else is.

The target has what COPY made of the publisher's rows in a table beside the compared one. What its rows and those of the
compared table differ in is asked of the server by other means than pgsub's: DISTINCT FROM and EXCEPT ALL.
``PGSUB_SEEDS=300`` takes more seeds than usual, ``PGSUB_FIRST_SEED`` others.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import psycopg
import pytest
from fix_servers import Database, Servers, other_servers
from psycopg import sql
from thorough import long
from verified import compare

from pgsub.reconcile import buckets, comparison, hashes, rows
from pgsub.reconcile.reading import read_rate

_FIRST = int(os.environ.get("PGSUB_FIRST_SEED", "0"))
_SEEDS = range(_FIRST, _FIRST + int(os.environ.get("PGSUB_SEEDS", "12")))
_TYPES = """
CREATE TYPE mood AS ENUM ('sad', 'ok', 'happy');
CREATE TYPE pair AS (a int, b text);
CREATE DOMAIN amount AS numeric(8,2);
CREATE DOMAIN code AS varchar(4);
CREATE DOMAIN small AS int CHECK (VALUE < 1000);
"""
_TEXTS = ["", " ", "a", "A", "a ", " a", "ab", "NULL", "null", "\\N", "\t", "é", "e\u0301", "x" * 40, "z" * 3000, "'"]
_WHOLE = ["0", "1", "-1", "2", "255", "256", "32767", "-32768"]
_LONG = [*_WHOLE, "2147483647", "-2147483648", "65536"]
_LONGER = [*_LONG, "4294967296", "4294967297", "9223372036854775807", "-9223372036854775808", "-4294967296"]
_DECIMALS = [
    "0",
    "0.0",
    "1",
    "1.0",
    "1.00",
    "-1",
    "0.1",
    "1e10",
    "123456789012345678901234567890.5",
    "NaN",
    "10",
    "100",
]
_SHORT_DECIMALS = ["0", "1", "1.0", "1.006", "-1.004", "99.99", "1.01", "NaN"]
_FLOATS = ["0", "-0", "1", "0.1", "0.30000000000000004", "0.3", "NaN", "Infinity", "-Infinity", "1e-30", "1e30"]
_TIMES = ["2026-01-01 00:00:00+00", "2026-01-01 01:00:00+01", "2026-01-01 00:00:00.000001+00", "infinity",
          "0044-03-15 12:00:00+00 BC", "2026-07-01 12:34:56.789+02"]  # fmt: skip
_DATES = ["2026-01-01", "2026-01-02", "infinity", "-infinity", "0001-01-01 BC"]
_SPANS = ["0", "1 day", "24:00:00", "1 mon", "30 days", "-1 mon +30 days", "1 year 2 mons", "00:00:00.000001"]
_BITS = ["00000", "00001", "10000", "11111"]
_JSON = ["{}", "[]", "null", '"a"', '{"a": 1}', '{"a": 1.0}', '{"b": 1, "a": 2}', "1", "1.0"]


@dataclass(frozen=True)
class Kind:
    """A type of the publisher, and one of the target that takes its values.

    :ivar own: values that only the target's type has, too.
    :ivar equal: whether the type has an equality operator.
    :ivar key: whether it may be a key: it has the operator classes, and the target's type takes no two values for one.
    """

    pub: str
    values: list[str]
    sub: str = ""
    own: list[str] = field(default_factory=list)
    equal: bool = True
    key: bool = True

    @property
    def here(self) -> str:
        """The target's type."""
        return self.sub or self.pub


KINDS = [
    Kind("bool", ["true", "false"]),
    Kind("int2", _WHOLE),
    Kind("int4", _LONG),
    Kind("int8", _LONGER),
    Kind("int4", _LONG, "int8", _LONGER),
    Kind("int8", _LONG, "int4"),
    Kind("int8", _LONG, "numeric", _DECIMALS),
    Kind("int4", _LONG, "text", _TEXTS),
    Kind("oid", ["0", "1", "4294967295", "2147483648"]),
    Kind("float4", _FLOATS),
    Kind("float8", [*_FLOATS, "1e300", "5e-324"]),
    Kind("float4", _FLOATS, "float8", ["0.10000000149011612"]),
    Kind("numeric", _DECIMALS),
    Kind("numeric(10,4)", _SHORT_DECIMALS, "numeric(8,2)", key=False),
    Kind("numeric(8,2)", _SHORT_DECIMALS, "numeric", ["1.010", "1.001"]),
    Kind("text", _TEXTS),
    Kind("text", _TEXTS, "varchar"),
    Kind("varchar(10)", ["", "a", "abcd", "ab  ", "abcd      "], "varchar(4)", key=False),
    Kind("varchar(40)", _TEXTS[:10], "text"),
    Kind("bpchar(5)", ["", "a", "a ", "abcde", " a", "A"]),
    Kind("bpchar(5)", ["", "a", "abc"], "bpchar(8)", ["abcdefg"]),
    Kind("bpchar(5)", ["", "a", "abc"], "text", ["abc", "a"]),
    Kind("text", ["", "a", "a  ", "abc"], "bpchar(5)", ["abcde"], key=False),
    Kind('"char"', ["a", "", "A"]),
    Kind("name", ["", "a", "A", "x" * 63]),
    Kind("bytea", ["", "\\x00", "\\x0000", "\\x61", "abc"]),
    Kind("date", _DATES),
    Kind("timestamp", [one[:19] for one in _TIMES if one[0] == "2"]),
    Kind("timestamptz", _TIMES),
    Kind("timestamptz", _TIMES, "timestamptz(0)", key=False),
    Kind("timestamptz", _TIMES, "timestamp"),
    Kind("timestamp(3)", ["2026-01-01 00:00:00.123", "2026-01-01"], "timestamp", ["2026-01-01 00:00:00.1235"]),
    Kind("time", ["00:00", "24:00", "12:34:56.789"]),
    Kind("timetz", ["00:00+00", "01:00+01", "12:34:56-08"]),
    Kind("interval", _SPANS),
    Kind(
        "uuid",
        [
            "00000000-0000-0000-0000-000000000000",
            "ffffffff-ffff-ffff-ffff-ffffffffffff",
            "00000000-0000-0000-0000-000000000001",
        ],
    ),
    Kind("json", _JSON, equal=False, key=False),
    Kind("jsonb", _JSON),
    Kind("json", _JSON, "jsonb", key=False),
    Kind("text", _JSON, "jsonb", key=False),
    Kind("point", ["(0,0)", "(1,2)", "(2,1)", "(NaN,0)"], equal=False, key=False),
    Kind("inet", ["10.0.0.1", "10.0.0.0/8", "::1", "10.0.0.1/8"]),
    Kind("macaddr", ["08:00:2b:01:02:03", "00:00:00:00:00:00"]),
    Kind("bit(5)", _BITS),
    Kind("varbit", ["", "0", "00", "1"]),
    Kind("bit(5)", _BITS, "varbit", ["1", "00"]),
    Kind("int4range", ["empty", "[1,2)", "[1,1]", "(,)", "[1,3)"]),
    Kind("numrange", ["empty", "[1,2)", "[1.0,2.0)", "(1,2]"]),
    Kind("int4multirange", ["{}", "{[1,2),[3,4)}", "{[1,1]}"]),
    Kind("int4[]", ["{}", "{NULL}", "{0}", "{1,2}", "{2,1}", "[0:1]={1,2}", "{{1,2}}"]),
    Kind("text[]", ["{}", "{NULL}", '{""}', "{a}", "{A}", '{"a,b"}', "{a,b}", '{"NULL"}']),
    Kind("numeric[]", ["{1}", "{1.0}", "{NaN}", "{}"]),
    Kind("numeric(10,4)[]", ["{1.006}", "{1.0}", "{1.01}"], "numeric(8,2)[]", key=False),
    Kind("varchar(8)[]", ["{ab}", "{}", '{"ab  "}'], "varchar(2)[]", key=False),
    Kind("tsvector", ["", "a b", "a:1 b:2"]),
    Kind("pg_lsn", ["0/0", "0/1", "1/0"]),
    Kind("money", ["0", "1", "-1.50"]),
    Kind("mood", ["sad", "ok", "happy"]),
    Kind("mood", ["sad", "ok"], "text", ["Sad"]),
    Kind("text", ["sad", "ok"], "mood", ["happy"]),
    Kind("mood[]", ["{sad}", "{ok,sad}", "{}"]),
    Kind("pair", ["(1,a)", "(,)", "(1,)", "(2,a)", '(1,"")']),
    Kind("pair", ["(1,a)", "(,)"], "text", ["(2,a)"]),
    Kind("amount", _SHORT_DECIMALS),
    Kind("amount", _SHORT_DECIMALS, "numeric", ["1.001"]),
    Kind("numeric", _SHORT_DECIMALS, "amount", key=False),
    Kind("code", ["", "a", "abcd", "A"]),
    Kind("code", ["", "a", "abcd", "A"], "text", ["abcde"]),
    Kind("text", ["", "a", "abcd", "ab  ", "abcd  "], "code", key=False),
    Kind("small", _WHOLE[:6]),
    Kind("small", _WHOLE[:6], "int8", _LONGER),
    Kind("int4", _WHOLE[:6], "small"),
    Kind("amount[]", ["{1.006}", "{}"]),
]


@dataclass
class Column:
    """A column of both tables."""

    name: str
    kind: Kind
    published: bool = True


class Schema:
    """Tables of one seed.

    :ivar chance: decides everything.
    :ivar latin: a database has no other characters.
    :ivar key: names of the target's key.
    """

    def __init__(self, chance: random.Random, latin: bool) -> None:
        self.chance, self.latin = chance, latin
        self.keyless = chance.random() < 0.25
        may = [kind for kind in KINDS if kind.equal and kind.key]
        first = Kind("int4", [str(n) for n in range(-40, 400)]) if chance.random() < 0.7 else chance.choice(may)
        self.columns = [Column("k", first)]
        if chance.random() < 0.4:
            self.columns.append(Column("k2", chance.choice(may)))
        self.key = [column.name for column in self.columns]
        some = [kind for kind in KINDS if kind.equal and kind.key] if self.keyless else KINDS
        more = chance.choice((1, 3, 8, 40))
        self.columns += [Column(f"c%{n}{{}}", chance.choice(some)) for n in range(more)]
        self.columns += [Column("secret", Kind("text", _TEXTS), False)] if chance.random() < 0.3 else []
        whole = first.pub == "int4" and first.here == "int4"
        self.filtered = chance.choice(("k % 3 <> 0", "k % 2 = 0", "k > 50 OR k IS NULL")) if (
            whole and chance.random() < 0.3
        ) else None  # fmt: skip
        self.partitioned = [chance.random() < 0.3 and first.pub in ("int4", "text", "int8") for _ in range(2)]

    @property
    def published(self) -> list[Column]:
        """Those that are sent."""
        return [column for column in self.columns if column.published]

    def table(self, name: str, number: int) -> str:
        """:param number: 0 for the publisher's, 1 for the target's."""
        chance, columns = self.chance, list(self.columns)
        chance.shuffle(columns)
        made = [f"{_quoted(c.name)} {c.kind.here if number else c.kind.pub}" for c in columns]
        gone = chance.sample(range(len(made) + 1), 1) if chance.random() < 0.5 else []
        for at in gone:
            made.insert(at, "gone int DEFAULT 7")
        key = "" if self.keyless else f", PRIMARY KEY ({', '.join(self.key)})"
        text = f"CREATE TABLE {name} ({', '.join(made)}{key})"
        if self.partitioned[number]:
            count = chance.choice((1, 3))
            text += " PARTITION BY HASH (k)"
            text += "".join(
                f"; CREATE TABLE {name}{n} PARTITION OF {name} FOR VALUES WITH (MODULUS {count}, REMAINDER {n})"
                for n in range(count)
            )
        dropped = f"; ALTER TABLE {name} DROP COLUMN gone" if gone else ""
        mine = f"; ALTER TABLE {name} ADD mine text DEFAULT 'own'" if number and chance.random() < 0.3 else ""
        if number and chance.random() < 0.3:
            mine += f"; ALTER TABLE {name} ADD made text GENERATED ALWAYS AS ('x') STORED"
        return text + dropped + mine

    def publication(self) -> str:
        """The publication ``p`` of table ``t``."""
        listed = f" ({self.names()})" if len(self.published) < len(self.columns) else ""
        where = f" WHERE ({self.filtered})" if self.filtered else ""
        return f"CREATE PUBLICATION p FOR TABLE t{listed}{where} WITH (publish = 'insert', publish_via_partition_root)"

    def names(self) -> str:
        """The published columns."""
        return ", ".join(_quoted(column.name) for column in self.published)


def _quoted(name: str) -> str:
    return sql.Identifier(name).as_string(None)


class Filled:
    """Both tables with rows.

    :ivar planted: statements that changed something.
    """

    def __init__(self, schema: Schema, pubdb: Database, subdb: Database) -> None:
        self.schema, self.pubdb, self.subdb = schema, pubdb, subdb
        self.planted: list[str] = []
        for number, database in enumerate((pubdb, subdb)):
            database.execute(f"{_TYPES}; {schema.table('t', number)}")
        pubdb.execute(schema.publication())
        self._fill(schema.chance.choice((0, 1, 5, 60, 300)))
        self._copy()

    def _fill(self, count: int) -> None:
        for _ in range(count):
            self._insert(self.pubdb, "t", 0)
        if self.schema.keyless and self.schema.chance.random() < 0.8:
            self.pubdb.execute("INSERT INTO t SELECT * FROM t WHERE ctid = '(0,1)'")
        for _ in range(self.schema.chance.choice((0, 0, 20))):  # what was deleted, or moved
            self.pubdb.execute("DELETE FROM t WHERE ctid IN (SELECT ctid FROM t ORDER BY random() LIMIT 1)")

    def _value(self, column: Column, number: int) -> str | None:
        kind, chance = column.kind, self.schema.chance
        if chance.random() < 0.1 and (self.schema.keyless or column.name not in self.schema.key):
            return None
        value = chance.choice([*kind.values, *(kind.own * number)])
        return value.replace("\u0301", "\u00e8") if self.schema.latin else value

    def _insert(self, database: Database, table: str, number: int) -> bool:
        values = [self._value(column, number) for column in self.schema.columns]
        names = ", ".join(_quoted(column.name) for column in self.schema.columns).replace("%", "%%")
        return self._run(database, f"INSERT INTO {table} ({names}) VALUES ({', '.join(['%s'] * len(values))})", *values)

    def _run(self, database: Database, statement: str, *values: str | None) -> bool:
        """Run it; return whether it was allowed and changed something."""
        try:
            with database.connection.transaction():
                types = [None if value is None else sql.Literal(value).as_string(None) for value in values]
                text = statement % tuple("NULL" if one is None else one for one in types)
                return database.connection.execute(text.encode()).rowcount > 0
        except (psycopg.errors.IntegrityError, psycopg.DataError):
            return False

    def _copy(self) -> None:
        """Bring the rows as a copy does: text of the publisher, input functions of the target."""
        where = f" WHERE {self.schema.filtered}" if self.schema.filtered else ""
        settings = "SET datestyle = ISO; SET extra_float_digits = 3; SET timezone = 'UTC'; SET intervalstyle = postgres"
        for database in (self.pubdb, self.subdb):
            database.execute(settings)
        self.subdb.execute("CREATE TABLE sent (LIKE t INCLUDING DEFAULTS)")
        names = self.schema.names()
        out, into = f"COPY (SELECT {names} FROM t{where}) TO STDOUT", f"COPY sent ({names}) FROM STDIN"
        with self.pubdb.connection.cursor() as here, self.subdb.connection.cursor() as there:
            with here.copy(out.encode()) as source, there.copy(into.encode()) as sink:
                for data in source:
                    sink.write(data)
        order = self.schema.chance.choice(("", " ORDER BY random()"))
        self.subdb.execute(f"INSERT INTO t ({names}) SELECT {names} FROM sent{order}")
        if self.schema.chance.random() < 0.3:
            first = _quoted(self.schema.columns[0].name)
            self.subdb.execute(f"UPDATE t SET {first} = {first}")

    def plant(self, count: int) -> None:
        """Change rows of the target."""
        for _ in range(count):
            some = "ctid IN (SELECT ctid FROM t ORDER BY random() LIMIT 1)"
            some += " AND tableoid IN (SELECT tableoid FROM t ORDER BY random() LIMIT 1)"
            what = self.schema.chance.choice(("delete", "insert", "update", "update", "update", "swap"))
            column = self.schema.chance.choice(self.schema.columns)
            name = _quoted(column.name).replace("%", "%%")
            if what == "insert":
                done = self._insert(self.subdb, "t", 1)
            elif what == "delete":
                done = self._run(self.subdb, f"DELETE FROM t WHERE {some}")
            elif what == "update":
                done = self._run(self.subdb, f"UPDATE t SET {name} = %s WHERE {some}", self._value(column, 1))
            else:  # values of two rows change places: sums of single values are the same
                two = "SELECT ctid, tableoid, row_number() OVER () AS n FROM (SELECT ctid, tableoid FROM t LIMIT 2) x"
                other = (
                    f"(SELECT {name} FROM t o, s WHERE (o.ctid, o.tableoid) = (s.ctid, s.tableoid) AND s.n = 3 - m.n)"
                )
                done = self._run(
                    self.subdb,
                    f"WITH s AS MATERIALIZED ({two}) UPDATE t SET {name} = {other} FROM s m"
                    " WHERE (t.ctid, t.tableoid) = (m.ctid, m.tableoid)",
                )
            if done:
                self.planted.append(f"{what} {column.name} {column.kind.pub} {column.kind.here}")

    def expected(self) -> tuple[int, int, int]:
        """Ask the target what is missing, extra and different."""
        columns = self.schema.published
        whole = not self.schema.keyless
        key = [c for c in columns if c.name in self.schema.key] if whole else columns

        def of(table: str, column: Column) -> str:
            return f"{table}.{_quoted(column.name)}{'' if column.kind.equal else '::text'}"

        if not whole:
            one, other = (
                f"SELECT {', '.join(of(table, column) for column in columns)} FROM {table}" for table in ("sent", "t")
            )
            count = "SELECT count(*) FROM (({}) EXCEPT ALL ({})) x"
            missing, extra = (self.subdb.value(count.format(*way)) for way in ((one, other), (other, one)))
            return missing, extra, 0
        same = " AND ".join(f"sent.{_quoted(c.name)} = t.{_quoted(c.name)}" for c in key)
        differ = " OR ".join(f"{of('sent', c)} IS DISTINCT FROM {of('t', c)}" for c in columns)
        query = f"""SELECT count(*) FILTER (WHERE t.tableoid IS NULL), count(*) FILTER (WHERE sent.tableoid IS NULL),
            count(*) FILTER (WHERE t.tableoid IS NOT NULL AND sent.tableoid IS NOT NULL AND ({differ}))
            FROM sent FULL JOIN t ON {same}"""
        try:
            [found] = self.subdb.rows(query)
        except psycopg.errors.FeatureNotSupported:  # a type without a merge or hash join
            pytest.skip("no full join")
        return found


@pytest.fixture
def databases(shared_servers: Servers) -> Iterator[list[Database]]:
    """What a test appends is dropped."""
    made: list[Database] = []
    yield made
    for database in made:
        database.drop()


def _where(chance: random.Random) -> list[tuple[str, str | None, str]]:
    versions = [None, *(other_servers() if chance.random() < 0.4 else ())]
    encodings = chance.choice((["UTF8"], ["UTF8"], ["UTF8"], ["UTF8", "LATIN1"]))
    return [(side, chance.choice(versions), chance.choice(encodings)) for side in ("publisher", "target")]


@contextlib.contextmanager
def _small(chance: random.Random, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Draw limits so that few rows are as many."""
    with monkeypatch.context() as patch:
        if chance.random() < 0.7:
            patch.setattr(read_rate, "MOST_BLOCKS", chance.choice((1, 2, 5)))
            patch.setattr(buckets, "MANY_ROWS", chance.choice((0, 5, 50)))
            patch.setattr(comparison, "MOST_HASHES", chance.choice((1, 10, 100)))
            patch.setattr(rows, "_PAIRS", chance.choice((1, 7)))
            patch.setattr(hashes, "_NESTED", chance.choice((1, 2, 32)))
            patch.setattr(buckets, "_ROWS_A_SUM", chance.choice((1, 8)))
        yield


@pytest.mark.parametrize("seed", [*_SEEDS[2:5], *long([*_SEEDS[:2], *_SEEDS[5:12]]), *_SEEDS[12:]])
def test_planted_faults_of_random_tables_are_found_and_nothing_else(
    databases: list[Database], shared_servers: Servers, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chance = random.Random(seed)
    places = _where(chance)
    for side_name, version, encoding in places:
        server = shared_servers(side_name, version)
        databases.append(Database(server, f"rnd_{side_name[:3]}_{os.getpid()}_{seed}", encoding))
    latin = any(encoding != "UTF8" for *_, encoding in places)
    filled = Filled(Schema(chance, latin), *databases)
    for count in (0, 1, 1, 5):
        filled.plant(count)
        with _small(chance, monkeypatch):
            found = compare(*databases).differences.counts
        expected = dict(zip(("missing", "extra", "different"), filled.expected(), strict=True))
        assert found == expected, (places, filled.planted)
