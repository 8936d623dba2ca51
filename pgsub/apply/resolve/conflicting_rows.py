"""Finds, locks and removes the existing rows that conflict with a change, inside its transaction.

Mirrors FindConflictTuple (execReplication.c) for changes that a rule applies despite the conflict.
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

#: Maximum number of row shapes whose statements are cached.
SHAPES = 200


class RowChanged(Exception):
    """A conflicting row that another session changed between the search and the lock."""


class ConflictingRows:
    """The existing rows that conflict with changes, in one target session.

    :param rows: the session's writer, in the transaction of the change, outside the pipeline.
    """

    def __init__(self, rows: RowWriter) -> None:
        self._rows, self._connection = rows, rows.connection
        self._searches: dict[tuple[str, str], TableSearch] = {}
        self._changes: dict[tuple[int, bytes, bytes | None, bool], tuple[RelationMap, Statement]] = {}

    def begin(self) -> None:
        """Begin a target transaction, and forget the tables, whose indexes may have changed."""
        self._searches.clear()
        self._changes.clear()

    def search(self, place: Place, where: tuple[str, str]) -> Search | None:
        """Search a table, or a partition of a partitioned one, for rows that conflict with a change.

        :param where: schema and name of the table or partition.
        :return: None if it is gone or does not belong to the relation.
        :raises StatementFailed: a value cannot be read, or the role may not read the table.
        """
        relation = place.mapped
        known = self._searches.get(where)
        if known is None:
            table = member(self._connection, relation.target, where)
            if table is None:
                return None
            known = self._searches[where] = TableSearch(self._connection, table)
        self._rows.hold(place, relation.target)  # as elsewhere, a table is locked before its partition
        self._rows.hold(place, known.table)
        change, sent = self._resulting_row(place), place.columns(sent=True)
        with _placed(place, change), roles.acting(self._connection, relation.target.acts_as):
            return known.search(change, *place.parameters(change), sent=sent, inserts=place.inserts)

    def _resulting_row(self, place: Place) -> Statement:
        """Return the same object for the same shape, by which :class:`TableSearch` identifies it."""
        shape = id(place.relation), place.row.kinds, place.old and place.old.kinds, place.inserts
        known = self._changes.get(shape)
        if known is None:
            if len(self._changes) >= SHAPES:
                self.begin()
            known = self._changes[shape] = place.mapped, place.resulting_row()  # keeping the map keeps its id unique
        return known[1]

    def cleared(self, place: Place, found: Search, where: tuple[str, str]) -> bool:
        """Remove the conflicting rows; return whether one of them became the row to be inserted.

        :param where: the table that was searched.
        :raises RowChanged: another session was faster.
        :raises StatementFailed: the target refuses.
        """
        relation, table = place.mapped, self._searches[where].table
        self._rows.hold(place, relation.target)
        self._rows.hold(place, table)
        rows = {hit.ctid: hit for hit in found.hits}
        same = _same_key(relation, found, self._searches[where]) if place.message_type == "INSERT" else None
        one = psycopg.RawCursor(self._connection)  # the table's name may have a percent sign
        with _placed(place), roles.acting(self._connection, relation.target.acts_as):
            # all before the first one is deleted: the action of a foreign key may delete or change others
            for ctid, hit in rows.items():
                # guard: a row that changes after its conflict was decided is searched and decided again
                if not one.execute(row_queries.lock_at(table), (ctid, str(hit.xid))).rowcount:
                    raise RowChanged
            others = [ctid for ctid in rows if same is None or ctid != same.ctid]
            deleted = [one.execute(statements.delete_at(table), (ctid,)).rowcount for ctid in others]
            # guard: a row in the way is deleted though a foreign key changes it meanwhile, always
            if all(deleted):
                if same is None:
                    return False
                if one.execute(row_queries.lock_at(table), (same.ctid, str(same.xid))).rowcount:
                    self._become(place, table.oid, str(same.ctid))
                    return True
        left = self.search(place, where)
        if left is None:
            raise RowChanged
        # of rows that a trigger keeps or makes again there are not fewer
        fewer = 0 < len({hit.ctid for hit in left.hits}) < len(rows)
        # guard: a row that a foreign key changes while others are deleted becomes the remote one
        return fewer and self.cleared(place, left, where)

    def _become(self, place: Place, table: int, ctid: str) -> None:
        statement = statements.update_at(place.mapped, place.row.kinds)
        if not statement.takes:
            return  # it has only key columns
        values, formats = place.parameters(statement)
        values += [str(table).encode(), ctid.encode()]
        text = statement.text.as_bytes(self._connection)
        result = self._connection.pgconn.exec_params(text, values, statement.types, [*formats, 0, 0])
        if result.status != pq.ExecStatus.COMMAND_OK:
            raise StatementFailed(place, psycopg.errors.error_from_result(result), statement)


@contextlib.contextmanager
def _placed(place: Place, statement: Statement | None = None) -> Iterator[None]:
    """Attach the change to errors of statements outside the pipeline."""
    try:
        yield
    except psycopg.Error as error:
        if error.sqlstate is None:
            raise  # the connection was lost
        raise StatementFailed(place, error, statement) from None


def _same_key(relation: RelationMap, found: Search, search: TableSearch) -> ConflictingRow | None:
    """Return the conflicting row that has the key of the remote row, so that it can become it."""
    leaf = relation.target.leaf_key
    # guard: a row with the key of its partition is changed, without "set(leaf.columns) if leaf is not None else "
    names = set(leaf.columns) if leaf is not None else {relation.columns[i].name for i in relation.lookup}
    always = {relation.columns[i].name for i in relation.always}  # no UPDATE can change them
    for hit in found.hits if relation.by_identity else ():
        remote, local = found.remote or {}, hit.row or {}
        # guard: a row whose key has another text is changed and not deleted, without " or search.has_key(hit, names)"
        equal = all(local.get(one) == remote.get(one) for one in names) or search.has_key(hit, names)
        if local and remote and equal and all(local.get(one) == remote.get(one) for one in always):
            return hit
    return None
