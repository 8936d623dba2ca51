"""The comparison of tables at one point: pieces of all tables in threads, then the rows of buckets that differ."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import psycopg
from psycopg import sql

from pgsub.common.errors import PgsubError
from pgsub.publisher.tables import RemoteTable
from pgsub.reconcile import buckets, expressions
from pgsub.reconcile.buckets import Selection, Totals
from pgsub.reconcile.equality import Equality
from pgsub.reconcile.expressions import ComparedTable
from pgsub.reconcile.hashes import hashes
from pgsub.reconcile.rows import Differences, Row, RowComparison, differing
from pgsub.reconcile.side import HASH_BITS, Piece, Side, Source

#: Rows that are asked for one by one at most, where the buckets that differ have many more.
MOST_HASHES = 500_000


@dataclass(slots=True)
class TableResult:
    """Outcome of the comparison of one table.

    :ivar publisher_rows: rows that were compared there; ``target_rows`` likewise.
    :ivar error: why it could not be compared.
    """

    table: ComparedTable
    publisher_rows: int = 0
    target_rows: int = 0
    differences: Differences = field(default_factory=Differences)
    error: PgsubError | None = None


Result = TypeVar("Result")
_Session = tuple[Side, psycopg.Connection]
#: The known reason for a difference, by the hash of its key and its kind.
Explain = Callable[[int, str], str | None]


class Comparison:
    """Sessions on both servers that compare one table after the other.

    :param sides: publisher and target.
    :param jobs: pieces that are read at the same time, each with a session on one server.
    :param sample: percent of the keys; None for all.
    """

    def __init__(self, sides: tuple[Side, Side], *, jobs: int, sample: float | None = None) -> None:
        self._sides = sides
        self._sample = sample
        self._pool = ThreadPoolExecutor(jobs, thread_name_prefix="compare")
        self._free: dict[str, list[psycopg.Connection]] = {side.name: [] for side in sides}
        self._lock = threading.Lock()

    def __enter__(self) -> Comparison:
        return self

    def __exit__(self, *failure: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        for free in self._free.values():
            for connection in free:
                connection.close()

    @property
    def sides(self) -> tuple[Side, Side]:
        """Publisher and target."""
        return self._sides

    def compare(
        self,
        table: ComparedTable,
        sources: tuple[Source, Source],
        explain: Explain = lambda key_hash, kind: None,
        progress: Callable[[int, int], None] = lambda done, total: None,
        found: Differences | None = None,
    ) -> TableResult:
        """Compare one table.

        :param progress: told pieces that are read, and how many there are.
        :param found: takes the differences as they are found.
        """
        result = TableResult(table, differences=Differences() if found is None else found)
        try:
            self._compare(result, sources, explain, progress)
        except PgsubError as error:
            result.error = error
        return result

    def _compare(
        self,
        result: TableResult,
        sources: tuple[Source, Source],
        explain: Explain,
        progress: Callable[[int, int], None],
    ) -> None:
        pieces = [self.on(side, partial(side.pieces, source=source)) for side, source in self._both(sources)]
        first, second, selection = buckets.find(lambda chosen: self._totals(sources, pieces, chosen, progress))
        result.publisher_rows, result.target_rows = first.rows, second.rows
        if selection is not None:
            if selection.rows > buckets.MANY_ROWS and abs(first.rows - second.rows) < MOST_HASHES:
                selection = self._narrowed(result.table, sources, selection)
            self._rows(result, sources, selection, explain)
        for side, source in self._both(sources):
            self.on(side, partial(side.check_not_rewritten, source=source, name=result.table.name))

    def _both(self, sources: tuple[Source, Source]) -> Iterator[tuple[Side, Source]]:
        return zip(self._sides, sources, strict=True)

    def on(self, side: Side, work: Callable[[psycopg.Connection], Result]) -> Result:
        """Work with a session that nobody else has; one that failed is not used again."""
        with self._lock:
            free = self._free[side.name]
            connection = free.pop() if free else None
        connection = side.connect() if connection is None else connection
        try:
            done = work(connection)
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._free[side.name].append(connection)
        return done

    def _totals(
        self,
        sources: tuple[Source, Source],
        pieces: Sequence[Sequence[Piece]],
        chosen: Selection,
        progress: Callable[[int, int], None],
    ) -> tuple[Totals, Totals]:
        totals, work = (Totals(), Totals()), []
        for total, parts, (side, source) in zip(totals, pieces, self._both(sources), strict=True):
            work += [self._pool.submit(self._add, total, side, source, part, chosen) for part in parts]
        for done in _completed(work):
            progress(done, len(work))
        return totals

    def each(self, work: Sequence[Callable[[], None]]) -> None:
        """Do pieces of work, some at a time; the first error ends all that have not begun."""
        for _ in _completed([self._pool.submit(one) for one in work]):
            pass

    def _add(self, total: Totals, side: Side, source: Source, piece: Piece, chosen: Selection) -> None:
        query = chosen.sums(source.rows(piece, self._sample))
        # a table that is no sum of small pieces takes its time
        bounded = piece.leaf is not None
        found = self.on(side, lambda one: side.fetch(one, query, "compare a table", bounded=bounded))
        with self._lock:
            total.add([(bucket, rows, int(summed)) for bucket, rows, summed in found])

    def _narrowed(self, table: ComparedTable, sources: tuple[Source, Source], chosen: Selection) -> Selection:
        """Choose the very rows that differ, by their hashes, unless they are too many."""
        hashes = self._on_both(
            lambda here, there: differing(
                self._hashes(table, here, sources[0], chosen),
                self._hashes(table, there, sources[1], chosen),
                MOST_HASHES,
            )
        )
        return chosen if hashes is None else Selection(HASH_BITS, hashes)

    def _rows(self, result: TableResult, sources: tuple[Source, Source], chosen: Selection, explain: Explain) -> None:
        target = self._sides[1]

        def with_target(asking: psycopg.Connection) -> Differences:
            equality = Equality(asking, target.translating)
            comparison = RowComparison(result.table, equality, explain, result.differences)
            return self._on_both(
                lambda here, there: comparison.run(
                    self._stream(result.table, here, sources[0], chosen),
                    self._stream(result.table, there, sources[1], chosen),
                )
            )

        self.on(target, with_target)

    def _on_both(self, work: Callable[[_Session, _Session], Result]) -> Result:
        """Work with a session on each side."""
        publisher, target = self._sides
        return self.on(
            publisher,
            lambda here: self.on(target, lambda there: work((publisher, here), (target, there))),
        )

    def _hashes(self, table: ComparedTable, session: _Session, source: Source, chosen: Selection) -> Iterator[int]:
        """Yield hashes of rows in their order."""
        rows = chosen.of(source.rows(Piece(), self._sample))
        for (hashed,) in self._sorted(table, session, source, sql.SQL("SELECT r {} ORDER BY r").format(rows)):
            yield int(hashed)

    def _stream(self, table: ComparedTable, session: _Session, source: Source, chosen: Selection) -> Iterator[Row]:
        """Yield rows in the order of their hashes."""
        names = [sql.Identifier(f"v{number}") for number in range(1, len(source.values) + len(source.more) + 1)]
        columns = sql.SQL(", ").join([sql.Identifier("k"), sql.Identifier("r"), *names])
        rows = chosen.of(source.rows(Piece(), self._sample, values=True))
        query = sql.SQL("SELECT {} {} ORDER BY k, r").format(columns, rows)
        for key, hashed, *values in self._sorted(table, session, source, query):
            yield int(key), int(hashed), tuple(values)

    def _sorted(
        self, table: ComparedTable, session: _Session, source: Source, query: sql.Composed
    ) -> Iterator[tuple[Any, ...]]:
        """Yield what a query gives; the server sorts it."""
        side, connection = session
        yield from side.stream(connection, source, query, table.name)


def _completed(work: Sequence[Future[None]]) -> Iterator[int]:
    """Yield how many are done, as they are; the first error ends all that have not begun."""
    left = set(work)
    try:
        while left:
            done, left = wait(left, return_when=FIRST_EXCEPTION, timeout=0.2)
            for one in done:
                one.result()
            yield len(work) - len(left)
    finally:
        for one in left:
            one.cancel()
        wait(left)


def sources(table: ComparedTable, *, in_utf8: bool, as_sent: bool = False) -> tuple[Source, Source]:
    """Compose how both sides of a table are read.

    :param in_utf8: whether the databases have different encodings.
    :param as_sent: whether values are read as their server gives them too, where that is another text.
    """
    remote, target = table.remote, table.target
    filters = row_filters(remote)
    here, there = expressions.publisher_values(table), expressions.target_values(table)
    return (
        Source(
            remote.oid,
            relation_of(remote.schema, remote.name, remote.relkind),
            filters,
            tuple(value.text for value in here),
            *hashes(here, table.key, in_utf8=in_utf8),
            loose=table.loose,
            more=tuple(expressions.rewritten(table).values()) if as_sent else (),
        ),
        Source(
            target.oid,
            relation_of(target.schema, target.name, target.relkind),
            (),
            tuple(value.text for value in there),
            *hashes(there, table.key, in_utf8=in_utf8),
            loose=table.loose,
            more=tuple(expressions.plain(table).values()) if as_sent else (),
        ),
    )


def row_filters(remote: RemoteTable) -> tuple[sql.SQL, ...]:
    """Return the conditions of a published table's rows, as SQL of the publisher."""
    return () if remote.row_filter is None else (sql.SQL(remote.row_filter),)


def relation_of(schema: str, name: str, relkind: str) -> sql.Composed:
    """Compose a table that rows are read from."""
    return sql.SQL("{}{}").format(sql.SQL("" if relkind == "p" else "ONLY "), sql.Identifier(schema, name))
