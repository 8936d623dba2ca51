"""Which parts of a table differ, by sums of hashes: both servers read the table once, and nothing but sums is sent.

NOTES
The first bits of the hash of its key put a row into a bucket; of each bucket both servers give the number of rows and
the sum of their hashes. Sums can be added, so each server reads the table in the order and in the pieces that suit it,
whatever its keys are, and there is no order of keys that the two would have to agree on. Buckets that differ are
divided by further bits, as long as this takes more rows off what must be sent in the end than it sends sums.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from psycopg import sql

from pgsub.reconcile.reading.source import chosen, prefix

#: Bits of the hash that one pass adds at most.
BITS = 12
#: Buckets are divided further while those that differ have more rows than this.
MANY_ROWS = 20_000
#: Sums that a later pass brings at most, and rows that are worth one of them.
_MOST_SUMS, _ROWS_A_SUM = 1 << 18, 8
#: A pass that adds fewer bits costs more than it is good for.
_LEAST_BITS = 2
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
    """Buckets by the first bits of the hash; 0 bits for the whole table.

    :ivar more: bits by which sums divide them.
    :ivar rows: of both sides in them.
    """

    bits: int = 0
    buckets: tuple[int, ...] = ()
    more: int = 0
    rows: int = 0

    def of(self, rows: sql.Composable) -> sql.Composed:
        """Compose what is read of rows ``k``, ``r``."""
        where = sql.SQL(" WHERE {}").format(chosen(self.bits, self.buckets)) if self.bits else sql.SQL("")
        return sql.SQL("FROM ({}) AS s{}").format(rows, where)

    def sums(self, rows: sql.Composable) -> sql.Composed:
        """Compose the sums of the buckets that the next bits make of these."""
        return sql.SQL("SELECT {}, pg_catalog.count(*), pg_catalog.sum(r)::pg_catalog.text {} GROUP BY 1").format(
            prefix(self.bits + self.more), self.of(rows)
        )


def find(
    read: Callable[[Selection], tuple[Totals, Totals]], bits: int = BITS
) -> tuple[Totals, Totals, Selection | None]:
    """Find the buckets that differ.

    :param bits: of the first pass.
    :return: the totals of all rows, and what must be looked at row by row; None where nothing differs.
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
    """Return by how many bits it is worth to divide buckets that have so many rows."""
    return min(BITS, (min(_MOST_SUMS, rows // _ROWS_A_SUM) // buckets).bit_length() - 1)
