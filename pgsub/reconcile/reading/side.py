"""One server's side of a comparison: sessions that see its snapshot, and the statements that read a table there.

NOTES
Each statement has a transaction of its own. It imports the snapshot, locks the tables that it names, and verifies that
these have the names (:mod:`pgsub.common.table_lock`). So no lock is held for longer than one piece takes to read, and
TRUNCATE or ALTER TABLE waits no longer. Their effect is noticed at the end: a table with other files than in the
snapshot was truncated or rewritten, which a snapshot does not show. A table with another name may have been renamed,
and another table with its old name read in its place, if the session may not lock it. So may a column, because names
mean the present columns, whatever the snapshot.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from typing import Any

import psycopg
from psycopg import sql

from pgsub.common import server_words, table_lock
from pgsub.common.connections.exported_snapshot import ExportedSnapshot, HolderGone
from pgsub.common.errors import PgsubError, PublisherUnavailable, TableReplaced, TableRewritten, TargetUnavailable
from pgsub.common.query import leave_transaction, scalar
from pgsub.reconcile.reading.read_rate import MOST_BLOCKS
from pgsub.reconcile.reading.source import Named, Piece, Source

_MOST_BLOCKS = 1 << 32  #: maximum number of blocks of a table (MaxBlockNumber, block.h), whatever a server reports

#: Settings that give a value the same text on both servers, besides datestyle, which all sessions set.
_TEXTS = {"timezone": "UTC", "intervalstyle": "postgres", "bytea_output": "hex", "xmloption": "content"}
_SETTINGS = {
    **_TEXTS,
    "jit": "off",
    "max_parallel_workers_per_gather": "0",
    "lock_timeout": "10s",
}
_STATEMENT_TIMEOUT = "10min"

#: CTE with a table and, for a partitioned table, all its partitions.
MEMBERS = """
WITH RECURSIVE member AS (
     SELECT {oid}::pg_catalog.oid AS oid
      UNION
     SELECT c.oid FROM member m JOIN pg_catalog.pg_inherits i ON i.inhparent = m.oid
       JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid AND c.relispartition)
"""
# Catalogs are read as of the snapshot; functions return the present state.
_REWRITTEN = f"""{MEMBERS}
SELECT pg_catalog.count(*) FROM member m LEFT JOIN pg_catalog.pg_class c USING (oid)
  LEFT JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE c.oid IS NULL OR c.relkind = 'r' AND c.relfilenode IS DISTINCT FROM pg_catalog.pg_relation_filenode(c.oid)
    OR c.oid::pg_catalog.regclass::pg_catalog.text
       IS DISTINCT FROM pg_catalog.format('%I.%I', n.nspname, c.relname)
    OR {table_lock.COLUMNS_RENAMED.format(oid="m.oid")}
    OR c.oid = {{oid}}::pg_catalog.oid AND (n.nspname, c.relname) <> ({{schema}}, {{name}})
"""
# A role that may read a partitioned table need not have privileges on its partitions, which have policies of their own.
# A role that may read only some columns of a table may not read the ctids of its rows.
_LEAVES = f"""{MEMBERS}
SELECT c.oid::pg_catalog.int8, n.nspname::pg_catalog.text, c.relname::pg_catalog.text,
       (pg_catalog.pg_relation_size(c.oid)
       / pg_catalog.current_setting('block_size')::pg_catalog.int8)::pg_catalog.int8,
       (coalesce(pg_catalog.pg_relation_size(nullif(c.reltoastrelid, 0::pg_catalog.oid)), 0)
       / pg_catalog.current_setting('block_size')::pg_catalog.int8)::pg_catalog.int8,
       c.relkind = 'r' AND (c.oid = {{oid}}::pg_catalog.oid OR NOT c.relrowsecurity)
           AND pg_catalog.has_schema_privilege(n.oid, 'USAGE') AND pg_catalog.has_table_privilege(c.oid, 'SELECT')
  FROM member m JOIN pg_catalog.pg_class c USING (oid) JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind <> 'p' ORDER BY c.oid
