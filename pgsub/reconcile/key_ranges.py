"""The comparison of a large table, range by range of its key, so that a later one can resume an interrupted one.

NOTES
Pieces by blocks tell nothing before both sides have been read completely, because a row may be in any block of the
other server. A range of keys has the same rows on both. So each range is compared separately, and the result that it is
equal at a position remains valid whatever happens to the rest. The servers find the rows of a range by an index. This
costs no more than reading the table only if its rows are stored in the order of the key. So a table is divided if the
statistics of both servers say so, and if both sort the first column of the key alike. Others are compared as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from psycopg import sql

from pgsub.common import failpoints
from pgsub.common.errors import PgsubError
from pgsub.reconcile.comparison import Comparison, Pieces, Sources, TableResult
from pgsub.reconcile.expressions import ComparedTable
from pgsub.reconcile.reading.sessions import Progress, Reading
from pgsub.reconcile.reading.side import MEMBERS
from pgsub.reconcile.reading.source import KeyRange, Piece
from pgsub.reconcile.rows import Explain

#: Minimum and maximum number of ranges. A range is what one statement reads, or more if the table is very large.
LEAST_RANGES, MOST_RANGES = 16, 4000
#: Number of ranges that are compared at once: the minimum, and the number for each session that reads.
_AT_ONCE, _OF_A_SESSION = 8, 2
#: Number of the target's blocks that are sampled for each range to find the bounds.
_SAMPLED = 32
#: Types that all servers sort alike, and the type as which their bounds are read.
_ORDERED = {
    20: "int8",
    21: "int8",
    23: "int8",
    1082: "date",
    1114: "timestamp",
    1184: "timestamptz",
    2950: "uuid",
}
# The required correlation with the order of the key. If one row in a hundred is out of order, it may cost a block read.
# Small partitions are read quickly, and have no statistics if they have one row or none.
_ORDERLY = f"""{MEMBERS}
SELECT coalesce(pg_catalog.bool_and(
       EXISTS (SELECT FROM pg_catalog.pg_index x JOIN pg_catalog.pg_class i ON i.oid = x.indexrelid
                 JOIN pg_catalog.pg_am m ON m.oid = i.relam
                WHERE x.indrelid = c.oid AND x.indisvalid AND x.indpred IS NULL AND m.amname = 'btree'
                  AND x.indkey[0] = a.attnum)
       AND EXISTS (SELECT FROM pg_catalog.pg_stats s
                    WHERE s.schemaname = n.nspname AND s.tablename = c.relname AND s.attname = a.attname
                      AND NOT s.inherited AND pg_catalog.abs(s.correlation) >= 0.99)), false)
  FROM member m JOIN pg_catalog.pg_class c USING (oid) JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attname = {{column}} AND NOT a.attisdropped
 WHERE c.relkind = 'r' AND pg_catalog.pg_relation_size(c.oid) > 131072
"""
_BOUNDS = """
SELECT (pg_catalog.percentile_disc({shares}::pg_catalog.float8[]) WITHIN GROUP (ORDER BY {column}))::pg_catalog.text[]
  FROM {table} TABLESAMPLE SYSTEM ({percent})
"""


@dataclass(frozen=True, slots=True)
class EqualRanges:
    """Consecutive ranges that were equal at one position.

    :ivar first: number of the first range; ``until``: of the range after the last one.
    :ivar rows: number of rows on either side.
    """

    first: int
    until: int
    lsn: int
    rows: int


@dataclass(slots=True)
class Ranges:
    """The ranges of a table, and which of them are known to be equal.

    :ivar lsn: position of the present comparison.
    :ivar keep: called when more ranges are known to be equal.
    :ivar bounds: texts of the key's first column at which all ranges but the first begin; none: it is not divided.
    """

    lsn: int
    keep: Callable[[Ranges], None]
    bounds: tuple[str, ...] = ()
    equal: list[EqualRanges] = field(default_factory=list)

    @property
    def count(self) -> int:
        """The number of ranges."""
        return len(self.bounds) + 1

    def left(self, most: int) -> list[range]:
        """Return the ranges that are still to be compared, in groups of at most ``most``."""
        equal = {number for one in self.equal for number in range(one.first, one.until)}
        found: list[range] = []
        for number in range(self.count):
            if number in equal:
                continue
            if found and found[-1].stop == number and len(found[-1]) < most:
                found[-1] = range(found[-1].start, number + 1)
            else:
                found.append(range(number, number + 1))
        return found

    def between(self, first: int, until: int) -> tuple[str | None, str | None]:
        """Return the lower and the upper bound of consecutive ranges; None: unbounded."""
        return self.bounds[first - 1] if first else None, self.bounds[until - 1] if until < self.count else None

    def joined(self) -> list[EqualRanges]:
        """Return the equal ranges. Adjacent ones with the same position are joined."""
        joined: list[EqualRanges] = []
        for one in sorted(self.equal, key=lambda found: found.first):
            before = joined[-1] if joined else None
            if before is not None and (before.until, before.lsn) == (one.first, one.lsn):
                joined[-1] = replace(before, until=one.until, rows=before.rows + one.rows)
            else:
                joined.append(one)
        return joined

    def earlier(self) -> list[EqualRanges]:
        """Return the ranges that an earlier comparison found equal."""
        return [one for one in self.joined() if one.lsn != self.lsn]


def first_column(table: ComparedTable) -> str:
    """Return the column of the key by which a table may be divided."""
    return table.columns[table.key[0]].name


def key_type(table: ComparedTable) -> str | None:
    """Return the type as which bounds of the key's first column are read; None if the servers may sort differently."""
    if not table.keyed:
        return None
    column = table.columns[table.key[0]]
    sent = next(one for one in table.remote.columns if one.name == column.name)
    here, there = _ORDERED.get(sent.type_oid), _ORDERED.get(column.type_oid)
    # a value that the target rounds may be in another range there
    return there if here == there and sent.typmod == column.typmod else None


