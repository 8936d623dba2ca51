"""Differences that the ledger explains: rows that were skipped, held or kept by a rule, by the hashes of their keys.

The ledger keeps changes that were skipped and not replayed, and changes of a held table. Their rows differ because
these changes wait there. A row that a rule kept differs because an operator set the rule. A change that a conflict left
out without being kept is lost. It is recorded, but it is no explanation.

A record explains a difference only while the publisher's row is what the left-out change made of it. Any later change
of the row was left out and recorded in turn, or was applied, so that the rows became equal: then something else has
changed the target. Only the last record of a row counts, whatever its source. Its values are compared as far as they
are known. A record from before the table's copy explains nothing, because the copy has the row.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import psycopg
from psycopg import sql
from psycopg.errors import InternalError_, ProtocolViolation

from pgsub.apply.conflicts.conflict_text import KEPT
from pgsub.common import table_lock
from pgsub.common.query import Binary, raw_cursor
from pgsub.reconcile import equality, expressions
from pgsub.reconcile.expressions import ComparedTable
from pgsub.reconcile.hashes import hashes
from pgsub.reconcile.reading import recorded_rows
from pgsub.reconcile.reading.recorded_rows import LOCAL, NEW, Recorded, Values
from pgsub.target.ledger.skipped_changes import Covered

_BATCH = 1000
#: Maximum number of binary values that one statement reads.
_PARAMETERS = 500
#: Maximum number of rows of one table that are read, the last ones. Earlier ones do not explain anything.
MOST = 200_000

_Texts = Sequence[str | None]
_BPCHAR = 1042
#: Types whose record is the text itself, even if it begins like bytes: bytea, name, text, char, varchar.
_SELF = (17, 19, 25, _BPCHAR, 1043)


class _Described(NamedTuple):
    """A description of what the publisher has of a row after a recorded change.

    :ivar record: the recorded row.
    :ivar known: number of known characters of each value; None: all.
    :ivar digest: hash of what is known; None: the publisher has no such row.
    """

    record: Recorded
    known: tuple[int | None, ...]
    digest: int | None

    def matches(self, row: _Texts | None) -> bool:
        """Return whether the publisher's row is the described one."""
        if row is None or self.digest is None:
            return row is None and self.digest is None
        return _digest(row, self.known) == self.digest


def _digest(row: _Texts, known: Sequence[int | None]) -> int:
    pairs = zip(row, known, strict=False)  # further values may follow
    return hash(tuple(None if value is None or most == 0 else value[:most] for value, most in pairs))


@dataclass(frozen=True, slots=True)
class Explanations:
    """The recorded reasons for differences of one table.

    :ivar described: what the last record of each row describes, by the hash of its key. Of one transaction there may
        be several.
    :ivar in_the_way: the same with records of rows that were in the way of one with another key.
    """

    described: Mapping[int, Sequence[_Described]]
    in_the_way: Mapping[int, Sequence[_Described]]

    def reason(self, key: int, row: _Texts | None) -> str | None:
        """Return the recorded reason why a row differs, or :data:`~pgsub.reconcile.rows.LEFT_OUT`.

        :param key: hash of its key.
        :param row: the publisher's row; None: it has none.
        """
        # What was in the way says nothing about a row that the publisher has.
        for described in (self.in_the_way if row is None else self.described).get(key, ()):
            # guard: a record of an earlier version of a row explains no difference
            if not described.matches(row):
                continue
            return described.record.reason
        return None


