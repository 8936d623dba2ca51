"""SQL that finds the rows in the way of another one, index by index: see :mod:`pgsub.target.sql.conflict_search`.

Keys and predicates are SQL of the catalog; the values of the change are parameters. Mirrors
ExecCheckIndexConstraints (execIndexing.c) as FindConflictTuple (execReplication.c) calls it.
"""

from __future__ import annotations

from collections.abc import Sequence

from psycopg import sql

from pgsub.target.catalog.relation import TargetColumn, TargetRelation
from pgsub.target.catalog.unique_indexes import UniqueIndex
from pgsub.target.sql.statements import row_texts


def completed(table: TargetRelation, change: sql.Composed, generated: dict[str, str]) -> sql.Composed:
    """The row as it would be, generated columns included. Expressions of the catalog are SQL already."""
    more = [
        sql.SQL(", ({}) AS {}").format(sql.SQL(text), sql.Identifier(name))
        for name, text in generated.items()
        if not _column(table, name).virtual
    ]
    alias = sql.Identifier(table.name)
    return sql.SQL("SELECT {0}.*{1} FROM ({2}) AS {0}").format(alias, sql.Composed(more), change)


def _column(table: TargetRelation, name: str) -> TargetColumn:
    column = table.column(name)
    assert column is not None
    return column


class Texts:
    """SQL that reads rows as the server's output functions write them, the change's values being parameters.

    :param remote: gives the row as it would be.
    :param sent: columns that came from the publisher.
    """

    def __init__(self, table: TargetRelation, remote: sql.Composed, sent: Sequence[str]) -> None:
        self._table = table
        self._remote = remote
        self._sent = sent
        self._columns = [column for column in table.columns if not column.virtual]

    def remote(self) -> sql.Composed:
        """The row as it would be, and the table that it is in."""
        return sql.SQL("SELECT pgsub_tableoid, {} FROM ({}) AS pgsub_remote").format(
            row_texts(self._columns, "pgsub_remote"), self._remote
        )

    def hit(self, index: UniqueIndex) -> sql.Composed:
        """The row that has the key of an index already."""
        return sql.SQL(
            "SELECT pgsub_local.pgsub_xmin, {same}, {keys}, {values}, pgsub_local.pgsub_ctid"
            " FROM (SELECT {alias}.*, {expressions}, {predicate} AS pgsub_in FROM ({remote}) AS {alias})"
            " AS pgsub_remote CROSS JOIN LATERAL ("
            "SELECT {alias}.*, xmin AS pgsub_xmin, ctid AS pgsub_ctid, {expressions} FROM ONLY {table}"
            " WHERE {condition} AND {predicate}"
            " AND (tableoid, ctid) IS DISTINCT FROM (pgsub_remote.pgsub_tableoid, pgsub_remote.pgsub_ctid)"
            " LIMIT 1) AS pgsub_local WHERE pgsub_remote.pgsub_in"
        ).format(
            same=self._same(),
            keys=sql.SQL(", ").join(sql.Identifier("pgsub_local", f"pgsub_key{n}") for n in range(len(index.keys))),
            values=row_texts(self._columns, "pgsub_local"),
            alias=sql.Identifier(self._table.name),
            expressions=index.named_keys(),
            predicate=index.where,
            remote=self._remote,
            table=sql.Identifier(self._table.schema, self._table.name),
            condition=index.equal("pgsub_remote"),
        )

    def _same(self) -> sql.Composed:
        parts = [
            sql.SQL("{}::text IS NOT DISTINCT FROM {}::text").format(
                sql.Identifier("pgsub_local", name), sql.Identifier("pgsub_remote", name)
            )
            for name in self._sent
        ]
        return sql.Composed([sql.SQL(" AND ").join(parts) if parts else sql.SQL("true")])