class RangeComparison:
    """A comparison of one table by its ranges, without those that are known to be equal.

    :param ranges: known ranges, to which further ones are added.
    """

    def __init__(
        self, comparison: Comparison, table: ComparedTable, sources: Sources, ranges: Ranges, explain: Explain
    ) -> None:
        self._comparison = comparison
        self._sources = sources
        self._ranges = ranges
        self._explain = explain
        self._result = TableResult(table)
        self._type = key_type(table)
        self._column = first_column(table) if self._type else ""

    def run(self, progress: Progress) -> TableResult:
        """Compare the table, as a whole if it cannot be divided."""
        try:
            self._compare(Reading(progress))
        except PgsubError as error:
            self._result.error = error
        return self._result

    def _compare(self, reading: Reading) -> None:
        comparison, result, ranges = self._comparison, self._result, self._ranges
        whole = comparison.pieces(self._sources)
        if not ranges.bounds:
            self._divide(whole)
        if not ranges.bounds:
            comparison.compare_pieces(result, self._sources, whole, self._explain, reading)
            comparison.check_not_rewritten(result.table, self._sources)
            return
        result.publisher_rows = result.target_rows = sum(one.rows for one in ranges.equal)
        left = ranges.left(self._at_once)
        reading.expect(sum(map(len, left)) * sum(sum(piece.blocks for piece in side) for side in whole) // ranges.count)
        for some in left:
            self._compare_some(some, whole, reading)

    @property
    def _at_once(self) -> int:
        return max(_AT_ONCE, _OF_A_SESSION * self._comparison.jobs)

    def _divide(self, whole: Pieces) -> None:
        """Find the bounds of ranges, if the table is large enough and stored in order."""
        target = self._comparison.sides[1]
        blocks = max(sum(piece.blocks for piece in side) for side in whole)
        count = min(blocks // self._comparison.blocks(target), MOST_RANGES)
        if self._type is None or count < LEAST_RANGES or not all(map(self._orderly, (0, 1))):
            return
        # without the blocks of TOAST, which contain no keys
        here = sum(piece.blocks if piece.until is None else piece.until - piece.first for piece in whole[1])
        query = sql.SQL(_BOUNDS).format(
            shares=[number / count for number in range(1, count)],
            column=sql.Identifier(self._column),
            table=self._sources[1].relation,
            percent=min(100.0, 100 * _SAMPLED * count / max(here, 1)),
        )
        doing, named = "divide a table", self._sources[1].named()
        [(bounds,)] = self._comparison.on(target, partial(target.fetch, query=query, doing=doing, named=named))
        # values that many rows share would make ranges of any size
        if bounds is not None and len(set(bounds)) == len(bounds):
            self._ranges.bounds = tuple(bounds)

    def _orderly(self, number: int) -> bool:
        side, source = self._comparison.sides[number], self._sources[number]
        query = sql.SQL(_ORDERLY).format(oid=source.oid, column=self._column)
        [(orderly,)] = self._comparison.on(side, partial(side.fetch, query=query, doing="read statistics of a table"))
        return bool(orderly)

    def _compare_some(self, some: range, whole: Pieces, reading: Reading) -> None:
        """Compare consecutive ranges together, and record that they are equal if no row differs."""
        comparison, result, ranges = self._comparison, self._result, self._ranges
        here, there = self._sources
        condition = self._keys(some.start, some.stop).conditions
        sources = (
            replace(here, conditions=(*here.conditions, *condition)),
            replace(there, conditions=(*there.conditions, *condition)),
        )
        differing, rows = sum(result.differences.counts.values()), result.target_rows
        pieces = self._pieces(some, whole[0]), self._pieces(some, whole[1])
        comparison.compare_pieces(result, sources, pieces, self._explain, reading)
        # guard: ranges of a table that was rewritten meanwhile are not remembered as equal
        comparison.check_not_rewritten(result.table, self._sources)
        if sum(result.differences.counts.values()) == differing:
            ranges.equal.append(EqualRanges(some.start, some.stop, ranges.lsn, result.target_rows - rows))
            ranges.keep(ranges)
        failpoints.point("verify.ranges_compared")

    def _keys(self, first: int, until: int) -> KeyRange:
        assert self._type is not None
        return KeyRange(self._column, self._type, *self._ranges.between(first, until))

    def _pieces(self, some: range, whole: list[Piece]) -> list[Piece]:
        tables = {piece.table for piece in whole}
        table = tables.pop() if len(tables) == 1 else None
        blocks = sum(piece.blocks for piece in whole) // self._ranges.count
        return [Piece(table, blocks=blocks, keys=self._keys(number, number + 1)) for number in some]
