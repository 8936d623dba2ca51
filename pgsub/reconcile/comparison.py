"""The comparison of tables at one point: pieces of all tables in threads, then the rows of buckets that differ."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import psycopg
from psycopg import sql

from pgsub.common.errors import PgsubError
from pgsub.reconcile import buckets, expressions
from pgsub.reconcile.buckets import Selection, Totals
from pgsub.reconcile.equality import Equality
from pgsub.reconcile.expressions import ComparedTable
from pgsub.reconcile.rows import Differences, Row, RowComparison
from pgsub.reconcile.side import Piece, Side, Source


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

    def compare(
        self,
        table: ComparedTable,
        sources: tuple[Source, Source],
        explain: Explain = lambda key_hash, kind: None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> TableResult:
        """Compare one table.

        :param progress: told pieces that are read, and how many there are.
        """
        result = TableResult(table)
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
            result.differences = self._rows(result.table, sources, selection, explain)
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

    def _add(self, total: Totals, side: Side, source: Source, piece: Piece, chosen: Selection) -> None:
        query = chosen.sums(source.rows(piece, self._sample))
        # a table that is no sum of small pieces takes its time
        bounded = piece.leaf is not None
        found = self.on(side, lambda one: side.fetch(one, query, "compare a table", bounded=bounded))
        with self._lock:
            total.add([(bucket, rows, int(summed)) for bucket, rows, summed in found])

    def _rows(
        self, table: ComparedTable, sources: tuple[Source, Source], chosen: Selection, explain: Explain
    ) -> Differences:
        (publisher, source), (target, copy) = self._both(sources)

        def with_target(asking: psycopg.Connection) -> Differences:
            comparison = RowComparison(table, Equality(asking, target.translating), explain)
            return self.on(
                publisher,
                lambda here: self.on(
                    target,
                    lambda there: comparison.run(
                        self._stream(publisher, here, source, chosen), self._stream(target, there, copy, chosen)
                    ),
                ),
            )

        return self.on(target, with_target)

    def _stream(self, side: Side, connection: psycopg.Connection, source: Source, chosen: Selection) -> Iterator[Row]:
        """Yield rows in the order of their hashes; the server sorts them."""
        names = [sql.Identifier(f"v{number}") for number in range(1, len(source.values) + 1)]
        columns = sql.SQL(", ").join([sql.Identifier("k"), sql.Identifier("r"), *names])
        rows = chosen.of(source.rows(Piece(), self._sample, values=True))
        query = sql.SQL("COPY (SELECT {} {} ORDER BY k, r) TO STDOUT").format(columns, rows)
        with side.seeing(connection, "compare rows", bounded=False):
            with connection.cursor() as cursor, cursor.copy(query) as copy:
                for key, hashed, *values in copy.rows():
                    yield int(key), int(hashed), tuple(values)


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


def sources(table: ComparedTable, *, in_utf8: bool) -> tuple[Source, Source]:
    """Compose how both sides of a table are read.

    :param in_utf8: whether the databases have different encodings.
    """
    remote, target = table.remote, table.target
    filters = () if remote.row_filter is None else (sql.SQL(remote.row_filter),)
    here, there = expressions.publisher_values(table), expressions.target_values(table)
    return (
        Source(
            remote.oid,
            _relation(remote.schema, remote.name, remote.relkind),
            filters,
            tuple(here),
            *expressions.hashes(here, table.key, in_utf8=in_utf8),
            loose=table.loose,
        ),
        Source(
            target.oid,
            _relation(target.schema, target.name, target.relkind),
            (),
            tuple(there),
            *expressions.hashes(there, table.key, in_utf8=in_utf8),
            loose=table.loose,
        ),
    )


def _relation(schema: str, name: str, relkind: str) -> sql.Composed:
    return sql.SQL("{}{}").format(sql.SQL("" if relkind == "p" else "ONLY "), sql.Identifier(schema, name))
