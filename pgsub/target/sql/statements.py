"""SQL of single changes, composed once per relation and shape. Mirrors execReplication.c's single-row operations."""

from __future__ import annotations

from collections.abc import Sequence

from psycopg import sql

from pgsub.target.catalog.relation import TargetRelation
from pgsub.target.catalog.relation_map import RelationMap
from pgsub.target.sql.statement_builder import Builder, Statement, only, table_name

_OID, _TID = 26, 27

#: All savepoints of subtransactions have the same name: the newest hides the others until it is released.
SAVEPOINT = Statement.fixed("SAVEPOINT pgsub_subxact")
ROLLBACK_TO = Statement.fixed("ROLLBACK TO SAVEPOINT pgsub_subxact")
RELEASE = Statement.fixed("RELEASE SAVEPOINT pgsub_subxact")


def copy_in(target: TargetRelation, columns: Sequence[str], *, binary: bool) -> sql.Composed:
    """Compose COPY FROM STDIN for these columns."""
    names = sql.SQL(", ").join(map(sql.Identifier, columns))
    listed = sql.SQL(" ({})").format(names) if columns else sql.SQL("")
    options = sql.SQL(" WITH (FORMAT binary)") if binary else sql.SQL("")
    return sql.SQL("COPY {}{} FROM STDIN{}").format(table_name(target), listed, options)


def insert(relation: RelationMap, kinds: bytes) -> Statement:
    """Compose an INSERT of all remote columns. A GENERATED ALWAYS identity gets the publisher's value.

    :param kinds: column kinds of the new tuple.
    """
    if not relation.columns:
        text = sql.SQL("INSERT INTO {} DEFAULT VALUES").format(table_name(relation.target))
        return Statement(text, (), ())
    build = Builder(relation, kinds)
    values = [build.value(i) for i in range(len(relation.columns))]
    text = sql.SQL("INSERT INTO {} ({}) OVERRIDING SYSTEM VALUE VALUES ({})").format(
        table_name(relation.target),
        sql.SQL(", ").join(sql.Identifier(c.name) for c in relation.columns),
        sql.SQL(", ").join(values),
    )
    return build.done(text)


def update(relation: RelationMap, kinds: bytes, old_kinds: bytes | None) -> Statement:
    """Compose an UPDATE of one row. It sets every sent column except unchanged TOAST and GENERATED ALWAYS identities.

    :param kinds: column kinds of the new tuple.
    :param old_kinds: column kinds of the K or O tuple; None: there is none.
    """
    build = Builder(relation, kinds, old_kinds)
    assignments = build.assignments()
    where = build.condition()
    text = _assigning(relation.target, assignments, where)
    if not assignments:  # the statement returns the rows that it found
        return build.done(text)
    if relation.target.fires:  # a row that a trigger keeps unchanged is not missing (worker.c), one that is gone is
        text = sql.SQL("WITH done AS ({}) SELECT FROM {} WHERE {} FOR NO KEY UPDATE").format(
            text, only(relation.target), where
        )
    return build.done(text)


def _assigning(target: TargetRelation, assignments: Sequence[sql.Composed], where: sql.Composed) -> sql.Composed:
    """Compose an UPDATE. With nothing to set, compose a row lock: a missing row is a conflict nevertheless."""
    if not assignments:
        name = unassigned(target)
        if name is None:
            return sql.SQL("SELECT FROM {} WHERE {} FOR NO KEY UPDATE").format(only(target), where)
        assignments = [sql.SQL("{0} = {0}").format(sql.Identifier(name))]
    return sql.SQL("UPDATE {} SET {} WHERE {}").format(only(target), sql.SQL(", ").join(assignments), where)


def unassigned(target: TargetRelation) -> str | None:
    """Return a column that an UPDATE may set to its present value; None if the server computes all columns."""
    return next((c.name for c in target.columns if not c.generated and c.identity != "a"), None)


