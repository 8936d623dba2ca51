"""Random changes of one relation, in text and binary form, for tests of change sets."""

from __future__ import annotations

import random
from dataclasses import dataclass

import psycopg
from protocol.encoding import encode
from psycopg import sql

from pgsub.protocol.messages import Column, Delete, Insert, Message, Relation, Tuple, Update

#: Keys, as SQL literals, by type: some are alike in their first bytes, or but for what pads them.
KEYS = {
    "int2": ["0", "1", "-1", "256", "32767", "-32768"],
    "int4": ["0", "1", "-1", "256", "65536", "2147483647"],
    "int8": ["0", "1", "-1", "4294967296", "1234567890", "12345678901"],
    "oid": ["1", "2", "256", "65536", "4294967295"],
    "bool": ["t", "f"],
    "uuid": [f"{n:08d}-0000-0000-0000-{m:012d}" for n in (0, 1) for m in (0, 1, 10)],
    "date": ["2000-01-01", "1999-12-31", "infinity", "10000-01-01"],
    "timestamp": ["2000-01-01", "2000-01-01 00:00:00.000001", "-infinity", "4714-11-24 BC"],
    "timestamptz": ["2000-01-01 00:00:00+00", "2000-01-01 00:00:00+01", "infinity"],
    "text": ["", "a", "a ", "abcdefgh", "abcdefghi", "abcdefghijklmnopq", "ä", "\\N"],
    "varchar(20)": ["", "a", "a ", "abcdefgh", "abcdefghi", "{a,b}", "NULL"],
    "bytea": ["\\x", "\\x00", "\\x0000", "\\x01", "\\x0100", "\\x" + "00" * 9, "\\x" + "00" * 10],
}
#: Keys of several columns: their bytes are the same behind each other.
WIDE = {
    ("int4", "int4"): [("0", "1"), ("1", "0"), ("1", "1"), ("256", "0")],
    ("text", "text"): [("", "ab"), ("a", "b"), ("ab", ""), ("b", "a"), ("abcdefgh", "abcdefgh")],
    ("int8", "text", "uuid"): [("1", "x", "0" * 32), ("1", "x", "1" * 32), ("2", "x", "0" * 32), ("1", "", "0" * 32)],
}
ALL = {**{(name,): [(key,) for key in keys] for name, keys in KEYS.items()}, **WIDE}
#: Further columns, and values for them.
VALUES = {
    "a": ("int4", ["1", "2", None]),
    "big": ("text", ["", "tab\tand\\slash\n", "x" * 40, None]),
    "c": ("bpchar(3)", ["x  ", "yz ", None]),
    "n": ("numeric(6,2)", ["1.50", "-1234.56", None]),
}
_UNCHANGED = b"u"
Value = tuple[bytes, bytes] | None  #: in text and in binary form


@dataclass
class Shape:
    """A table ``name`` of the target, and the relation whose changes go there."""

    name: str
    relation: Relation
    keys: list[tuple[Value, ...]]
    values: list[list[Value]]

    def tuple(self, key: int, values: list[int | None] | None, form: int) -> Tuple:
        """A row; a value None is not sent, values None are a K tuple's.

        :param form: 0 text, 1 binary.
        """
        cells: list[tuple[bytes, bytes | None]] = [(b"tb"[form : form + 1], one[form]) for one in self.keys[key] if one]
        for at, possible in enumerate(self.values):
            number = None if values is None else values[at]
            value = possible[number] if number is not None else None
            if value is not None:
                cells.append((b"tb"[form : form + 1], value[form]))
            else:
                cells.append((b"n" if values is None or number is not None else _UNCHANGED, None))
        return Tuple(b"".join(kind for kind, _ in cells), tuple(value for _, value in cells))


def make(session: psycopg.Connection, number: int, types: tuple[str, ...], *, full: bool) -> Shape:
    """Make a table; its columns stand in another order than the relation's, and it has one of its own."""
    name = f"t{number}{'f' if full else ''}"
    key = [f"k{i}" for i in range(len(types))]
    columns = [f"local int DEFAULT 7, {', '.join(f'{n} {t}' for n, (t, _) in reversed(VALUES.items()))}"]
    columns += [f"{n} {t}" for n, t in zip(key, types, strict=True)]
    session.execute(f"CREATE TABLE public.{name} ({', '.join(columns)}, PRIMARY KEY ({', '.join(key)}))".encode())
    rows = session.execute(
        "SELECT attname, atttypid::int, atttypmod FROM pg_attribute WHERE attrelid = %s::regclass", (f"public.{name}",)
    )
    types_of = {n: (oid, typmod) for n, oid, typmod in rows}
    described = tuple(Column(int(full or n in key), n, *types_of[n]) for n in [*key, *VALUES])
    relation = Relation(1000 + 2 * number + full, "public", name, "f" if full else "d", described)
    keys = [tuple(_value(session, t, one) for t, one in zip(types, keys, strict=True)) for keys in ALL[types]]
    return Shape(name, relation, keys, [[_value(session, t, one) for one in some] for t, some in VALUES.values()])


def _value(session: psycopg.Connection, type_: str, literal: str | None) -> Value:
    if literal is None:
        return None
    base = type_.partition("(")[0]
    send = base + ("_send" if base in ("date", "timestamp", "timestamptz", "numeric", "uuid") else "send")
    query = sql.SQL("SELECT {0}::{1}::text, {2}({0}::{1})").format(sql.Literal(literal), sql.SQL(type_), sql.SQL(send))
    row = session.execute(query).fetchone()
    assert row is not None
    return (literal if base == "bpchar" else row[0]).encode(), row[1]


@dataclass
class Case:
    """Which keys are there before, and what is changed, as messages."""

    shape: Shape
    form: int
    before: set[int]
    messages: list[Message]

    @property
    def payloads(self) -> list[bytes]:
        """The messages as the publisher sends them."""
        return [encode(message) for message in self.messages]


def draw(shape: Shape, chance: random.Random, *, full: bool) -> Case:
    """Mostly changes that follow from each other; sometimes one that does not, or a change of a key."""
    count = len(shape.keys)
    case = Case(shape, chance.randrange(2), set(chance.sample(range(count), chance.randrange(count + 1))), [])
    present = set(case.before)
    wrong = chance.choice([0, 0, 0.03])
    for _ in range(chance.choice([1, 5, 20, 60])):
        key = chance.randrange(count)
        there = (key in present) != (chance.random() < wrong)
        case.messages.append(_change(case, key, there, chance, full=full, moves=wrong > 0 and chance.random() < 0.01))
        present.symmetric_difference_update({key} if not isinstance(case.messages[-1], Update) else ())
    return case


def _change(case: Case, key: int, there: bool, chance: random.Random, *, full: bool, moves: bool) -> Message:
    shape, relid = case.shape, case.shape.relation.relid
    drawn: list[int | None] = [chance.randrange(len(values)) for values in shape.values]
    if not there:
        return Insert(relid, shape.tuple(key, drawn, case.form))
    old = shape.tuple(key, drawn if full else None, case.form)
    if chance.random() < 0.25:
        return Delete(relid, "O" if full else "K", old)
    unsent = [None if chance.random() < 0.3 else number for number in drawn]
    new = key if not moves else chance.randrange(len(shape.keys))
    with_old = full or moves
    return Update(
        relid,
        ("O" if full else "K") if with_old else "",
        old if with_old else None,
        shape.tuple(new, unsent, case.form),
    )
