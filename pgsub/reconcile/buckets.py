"""Which parts of a table differ, by sums of hashes: both servers read the table once, and nothing but sums is sent.

NOTES
The first bits of the hash of its key put a row into a bucket; of each bucket both servers give the number of rows and
the sum of their hashes. Sums can be added, so each server reads the table in the order and in the pieces that suit it,
whatever its keys are, and there is no order of keys that the two would have to agree on. Buckets that differ are
divided by further bits, as long as this takes rows off what must be sent in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from psycopg import sql

from pgsub.reconcile.side import chosen, prefix

#: Bits of the hash that one pass adds.
BITS = 12
#: Buckets are divided further while those that differ are at most so many, and have more rows than this.
FEW_BUCKETS, MANY_ROWS = 64, 20_000
#: The hash has 64.
_MOST_BITS = 4 * BITS

#: Rows and sum by bucket.
Sums = dict[int, tuple[int, int]]


@dataclass(slots=True)
class Totals:
    """Rows and sums of one side in each bucket, added up over its pieces."""

    rows: int = 0
    sums: Sums = field(default_factory=dict)

    def add(self, found: Collection[tuple[int, int, int]]) -> None:
        """Add what one piece has: bucket, rows, sum of hashes."""
        for bucket, rows, total in found:
            before = self.sums.get(bucket, (0, 0))
            self.sums[bucket] = before[0] + rows, before[1] + total
            self.rows += rows


def differing(one: Totals, other: Totals) -> list[int]:
    """Return the buckets of which the two sides do not have the same."""
    nothing = (0, 0)
    buckets = one.sums.keys() | other.sums.keys()
    return sorted(b for b in buckets if one.sums.get(b, nothing) != other.sums.get(b, nothing))


@dataclass(frozen=True, slots=True)
class Selection:
    """Buckets by the first bits of the hash; 0 bits for the whole table."""

    bits: int = 0
    buckets: tuple[int, ...] = ()

    def of(self, rows: sql.Composable) -> sql.Composed:
        """Compose what is read of rows ``k``, ``r``."""
        where = sql.SQL(" WHERE {}").format(chosen(self.bits, self.buckets)) if self.bits else sql.SQL("")
        return sql.SQL("FROM ({}) AS s{}").format(rows, where)

    def sums(self, rows: sql.Composable) -> sql.Composed:
        """Compose the sums of the buckets that the next bits make of these."""
        return sql.SQL("SELECT {}, pg_catalog.count(*), pg_catalog.sum(r)::pg_catalog.text {} GROUP BY 1").format(
            prefix(self.bits + BITS), self.of(rows)
        )


def find(read: Callable[[Selection], tuple[Totals, Totals]]) -> tuple[Totals, Totals, Selection | None]:
    """Find the buckets that differ.

    :param read: gives the totals of both sides.
    :return: the totals of all rows, and what must be looked at row by row; None where nothing differs.
    """
    selection = Selection()
    first = found = read(selection)
    while True:
        buckets = differing(*found)
        if not buckets:
            return *first, None
        selection = Selection(selection.bits + BITS, tuple(buckets))
        rows = sum(side.sums.get(bucket, (0, 0))[0] for side in found for bucket in buckets)
        if selection.bits >= _MOST_BITS or len(buckets) > FEW_BUCKETS or rows <= MANY_ROWS:
            return *first, selection
        found = read(selection)
