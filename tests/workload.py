"""A random workload for logical replication as a plain value: each table and each transaction grows from one integer.

Leaving out a table or a transaction leaves the others nearly as they were, so a failing workload can be made smaller.
What the tables may hold and the transactions may do is chosen so that every subscriber must end with the same rows:
inserts never meet a row that only the target has, and where a row of several equal ones is to be found, the equal ones
are identical. A transaction that is prepared never changes one of several equal rows: the next transaction that wanted
such a row would wait for it, the server's own apply worker too, before the COMMIT PREPARED behind it is read. Nor does
it insert one: the server's own apply worker, which looks for rows with a dirty snapshot, would wait for that, too.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import psycopg
from psycopg import sql
from psycopg.sql import Composable, Composed, Identifier, Literal

#: What the columns need, in each database once.
TYPES = """
CREATE TYPE mood AS ENUM ('sad', 'it''s', 'a,"b\\c');
CREATE DOMAIN positive AS int CHECK (VALUE > 0);
CREATE TYPE pair AS (a int, "B b" text, c mood);
CREATE SCHEMA x;
CREATE EXTENSION hstore SCHEMA x;
CREATE EXTENSION citext SCHEMA x;
"""
#: Values of these are equal only where they are identical.
EXACT = {
    "bigint": ("-9223372036854775808", "0", "9223372036854775807"),
    "boolean": ("t", "f"),
    "money": ("-92233720368547758.08", "0.01"),
    "text": ("", "\\N", "\\", "\t\r\n", "NULL", "ünïcödé 😀", "ß¿Ýé", "日本", "a" * 300),
    "varchar(7)": ("", "  x  ", "\\."),
    '"char"': ("a", ""),
    "bytea": ("", "\\x00ff5c0a090d27"),
    "date": ("infinity", "4713-01-01 BC", "2000-02-29"),
    "timestamp": ("-infinity", "294276-12-31 23:59:59.999999"),
    "timestamptz": ("infinity", "4713-01-01 00:00:00+00 BC", "2021-03-28 02:30:00+02"),
    "bit varying": ("", "101", "1" * 40),
    "uuid": ("00000000-0000-0000-0000-000000000000", "ffffffff-ffff-4fff-bfff-ffffffffffff"),
    "inet": ("::1", "10.0.0.1/8"),
    "macaddr": ("08:00:2b:01:02:03",),
    "pg_lsn": ("0/0", "FFFFFFFF/FFFFFFFF"),
    "xid8": ("18446744073709551615",),
    "tsvector": ("'a':1A 'fat''s':2,3C", ""),
    "int4range": ("empty", "(,)", "[1,5)"),
    "int8multirange": ("{}", "{[1,3),[5,7)}"),
    "int[]": ("{}", "{1,NULL,-3}", "[2:3]={7,8}"),
    "text[]": ("{}", '{"",NULL,"a,b","c\\"d"}'),
    "mood": ("sad", "it's", 'a,"b\\c'),
    "positive": ("1", "2147483647"),
    "pair": ("(1,,)", '(,"a,""b",sad)'),
}
#: Equal values of these may look different, so tables that are searched by all of their columns have none.
LOOSE = {
    "numeric": ("NaN", "Infinity", "0", "-0.00", "0.000", "1e50", "123456789012345678901234567890.5"),
    "double precision": ("NaN", "-Infinity", "-0", "0", "5e-324", "0.1"),
    "real": ("NaN", "-0", "0", "0.1", "3.4028235e38"),
    "interval": ("1 day", "24:00:00", "-1 year 2 mons -3 days 04:05:06.789"),
    "jsonb": ('{"a": [1, 2.50, null]}', "1.0", "1.00"),
    "char(5)": ("", "ab", "ab  "),
    "x.citext": ("MiXed", "mixed", ""),
    "x.hstore": ('"a"=>"1", "b c"=>NULL', ""),
}
#: These have no equality at all.
UNEQUAL = {
    "json": ('{"b": 1,  "a": "\\u0041\\n", "b": 2}', "[]"),
    "point": ("(1e-300,-0)", "(NaN,Infinity)"),
    "polygon": ("((0,0),(1,1),(2,0))",),
}
ALL = {**EXACT, **LOOSE, **UNEQUAL}
#: Second column of a key.
KEYS = {
    name: ALL[name] for name in ("text", "uuid", "date", "numeric", "mood", "double precision", "x.citext", "bytea")
}
#: The same bytes in another type, and what only the text form fits.
_YEAR_TO_MONTH = "interval year to month"
WIDER = {"varchar(7)": "text", "mood": "mood", '"char"': '"char"'}
WIDER_AS_TEXT = {**WIDER, "date": "text", "bigint": "numeric", "uuid": "text", "real": "double precision"}

#: Narrower types on the targets: their modifier makes other values of these, which stay different from each other.
NARROWER = {
    "numeric(12,4)": (("1.2345", "2.3456", "-7.0049"), "numeric(10,2)"),
    "timestamp(5)": (("2024-01-01 00:00:00.12345", "2024-01-01 00:00:07.98765"), "timestamp(2)"),
    "time(6)": (("01:02:03.4567", "04:05:06.5"), "time(0)"),
    "varchar(9)": (("ab    ", "cde"), "varchar(3)"),
    "numeric(8,3)[]": (("{1.125,NULL}", "{}", "{{2.5},{3.14}}"), "numeric(8,1)[]"),
}
#: As text only; a cast of the text to the type would read it otherwise than the type's input function does.
FIELDS = {"varchar(11)": (("5", "1 03:04:05"), "interval hour"), "varchar(12)": (("3", "1-2"), _YEAR_TO_MONTH)}

#: Encodings of databases; SQL_ASCII takes any bytes.
_CODECS = {"UTF8": "utf8", "LATIN1": "latin1", "WIN1252": "cp1252", "EUC_JP": "euc_jp", "SQL_ASCII": "utf8"}
#: Of the publisher and of the targets.
ENCODINGS = (
    *(("UTF8", name) for name in ("UTF8", "LATIN1", "WIN1252", "EUC_JP", "SQL_ASCII")),
    *(("LATIN1", name) for name in ("UTF8", "LATIN1")),
    ("SQL_ASCII", "SQL_ASCII"),
)

#: A statement that its server refuses with one of these is none; any other error is a mistake in here.
REFUSED = (
    psycopg.errors.IntegrityError,
    psycopg.errors.LockNotAvailable,
    psycopg.errors.CardinalityViolation,
    psycopg.errors.ObjectNotInPrerequisiteState,
    psycopg.errors.NumericValueOutOfRange,
    psycopg.errors.InvalidColumnReference,
)


@dataclass(frozen=True)
class Workload:
    """Tables and transactions by the integers they grow from, and how the subscriber under test is set.

    :ivar phases: transactions; the first integer of each says what happens before it on all sides.
    :ivar immediate: everything streams as it is written; otherwise what exceeds 64 kB.
    :ivar encodings: of the publisher and of the targets.
    :ivar writers: sessions of the target that apply at once.
    """

    tables: tuple[int, ...]
    phases: tuple[tuple[int, ...], ...]
    sessions: int = 2
    via_root: bool = False
    binary: bool = False
    streaming: str = "on"
    apply_mode: str = "batched"
    two_phase: bool = False
    immediate: bool = True
    encodings: tuple[str, str] = ("UTF8", "UTF8")
    writers: int = 1

    def fitting(self, kind: str) -> tuple[str, ...]:
        """Values of a type that both encodings have."""
        return tuple(value for value in ALL[kind] if all(_has(name, value) for name in self.encodings))


def _has(encoding: str, value: str) -> bool:
    try:
        value.encode(_CODECS[encoding])
    except UnicodeEncodeError:
        return False
    return True


@dataclass
class Column:
    """A published column; ``wide`` is its type on the targets, ``values`` None for one that is not written."""

    name: str
    kind: str
    values: tuple[str, ...] | None
    wide: str
    key: bool = False

    def value(self, chance: random.Random) -> Composable:
        """A value, or NULL."""
        if not self.values or (not self.key and chance.random() < 0.12):
            return sql.SQL("NULL")
        if self.wide.startswith("interval "):  # on a target, too, where varchar is not assigned to it
            return sql.SQL("{}").format(Literal(chance.choice(self.values)))
        return sql.SQL("{}::{}").format(Literal(chance.choice(self.values)), sql.SQL(self.kind))


@dataclass
class Table:
    """A published table. ``identity``: default, index, full (with a key), bare (full without a key), nothing."""

    name: Identifier
    identity: str
    key: list[Column]
    columns: list[Column]
    publisher: Composed
    target: Composed
    filter: Composable | None = None
    listed: bool = False  #: published with a column list
    serial: bool = False  #: has an identity column ``n``
    parted: bool = False  #: is partitioned on the publisher
    alike: bool = True  #: the targets are meant to have the publisher's rows
    split_by: Column | None = None  #: only the targets' partitions have a key, and are split by this

    @property
    def free(self) -> list[Column]:
        """The columns without a key that may differ: what splits partitions leads to their rows, see differences.md."""
        return [column for column in self.columns if column is not self.split_by]

    @property
    def searched(self) -> bool:
        """Whether rows are found by all of their values."""
        return self.identity == "bare"

    def names(self) -> Composed:
        """What it publishes."""
        more = [Identifier("n")] if self.serial else []
        return sql.SQL(", ").join([*(Identifier(c.name) for c in (*self.key, *self.columns)), *more])


def grow_table(schema: str, number: int, seed: int, workload: Workload) -> Table:
    """The table of one integer."""
    chance = random.Random(f"table {seed}")
    identity = chance.choice(["default", "default", "index", "full", "bare", "nothing"])
    parted = identity == "default" and chance.random() < 0.25
    key = [Column("k", "int", (), "int", key=True)]
    if chance.random() < 0.4:
        kind = chance.choice(sorted(KEYS if identity != "bare" else EXACT))
        key.append(Column("K 2", kind, workload.fitting(kind), kind, key=True))
    wider = WIDER if workload.binary else WIDER_AS_TEXT
    columns = []
    for place in range(chance.randrange(5)):
        kind = chance.choice(sorted(EXACT if identity == "bare" else ALL))
        wide = wider.get(kind, kind) if chance.random() < 0.3 and identity != "bare" else kind
        name = chance.choice([f"c{place}", f"C {place}", f'ü"%{place}'])
        columns.append(Column(name, kind, workload.fitting(kind), wide))
    if chance.random() < 0.6:
        columns.append(Column("big", "text", _big(chance), "text"))
    slim = _grow_narrower(seed, identity, key, columns, workload)
    shape = _Shape(chance, schema, number, identity, key, columns, parted, parted and not workload.via_root)
    shape.tells = identity != "bare" and random.Random(f"tells {seed}").random() < 0.5
    split = random.Random(f"leaf keys {seed}")
    splits = [column for column in columns if column.wide in _SPLITS]
    if identity == "full" and splits and split.random() < 0.6:
        shape.split_by = split.choice(splits)
    found = Table(shape.name, identity, key, columns, shape.publisher(), shape.target())
    found.split_by = shape.split_by
    found.serial, found.parted, found.alike = shape.serial, parted, shape.alike and not slim
    if not parted and identity in ("default", "index", "nothing") and chance.random() < 0.2:
        # TOAST that an update left alone is lost where its row begins to match: the server's own subscriber has NULL
        found.filter, found.alike = sql.SQL("(k % 3) <> 1"), False
    if not parted and identity in ("default", "index") and not shape.serial and columns and chance.random() < 0.2:
        found.columns, found.listed = columns[:-1], True
    return found


def _grow_narrower(seed: int, identity: str, key: list[Column], columns: list[Column], workload: Workload) -> bool:
    """Columns that are narrower on the targets; whether one of them is read there as no cast of the text reads it.

    By integers of their own: the rest of the table is what it was without them.
    """
    chance = random.Random(f"narrower {seed}")
    if chance.random() < 0.3:
        kind = chance.choice(sorted(NARROWER))
        values, narrow = NARROWER[kind]
        key.append(Column("K 3", kind, values, narrow, key=True))
    if chance.random() < 0.4:
        kind = chance.choice(sorted(NARROWER))
        values, narrow = NARROWER[kind]
        columns.insert(0, Column("slim", kind, values, narrow))
    if workload.binary or identity == "bare" or chance.random() >= 0.2:
        return False
    kind = chance.choice(sorted(FIELDS))
    columns.insert(0, Column("fields", kind, *FIELDS[kind]))
    return True


def _big(chance: random.Random) -> tuple[str, ...]:
    return ("", "short", *("".join(chance.choices("abcdefgh\\\t\n", k=size)) for size in (2500, 4000)))


class _Shape:
    """What a table looks like on both sides."""

    def __init__(
        self,
        chance: random.Random,
        schema: str,
        number: int,
        identity: str,
        key: Sequence[Column],
        columns: Sequence[Column],
        parted: bool,
        same_leaves: bool,
    ) -> None:
        self._chance, self._schema, self._identity = chance, schema, identity
        self._key, self._columns = key, columns
        self._bare_name = chance.choice([f"t{number}", f"T {number}", f'q"%{number}'])
        self._parted, self._same_leaves = parted, same_leaves
        self._keyed = identity not in ("bare", "nothing") or (identity == "nothing" and chance.random() < 0.5)
        self.name = Identifier(schema, self._bare_name)
        self.serial = not parted and chance.random() < 0.3
        self._always = chance.choice(["ALWAYS", "BY DEFAULT"])
        self._generated = chance.random() < 0.3
        self.alike = True
        self.tells = False  #: a partitioned target's trigger notes in a row what was done to it
        self.split_by: Column | None = None  #: only the partitions of the target have a key, and are split by this

    def _key_names(self) -> list[Identifier]:
        return [Identifier(column.name) for column in self._key]

    def publisher(self) -> Composed:
        parts = [_defined(c, c.kind, " NOT NULL" if c in self._key else "") for c in (*self._key, *self._columns)]
        parts += self._identity_column() + ([_SQL("gen int GENERATED ALWAYS AS (k * 2) STORED")] * self._generated)
        if self._keyed and self._identity != "index":
            parts.append(_SQL("PRIMARY KEY ({})").format(_SQL(", ").join(self._key_names())))
        text = self._create(parts, _SQL(" PARTITION BY HASH (k)") if self._parted else _SQL(""))
        if self._parted:
            text += self._hash_leaves()
        if self._identity == "index":
            index = Identifier(f"{self._bare_name} ri")
            text += _SQL("CREATE UNIQUE INDEX {} ON {} ({});").format(index, self.name, _join(self._key_names()))
            text += _SQL("ALTER TABLE {} REPLICA IDENTITY USING INDEX {};").format(self.name, index)
        elif self._identity in ("full", "bare", "nothing"):
            which = _SQL("NOTHING" if self._identity == "nothing" else "FULL")
            text += _SQL("ALTER TABLE {} REPLICA IDENTITY {};").format(self.name, which)
        if any(column.name == "big" for column in self._columns):
            text += _SQL("ALTER TABLE {} ALTER big SET STORAGE EXTERNAL;").format(self.name)
        return text

    def target(self) -> Composed:
        chance = self._chance
        parts = [_defined(c, c.wide, "") for c in (*self._key, *self._columns)]
        parts += self._identity_column() + self._own_columns()
        chance.shuffle(parts)
        names = self._key_names()
        chance.shuffle(names)
        if self.split_by is not None:
            return self._keyed_leaves(self.split_by, parts, names)
        by_index = self._keyed and not self._parted and chance.random() < 0.2
        if self._keyed and not by_index:
            parts.append(_SQL("PRIMARY KEY ({})").format(_join(names)))
        shape = (
            "hash leaves" if self._same_leaves else chance.choice(["plain", "plain", "range", "list", "hash leaves"])
        )
        text = self._create(parts, _SQL("") if shape == "plain" or by_index else _SQL(_PARTED[shape]))
        if shape == "hash leaves" and not by_index:
            text += self._hash_leaves()
        elif shape in _BOUNDS and not by_index:
            text += self._leaves(_BOUNDS[shape])
            text += self._telling() if self._is_told else _SQL("").format()
        if by_index:
            text += self._target_index(names)
        elif self._identity == "bare" and chance.random() < 0.3:
            text += _SQL("CREATE INDEX ON {} (k);").format(self.name)
        return text

    def _keyed_leaves(self, split_by: Column, parts: Sequence[Composable], names: Sequence[Identifier]) -> Composed:
        text = self._create(parts, _SQL(" PARTITION BY HASH ({})").format(Identifier(split_by.name)))
        text += self._hash_leaves()
        for number in (0, 1):
            leaf = Identifier(self._schema, f"{self._bare_name} {number}")
            text += _SQL("ALTER TABLE {} ADD PRIMARY KEY ({});").format(leaf, _join(names))
        return text + (self._telling() if self._is_told else _SQL("").format())

    @property
    def _is_told(self) -> bool:
        # SQL can only delete and insert a row whose identity GENERATED ALWAYS changes, see docs/differences.md
        return self.tells and not (self.serial and self._always == "ALWAYS")

    def _telling(self) -> Composed:
        """A row that goes to another partition is inserted there, and not updated: a trigger sees the difference."""
        function = Identifier(self._schema, f"{self._bare_name} tells")
        return _SQL(
            "ALTER TABLE {0} ADD told text; CREATE FUNCTION {1}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            " NEW.told := coalesce(NEW.told, '') || left(TG_OP, 1); RETURN NEW; END $$;"
            "CREATE TRIGGER tells BEFORE INSERT OR UPDATE ON {0} FOR EACH ROW EXECUTE FUNCTION {1}();"
            "ALTER TABLE {0} ENABLE ALWAYS TRIGGER tells;"
        ).format(self.name, function)

    def _own_columns(self) -> list[Composed]:
        chance = self._chance
        found = [_SQL("gen int GENERATED ALWAYS AS (k * 3) STORED").format()] * self._generated
        if chance.random() < 0.4:  # where it is not NULL, no row is found by all of its values
            default = self._identity != "bare" or chance.random() < 0.2
            self.alike = not default or self._identity != "bare"
            found.append(_SQL("mine int {}").format(_SQL("DEFAULT 7" if default else "")))
        if chance.random() < 0.2:
            found.append(_SQL("calc text GENERATED ALWAYS AS ((k + 1)::text) STORED").format())
        return found

    def _identity_column(self) -> list[Composed]:
        return [_SQL("n int GENERATED {} AS IDENTITY").format(_SQL(self._always))] * self.serial

    def _create(self, parts: Sequence[Composable], tail: Composable) -> Composed:
        return _SQL("CREATE TABLE {} ({}){};").format(self.name, _join(parts), tail)

    def _target_index(self, names: Sequence[Identifier]) -> Composed:
        index = Identifier(f"{self._bare_name} ti")
        text = _SQL(";").join(_SQL("ALTER TABLE {} ALTER {} SET NOT NULL").format(self.name, name) for name in names)
        text += _SQL(";CREATE UNIQUE INDEX {} ON {} ({});").format(index, self.name, _join(names))
        return text + _SQL("ALTER TABLE {} REPLICA IDENTITY USING INDEX {};").format(self.name, index)

    def _hash_leaves(self) -> Composed:
        return self._leaves([f"WITH (MODULUS 2, REMAINDER {number})" for number in (0, 1)])

    def _leaves(self, bounds: Sequence[str]) -> Composed:
        text = _SQL("").format()
        for number, bound in enumerate(bounds):
            leaf = Identifier(self._schema, f"{self._bare_name} {number}")
            values = _SQL(f"FOR VALUES {bound}" if bound != "DEFAULT" else bound)
            text += _SQL("CREATE TABLE {} PARTITION OF {} {};").format(leaf, self.name, values)
        return text


_SQL = sql.SQL
#: Types by whose values targets are partitioned.
_SPLITS = (
    "text",
    "bigint",
    "boolean",
    "date",
    "uuid",
    "mood",
    "numeric",
    "double precision",
    "inet",
    "x.citext",
    "int[]",
)
_PARTED = {
    "range": " PARTITION BY RANGE (k)",
    "list": " PARTITION BY LIST (k)",
    "hash leaves": " PARTITION BY HASH (k)",
}
_BOUNDS = {
    "range": ["FROM (MINVALUE) TO (20)", "FROM (20) TO (200)", "FROM (200) TO (MAXVALUE)"],
    "list": ["IN (1, 2, 3, 4, 5, 6, 7)", "IN (8, 9, 10, 11, 50, 51, 52)", "DEFAULT"],
}


def _join(parts: Sequence[Composable]) -> Composed:
    return _SQL(", ").join(parts)


def _defined(column: Column, kind: str, more: str) -> Composed:
    return _SQL("{} {}{}").format(Identifier(column.name), _SQL(kind), _SQL(more))


def published(tables: Sequence[Table]) -> Composed:
    """The list of a publication."""
    parts = []
    for table in tables:
        columns = _SQL(" ({})").format(table.names()) if table.listed else _SQL("")
        rows = _SQL(" WHERE ({})").format(table.filter) if table.filter is not None else _SQL("")
        parts.append(_SQL("{}{}{}").format(table.name, columns, rows))
    return _join(parts)
