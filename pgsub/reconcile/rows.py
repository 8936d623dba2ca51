"""The comparison of the rows of differing buckets, which both servers send in the order of their hashes."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from operator import itemgetter

from pgsub.common.errors import SchemaFault
from pgsub.reconcile.equality import Equality, Values
from pgsub.reconcile.expressions import ComparedTable, loose

#: Hashes of key and row, and the row.
Row = tuple[int, int, Values]
#: Returns the known reason for a difference, by the hash of its key, its kind and the publisher's row, if it has one.
Explain = Callable[[int, str, Values | None], str | None]

#: Maximum number of a table's differing rows that are listed.
LISTED = 1000
#: Maximum number of different rows with one key that are compared.
OF_ONE_KEY = 100_000
#: Maximum number of value pairs, and their bytes, that the target compares at once.
_PAIRS, _PAIR_BYTES = 500, 4 << 20
#: Maximum number of rows that only one side has, and their bytes, whose keys the target compares in the end. Further
#: rows are judged by the texts of their keys.
_ALONE, _ALONE_BYTES = 50_000, 64 << 20
MISSING, EXTRA, DIFFERENT = "missing", "extra", "different"
#: Mark of a row for which a conflict left out a change without keeping it. It is no reason for a difference.
LEFT_OUT = "left_out"


@dataclass(frozen=True, slots=True)
class Difference:
    """A row that is not the same on both sides.

    :ivar kind: missing on the target, extra there, or different.
    :ivar publisher: values on the publisher; ``target``: on the target. None: the row does not exist there.
    :ivar known: what the record tells about the row.
    """

    kind: str
    publisher: Values | None
    target: Values | None
    known: str | None = None

    @property
    def left_out(self) -> bool:
        """Whether a conflict left out a change of the row without keeping it."""
        return self.known == LEFT_OUT

    @property
    def explained(self) -> str | None:
        """The reason why it differs; None: unknown."""
        return None if self.left_out else self.known


@dataclass(slots=True)
class Differences:
    """The differing rows of a table: all are counted, some are listed.

    :ivar counts: number of rows, by kind.
    :ivar explained: number of rows that the record explains, by kind.
    """

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys((MISSING, EXTRA, DIFFERENT), 0))
    explained: dict[str, int] = field(default_factory=lambda: dict.fromkeys((MISSING, EXTRA, DIFFERENT), 0))
    listed: list[Difference] = field(default_factory=list)

    @property
    def unexplained(self) -> int:
        """The number of differing rows that the record does not explain."""
        return sum(self.counts.values()) - sum(self.explained.values())

    def add(self, one: Difference) -> None:
        """Count a difference, and list it if there is space. Those without an explanation take precedence."""
        self.counts[one.kind] += 1
        self.explained[one.kind] += one.explained is not None
        if len(self.listed) < LISTED:
            self.listed.append(one)
        elif one.explained is None:
            known = next((n for n, other in enumerate(self.listed) if other.explained is not None), None)
            if known is not None:
                self.listed[known] = one


class RowComparison:
    """The comparison of the rows of one table.

    :param equality: tells which values are equal on the target.
    :param explain: may also return :data:`LEFT_OUT`.
    """

    def __init__(
        self,
        table: ComparedTable,
        equality: Equality,
        explain: Explain = lambda key_hash, kind, row: None,
        found: Differences | None = None,
    ) -> None:
        self._table = table
        self._equality = equality
        self._alone: list[tuple[int, str, Values]] = []
        self._alone_bytes = 0
        self._explain = explain
        self._pairs: list[tuple[int, Values, Values]] = []
        self._bytes = 0
        self.found = Differences() if found is None else found

    def run(self, publisher: Iterator[Row], target: Iterator[Row]) -> Differences:
        """Compare rows that arrive in the order of their hashes."""
        tagged = heapq.merge(
            ((k, r, 0, v) for k, r, v in publisher), ((k, r, 1, v) for k, r, v in target), key=itemgetter(0, 1)
        )
        for key, rows in itertools.groupby(tagged, key=itemgetter(0)):
            self._of_key(key, *_surplus((r, side, v) for _, r, side, v in rows))
        self._match()
        self._ask()
        return self.found

    def _of_key(self, key: int, here: list[tuple[Values, int]], there: list[tuple[Values, int]]) -> None:
        """Process the rows of one key that only one side has."""
        if self._table.keyed:
            others = {self._key(values): values for values, _ in there}
            for values, _ in list(here):
                other = others.get(self._key(values))
                if other is not None:
                    self._pair(key, values, other)
                    here = [one for one in here if one[0] is not values]
                    there = [one for one in there if one[0] is not other]
        for values, count in here:
            self._one_side(key, MISSING, values, count)
        for values, count in there:
            self._one_side(key, EXTRA, values, count)

    def _one_side(self, key: int, kind: str, values: Values, count: int) -> None:
        """Process a row that only one side has with this text of its key."""
        for _ in range(count):
            if not self._table.loose or len(self._alone) >= _ALONE or self._alone_bytes >= _ALONE_BYTES:
                self._add_alone(key, kind, values)
            else:
                self._alone.append((key, kind, values))
                self._alone_bytes += sum(len(value or "") for value in values)

    def _match(self) -> None:
        """Pair rows of both sides whose keys have different texts but are equal on the target."""
        columns = [self._table.columns[position] for position in self._table.key]
        keys = [self._key(values) for *_, values in self._alone]
        for members in self._equality.groups(columns, keys) if keys else ():
            here, there = ([self._alone[n] for n in members if self._alone[n][1] == k] for k in (MISSING, EXTRA))
            for (key, _, one), (_, _, other) in zip(here, there, strict=False):
                if self._table.keyed:
                    self._pair(key, one, other)
            paired = min(len(here), len(there))
            for one_of in (*here[paired:], *there[paired:]):
                self._add_alone(*one_of)
        self._alone = []

    def _add_alone(self, key: int, kind: str, values: Values) -> None:
        self._add(key, kind, *((values, None) if kind == MISSING else (None, values)))

    def _key(self, values: Values) -> Values:
        return tuple(values[n] for n in self._table.key)

    def _pair(self, key: int, one: Values, other: Values) -> None:
        columns = zip(self._table.columns, one, other, strict=False)  # further values may follow
        if any(a is None or b is None or not loose(column) for column, a, b in columns if a != b):
            self._add(key, DIFFERENT, one, other)
            return
        self._pairs.append((key, one, other))
        self._bytes += sum(len(value or "") for value in (*one, *other))
        if len(self._pairs) >= _PAIRS or self._bytes >= _PAIR_BYTES:
            self._ask()

    def _ask(self) -> None:
        """Compare pairs on the target whose texts differ, in types that have several texts for one value."""
        differ: set[int] = set()
        for position, column in enumerate(self._table.columns):
            asked: list[tuple[int, tuple[str, str]]] = []
            for number, (_, one, other) in enumerate(self._pairs):
                a, b = one[position], other[position]
                if a is not None and b is not None and a != b and number not in differ:
                    asked.append((number, (a, b)))
            if asked:
                answers = self._equality.of_pairs(column, [values for _, values in asked])
                differ |= {number for (number, _), same in zip(asked, answers, strict=True) if not same}
        for number in sorted(differ):
            self._add(self._pairs[number][0], DIFFERENT, *self._pairs[number][1:])
        self._pairs, self._bytes = [], 0

    def _add(self, key: int, kind: str, one: Values | None, other: Values | None) -> None:
        self.found.add(Difference(kind, one, other, self._explain(key, kind, one)))


def left_by(unpublished: Collection[str]) -> set[str]:
    """Return the kinds of differences that unpublished changes cause.

    :param unpublished: insert, update, delete, truncate.
    """
    # guard: rows that an unpublished TRUNCATE left are not repaired, without ", "truncate": {EXTRA}"
    left = {"insert": {MISSING}, "update": {DIFFERENT, EXTRA}, "delete": {EXTRA}, "truncate": {EXTRA}}
    return set().union(*(left[operation] for operation in unpublished))


def differing(publisher: Iterator[int], target: Iterator[int], most: int) -> tuple[int, ...] | None:
    """Return the hashes of rows that the two sides do not have equally often; None if there are more than ``most``.

    :param publisher: hashes of rows in ascending order; ``target`` likewise.
    """
    found: list[int] = []
    tagged = heapq.merge(((hashed, 1) for hashed in publisher), ((hashed, -1) for hashed in target))
    for hashed, rows in itertools.groupby(tagged, key=itemgetter(0)):
        if sum(side for _, side in rows):
            if len(found) >= most:
                return None
            found.append(hashed)
    return tuple(found)


def _surplus(rows: Iterator[tuple[int, int, Values]]) -> tuple[list[tuple[Values, int]], list[tuple[Values, int]]]:
    """Remove rows that both sides have; return those that only one side has, and how often.

    :raises SchemaFault: there are more than can be kept in memory.
    """
    counts: dict[int, list[int]] = {}
    samples: dict[tuple[int, int], Values] = {}  # of each side, because the texts of equal rows may differ
    for hashed, side, values in rows:
        counts.setdefault(hashed, [0, 0])[side] += 1
        samples.setdefault((hashed, side), values)
        # guard: the rows collected for one key are limited
        if len(counts) > OF_ONE_KEY:
            raise SchemaFault(
                f"more than {OF_ONE_KEY} different rows have the same key, and cannot be compared",
                detail="The target identifies rows by columns that are not unique on the publisher.",
                hint="Give the publisher's table the key that the target's has.",
            )
    more = [(hashed, here - there) for hashed, (here, there) in counts.items()]
    return (
        [(samples[hashed, 0], count) for hashed, count in more if count > 0],
        [(samples[hashed, 1], -count) for hashed, count in more if count < 0],
    )
