"""Values and rows as SQL for either server, so that equal ones have the same text and the same hash on both.

NOTES
A value is compared by the text of the target's type. If the publisher's column has another type or modifier, the
publisher converts the value through its text to the target's type, as apply does. If a value has several texts, one of
them is chosen: numeric without trailing zeros, zero without a sign. Types with more of them (interval, citext, jsonb
with numbers) are compared by the target's equality, row by row (:mod:`pgsub.reconcile.rows`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from psycopg import sql

from pgsub.publisher.tables import RemoteColumn, RemoteTable
from pgsub.reconcile.built_in_types import has_length, written
from pgsub.reconcile.hashes import Value
from pgsub.target.catalog.relation import TargetColumn, TargetRelation

_NUMERIC, _FLOATS = 1700, (700, 701)
FIRST_NORMAL = 16384
#: Types whose values are equal only if their canonical texts are: bool, bytea, name, int8, int2, int4, text, oid,
#: float4, float8, bpchar, varchar, date, timestamp, timestamptz, bit, varbit, numeric, uuid, xid, cid, json, xml.
_BY_TEXT = frozenset(
    {16, 17, 19, 20, 21, 23, 25, 26, 28, 29, 114, 142, 700, 701, 1042, 1043, 1082, 1114, 1184, 1560, 1562, 1700, 2950}
)
_TEXT = sql.SQL("({})::pg_catalog.text")
_OUTPUT = sql.SQL("CASE WHEN pg_catalog.num_nulls({0}) = 0 THEN pg_catalog.concat({0}) END")
_NULL, _NULLS = sql.SQL("{} IS NULL"), sql.SQL("pg_catalog.num_nulls({}) = 1")
_VARCHAR, _VARHDRSZ = 1043, 4
_WHOLE = frozenset({20, 21, 23})
_INT8 = sql.Composed([sql.SQL("pg_catalog.int8")])
#: An assignment truncates only blanks.
_FITTED = sql.SQL(
    '(SELECT CASE WHEN pg_catalog.char_length(pg_catalog.rtrim(t)) <= {1} THEN pg_catalog."left"(t, {1}) ELSE t END'
    " FROM (SELECT {0} AS t) AS x)"
)


@dataclass(frozen=True, slots=True)
class ComparedTable:
    """A published table and the target's, with the columns that both have.

    :ivar columns: the target's columns, in the publisher's order.
    :ivar key: positions of the columns that identify a row; all columns if there is no key.
    :ivar keyed: whether there is a key.
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
        """Whether keys that are equal on the target may have different texts."""
        return any(loose(self.columns[position]) for position in self.key)


def loose(column: TargetColumn) -> bool:
    """Return whether values with different canonical texts may be equal on the target."""
    return column.equality is not None and not (column.type_oid in _BY_TEXT and column.deterministic)


def compared(remote: RemoteTable, target: TargetRelation) -> ComparedTable:
    """Pair the columns of two tables by name, without generated columns, which the target computes itself."""
    names = {column.name: column for column in target.columns if not column.generated}
    columns = tuple(names[column.name] for column in remote.columns if column.name in names)
    positions = {column.name: number for number, column in enumerate(columns)}
    keyed = bool(target.identity) and all(name in positions for name in target.identity)
    key = tuple(positions[name] for name in target.identity) if keyed else tuple(range(len(columns)))
    return ComparedTable(remote, target, columns, key, keyed)


def not_readable(table: ComparedTable) -> str | None:
    """Return why rows of a table cannot be read on both servers; None if they can."""
    for side, foreign in (("publisher", table.remote.foreign_partitions), ("target", table.target.foreign_partitions)):
        if foreign:
            return f"a partition of it on the {side} is a foreign table, whose rows are those of another server"
    return None


def not_comparable(table: ComparedTable) -> str | None:
    """Return why rows of a table cannot be found by their values; None if they can."""
    if (reason := not_readable(table)) is not None:
        return reason
    if not table.columns:
        return "no column of it is published"
    without = [table.columns[n].name for n in table.key if table.columns[n].equality is None]
    if without and not table.keyed:
        return f'it has no key, and the type of column "{without[0]}" has no equality operator'
    return None


def output(column: str) -> sql.Composed:
    """Compose the result of the output function of a column's type. A cast could be a function of the type's owner."""
    return _OUTPUT.format(sql.Identifier(column))


def publisher_values(table: ComparedTable) -> list[Value]:
    """Compose the value of each compared column on the publisher."""
    sent = {column.name: column for column in table.remote.columns}
    return [_of_publisher(sent[column.name], column) for column in table.columns]


