"""SQL that finds conflicting rows, index by index; see :mod:`pgsub.target.sql.conflict_search`.

Keys and predicates are SQL from the catalogs. The values of the change are parameters. Mirrors
ExecCheckIndexConstraints (execIndexing.c) as FindConflictTuple (execReplication.c) calls it.
"""

from __future__ import annotations

from collections.abc import Sequence

from psycopg import sql

from pgsub.target.catalog.relation import TargetColumn, TargetRelation
from pgsub.target.catalog.unique_indexes import UniqueIndex
from pgsub.target.sql.row_queries import row_texts


def completed(table: TargetRelation, change: sql.Composed, generated: dict[str, str]) -> sql.Composed:
    """Compose the row as the change would make it, with generated columns by their expressions from the catalogs."""
    names = {column.name for column in stored(table)}
    more = [
        sql.SQL(", ({}) AS {}").format(sql.SQL(text), sql.Identifier(name))
        for name, text in generated.items()
        if name in names
    ]
    alias = sql.Identifier(table.name)
    return sql.SQL("SELECT {0}.*{1} FROM ({2}) AS {0}").format(alias, sql.Composed(more), change)


def remote_row(table: TargetRelation, remote: sql.Composed) -> sql.Composed:
    """Compose the row as the change would make it, as text, and the table that it is in.

    :param remote: query for that row.
    """
    return sql.SQL("SELECT pgsub_tableoid, {} FROM ({}) AS pgsub_remote").format(
        row_texts(stored(table), "pgsub_remote"), remote
    )


def stored(table: TargetRelation) -> list[TargetColumn]:
    """Return the columns whose values are stored in a row."""
    return [column for column in table.columns if not column.virtual]


def conflicting_row(
    table: TargetRelation, index: UniqueIndex, remote: sql.Composed, sent: Sequence[str]
) -> sql.Composed:
    """Compose the search for the row that already has the key of an index, in the format of the output functions.

    :param remote: query for the row as the change would make it.
    :param sent: columns that the publisher sent.
    """
    same = [
        sql.SQL("{}::text IS NOT DISTINCT FROM {}::text").format(
            sql.Identifier("pgsub_local", name), sql.Identifier("pgsub_remote", name)
        )
        for name in sent
    ]
    return sql.SQL(
        "SELECT pgsub_local.pgsub_xmin, {same}, {keys}, {values}, pgsub_local.pgsub_ctid"
        " FROM (SELECT {alias}.*, {expressions}, {predicate} AS pgsub_in FROM ({remote}) AS {alias})"
        " AS pgsub_remote CROSS JOIN LATERAL ("
        "SELECT {alias}.*, xmin AS pgsub_xmin, ctid AS pgsub_ctid, {expressions} FROM ONLY {table}"
        " WHERE {condition} AND {predicate}"
        " AND (tableoid, ctid) IS DISTINCT FROM (pgsub_remote.pgsub_tableoid, pgsub_remote.pgsub_ctid)"
        " LIMIT 1) AS pgsub_local WHERE pgsub_remote.pgsub_in"
    ).format(
        same=sql.SQL(" AND ").join(same) if same else sql.SQL("true"),
        keys=sql.SQL(", ").join(sql.Identifier("pgsub_local", f"pgsub_key{n}") for n in range(len(index.keys))),
        values=row_texts(stored(table), "pgsub_local"),
        alias=sql.Identifier(table.name),
        expressions=index.named_keys(),
        predicate=index.where,
        remote=remote,
        table=sql.Identifier(table.schema, table.name),
        condition=index.equal("pgsub_remote"),
    )
