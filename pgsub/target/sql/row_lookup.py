"""Rows of target tables as a preview reads them: nothing is written, and no code of a table runs.

The target's input functions read the publisher's text, and its receive functions binary values. Comparisons use the
target's text of both sides. Unique indexes and constraints are evaluated by SELECT. So no trigger fires, no default is
evaluated, no sequence advances, and no row is locked. Mirrors RelationFindReplTupleByIndex and CheckAndReportConflict
(execReplication.c).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import psycopg
from psycopg import sql

from pgsub.common import table_lock
from pgsub.common.connections import session_role
from pgsub.common.errors import TableReplaced
from pgsub.common.query import Binary, raw_cursor
from pgsub.target.catalog import typmod
from pgsub.target.catalog.relation import TargetColumn, TargetRelation
from pgsub.target.catalog.row_constraints import RowConstraints
from pgsub.target.catalog.unique_indexes import INDEXES, UniqueIndex
from pgsub.target.session import roles
from pgsub.target.sql.row_equality import Fingerprints
from pgsub.target.sql.statement_builder import found_by, only

#: A row as texts of the target, by column.
Row = Mapping[str, str | None]
#: A row as the publisher sent it.
SentRow = Mapping[str, str | Binary | None]
_Values = Sequence[str | Binary | None]


@dataclass(frozen=True, slots=True)
class Found:
    """A row of the target: its place, the transaction that wrote it, and its values as text."""

    place: str
    xid: str
    values: Row


class ReadOnlySession:
    """A read-only session of a preview. Statements run as the role as which apply would act.

    :param connection: in autocommit mode.
    """

    def __init__(self, connection: psycopg.Connection) -> None:
        self._connection = connection
        self._role: str | None = None
        self._open = False
        self._verified: set[str | None] = {None}
        connection.execute("SET default_transaction_read_only = on")
        connection.execute("SET lock_timeout = '10s'")  # another session's TRUNCATE or ALTER TABLE may hold a lock

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        if self._open and not self._connection.closed:
            self._connection.execute("ROLLBACK")
        self._open, self._role = False, None
        self._verified = {None}

    def rows(self, table: TargetRelation, query: str, values: _Values) -> list[tuple[Any, ...]]:
        """Run a query on a table as its role.

        :raises psycopg.Error: the transaction has ended; the next query begins another.
        :raises TableReplaced: a type was renamed.
        """
        role, types = table.acts_as, table.named_types
        try:
            if not self._open:
                self._connection.execute("BEGIN READ ONLY")
                self._open = True
            if role != self._role:
                self._connection.execute(session_role.set_role(role))
                self._role = role
            if types not in self._verified:
                table_lock.verify_types(self._connection, types, table.schema, table.name)
                self._verified.add(types)
            # the query contains names and expressions from the catalogs, in which % is an ordinary character
            return raw_cursor(self._connection).execute(query.encode(), values).fetchall()
        except (psycopg.Error, TableReplaced):
            self._end()
            raise

    def catalog(self, query: str, oid: int) -> list[tuple[Any, ...]]:
        """Run a query on the catalogs about one table."""
        self._end()
        return self._connection.execute(query.encode(), (oid,)).fetchall()


class InTransaction:
    """The open transaction of a writing session, whose own changes are visible."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self._connection = connection

    def rows(self, table: TargetRelation, query: str, values: _Values) -> list[tuple[Any, ...]]:
        """See :class:`ReadOnlySession`."""
        with roles.acting(self._connection, table.acts_as):
            table_lock.verify_types(self._connection, table.named_types, table.schema, table.name)
            return raw_cursor(self._connection).execute(query.encode(), values).fetchall()

    def catalog(self, query: str, oid: int) -> list[tuple[Any, ...]]:
        """See :class:`ReadOnlySession`."""
        return self._connection.execute(query.encode(), (oid,)).fetchall()


