"""Finds the rows in the way of one change inside its transaction, records, locks and removes them.

Mirrors FindConflictTuple (execReplication.c) for changes that a rule wants made in spite of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psycopg
from psycopg import pq

from pgsub.apply.conflicts.error_context import Place
from pgsub.apply.rows.writer import RowWriter
from pgsub.target.catalog.relation_map import RelationMap
from pgsub.target.session import roles
from pgsub.target.sql import row_queries, statements
from pgsub.target.sql.conflict_search import ConflictingRow, Search, TableSearch, member
from pgsub.target.sql.pipeline import StatementFailed
from pgsub.target.sql.statement_builder import Statement

#: Shapes of rows whose statements are remembered.
SHAPES = 200


class RowChanged(Exception):
    """A row in the way was changed by others between the search and the lock."""


class ConflictingRows:
    """The rows in the way of changes, through one target session.

    :param rows: its writer, in the transaction of the change, out of the pipeline.
    """

    def __init__(self, rows: RowWriter) -> None:
        self._rows, self._connection = rows, rows.connection
        self._searches: dict[tuple[str, str], TableSearch] = {}
        self._changes: dict[tuple[int, bytes, bytes | None, bool], tuple[RelationMap, Statement]] = {}

    def begin(self) -> None:
        """Begin a target transaction: tables may have other indexes now."""
        self._searches.clear()
        self._changes.clear()

    def search(self, place: Place, where: tuple[str, str]) -> Search | None:
        """Search the rows in the way of a change in a table; of a partitioned one in a partition.

        :param where: schema and name of it.
        :return: None where it is gone, or none of the relation's.
        :raises StatementFailed: a value cannot be read, or the role may not read the table.
        """
        relation = place.mapped
        known = self._searches.get(where)
        if known is None:
            table = member(self._connection, relation.target, where)
            if table is None:
                return None
            known = self._searches[where] = TableSearch(self._connection, table)
        self._rows.hold(place, relation.target)  # a partition is locked behind its table, as elsewhere
        self._rows.hold(place, known.table)
        change, sent = self._resulting_row(place), place.columns(sent=True)
        with _placed(place, change), roles.acting(self._connection, relation.target.acts_as):
            return known.search(change, *place.parameters(change), sent=sent, inserts=place.inserts)

    def _resulting_row(self, place: Place) -> Statement:
        """Compose the same object for the same shape, by which :class:`TableSearch` knows it."""
        shape = id(place.relation), place.row.kinds, place.old and place.old.kinds, place.inserts
        known = self._changes.get(shape)
        if known is None:
            if len(self._changes) >= SHAPES:
                self.begin()
            known = self._changes[shape] = place.mapped, place.resulting_row()  # the map's id stays its own
        return known[1]

    def cleared(self, place: Place, found: Search, where: tuple[str, str]) -> bool:
        """Remove the rows in the way; return whether one of them became the row to be inserted.

        :param where: the table that was looked at.
        :raises RowChanged: another session was faster.
        :raises StatementFailed: the target refuses.
        """
        relation, table = place.mapped, self._searches[where].table
        self._rows.hold(place, relation.target)
        self._rows.hold(place, table)
        same = next((hit for hit in found.hits if _same_key(relation, hit, found)), None)
        became = None
        one = psycopg.RawCursor(self._connection)  # the table's name may hold a percent sign
        with _placed(place), roles.acting(self._connection, relation.target.acts_as):
            for ctid, hit in {hit.ctid: hit for hit in found.hits}.items():
                if not one.execute(row_queries.lock_at(table), (ctid, str(hit.xid))).rowcount:
                    raise RowChanged
                if same is not None and hit.ctid == same.ctid and place.message_type == "INSERT":
                    became = ctid
                else:
                    one.execute(statements.delete_at(table), (ctid,))
            if became is not None:
                self._become(place, table.oid, became)
        return became is not None

    def _become(self, place: Place, table: int, ctid: str) -> None:
        statement = statements.update_at(place.mapped, place.row.kinds)
        if not statement.takes:
            return  # it has no other columns than its key
        values, formats = place.parameters(statement)
        values += [str(table).encode(), ctid.encode()]
        text = statement.text.as_bytes(self._connection)
        result = self._connection.pgconn.exec_params(text, values, statement.types, [*formats, 0, 0])
        if result.status != pq.ExecStatus.COMMAND_OK:
            raise StatementFailed(place, psycopg.errors.error_from_result(result), statement)


@contextlib.contextmanager
def _placed(place: Place, statement: Statement | None = None) -> Iterator[None]:
    """Raise errors of statements that are not the pipeline's with the change that they are about."""
    try:
        yield
    except psycopg.Error as error:
        if error.sqlstate is None:
            raise  # the connection was lost
        raise StatementFailed(place, error, statement) from None


def _same_key(relation: RelationMap, hit: ConflictingRow, found: Search) -> bool:
    """Return whether a row in the way has the key of the remote one, and so can become it."""
    if not relation.by_identity or hit.row is None or found.remote is None:
        return False
    names = {relation.columns[i].name for i in (*relation.lookup, *relation.always)}
    return all(hit.row.get(name) == found.remote.get(name) for name in names)