def explained(
    connection: psycopg.Connection,
    subid: int,
    table: ComparedTable,
    conflicts: Iterable[Recorded],
    *,
    names: Sequence[tuple[str, str]],
    in_utf8: bool,
    updated: bool = True,
    covered: Covered = Covered(),
) -> Explanations:
    """Read which rows of a table the ledger and the record of conflicts explain, or have as left out.

    :param connection: on the target, in a transaction that sees the snapshot.
    :param conflicts: rows of conflicts, the last first: with :data:`CONFLICT` if a rule kept the existing row, with
        :data:`~pgsub.reconcile.rows.LEFT_OUT` if the change was left out otherwise.
    :param names: schemas and names under which rows may be recorded: the subscription's, the table's, its partitions'.
    :param updated: whether updates are published. If not, a row may change without any record.
    :param covered: what the table's copy has.
    """
    reader = _Reader(connection, table, in_utf8, updated)
    recorded = list(conflicts)
    skipped = reader.read(recorded_rows.skipped(connection, subid, names, covered))
    # while a table is held, nothing else of it is recorded
    held = {key: (one,) for key, one in reader.read(recorded_rows.held(connection, subid, table.target.oid)).items()}
    remote = reader.read(row for row in recorded if row.of != LOCAL)
    return Explanations(*(_last(skipped, found) | held for found in (remote, reader.read(recorded))))


def _last(skipped: dict[int, _Described], conflicts: dict[int, _Described]) -> dict[int, tuple[_Described, ...]]:
    """Return the last of the records of each row."""
    found: dict[int, tuple[_Described, ...]] = {key: (one,) for key, one in (conflicts | skipped).items()}
    for key in skipped.keys() & conflicts.keys():
        change, conflict = skipped[key], conflicts[key]
        # guard: of a skipped change and a conflict of a row, the later one decides
        if conflict.record.follows(change.record):
            found[key] = (conflict,)
        elif not change.record.follows(conflict.record):
            found[key] = (change, conflict)
    return found


def _known(value: Any, *, other_text: bool, itself: bool) -> int | None:
    """Return how many characters of the publisher's text a recorded value has; None: all.

    :param other_text: the text by which the column is compared is not the one that the publisher sends.
    :param itself: a record of this type is the text itself. Others may be bytes that were sent in binary form.
    """
    if value is None:
        return None
    # what was not sent, and binary values and bytes for which the record has a text of its own
    # guard: a text that begins like bytes is compared, without " and not itself"
    if not isinstance(value, str) or "\ufffd" in value or (value.startswith("\\x") and not itself):
        return 0
    if len(value) <= KEPT:
        return None
    if other_text:
        return 0
    return KEPT if len(value) == KEPT + len("...") and value.endswith("...") else None