"""


def date_order(session: psycopg.Connection) -> str:
    """Return the order of day and month in which the target reads dates."""
    return str(scalar(session, "SHOW datestyle")).rpartition(", ")[2]


@contextlib.contextmanager
def same_texts(connection: psycopg.Connection) -> Iterator[None]:
    """Give values the text that they have in sessions of :class:`Side`, in a part of a transaction that writes nothing.

    The rest of the transaction has the target's own settings, which triggers and defaults may use.
    """
    connection.execute("SAVEPOINT pgsub_texts")
    # guard: rows are found again whatever the settings of the target make of their keys
    for name, value in _TEXTS.items():
        connection.execute(sql.SQL("SET LOCAL {} = {}").format(sql.Identifier(name), sql.Literal(value)))
    yield
    connection.execute("ROLLBACK TO SAVEPOINT pgsub_texts; RELEASE SAVEPOINT pgsub_texts")


class Side:
    """One server with its snapshot.

    :param connect: opens a session with the fixed settings.
    :param order: order of day and month on the target.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], psycopg.Connection],
        snapshot: ExportedSnapshot | None,
        translate: Callable[[psycopg.Error, str], PgsubError],
        order: str = "MDY",
    ) -> None:
        self.name = name
        self._connect = connect
        self.snapshot = snapshot
        self._translate = translate
        self._settings = {**_SETTINGS, "datestyle": f"ISO, {order}"}

    def connect(self) -> psycopg.Connection:
        """Open a session with its own state, for one thread."""
        connection = self._connect()
        with self.translating("prepare a session"):
            for name, value in self._settings.items():
                connection.execute(sql.SQL("SET {} = {}").format(sql.Identifier(name), sql.Literal(value)))
        return connection

    @contextlib.contextmanager
    def translating(self, doing: str) -> Iterator[None]:
        """Translate psycopg's errors to pgsub's."""
        try:
            yield
        except psycopg.Error as error:
            translated = self._translate(error, doing)
            translated.detail = f"{translated.detail or ''} This happened on the {self.name}.".strip()
            raise translated from None

    @contextlib.contextmanager
    def seeing(
        self, connection: psycopg.Connection, doing: str, *, named: Collection[Named] = (), bounded: bool = True
    ) -> Iterator[bool]:
        """Open a transaction that sees the snapshot; yield whether the named tables are locked.

        :param named: tables that its statements name, in locking order.
        :param bounded: limit its statements to :data:`_STATEMENT_TIMEOUT`.
        :raises TableRewritten: another table has one of the names.
        """
        with self.translating(doing):
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            try:
                self._import(connection)
                if bounded:
                    connection.execute(f"SET LOCAL statement_timeout = '{_STATEMENT_TIMEOUT}'".encode())
                locked = [self._hold(connection, *one) for one in named]
                yield all(locked)
            finally:
                leave_transaction(connection)

    def _hold(self, connection: psycopg.Connection, oid: int, schema: str, name: str) -> bool:
        try:
            return table_lock.hold(connection, oid, schema, name, table_lock.READING)
        except TableReplaced:
            raise self._rewritten(f"{schema}.{name}") from None

    def _rewritten(self, name: str) -> TableRewritten:
        return TableRewritten(
            f'table "{name}" was truncated, rewritten or renamed on the {self.name} while it was compared',
            hint="Compare it again.",
        )

    def _import(self, connection: psycopg.Connection) -> None:
        try:
            assert self.snapshot is not None
            connection.execute(self.snapshot.importing(), prepare=False)
        except HolderGone as error:
            lost = PublisherUnavailable if self.name == "publisher" else TargetUnavailable
            raise lost(
                f"could not import a snapshot: {server_words.said(error).message}",
                detail="The session that held the snapshot has ended.",
                sqlstate=error.sqlstate,
            ) from None

    def fetch(
        self,
        connection: psycopg.Connection,
        query: sql.Composable,
        doing: str,
        *,
        named: Collection[Named] = (),
        bounded: bool = True,
    ) -> list[Any]:
        """Return the rows of a query that sees the snapshot; see :meth:`seeing`."""
        with self.seeing(connection, doing, named=named, bounded=bounded):
            return connection.execute(sql.Composed([query])).fetchall()

    def stream(
        self,
        connection: psycopg.Connection,
        source: Source,
        query: sql.Composable,
        name: str,
        pieces: Sequence[Piece] = (),
    ) -> Generator[tuple[Any, ...], None, None]:
        """Yield the rows of a query as texts of all columns, after a check that the table was not rewritten.

        :param pieces: pieces that the query reads; none: the whole table.
        :raises TableRewritten: it was rewritten.
        """
        named = source.in_lock_order(pieces)
        whole = not pieces or any(piece.table is None for piece in pieces)
        with self.seeing(connection, "compare rows", named=named, bounded=False) as locked:
            # lock everything that is read against a rewrite, then check: callers may act upon the rows
            # guard: partitions read through their table are locked before they are checked for a rewrite
            if whole or not locked:
                connection.execute(sql.SQL("SELECT FROM {} LIMIT 0").format(source.relation))
            self.refuse_rewritten(connection, source, name)
            with connection.cursor() as cursor, cursor.copy(sql.SQL("COPY ({}) TO STDOUT").format(query)) as copy:
                yield from copy.rows()

    def pieces(self, connection: psycopg.Connection, source: Source, most: int = MOST_BLOCKS) -> list[Piece]:
        """Divide a table, or each of its partitions, by blocks. The last piece of each is open: it may have grown.

        A partitioned table is one piece if a partition is foreign, or if the session may not read one by itself.

        :param most: maximum number of blocks of a piece.
        """
        query = sql.SQL(_LEAVES).format(oid=source.oid)
        leaves = self.fetch(connection, query, "read the size of a table")
        if not leaves or not all(readable for *_, readable in leaves):
            return [Piece()]
        pieces = []
        for *table, blocks, large, _ in leaves:
            end = min(max(blocks or 0, 1), _MOST_BLOCKS)
            whole = min(end + max(large or 0, 0), _MOST_BLOCKS)  # TOAST is assumed to be evenly distributed
            starts = list(range(0, end, -(-most * end // whole)))
            pieces += [
                Piece((table[0], table[1], table[2]), at, until, ((until or end) - at) * whole // end)
                for at, until in zip(starts, [*starts[1:], None], strict=True)
            ]
        return pieces

    def check_not_rewritten(self, connection: psycopg.Connection, source: Source, name: str) -> None:
        """Check, after a table was read, that it was not rewritten since the snapshot.

        :raises TableRewritten: it was.
        """
        with self.seeing(connection, "look whether a table was rewritten"):
            self.refuse_rewritten(connection, source, name)

    def refuse_rewritten(self, connection: psycopg.Connection, source: Source, name: str) -> None:
        """Do the check of :meth:`check_not_rewritten` in an open transaction that sees the snapshot."""
        schema, known_as = map(sql.Literal, source.name)
        query = sql.SQL(_REWRITTEN).format(oid=source.oid, schema=schema, name=known_as)
        [(changed,)] = connection.execute(query).fetchall()
        # guard: a table rewritten during its comparison gets no verdict
        if changed:
            raise self._rewritten(name)
