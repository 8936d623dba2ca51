"""The comparison of parts of a table that were copied before, by hashes of whole rows.

NOTES
A part is a range of the publisher's blocks and the transactions that copied its rows to the target. Both sides return
the number of its rows and the sum of their hashes, so a part that is equal costs one line. In a part that is not, sums
of hashes find the rows, as in :mod:`~pgsub.reconcile.buckets`. Only their ctids are needed: a missing row is copied by
its ctid, a surplus row is deleted by its ctid, and both are done to a row that differs. No values are sent, and no key
is needed.

A row that an UPDATE moved to another part is surplus in the one and missing in the other. Locally changed rows have the
xid of the transaction that changed them, so they belong to no part.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Any

import psycopg
from psycopg import sql

from pgsub.reconcile import buckets, expressions
from pgsub.reconcile.buckets import Selection, Totals
from pgsub.reconcile.comparison import Comparison, source_of
from pgsub.reconcile.expressions import ComparedTable
from pgsub.reconcile.hashes import hashes
from pgsub.reconcile.reading.side import Side
from pgsub.reconcile.reading.source import Named, Piece, Source

#: Maximum number of rows of a part that are copied or removed individually. With more, the part is copied again.
MOST_ROWS = 50_000
#: Maximum number of parts that are examined at the same time, if there are enough sessions.
_AT_ONCE = 16
#: Initial number of rows per bucket.
_ROWS_A_SUM = 16
#: Bytes of a hash and a ctid in transit.
_LINE = 32
_PUBLISHER, _TARGET = 0, 1
#: A query for rows, and the pieces that it reads.
_Rows = tuple[sql.Composable, Sequence[Piece]]
_XMIN, _TABLE, _CTID = (sql.SQL(f"{name}::pg_catalog.text") for name in ("xmin", "tableoid", "ctid"))


@dataclass(frozen=True, slots=True)
class Part:
    """Blocks of the publisher, and the rows that were copied from them.

    :ivar leaf: the publisher's table with the blocks; None: no table has that name any more.
    :ivar until: the block after the last one.
    :ivar xids: xmin values of the target's rows.
    :ivar rows: number of copied rows; ``bytes``: their size.
    """

    leaf: Named | None
    first: int
    until: int
    xids: tuple[int, ...]
    rows: int
    bytes: int


@dataclass(slots=True)
class PartResult:
    """The differences between both sides of a part.

    :ivar surplus: rows to remove from the target: xid, OID of the table, ctid.
    :ivar missing: ctids of the publisher's rows to copy.
    :ivar anew: the whole part must be copied again; no rows are listed then.
    """

    part: Part
    surplus: list[tuple[int, int, str]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    anew: bool = False


class PartComparison:
    """A comparison of the parts of one table.

    :param in_utf8: whether the databases have different encodings.
    """

    def __init__(self, comparison: Comparison, table: ComparedTable, *, in_utf8: bool) -> None:
        self._comparison = comparison
        self._publisher, self._target = comparison.sides
        here, there = expressions.exact_values(table)
        everything = range(len(table.columns))
        _, hash_here = hashes(here, everything, in_utf8=in_utf8)
        _, hash_there = hashes(there, everything, in_utf8=in_utf8)
        # buckets are formed by the row's own hash
        self._here = source_of(table.remote, (_CTID,), (hash_here, hash_here))
        self._there = source_of(table.target, (_XMIN, _TABLE, _CTID), (hash_there, hash_there))
        self._name = table.name
        self._lock = threading.Lock()
        self._pieces: list[Piece] = []
        #: by xid: number of each piece with its rows, and their number and sum
        self._brought: dict[int, list[tuple[int, int, int]]] = {}
        self._published: dict[Part, tuple[int, int]] = {}
        self._parts: Sequence[Part] = ()

    def read(self, parts: Sequence[Part]) -> None:
        """Add up the rows of parts on both sides."""
        self._parts = parts
        source = replace(self._there, conditions=(_of_xids([xid for part in parts for xid in part.xids]),))
        self._pieces = self._comparison.on(self._target, partial(self._target.pieces, source=source))
        self._comparison.each(
            [partial(self._add_target, source, number) for number in range(len(self._pieces))]
            + [partial(self._add_publisher, part) for part in parts]
        )

    def target_rows(self, part: Part) -> int:
        """Return how many rows of a part the target still has."""
        return self._of_target(part)[0]

    def differing(self) -> Iterator[PartResult]:
        """Examine the parts that differ, and yield their results."""
        differ = [part for part in self._parts if self._of_target(part) != self._published[part]]
        for at in range(0, len(differ), _AT_ONCE):
            results = [PartResult(part) for part in differ[at : at + _AT_ONCE]]
            self._comparison.each([partial(self._look_closely, result) for result in results])
            yield from results

    def _of_target(self, part: Part) -> tuple[int, int]:
        found = [one for xid in part.xids for one in self._brought.get(xid, [])]
        return sum(rows for _, rows, _ in found), sum(summed for *_, summed in found)

    def _add_target(self, source: Source, number: int) -> None:
        piece = self._pieces[number]
        query = sql.SQL("SELECT v1, pg_catalog.count(*), pg_catalog.sum(r)::pg_catalog.text FROM ({}) AS s GROUP BY 1")
        text = query.format(source.rows(piece, None, values=True))
        found = self._comparison.on(self._target, lambda one: self._fetch(self._target, one, source, text, [piece]))
        with self._lock:
            for xid, rows, summed in found:
                self._brought.setdefault(int(xid), []).append((number, rows, int(summed)))

    def _add_publisher(self, part: Part) -> None:
        self._published[part] = self._comparison.on(self._publisher, partial(self._of_part, part))

    def _fetch(
        self,
        side: Side,
        connection: psycopg.Connection,
        source: Source,
        query: sql.Composed,
        pieces: Sequence[Piece],
    ) -> list[tuple[Any, ...]]:
        named = source.in_lock_order(pieces)
        bounded = len(pieces) == 1 and pieces[0].table is not None
        with side.seeing(connection, "compare a part of a table", named=named, bounded=bounded):
            rows = connection.execute(query).fetchall()
            side.refuse_rewritten(connection, source, self._name)  # the query has locked the table
        return rows

    def _of_part(self, part: Part, connection: psycopg.Connection) -> tuple[int, int]:
        """Return number and sum of the rows of a part on the publisher."""
        if part.leaf is None:
            return 0, 0
        piece = _piece(part)
        rows = self._here.rows(piece, None)
        query = sql.SQL("SELECT pg_catalog.count(*), coalesce(pg_catalog.sum(r), 0)::pg_catalog.text FROM ({}) AS s")
        [(count, summed)] = self._fetch(self._publisher, connection, self._here, query.format(rows), [piece])
        return count, int(summed)

    def _look_closely(self, result: PartResult) -> None:
        part = result.part
        if part.leaf is None or not self._published[part][0] or not part.rows:
            result.anew = True
            return
        of_part = [_piece(part)]
        here = self._here.rows(of_part[0], None, values=True)
        source = replace(self._there, conditions=(_of_xids(part.xids),))
        numbers = sorted({number for xid in part.xids for number, *_ in self._brought.get(xid, [])})
        brought = [self._pieces[number] for number in numbers]
        there = sql.SQL(" UNION ALL ").join(source.rows(piece, None, values=True) for piece in brought)

        def read(chosen: Selection) -> tuple[Totals, Totals]:
            return (
                self._sums(self._publisher, self._here, chosen.sums(here), of_part),
                self._sums(self._target, self._there, chosen.sums(there), brought),
            )

        _, _, selection = buckets.find(read, min(buckets.BITS, (part.rows // _ROWS_A_SUM).bit_length()))
        if selection is not None and selection.rows // 2 * _LINE > part.bytes // 2:
            result.anew = True
        elif selection is not None:
            self._list(result, selection, (here, of_part), (there, brought))

    def _sums(self, side: Side, source: Source, query: sql.Composed, pieces: Sequence[Piece]) -> Totals:
        totals = Totals()
        found = self._comparison.on(side, lambda one: self._fetch(side, one, source, query, pieces))
        totals.add([(bucket, rows, int(summed)) for bucket, rows, summed in found])
        return totals

    def _list(self, result: PartResult, chosen: Selection, here: _Rows, there: _Rows) -> None:
        """List the rows that differ."""
        columns = sql.SQL("SELECT r, v1 {} ORDER BY r"), sql.SQL("SELECT r, v1, v2, v3 {} ORDER BY r")
        queries = columns[0].format(chosen.of(here[0])), columns[1].format(chosen.of(there[0]))

        def with_both(ours: psycopg.Connection, theirs: psycopg.Connection) -> None:
            with (
                contextlib.closing(self._publisher.stream(ours, self._here, queries[0], self._name, here[1])) as sent,
                contextlib.closing(self._target.stream(theirs, self._there, queries[1], self._name, there[1])) as kept,
            ):
                _take(result, _alone(sent, kept))

        self._comparison.on(
            self._publisher,
            lambda ours: self._comparison.on(self._target, lambda theirs: with_both(ours, theirs)),
        )


def _piece(part: Part) -> Piece:
    assert part.leaf is not None
    return Piece(part.leaf, part.first, part.until)


def _of_xids(xids: Sequence[int]) -> sql.Composed:
    array = sql.Literal("{" + ",".join(map(str, xids)) + "}")
    return sql.SQL("xmin::pg_catalog.text::pg_catalog.int8 = ANY ({}::pg_catalog.int8[])").format(array)


def _take(result: PartResult, rows: Iterator[tuple[int, Sequence[str]]]) -> None:
    for side, row in rows:
        if side == _PUBLISHER:
            result.missing.append(row[0])
        else:
            xid, table, ctid = row
            result.surplus.append((int(xid), int(table), ctid))
        if max(len(result.missing), len(result.surplus)) > MOST_ROWS:
            result.anew, result.missing, result.surplus = True, [], []
            return


def _alone(publisher: Iterator[Sequence[str]], target: Iterator[Sequence[str]]) -> Iterator[tuple[int, Sequence[str]]]:
    """Yield the rows that one side has more often than the other, each with its side.

    :param publisher: rows that begin with their hash, in the order of hashes; ``target`` likewise.
    """
    tagged = heapq.merge(
        ((int(hashed), _PUBLISHER, row) for hashed, *row in publisher),
        ((int(hashed), _TARGET, row) for hashed, *row in target),
        key=itemgetter(0),
    )
    for _, rows in itertools.groupby(tagged, key=itemgetter(0)):
        sides: tuple[list[Sequence[str]], list[Sequence[str]]] = ([], [])
        for _, side, row in rows:
            sides[side].append(row)
        same = min(map(len, sides))
        for side, several in enumerate(sides):
            yield from ((side, row) for row in several[same:])