class _Reader:
    """A reader of recorded rows, in the form in which rows of the table are compared.

    :param connection: on the target.
    """

    def __init__(self, connection: psycopg.Connection, table: ComparedTable, in_utf8: bool, updated: bool) -> None:
        self._connection = connection
        self._updated = updated
        self._table = table
        self._key = [table.columns[position].name for position in table.key]
        other = expressions.rewritten(table)
        self._columns = [(c, n in other or c.type_oid == _BPCHAR) for n, c in enumerate(table.columns)]
        # values of other types are compared by the text that the publisher sends, and are not read as their type
        self._cast = [n for n, c in enumerate(table.columns) if c.type_oid < expressions.FIRST_NORMAL]
        self._read = list(dict.fromkeys([*table.key, *self._cast]))
        self._query = self._composed(in_utf8)

    def _composed(self, in_utf8: bool) -> sql.Composed:
        """Compose the hashes of keys, as those of the target's rows, and the texts by which values are compared."""
        values = expressions.target_values(self._table)
        key = [values[position] for position in self._table.key]
        hashed, _ = hashes(key, range(len(key)), in_utf8=in_utf8)
        columns = [(f"a{n}", self._table.columns[n]) for n in self._read]
        return sql.SQL("SELECT {} FROM (SELECT {} FROM ROWS FROM ({}) AS u ({})) AS s").format(
            sql.SQL(", ").join([hashed, *(values[n].text for n in self._cast)]),
            sql.SQL(", ").join(
                sql.SQL("u.{}::{} AS {}").format(
                    sql.Identifier(given), sql.SQL(c.uncut or c.full_type), sql.Identifier(c.name)
                )
                for given, c in columns
            ),
            equality.unnested(len(columns)),
            sql.SQL(", ").join(sql.Identifier(given) for given, _ in columns),
        )

    def read(self, rows: Iterable[Recorded]) -> dict[int, _Described]:
        """Return what the first of the rows with a key describes, by the hash of the key.

        :raises TableReplaced: a type was renamed.
        """
        found: dict[int, _Described] = {}
        some = iter(row for row in itertools.islice(rows, MOST) if self._has_key(row.values))
        while batch := list(itertools.islice(some, _BATCH)):
            for key, described in self._described(batch):
                found.setdefault(key, described)
        return found

    def _has_key(self, row: Values) -> bool:
        return not self._table.keyed or all(isinstance(row.get(name), str | bytes) for name in self._key)

    def _described(self, rows: Sequence[Recorded]) -> Iterator[tuple[int, _Described]]:
        """Describe rows. Of a row with an invalid value only the key is known, and none is if that is invalid."""
        try:
            rows, answers = self._asked(rows)
        # the text of a regclass may be no name on the target, and a binary value be of the type that a column had
        except (psycopg.DataError, psycopg.ProgrammingError, ProtocolViolation, InternalError_):
            half = len(rows) // 2
            only_key = {name: rows[0].values.get(name) for name in self._key}
            if half:
                yield from self._described(rows[:half])
                yield from self._described(rows[half:])
            elif len(only_key) < len(rows[0].values):
                yield from self._described([rows[0]._replace(values=only_key)])
            return
        for row, (key, *texts) in zip(rows, answers, strict=True):
            yield key, self._of(row, texts)

    def _asked(self, rows: Sequence[Recorded]) -> tuple[Sequence[Recorded], list[Any]]:
        names = [self._table.columns[n].name for n in self._read]
        with self._connection.transaction():
            target = self._table.target
            table_lock.verify_types(self._connection, target.named_types, target.schema, target.name)
            # guard: binary values of a record are read as the target reads them
            rows = self._in_text(rows)
            arrays = [[self._sent(name, row.values.get(name)) for row in rows] for name in names]
            return rows, psycopg.RawCursor(self._connection).execute(self._query, arrays).fetchall()

    def _in_text(self, rows: Sequence[Recorded]) -> Sequence[Recorded]:
        """Replace binary values by the text that the target has for them."""
        types = {column.name: column.type_oid for column in self._table.columns}
        found = [
            (n, name, Binary(types[name], value))
            for n, row in enumerate(rows)
            for name, value in row.values.items()
            if isinstance(value, bytes) and name in types
        ]
        changed: defaultdict[int, dict[str, str]] = defaultdict(dict)
        for start in range(0, len(found), _PARAMETERS):
            some = found[start : start + _PARAMETERS]
            outputs = ", ".join(f"pg_catalog.format('%s', ${n})" for n in range(1, len(some) + 1))
            [texts] = raw_cursor(self._connection).execute(f"SELECT {outputs}".encode(), [v for _, _, v in some])
            for (n, name, _), text in zip(some, texts, strict=True):
                changed[n][name] = text
        return [row._replace(values={**row.values, **changed[n]}) for n, row in enumerate(rows)]

    def _sent(self, name: str, value: Any) -> str | None:
        """Return the value if the target is to read it. Long ones have the same text there, or are not known."""
        return value if isinstance(value, str) and (len(value) <= KEPT or name in self._key) else None

    def _of(self, row: Recorded, texts: Sequence[str | None]) -> _Described:
        if row.of != NEW:
            return _Described(row, (), None)
        known: list[int | None] = []
        values = [row.values.get(column.name) for column, _ in self._columns]
        for column, other_text in self._columns:
            value = row.values.get(column.name, ...) if self._updated else ...
            known.append(_known(value, other_text=other_text, itself=column.type_oid in _SELF))
        for position, text in zip(self._cast, texts, strict=True):
            values[position] = values[position] if text is None else text
        return _Described(row, tuple(known), _digest(values, known))
