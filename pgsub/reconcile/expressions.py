"""Values and rows as SQL of either server, so that what is equal has the same text, and the same hash, on both.

NOTES
A value is compared in the text that the target's type gives it. On the publisher a column of another type, or with
another modifier, is brought to the target's type by way of its text, as apply brings it there. What has several texts
for one value gets one: numeric without trailing zeros, zero without a sign. Types with further ones (interval, citext,
jsonb with numbers) are left to the target's equality, row by row (:mod:`pgsub.reconcile.rows`).

Hashes are those of hash partitioning (hashtextextended and its like). They are the same on all versions from 11 on,
for pg_upgrade relies on it. A row's is mixed once more in the end, because hash_array_extended is linear: sums over
rows would not notice that two rows have exchanged a value. Servers of different encodings hash the bytes of UTF-8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from psycopg import sql

from pgsub.publisher.tables import RemoteColumn, RemoteTable
from pgsub.target.catalog.relation import TargetColumn, TargetRelation

_NUMERIC, _FLOATS = 1700, (700, 701)
FIRST_NORMAL = 16384
#: Types whose values are equal only where their canonical texts are: bool, bytea, name, int8, int2, int4, text, oid,
#: float4, float8, bpchar, varchar, date, timestamp, timestamptz, bit, varbit, numeric, uuid, xid, cid, json, xml.
_BY_TEXT = frozenset(
    {16, 17, 19, 20, 21, 23, 25, 26, 28, 29, 114, 142, 700, 701, 1042, 1043, 1082, 1114, 1184, 1560, 1562, 1700, 2950}
)
_TEXT = sql.SQL("({})::pg_catalog.text")
_OUTPUT = sql.SQL("CASE WHEN pg_catalog.num_nulls({0}) = 0 THEN pg_catalog.concat({0}) END")
_HASH = sql.SQL('pg_catalog.hashtextextended(({}) COLLATE pg_catalog."C", 0)')
_IN_UTF8 = sql.SQL("pg_catalog.encode(pg_catalog.convert_to({}, 'UTF8'), 'hex')")
_MIXED = sql.SQL(
    "pg_catalog.hashint8extended(pg_catalog.hash_array_extended(ARRAY[{}]::pg_catalog.int8[], 0), {}::pg_catalog.int8)"
)
_ROW, _KEY = sql.Literal(1), sql.Literal(2)
_VARCHAR, _VARHDRSZ = 1043, 4
#: An assignment cuts blanks, and nothing else.
_FITTED = sql.SQL(
    '(SELECT CASE WHEN pg_catalog.char_length(pg_catalog.rtrim(t)) <= {1} THEN pg_catalog."left"(t, {1}) ELSE t END'
    " FROM (SELECT {0} AS t) AS x)"
)
#: Types of which an explicit cast to a length cuts what an assignment refuses, without their length.
_CUT = {
    1014: "pg_catalog.bpchar[]",
    1015: "pg_catalog.varchar[]",
    1042: "pg_catalog.bpchar",
    1560: 'pg_catalog."bit"',
    1561: 'pg_catalog."bit"[]',
    1562: "pg_catalog.varbit",
    1563: "pg_catalog.varbit[]",
}


@dataclass(frozen=True, slots=True)
class ComparedTable:
    """A published table and the target's, with the columns that both have.

    :ivar columns: of the target, in the order of the publisher's.
    :ivar key: positions of those that identify a row; all of them where nothing does.
    :ivar keyed: whether something does.
    """

    remote: RemoteTable
    target: TargetRelation
    columns: tuple[TargetColumn, ...]
    key: tuple[int, ...]
    keyed: bool

    @property
    def name(self) -> str:
        """Its name on the target, for messages."""
        return f"{self.target.schema}.{self.target.name}"

    @property
    def loose(self) -> bool:
        """Whether keys that the target takes for equal may have different texts."""
        return any(loose(self.columns[position]) for position in self.key)


def loose(column: TargetColumn) -> bool:
    """Return whether the target may take values of different canonical texts for equal."""
    return column.equality is not None and not (column.type_oid in _BY_TEXT and column.deterministic)


def compared(remote: RemoteTable, target: TargetRelation) -> ComparedTable:
    """Pair the columns of two tables by name; generated ones of the target hold what the target makes of the others."""
    names = {column.name: column for column in target.columns if not column.generated}
    columns = tuple(names[column.name] for column in remote.columns if column.name in names)
    positions = {column.name: number for number, column in enumerate(columns)}
    keyed = bool(target.identity) and all(name in positions for name in target.identity)
    key = tuple(positions[name] for name in target.identity) if keyed else tuple(range(len(columns)))
    return ComparedTable(remote, target, columns, key, keyed)


def not_comparable(table: ComparedTable) -> str | None:
    """Return why rows of a table cannot be found by their values; None where they can."""
    if not table.columns:
        return "no column of it is published"
    without = [table.columns[n].name for n in table.key if table.columns[n].equality is None]
    if without and not table.keyed:
        return f'it has no key, and the type of column "{without[0]}" has no equality operator'
    return None


def output(column: str) -> sql.Composed:
    """Compose what the output function of a column's type gives, and no cast of the type's owner."""
    return _OUTPUT.format(sql.Identifier(column))


def publisher_values(table: ComparedTable) -> list[sql.Composed]:
    """Compose the text of each compared column on the publisher."""
    sent = {column.name: column for column in table.remote.columns}
    return [_of_publisher(sent[column.name], column) for column in table.columns]


def _of_publisher(remote: RemoteColumn, column: TargetColumn) -> sql.Composed:
    name = sql.Identifier(remote.name)
    if column.type_oid == _VARCHAR and column.typmod not in (-1, remote.typmod) and remote.type_oid < FIRST_NORMAL:
        return _FITTED.format(_OUTPUT.format(name), sql.Literal(column.typmod - _VARHDRSZ))
    if remote.type_oid == column.type_oid and (column.typmod in (-1, remote.typmod) or column.type_oid in _CUT):
        return _canonical(name, column.type_oid)
    if column.type_oid >= FIRST_NORMAL or (remote.type_oid >= FIRST_NORMAL and remote.type_name == column.type_name):
        return _OUTPUT.format(name)
    read = sql.SQL("(({})::{})").format(_OUTPUT.format(name), sql.SQL(_CUT.get(column.type_oid, column.full_type)))
    return _canonical(read, column.type_oid)


def rewritten(table: ComparedTable) -> dict[int, sql.Composed]:
    """Compose what the publisher would send, by position, of columns that are compared by other texts."""
    sent = {column.name: column for column in table.remote.columns}
    return {
        position: output(column.name)
        for position, column in enumerate(table.columns)
        if column.type_oid in (_NUMERIC, *_FLOATS)
        or sent[column.name].type_oid != column.type_oid
        or column.typmod not in (-1, sent[column.name].typmod)
    }


def target_values(table: ComparedTable) -> list[sql.Composed]:
    """Compose the text of each compared column on the target."""
    return [_canonical(sql.Identifier(column.name), column.type_oid) for column in table.columns]


def plain(table: ComparedTable) -> dict[int, sql.Composed]:
    """Compose what the target's types give, by position, of columns that are compared by other texts."""
    return {
        position: output(column.name)
        for position, column in enumerate(table.columns)
        if column.type_oid in (_NUMERIC, *_FLOATS)
    }


