"""The COPY statements for a published table, a leaf of it, or a range of a leaf's blocks.

Mirrors ``copy_table`` (tablesync.c).
"""

from __future__ import annotations

from collections.abc import Sequence

from psycopg import sql

from pgsub.publisher.tables import Leaf, RemoteTable


def copy_statement(
    table: RemoteTable,
    *,
    columns: Sequence[str] | None = None,
    leaf: Leaf | None = None,
    ctid_from: int | None = None,
    ctid_to: int | None = None,
    ctids: Sequence[str] | None = None,
    binary: bool = False,
    times: bool = False,
) -> sql.Composed:
    """Compose COPY ... TO STDOUT for a table, one of its leaves, or a range of a leaf's blocks.

    A partitioned root is read by SELECT, which every version supports. A plain table is read with ONLY, because
    inheritance children are published on their own.

    :param columns: names in the wanted order; None: all of ``table.columns``.
    :param leaf: None: the whole table.
    :param ctid_from: first block.
    :param ctid_to: block after the last one; None for the last range, which then includes rows added meanwhile.
    :param ctids: restricts the copy to these rows.
    :param times: add a last column with the row's commit time, in microseconds since 2000; NULL if the publisher does
        not track it.
    """
    names = [column.name for column in table.columns] if columns is None else list(columns)
    listed = sql.SQL(", ").join([*map(sql.Identifier, names), *([_TIME] if times else [])])
    relation = sql.Identifier(leaf.schema, leaf.name) if leaf else sql.Identifier(table.schema, table.name)
    conditions = []
    if ctid_from:
        conditions.append(sql.SQL("ctid >= {}::pg_catalog.tid").format(f"({ctid_from},0)"))
    if ctid_to is not None:
        conditions.append(sql.SQL("ctid < {}::pg_catalog.tid").format(f"({ctid_to},0)"))
    if ctids is not None:
        conditions.append(sql.SQL("ctid = ANY ({}::pg_catalog.tid[])").format(_array(ctids)))
    partitioned = leaf is None and table.relkind == "p"
    generated = {column.name for column in table.columns if column.generated}
    source = sql.SQL("{} ({})" if names else "{}").format(relation, listed)
    if times or conditions or table.row_filter is not None or partitioned or generated.intersection(names):
        selected = _selection(table, listed, relation, conditions, partitioned=partitioned)
        source = sql.SQL("({})").format(selected)
    return sql.SQL("COPY {} TO STDOUT{}").format(source, sql.SQL(" WITH (FORMAT binary)" if binary else ""))


def _array(ctids: Sequence[str]) -> sql.Literal:
    return sql.Literal("{" + ",".join(f'"{one}"' for one in ctids) + "}")


def selection(table: RemoteTable, columns: Sequence[str]) -> sql.Composed:
    """Compose the SELECT of the published rows of a whole table.

    :param columns: names in the wanted order.
    """
    listed = sql.SQL(", ").join(map(sql.Identifier, columns))
    relation = sql.Identifier(table.schema, table.name)
    return _selection(table, listed, relation, [], partitioned=table.relkind == "p")


def _selection(
    table: RemoteTable,
    listed: sql.Composable,
    relation: sql.Composable,
    conditions: list[sql.Composed],
    *,
    partitioned: bool,
) -> sql.Composed:
    # The publisher itself deparsed the row filter, with an empty search_path, so it can be sent back unchanged.
    everything = [*conditions, *([] if table.row_filter is None else [sql.SQL(table.row_filter)])]
    where = sql.SQL(" WHERE {}" if everything else "").format(sql.SQL(" AND ").join(everything))
    return sql.SQL("SELECT {} FROM {}{}{}").format(listed, sql.SQL("" if partitioned else "ONLY "), relation, where)


_TIME = sql.SQL(
    "CASE WHEN pg_catalog.current_setting('track_commit_timestamp')::pg_catalog.bool THEN"
    " ((pg_catalog.date_part('epoch', pg_catalog.pg_xact_commit_timestamp(xmin)) - 946684800) * 1000000)"
    "::pg_catalog.int8 END"
)