def replace_identity(relation: RelationMap, kinds: bytes, old_kinds: bytes | None) -> Statement:
    """Compose an UPDATE that may change a GENERATED ALWAYS identity column, whose value only INSERT may override.

    A row with the same identity value is updated. Any other is deleted and inserted with its unsent columns. The
    statement returns the rows that it found. The parameters are those of :func:`update`.
    """
    build = Builder(relation, kinds, old_kinds)
    assignments = build.assignments()
    columns, values = build.completed("old")
    where, same = build.condition(), build.has_identities()
    kept = _assigning(relation.target, assignments, sql.SQL("{} AND {}").format(where, same))
    # guard: a row is not deleted and inserted again where an update suffices, without " AND ({same}) IS NOT TRUE"
    text = sql.SQL(
        "WITH kept AS ({kept}), old AS (DELETE FROM {table} WHERE {where} AND ({same}) IS NOT TRUE RETURNING *),"
        " new AS (INSERT INTO {name} ({columns}) OVERRIDING SYSTEM VALUE SELECT {values} FROM old)"
        " SELECT FROM {table} WHERE {where} FOR UPDATE"
    ).format(
        kept=kept,
        table=only(relation.target),
        where=where,
        same=same,
        name=table_name(relation.target),
        columns=columns,
        values=values,
    )
    return build.done(text)


def reroute(relation: RelationMap, kinds: bytes, old_kinds: bytes | None) -> Statement:
    """Compose the move of a row to another partition: no UPDATE trigger fires (apply_handle_tuple_routing, worker.c).

    The row is inserted even if a trigger keeps the old one. The parameters are those of :func:`update`.
    """
    build = Builder(relation, kinds, old_kinds)
    columns, values = build.completed("pgsub_old")
    where = build.condition()
    text = sql.SQL(
        "WITH pgsub_old AS MATERIALIZED (SELECT * FROM {table} WHERE {where}),"
        " pgsub_gone AS (DELETE FROM {table} WHERE {where} RETURNING 1),"
        " pgsub_new AS (INSERT INTO {table} ({columns}) OVERRIDING SYSTEM VALUE"
        " SELECT {values} FROM pgsub_old CROSS JOIN (SELECT pg_catalog.count(*) FROM pgsub_gone) AS pgsub_first)"
        " SELECT FROM pgsub_old"
    ).format(
        table=only(relation.target),
        where=where,
        columns=columns,
        values=values,
    )
    return build.done(text)


def delete(relation: RelationMap, old_kinds: bytes) -> Statement:
    """Compose a DELETE of one row.

    A row that a BEFORE trigger keeps is not missing (see :func:`update`), but the DELETE does not count it. So it is
    counted by a lock, which waits for other sessions before the DELETE does. If the role may not lock rows, the
    statement returns two rows for a deleted one, and one for a row that is in doubt (``hides_deletes``).
    """
    build = Builder(relation, b"", old_kinds)
    where = build.condition()
    text = sql.SQL("DELETE FROM {} WHERE {}").format(only(relation.target), where)
    if not relation.target.fires_before_delete:
        return build.done(text)
    # guard: a row that came while its deletion waited does not count as deleted, without " FOR UPDATE"
    counted = "WITH done AS ({}) SELECT FROM {} WHERE {} FOR UPDATE"
    if relation.target.hides_deletes:
        counted = "WITH done AS ({} RETURNING 1) SELECT FROM {} WHERE {} UNION ALL SELECT FROM done"
    return build.done(sql.SQL(counted).format(text, only(relation.target), where))


def update_at(relation: RelationMap, kinds: bytes) -> Statement:
    """Compose an UPDATE that sets the row at a place to a remote row of an INSERT. Unsent columns stay.

    The last two parameters are the place: table (OID) and ctid.
    """
    build = Builder(relation, kinds)
    assignments = build.assignments()
    count = len(build.types)
    text = sql.SQL("UPDATE {} SET {} WHERE tableoid = {} AND ctid = {}").format(
        only(relation.target), sql.SQL(", ").join(assignments), sql.SQL(f"${count + 1}"), sql.SQL(f"${count + 2}")
    )
    build.types += [_OID, _TID]
    return build.done(text)


def delete_at(table: TargetRelation) -> sql.Composed:
    """Compose a DELETE of the row at a ctid, for a RawCursor."""
    return sql.SQL("DELETE FROM ONLY {} WHERE ctid = $1::tid").format(table_name(table))


def truncate(targets: Sequence[TargetRelation], *, restart_identity: bool) -> sql.Composed:
    """Compose one TRUNCATE for all tables. It is RESTRICT, whatever the publisher sent, as with ExecuteTruncateGuts."""
    names = sql.SQL(", ").join(only(t) for t in targets)
    return sql.SQL("TRUNCATE {}{}").format(names, sql.SQL(" RESTART IDENTITY" if restart_identity else ""))
