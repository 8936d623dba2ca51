"""The comparison of a table at one point: sums of its pieces, then the rows of buckets that differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import psycopg
from psycopg import sql

from pgsub.common.errors import PgsubError, StateForbids
from pgsub.publisher.tables import RemoteTable
from pgsub.reconcile import buckets, expressions
from pgsub.reconcile.buckets import Selection, Totals
from pgsub.reconcile.equality import Equality
from pgsub.reconcile.expressions import ComparedTable
from pgsub.reconcile.hashes import PROBE, hashes
from pgsub.reconcile.reading.sessions import Progress, Reading, Session, Sessions
from pgsub.reconcile.reading.side import Side
from pgsub.reconcile.reading.source import HASH_BITS, Named, Piece, Source
from pgsub.reconcile.rows import Differences, Explain, Row, RowComparison, differing
from pgsub.target.catalog.relation import TargetRelation

#: Maximum number of rows that are selected individually if the buckets that differ have many more.
MOST_HASHES = 500_000


@dataclass(slots=True)
class TableResult:
    """The outcome of the comparison of one table.

    :ivar publisher_rows: number of rows compared on the publisher; ``target_rows``: on the target.
    :ivar error: why the table could not be compared; None: it was.
    """

    table: ComparedTable
    publisher_rows: int = 0
    target_rows: int = 0
    differences: Differences = field(default_factory=Differences)
    error: PgsubError | None = None


_CTID = sql.SQL("ctid::pg_catalog.text")
#: The sources on the publisher and on the target.
Sources = tuple[Source, Source]
Pieces = tuple[list[Piece], list[Piece]]
_Work = tuple[Side, Source, Piece]
#: Selected rows, and the pieces that contain them on both sides.
_Wanted = tuple[Selection, tuple[Sequence[Piece], Sequence[Piece]]]


@dataclass(slots=True)
class _Addresses:
    """The ctids of one side's rows, by table.

    :ivar many: there are more than are kept.
    """

    by_table: dict[Named, list[str]] = field(default_factory=dict)
    rows: int = 0

    @property
    def many(self) -> bool:
        return self.rows > MOST_HASHES

    @property
    def pieces(self) -> list[Piece]:
        return [Piece(table, addresses=tuple(found)) for table, found in self.by_table.items()]

    def add(self, piece: Piece, addresses: Sequence[str]) -> None:
        assert piece.table is not None
        self.rows += len(addresses)
        if addresses and not self.many:
            self.by_table.setdefault(piece.table, []).extend(addresses)


class Comparison(Sessions):
    """A comparison of one table after another; see :class:`~pgsub.reconcile.reading.sessions.Sessions` for parameters.

    :param sample: percentage of the keys; None: all.
    """

    def __init__(
        self, sides: tuple[Side, Side], *, jobs: int, sample: float | None = None, rate: int | None = None
    ) -> None:
        super().__init__(sides, jobs=jobs, rate=rate)
        self._sample = sample
        self._alike: bool | None = None  #: whether both servers compute the same hashes; None: unknown

    def compare(
        self,
        table: ComparedTable,
        sources: Sources,
        explain: Explain = lambda key_hash, kind, row: None,
        progress: Progress = lambda done, total: None,
        found: Differences | None = None,
    ) -> TableResult:
        """Compare one table."""
        result = TableResult(table, differences=Differences() if found is None else found)
        try:
            self.compare_pieces(result, sources, self.pieces(sources), explain, Reading(progress))
            self.check_not_rewritten(table, sources)
        except PgsubError as error:
            result.error = error
        return result

    def pieces(self, sources: Sources) -> Pieces:
        """Divide both sides of a table by blocks."""
        both = zip(self.sides, sources, strict=True)
        here, there = (self.on(side, partial(side.pieces, source=one, most=self.blocks(side))) for side, one in both)
        return here, there

    def check_not_rewritten(self, table: ComparedTable, sources: Sources) -> None:
        """Check that the table was not rewritten on either side since the snapshots."""
        for side, source in zip(self.sides, sources, strict=True):
            self.on(side, partial(side.check_not_rewritten, source=source, name=table.name))

    def compare_pieces(
        self, result: TableResult, sources: Sources, pieces: Pieces, explain: Explain, reading: Reading
    ) -> None:
        """Compare all rows of both sources, and add the differences to ``result``.

        :param pieces: pieces of both sides that contain all rows.
        """
        self._check_hashes()
        parts = zip(self.sides, sources, pieces, strict=True)
        work = [(side, source, piece) for side, source, some in parts for piece in some]
        first, second, selection = buckets.find(lambda chosen: self._totals(work, chosen, reading))
        result.publisher_rows += first.rows
        result.target_rows += second.rows
        if selection is not None:
            if selection.rows > buckets.MANY_ROWS and abs(first.rows - second.rows) < MOST_HASHES:
                selection = self._narrowed(result.table, sources, selection)
            self._rows(result, sources, self._found(work, selection, reading), explain)

    def _check_hashes(self) -> None:
        """Check that both servers compute the same hashes."""
        if self._alike is None:
            here, there = (self.on(side, partial(side.fetch, query=PROBE, doing="hash values")) for side in self.sides)
            self._alike = here == there
        # guard: rows are not compared by hashes that the two servers compute differently
        if not self._alike:
            raise StateForbids(
                "the publisher and the target do not give the same hashes for the same values",
                detail="Their processors have different byte orders, or one of them has other hash functions than"
                " PostgreSQL.",
                hint="Their tables cannot be compared.",
            )

    def _totals(self, work: Sequence[_Work], chosen: Selection, reading: Reading) -> tuple[Totals, Totals]:
        totals = {side.name: Totals() for side in self.sides}
        self.read([(side, piece, partial(self._add, totals[side.name], side, source, piece, chosen))
                   for side, source, piece in work], reading)  # fmt: skip
        first, second = totals.values()
        return first, second

    def _add(self, total: Totals, side: Side, source: Source, piece: Piece, chosen: Selection) -> None:
        found = self._fetch(side, chosen.sums(source.rows(piece, self._sample)), source, piece)
        with self._lock:
            total.add([(bucket, rows, int(summed)) for bucket, rows, summed in found])

    def _fetch(self, side: Side, query: sql.Composed, source: Source, piece: Piece) -> list[Any]:
        # a table that is not divided into small pieces takes longer than the statement timeout
        named = source.named([piece])
        return self.on(side, lambda one: side.fetch(one, query, "compare a table", named=named, bounded=piece.small))

    def _found(self, work: Sequence[_Work], chosen: Selection, reading: Reading) -> _Wanted:
        """Find the ctids of rows, piece by piece, unless there are too many or a piece has several tables."""
        addresses = {side.name: _Addresses() for side in self.sides}
        if chosen.rows <= MOST_HASHES and all(piece.table is not None for *_, piece in work):
            self.read([(side, piece, partial(self._locate, addresses[side.name], side, source, piece, chosen))
                       for side, source, piece in work], reading)  # fmt: skip
            if not any(one.many for one in addresses.values()):
                first, second = (one.pieces for one in addresses.values())
                return chosen, (first, second)
        return chosen, ([Piece()], [Piece()])

    def _locate(self, found: _Addresses, side: Side, source: Source, piece: Piece, chosen: Selection) -> None:
        if found.many:
            return
        rows = replace(source, values=(_CTID,), more=()).rows(piece, self._sample, values=True)
        addresses = self._fetch(side, sql.SQL("SELECT v1 {}").format(chosen.of(rows)), source, piece)
        with self._lock:
            found.add(piece, [address for (address,) in addresses])

    def _narrowed(self, table: ComparedTable, sources: Sources, chosen: Selection) -> Selection:
        """Select the differing rows by their hashes, unless there are too many."""
        hashes = self.on_both(
            lambda here, there: differing(
                self._hashes(table, here, sources[0], chosen),
                self._hashes(table, there, sources[1], chosen),
                MOST_HASHES,
            )
        )
        return chosen if hashes is None else Selection(HASH_BITS, hashes)

    def _rows(self, result: TableResult, sources: Sources, wanted: _Wanted, explain: Explain) -> None:
        chosen, (first, second) = wanted
        target = self.sides[1]

        def with_target(asking: psycopg.Connection) -> Differences:
            equality = Equality(asking, target.translating, result.table.target)
            comparison = RowComparison(result.table, equality, explain, result.differences)
            return self.on_both(
                lambda here, there: comparison.run(
                    self._stream(result.table, here, sources[0], first, chosen),
                    self._stream(result.table, there, sources[1], second, chosen),
                )
            )

        self.on(target, with_target)

    def _hashes(self, table: ComparedTable, session: Session, source: Source, chosen: Selection) -> Iterator[int]:
        """Yield hashes of rows in ascending order."""
        rows = chosen.of(source.rows(Piece(), self._sample))
        side, connection = session
        query = sql.SQL("SELECT r {} ORDER BY r").format(rows)
        for (hashed,) in side.stream(connection, source, query, table.name, ()):
            yield int(hashed)

    def _stream(
        self, table: ComparedTable, session: Session, source: Source, pieces: Sequence[Piece], chosen: Selection
    ) -> Iterator[Row]:
        """Yield rows in the order of their hashes."""
        if not pieces:
            return
        names = [sql.Identifier(f"v{number}") for number in range(1, len(source.values) + len(source.more) + 1)]
        columns = sql.SQL(", ").join([sql.Identifier("k"), sql.Identifier("r"), *names])
        rows = sql.SQL(" UNION ALL ").join(source.rows(piece, self._sample, values=True) for piece in pieces)
        query = sql.SQL("SELECT {} {} ORDER BY k, r").format(columns, chosen.of(rows))
        side, connection = session
        for key, hashed, *values in side.stream(connection, source, query, table.name, pieces):
            yield int(key), int(hashed), tuple(values)


def sources(table: ComparedTable, *, in_utf8: bool, as_sent: bool = False) -> Sources:
    """Compose how to read both sides of a table.

    :param in_utf8: whether the databases have different encodings.
    :param as_sent: also read the server's own text of values that are compared by another text.
    """
    here, there = expressions.publisher_values(table), expressions.target_values(table)
    more_here, more_there = expressions.rewritten(table), expressions.plain(table)
    return (
        source_of(
            table.remote,
            tuple(value.text for value in here),
            hashes(here, table.key, in_utf8=in_utf8),
            loose=table.loose,
            more=tuple(more_here.values()) if as_sent else (),
        ),
        source_of(
            table.target,
            tuple(value.text for value in there),
            hashes(there, table.key, in_utf8=in_utf8),
            loose=table.loose,
            more=tuple(more_there.values()) if as_sent else (),
        ),
    )


def source_of(
    table: RemoteTable | TargetRelation,
    values: tuple[sql.Composable, ...],
    hashed: tuple[sql.Composable, sql.Composable],
    *,
    loose: bool = False,
    more: tuple[sql.Composable, ...] = (),
) -> Source:
    """Compose how to read a table without its inheritance children, and of a published one only the published rows.

    :param values: see :class:`~pgsub.reconcile.reading.source.Source`, as for the others.
    :param hashed: hash of a row's key, and of the row.
    """
    only = sql.SQL("" if table.relkind == "p" else "ONLY ")
    relation = sql.SQL("{}{}").format(only, sql.Identifier(table.schema, table.name))
    row_filter = table.row_filter if isinstance(table, RemoteTable) else None
    conditions = () if row_filter is None else (sql.SQL(row_filter),)
    return Source(table.oid, (table.schema, table.name), relation, conditions, values, *hashed, loose, more)