def exact_values(table: ComparedTable) -> tuple[list[sql.Composed], list[sql.Composed]]:
    """Compose texts of each compared column on both sides that differ wherever a copy would bring another text.

    :return: of the publisher and of the target. Columns of different types are compared by what the target would store.
    """
    sent = {column.name: column for column in table.remote.columns}
    here, there = publisher_values(table), target_values(table)
    for position, column in enumerate(table.columns):
        if (column.type_oid, column.typmod) == (sent[column.name].type_oid, sent[column.name].typmod):
            name = sql.Identifier(column.name)
            text = _TEXT.format(name) if column.type_oid < FIRST_NORMAL else _OUTPUT.format(name)
            here[position] = there[position] = text
    return here, there


def _canonical(value: sql.Composable, type_oid: int) -> sql.Composed:
    if type_oid == _NUMERIC:
        return _TEXT.format(sql.SQL("pg_catalog.trim_scale({})").format(value))
    if type_oid in _FLOATS:
        return sql.SQL("CASE WHEN {0} = 0 THEN '0' ELSE {1} END").format(value, _TEXT.format(value))
    # a cast to text may be a function of the type's owner, which would run with the rights of this session
    if type_oid >= FIRST_NORMAL:
        return _OUTPUT.format(value)
    return _TEXT.format(value)


def hashes(values: Sequence[sql.Composable], key: Sequence[int], *, in_utf8: bool) -> tuple[sql.Composed, sql.Composed]:
    """Compose the hash of a row's key and that of the row.

    :param values: texts of its columns.
    :param in_utf8: whether the other server has another encoding.
    """
    each = [_HASH.format(_IN_UTF8.format(value) if in_utf8 else value) for value in values]
    return _MIXED.format(_listed([each[n] for n in key]), _KEY), _MIXED.format(_listed(each), _ROW)


def _listed(parts: Sequence[sql.Composable]) -> sql.Composed:
    return sql.SQL(", ").join(parts)