def _of_publisher(remote: RemoteColumn, column: TargetColumn) -> Value:
    name, null = sql.Identifier(remote.name), _null(remote.name, remote.type_oid)
    if _fitted(remote, column):
        return Value(_FITTED.format(_OUTPUT.format(name), sql.Literal(column.typmod - _VARHDRSZ)), null)
    if remote.type_oid == column.type_oid and (column.typmod in (-1, remote.typmod) or has_length(column.type_oid)):
        return Value(_canonical(name, column.type_oid), null, name, column.type_oid)
    # the target's own text of its type is not used here
    here = written(column.type_oid, column.typmod) if _typed(remote, column) else None
    if here is None:
        return Value(_OUTPUT.format(name), null)
    read = sql.SQL("(({})::{})").format(_OUTPUT.format(name), here)
    return Value(_canonical(read, column.type_oid), null, read, column.type_oid)


def _fitted(remote: RemoteColumn, column: TargetColumn) -> bool:
    """Return whether the publisher must truncate blanks of a value, as an assignment on the target does."""
    narrower = column.type_oid == _VARCHAR and column.typmod not in (-1, remote.typmod)
    return narrower and remote.type_oid < FIRST_NORMAL


def _typed(remote: RemoteColumn, column: TargetColumn) -> bool:
    """Return whether the publisher can make values of the target's type, and not only their text."""
    namesake = remote.type_oid >= FIRST_NORMAL and remote.type_name == column.type_name
    known = written(column.type_oid, column.typmod) is not None
    return known and not namesake and not _fitted(remote, column)


def found_again(remote: RemoteColumn, column: TargetColumn) -> sql.Composed | None:
    """Compose the type as which the publisher reads the target's text, to find the value from which apply made it.

    :return: None if there is none: the target's type truncates or rounds, or has more values than the publisher's.
    """
    if {remote.type_oid, column.type_oid} <= _WHOLE:
        return _INT8  # it includes the values of all of them, and can use the same index
    wider = column.type_oid == _VARCHAR and column.typmod >= remote.typmod > 0
    if remote.type_oid != column.type_oid or not (column.typmod in (-1, remote.typmod) or wider):
        return None
    return sql.Composed([sql.Identifier(remote.type_schema, remote.type_name)])


def _null(column: str, type_oid: int) -> sql.Composed:
    """Compose the condition that a column is null. (IS NULL tests the fields of a composite value.)"""
    return (_NULL if type_oid < FIRST_NORMAL else _NULLS).format(sql.Identifier(column))


def rewritten(table: ComparedTable) -> dict[int, sql.Composed]:
    """Compose the values as the publisher would send them, by position, of columns that are compared by other texts."""
    sent = {column.name: column for column in table.remote.columns}
    return {
        position: output(column.name)
        for position, column in enumerate(table.columns)
        if column.type_oid in (_NUMERIC, *_FLOATS)
        or sent[column.name].type_oid != column.type_oid
        or column.typmod not in (-1, sent[column.name].typmod)
    }


def target_values(table: ComparedTable) -> list[Value]:
    """Compose the value of each compared column on the target."""
    sent = {column.name: column for column in table.remote.columns}
    return [_of_target(sent[column.name], column) for column in table.columns]


def _of_target(remote: RemoteColumn, column: TargetColumn) -> Value:
    name = sql.Identifier(column.name)
    text, null = _canonical(name, column.type_oid), _null(column.name, column.type_oid)
    return Value(text, null, name if _typed(remote, column) else None, column.type_oid)


def plain(table: ComparedTable) -> dict[int, sql.Composed]:
    """Compose the target's own texts, by position, of columns that are compared by other texts."""
    return {
        position: output(column.name)
        for position, column in enumerate(table.columns)
        if column.type_oid in (_NUMERIC, *_FLOATS)
    }


def exact_values(table: ComparedTable) -> tuple[list[Value], list[Value]]:
    """Compose values of each compared column on both sides that differ whenever a copy would store another text.

    :return: the publisher's and the target's. Columns of different types are compared by the value on the target.
    """
    sent = {column.name: column for column in table.remote.columns}
    here, there = publisher_values(table), target_values(table)
    for position, column in enumerate(table.columns):
        if (column.type_oid, column.typmod) == (sent[column.name].type_oid, sent[column.name].typmod):
            name = sql.Identifier(column.name)
            text = _TEXT.format(name) if column.type_oid < FIRST_NORMAL else _OUTPUT.format(name)
            here[position], there[position] = replace(here[position], text=text), replace(there[position], text=text)
    return here, there


def _canonical(value: sql.Composable, type_oid: int) -> sql.Composed:
    if type_oid == _NUMERIC:
        return _TEXT.format(sql.SQL("pg_catalog.trim_scale({})").format(value))
    if type_oid in _FLOATS:
        return sql.SQL("CASE WHEN {0} = 0 THEN '0' ELSE {1} END").format(value, _TEXT.format(value))
    # a cast to text may be a function of the type's owner, which would run with this session's rights
    if type_oid >= FIRST_NORMAL:
        return _OUTPUT.format(value)
    return _TEXT.format(value)