class TableLookup:
    """Reads of one target table.

    :ivar indexes: its unique indexes.
    :ivar fingerprints: compares rows by unique indexes and keys.
    """

    def __init__(self, session: ReadOnlySession | InTransaction, target: TargetRelation) -> None:
        self._session = session
        self._target = target
        self.columns = [c for c in target.columns if not c.generated]
        self.indexes = [UniqueIndex(*row) for row in session.catalog(INDEXES, target.oid)]
        self._from = only(target)
        self._queries: dict[tuple[str, ...], str] = {}
        self.fingerprints = Fingerprints(target, self.indexes, self._rows, self._as_row)
        texts = [sql.SQL("t.{}::pg_catalog.text").format(sql.Identifier(c.name)) for c in self.columns]
        self._selected = sql.SQL(", ").join([sql.SQL("t.tableoid::text || t.ctid::text, t.xmin::text"), *texts])

    @cached_property
    def _constraints(self) -> RowConstraints:
        """The constraints, which are not read before they are needed, because that locks all partitions."""
        return RowConstraints.read(self._session.catalog, self._target)

    def read(self, row: SentRow) -> Row:
        """Convert a row's values to the target's text of them.

        :raises psycopg.Error: a value is invalid for its column's type.
        """
        columns = self._sent(row)
        if not columns:
            return {}

        def build() -> sql.Composed:
            casts = [sql.SQL("{}::pg_catalog.text").format(_value(c, i)) for i, c in enumerate(columns)]
            return sql.SQL("SELECT {}").format(sql.SQL(", ").join(casts))

        [texts] = self._rows("read", columns, build, [row[c.name] for c in columns])
        return dict(zip((c.name for c in columns), texts, strict=True))

    def find(self, key: Row) -> Found | None:
        """Find a row that has these values in these columns. NULLs are equal.

        :raises SchemaFault: a column's type has no equality.
        """
        columns = self._sent(key)
        valued = [c for c in columns if key[c.name] is not None]

        def build() -> sql.Composed:
            parts = [sql.SQL("true").format()]
            by_key = self._target.key_equality if {c.name for c in columns} == set(self._target.identity) else ()
            for column in columns:
                name = sql.Identifier("t", column.name)
                if column not in valued:
                    parts.append(sql.SQL("{} IS NULL").format(name))
                    continue
                parts.append(found_by(column, name, _value(column, valued.index(column)), by_key))
            query = sql.SQL("SELECT {} FROM {} t WHERE {} LIMIT 1")
            return query.format(self._selected, self._from, sql.SQL(" AND ").join(parts))

        nulls = "".join("v" if c in valued else "n" for c in columns)
        rows = self._rows(f"find {nulls}", columns, build, [key[c.name] for c in valued])
        return self._found(rows[0]) if rows else None

    def taken(self, row: Row) -> list[tuple[UniqueIndex, Found]]:
        """Find rows that have one of the row's unique keys, by index. The row itself is among them if it exists."""
        if not self.indexes:
            return []
        columns = self._sent(row)

        def build() -> sql.Composed:
            queries = [self._taken(number, index, columns) for number, index in enumerate(self.indexes)]
            return sql.SQL(" UNION ALL ").join(queries)

        found = self._rows("taken", columns, build, [row[c.name] for c in columns])
        return [(self.indexes[one[0]], self._found(one[1:])) for one in found]

    def _taken(self, number: int, index: UniqueIndex, columns: Sequence[TargetColumn]) -> sql.Composed:
        return sql.SQL(
            "(SELECT {}, {} FROM {} t, (SELECT {} FROM {} WHERE {}) AS pgsub_wanted WHERE {} AND {} LIMIT 1)"
        ).format(
            sql.Literal(number), self._selected, self._from,
            index.named_keys(), self._as_row(columns), index.where, index.equal("pgsub_wanted"), index.where,
        )  # fmt: skip

    def violated(self, row: Row) -> str | None:
        """Return the server's error for a complete new row; None if the row fits.

        It checks NOT NULL and CHECK constraints of the table, and whether a partition accepts the row.
        """
        missing = self._constraints.missing(row)
        if missing is not None or not self._constraints.checks:
            return missing
        columns = self._sent(row)
        [holds] = self._rows(
            "violated", columns, lambda: self._constraints.query(self._as_row(columns)), [row[c.name] for c in columns]
        )
        return self._constraints.error(holds)

    def empty(self) -> bool:
        """Return whether the table has no row."""
        return not self._rows("empty", (), lambda: sql.SQL("SELECT FROM {} t LIMIT 1").format(self._from), ())

    def _rows(
        self,
        what: str,
        columns: Sequence[TargetColumn],
        build: Callable[[], sql.Composed],
        values: _Values,
    ) -> list[tuple[Any, ...]]:
        """Run a query. It is composed once for each set of columns, because that takes longer than to run it."""
        key = (what, *(c.name for c in columns))
        query = self._queries.get(key)
        if query is None:
            query = self._queries[key] = build().as_string()
        return self._session.rows(self._target, query, values)

    def _sent(self, row: SentRow) -> list[TargetColumn]:
        return [c for c in self._target.columns if c.name in row]

    def _found(self, row: Sequence[Any]) -> Found:
        return Found(row[0], row[1], {c.name: value for c, value in zip(self.columns, row[2:], strict=True)})

    def _as_row(self, columns: Sequence[TargetColumn]) -> sql.Composed:
        """Compose a subquery of the row with all columns. Missing values are NULL, which violates nothing."""
        positions = {c.name: i for i, c in enumerate(columns)}
        casts = [
            sql.SQL("{} AS {}").format(
                c.collated(
                    _value(c, positions[c.name])
                    if c.name in positions
                    else sql.SQL("CAST(NULL AS {})").format(sql.SQL(c.full_type))
                ),
                sql.Identifier(c.name),
            )
            for c in self._target.columns
        ]
        return sql.SQL("(SELECT {}) AS {}").format(sql.SQL(", ").join(casts), sql.Identifier(self._target.name))


def _value(column: TargetColumn, position: int) -> sql.Composed:
    return typmod.value(column, sql.SQL(f"${position + 1}"))
