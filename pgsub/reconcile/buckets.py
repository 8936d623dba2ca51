"""The search for the parts of a table that differ, by sums of hashes. Both servers read the table and send only sums.

NOTES
The first bits of its key's hash put a row into a bucket. For each bucket both servers return the number of rows and the
sum of their hashes. Sums can be added, so each server reads the table in its own order and pieces, and the servers need
not agree on an order of keys. Buckets that differ are divided by further bits, as long as the additional sums cost less
than the rows that need not be sent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from psycopg import sql

from pgsub.reconcile.reading.source import chosen, prefix

#: Maximum number of bits that one pass adds.
BITS = 12
#: Buckets are divided further while those that differ have more rows than this.
MANY_ROWS = 20_000
#: Maximum number of sums in a later pass, and number of rows that justify one more sum.
_MOST_SUMS, _ROWS_A_SUM = 1 << 18, 8
#: A pass that adds fewer bits is not worth its cost.
_LEAST_BITS = 2
#: The hash has 64 bits.
_MOST_BITS = 4 * BITS

#: Rows and sum by bucket.
Sums = dict[int, tuple[int, int]]


@dataclass(slots=True)
class Totals:
    """Rows and sums of one side in each bucket, for all its pieces."""

    rows: int = 0
    sums: Sums = field(default_factory=dict)

    def add(self, found: Collection[tuple[int, int, int]]) -> None:
        """Add the result of one piece: bucket, rows, sum of hashes."""
        for bucket, rows, total in found:
            before = self.sums.get(bucket, (0, 0))
            self.sums[bucket] = before[0] + rows, before[1] + total
            self.rows += rows


def differing(one: Totals, other: Totals) -> list[int]:
    """Return the buckets in which the two sides differ."""
    nothing = (0, 0)
    buckets = one.sums.keys() | other.sums.keys()
    return sorted(b for b in buckets if one.sums.get(b, nothing) != other.sums.get(b, nothing))


@dataclass(frozen=True, slots=True)
class Selection:
    """A selection of buckets by the first bits of the hash. 0 bits select the whole table.

    :ivar more: number of further bits by which sums divide the buckets.
    :ivar rows: number of rows in them, on both sides together.
    """

    bits: int = 0
    buckets: tuple[int, ...] = ()
    more: int = 0
    rows: int = 0

    def of(self, rows: sql.Composable) -> sql.Composed:
        """Compose the FROM clause that selects from rows ``k``, ``r``."""
        where = sql.SQL(" WHERE {}").format(chosen(self.bits, self.buckets)) if self.bits else sql.SQL("")
        return sql.SQL("FROM ({}) AS s{}").format(rows, where)

    def sums(self, rows: sql.Composable) -> sql.Composed:
        """Compose the query for the sums of the buckets into which the next bits divide these."""
        return sql.SQL("SELECT {}, pg_catalog.count(*), pg_catalog.sum(r)::pg_catalog.text {} GROUP BY 1").format(
            prefix(self.bits + self.more), self.of(rows)
        )


def find(
    read: Callable[[Selection], tuple[Totals, Totals]], bits: int = BITS
) -> tuple[Totals, Totals, Selection | None]:
    """Find the buckets that differ.

    :param bits: number of bits of the first pass.
    :return: totals of all rows on both sides, and the selection to compare row by row; None if nothing differs.
    """
    selection = Selection(more=bits)
    first = found = read(selection)
    while True:
        buckets = differing(*found)
        if not buckets:
            return *first, None
        rows = sum(side.sums.get(bucket, (0, 0))[0] for side in found for bucket in buckets)
        more = _worth(len(buckets), rows)
        selection = Selection(selection.bits + selection.more, tuple(buckets), more, rows)
        if selection.bits >= _MOST_BITS or rows <= MANY_ROWS or more < _LEAST_BITS:
            return *first, selection
        found = read(selection)


def _worth(buckets: int, rows: int) -> int:
    """Return the number of bits by which it is worth dividing buckets with this number of rows."""
    return min(BITS, (min(_MOST_SUMS, rows // _ROWS_A_SUM) // buckets).bit_length() - 1)
