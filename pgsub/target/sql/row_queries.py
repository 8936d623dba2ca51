"""SELECTs about single rows: the result of a change, the last writer of a row, whether it changes its partition.

They find rows as :mod:`~pgsub.target.sql.statements` does, and change nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from psycopg import sql

from pgsub.common import table_lock
from pgsub.common.text import legible
from pgsub.target.catalog.relation import TargetColumn, TargetRelation
from pgsub.target.catalog.relation_map import RelationMap
from pgsub.target.catalog.table_names import Partition
from pgsub.target.sql.statement_builder import Builder, Statement, only, table_name

#: Larger values, in bytes, are not read for display.
LARGEST = 65536

# UTF-8 may lack a character of the text, so that the server cannot send it: it sends the bytes, with their encoding.
_SENT = """
(SELECT CASE e WHEN 'UTF8' THEN t ELSE e || ':' || pg_catalog.encode(pg_catalog.convert_to(t, e), 'hex') END
   FROM (SELECT {} AS t, pg_catalog.getdatabaseencoding()::text AS e) AS pgsub_texts)"""


def row_texts(columns: Sequence[TargetColumn], alias: str) -> sql.Composed:
    """Compose a JSON array of the values in the format of their output functions. Of a large value, it has the size.

    It is a single column, because a target list is limited to 1664 columns and a table can have 1600.
    """
    value = sql.SQL(
        "CASE WHEN pg_catalog.pg_column_size({0}) <= {1} THEN pg_catalog.format('%s', {0})"
        " ELSE '(' || pg_catalog.pg_column_size({0}) || ' bytes)' END"
    )
    values = sql.SQL(", ").join(value.format(sql.Identifier(alias, c.name), sql.Literal(LARGEST)) for c in columns)
    return sql.SQL(_SENT).format(sql.SQL("pg_catalog.to_json(ARRAY[{}]::text[])::text").format(values))


def read_texts(sent: str | None) -> list[str | None]:
    """Return the values of :func:`row_texts`, by :func:`~pgsub.common.text.legible`."""
    if sent is None or sent.startswith("["):
        values: list[str | None] = json.loads(sent or "[]")
        return values
    encoding, _, content = sent.partition(":")
    # all but the values is ASCII, in every encoding; not every codec of Python tells them apart as the server does
    found = json.loads(bytes.fromhex(content).decode("latin-1"))
    return [None if one is None else legible(one.encode("latin-1"), encoding) for one in found]


def foreign_origin(relation: RelationMap, xmin: sql.Identifier) -> sql.Composed:
    """Compose a query for time and origin of a row's last writer, if it is known and another origin.

    :param xmin: the row's xmin. The session's own transaction, and one that was not tracked, have no origin.
    """
    return sql.SQL(
        "SELECT pgsub_w.pgsub_at, pgsub_w.pgsub_origin"
        " FROM pg_catalog.pg_xact_commit_timestamp_origin({}) AS pgsub_w (pgsub_at, pgsub_origin)"
        " WHERE pgsub_w.pgsub_at IS NOT NULL AND pgsub_w.pgsub_origin NOT IN (SELECT o.roident"
        " FROM pg_catalog.pg_replication_origin o WHERE o.roname = {} OR o.roname LIKE {})"
    ).format(
        xmin,
        sql.Literal(f"pgsub_{relation.target.origins_of}"),
        sql.Literal(f"pgsub\\_{relation.target.origins_of}\\_%"),
    )


def origin_differs(relation: RelationMap, kinds: bytes, old: bool, *, lock: str = "") -> Statement:
    """Compose a SELECT of the row that an update or delete finds, if another origin wrote it last.

    Columns: schema and name of its table, transaction, time, origin (NULL: local, '': dropped), :func:`row_texts`,
    time in microseconds since 2000.

    :param kinds: column kinds of the tuple by which the row is found.
    :param old: whether that is the old tuple, not the new one.
    :param lock: strength (UPDATE) of a lock on the row until the transaction ends; "": none. A locked row is returned
        even if no other origin wrote it last. Its time and values are NULL then.
    """
    build = Builder(relation, kinds, kinds if old else None)
    where = build.condition()
    # guard: a row that another session updates while its change waits is a conflict, without " FOR {lock}"
    locking = f" FOR {lock}" if lock else ""
    text = sql.SQL(
        "SELECT pgsub_n.nspname, pgsub_c.relname, pgsub_row.pgsub_xmin, pgsub_by.pgsub_at,"
        " CASE WHEN pgsub_by.pgsub_origin <> 0 THEN coalesce(pgsub_o.roname, '') END,"
        " CASE WHEN pgsub_by.pgsub_at IS NOT NULL THEN {} END,"
        " ((extract(epoch FROM pgsub_by.pgsub_at) - 946684800) * 1000000)::bigint"
        " FROM (SELECT *, xmin AS pgsub_xmin, tableoid AS pgsub_table FROM {} WHERE {} LIMIT 1{}) AS pgsub_row"
        " {} JOIN LATERAL ({}) AS pgsub_by ON true"
        " JOIN pg_catalog.pg_class pgsub_c ON pgsub_c.oid = pgsub_row.pgsub_table"
        " JOIN pg_catalog.pg_namespace pgsub_n ON pgsub_n.oid = pgsub_c.relnamespace"
        " LEFT JOIN pg_catalog.pg_replication_origin pgsub_o ON pgsub_o.roident = pgsub_by.pgsub_origin"
    ).format(
        row_texts(relation.target.columns, "pgsub_row"),
        only(relation.target),
        where,
        sql.SQL(locking),
        sql.SQL("LEFT" if lock else "INNER"),
        foreign_origin(relation, sql.Identifier("pgsub_row", "pgsub_xmin")),
    )
    return build.done(text)


def present(relation: RelationMap, kinds: bytes, old: bool) -> Statement:
    """Compose a SELECT that finds the row of an update or delete, unless the transaction itself has written it.

    The parameters are those of :func:`origin_differs`.
    """
    build = Builder(relation, kinds, kinds if old else None)
    own = "coalesce(xmin OPERATOR(pg_catalog.=) pg_catalog.pg_current_xact_id_if_assigned()::pg_catalog.xid, false)"
    text = sql.SQL("SELECT FROM {} WHERE {} AND NOT " + own).format(only(relation.target), build.condition())
    return build.done(text)


def untouched(relation: RelationMap, old_kinds: bytes) -> Statement:
    """Compose a SELECT that finds the row of a delete, unless the transaction itself has written or locked it.

    Row triggers lock their row before they decide about it (GetTupleForTrigger, trigger.c). A session has a lock for
    each of its subtransactions, too. The parameters are those of :func:`~pgsub.target.sql.statements.delete`.
    """
    build = Builder(relation, b"", old_kinds)
    own = (
        "EXISTS (SELECT FROM pg_catalog.pg_locks pgsub_own WHERE pgsub_own.pid OPERATOR(pg_catalog.=)"
        " pg_catalog.pg_backend_pid() AND (pgsub_own.transactionid OPERATOR(pg_catalog.=) xmin"
        " OR pgsub_own.transactionid OPERATOR(pg_catalog.=) xmax))"
    )
    text = sql.SQL("SELECT FROM {} WHERE {} AND NOT " + own).format(only(relation.target), build.condition())
    return build.done(text)


def resulting_row(relation: RelationMap, kinds: bytes, old_kinds: bytes | None, *, inserts: bool) -> Statement:
    """Compose a SELECT of the row that a change would leave, without generated columns.

    Columns that were not sent come from the row that an update finds, and are NULL for an insert. pgsub_tableoid and
    pgsub_ctid are the place of the row that was found. The parameters are those of :func:`update`.
    """
    build = Builder(relation, kinds, old_kinds)
    shown: list[sql.Composable] = []
    for column in relation.target.columns:
        if column.generated:
            continue
        name = sql.Identifier(column.name)
        if column.name in build.sent or inserts:
            absent = column.name not in build.sent
            value = sql.SQL("NULL") if absent else build.value(build.sent[column.name])
            # the type is SQL from the catalogs
            cast = column.collated(sql.SQL("{}::{}").format(value, sql.SQL(column.full_type)))
            shown.append(sql.SQL("{} AS {}").format(cast, name))
        else:
            shown.append(sql.SQL("{0} AS {0}").format(name))
    if inserts:
        shown.append(sql.SQL("NULL::oid AS pgsub_tableoid, NULL::tid AS pgsub_ctid"))
        return build.done(sql.SQL("SELECT {}").format(sql.SQL(", ").join(shown)))
    shown.append(sql.SQL("tableoid AS pgsub_tableoid, ctid AS pgsub_ctid"))
    where = build.condition()
    text = sql.SQL("SELECT {} FROM {} WHERE {} LIMIT 1")
    return build.done(text.format(sql.SQL(", ").join(shown), only(relation.target), where))


def leaves_partition(
    relation: RelationMap, kinds: bytes, old_kinds: bytes | None, partitions: Sequence[Partition]
) -> Statement:
    """Compose a SELECT of whether the row that an update finds would leave its partition. It locks the row.

    It returns NULL if the row's partition is not among those that are given.

    :param partitions: the partitions. The other parameters are those of :func:`update`.
    """
    becomes = resulting_row(relation, kinds, old_kinds, inserts=False)
    # the constraints are SQL from the catalogs
    takes = sql.SQL(" ").join(
        sql.SQL("WHEN {} THEN ({}) IS NOT FALSE").format(sql.Literal(oid), sql.SQL(constraint or "true"))
        for oid, _, _, constraint in partitions
    )
    text = sql.SQL("SELECT NOT CASE pgsub_tableoid WHEN 0 THEN true {} END FROM ({} FOR UPDATE) AS {}").format(
        takes, becomes.text, sql.Identifier(relation.target.name)
    )
    return replace(becomes, text=text)


def lock_at(table: TargetRelation) -> sql.Composed:
    """Compose a SELECT that locks a row, by ctid and xmin, for a RawCursor."""
    return sql.SQL("SELECT FROM ONLY {} WHERE ctid = $1::tid AND xmin = $2::xid FOR UPDATE").format(table_name(table))


_NAME_UNCHANGED = (
    "SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
    " WHERE c.oid = $1 AND n.nspname = $2 AND c.relname = $3"
)
#: Returns a row if a table (OID) still has its name (schema, name).
NAME_UNCHANGED = Statement(sql.SQL(_NAME_UNCHANGED).format(), (26, 19, 19), ())
#: Returns a row if a table also has its definition still, or a trigger of the transaction itself has altered it.
DEFINITION_UNCHANGED = Statement(
    sql.SQL(
        f"{_NAME_UNCHANGED} AND ({table_lock.DEFINITION.format(oid='$1')} = $4 OR {table_lock.ALTERED_HERE})"
    ).format(),
    (26, 19, 19, 25),
    (),
)
