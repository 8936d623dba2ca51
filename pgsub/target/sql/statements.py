"""SQL of single changes, composed once per relation and shape. Mirrors execReplication.c's single-row operations.

Parameters are declared with the *target* column's type, so a value is read by the very input (or receive) function that
the server's own apply would call. What the column's modifier makes of it is :mod:`~pgsub.target.catalog.modifier`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from psycopg import sql

from pgsub.common.errors import SchemaFault
from pgsub.protocol.reader import BINARY, NULL, UNCHANGED
from pgsub.target.catalog import modifier
from pgsub.target.catalog.mapping import RelationMap
from pgsub.target.catalog.relation import TargetColumn, TargetRelation

#: Bytes of a value above which it is not read to be shown.
LARGEST = 65536
_TEXT, _OID, _TID = 25, 26, 27


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement to prepare: text, parameter types, and which values it takes in which order.

    ``takes``: pairs of ('n'ew or 'o'ld tuple, remote column position).
    """

    text: sql.Composed
    types: tuple[int, ...]
    takes: tuple[tuple[str, int], ...]


#: Savepoints of subtransactions all have one name: the newest hides the others until it is released.
SAVEPOINT = Statement(sql.Composed([sql.SQL("SAVEPOINT pgsub_subxact")]), (), ())
ROLLBACK_TO = Statement(sql.Composed([sql.SQL("ROLLBACK TO SAVEPOINT pgsub_subxact")]), (), ())
RELEASE = Statement(sql.Composed([sql.SQL("RELEASE SAVEPOINT pgsub_subxact")]), (), ())


def table_name(target: TargetRelation) -> sql.Identifier:
    """The table's qualified name."""
    return sql.Identifier(target.schema, target.name)


def copy_in(target: TargetRelation, columns: Sequence[str], *, binary: bool) -> sql.Composed:
    """COPY FROM STDIN for these columns."""
    names = sql.SQL(", ").join(map(sql.Identifier, columns))
    listed = sql.SQL(" ({})").format(names) if columns else sql.SQL("")
    options = sql.SQL(" WITH (FORMAT binary)") if binary else sql.SQL("")
    return sql.SQL("COPY {}{} FROM STDIN{}").format(table_name(target), listed, options)


def insert(relation: RelationMap, kinds: bytes) -> Statement:
    """INSERT of all remote columns; a GENERATED ALWAYS identity takes the publisher's value.

    :param kinds: kinds of the new tuple's columns.
    """
    if not relation.columns:
        text = sql.SQL("INSERT INTO {} DEFAULT VALUES").format(table_name(relation.target))
        return Statement(text, (), ())
    build = _Builder()
    values = [build.value(relation, "n", i, kinds) for i in range(len(relation.columns))]
    text = sql.SQL("INSERT INTO {} ({}) OVERRIDING SYSTEM VALUE VALUES ({})").format(
        table_name(relation.target),
        sql.SQL(", ").join(sql.Identifier(c.name) for c in relation.columns),
        sql.SQL(", ").join(values),
    )
    return build.done(text)


def update(relation: RelationMap, kinds: bytes, old_kinds: bytes | None) -> Statement:
    """UPDATE of one row: every sent column but unchanged TOAST ones and GENERATED ALWAYS identities.

    :param kinds: kinds of the new tuple's columns.
    :param old_kinds: kinds of the K or O tuple, None where there is none.
    """
    build = _Builder()
    assignments = _assignments(relation, build, kinds)
    where = _condition(relation, build, kinds, old_kinds)
    if not assignments:  # nothing to set, but the row must be there: a missing one is still a conflict
        name = unassigned(relation.target)
        if name is None:
            text = sql.SQL("SELECT FROM {} WHERE {} FOR NO KEY UPDATE").format(only(relation.target), where)
            return build.done(text)
        assignments = [sql.SQL("{0} = {0}").format(sql.Identifier(name))]
    text = sql.SQL("UPDATE {} SET {} WHERE {}").format(only(relation.target), sql.SQL(", ").join(assignments), where)
    return build.done(_found(relation.target, where, text))


def unassigned(target: TargetRelation) -> str | None:
    """A column that an UPDATE may set to what it is; None where the server computes them all."""
    return next((c.name for c in target.columns if not c.generated and c.identity != "a"), None)


def replace_identity(relation: RelationMap, kinds: bytes, old_kinds: bytes | None) -> Statement:
    """UPDATE of one row that changes a GENERATED ALWAYS identity column: only INSERT may override its value.

    What was not sent is carried over. Parameters as of :func:`update`.
    """
    build = _Builder()
    columns, values = _completed(relation, build, kinds, "old")
    where = _condition(relation, build, kinds, old_kinds)
    text = sql.SQL(
        "WITH old AS (DELETE FROM {} WHERE {} RETURNING *)"
        " INSERT INTO {} ({}) OVERRIDING SYSTEM VALUE SELECT {} FROM old"
    ).format(
        only(relation.target),
        where,
        table_name(relation.target),
        columns,
        values,
    )
    return build.done(text)


def leaves_partition(
    relation: RelationMap, kinds: bytes, old_kinds: bytes | None, partitions: Sequence[tuple[int, str]]
) -> Statement:
    """SELECT of whether the row that an update finds would leave its partition; nobody changes it from then on.

    :param partitions: of the table; the others are as of :func:`update`.
    """
    becomes = resulting_row(relation, kinds, old_kinds, inserts=False)
    # the catalog wrote the constraints as SQL
    takes = sql.SQL(" ").join(
        sql.SQL("WHEN {} THEN ({}) IS NOT FALSE").format(sql.Literal(oid), sql.SQL(constraint))
        for oid, constraint in partitions
    )
    text = sql.SQL(
        "SELECT NOT CASE pgsub_tableoid WHEN 0 THEN true {} ELSE true END FROM ({} FOR UPDATE) AS {}"
    ).format(takes, becomes.text, sql.Identifier(relation.target.name))
    return Statement(text, becomes.types, becomes.takes)


def reroute(relation: RelationMap, kinds: bytes, old_kinds: bytes | None) -> Statement:
    """DELETE and INSERT of one row that leaves its partition: no UPDATE fires (apply_handle_tuple_routing, worker.c).

    The row comes even where a trigger keeps the old one. Parameters as of :func:`update`.
    """
    build = _Builder()
    columns, values = _completed(relation, build, kinds, "pgsub_old")
    where = _condition(relation, build, kinds, old_kinds)
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
    """DELETE of one row."""
    build = _Builder()
    where = _condition(relation, build, b"", old_kinds)
    text = sql.SQL("DELETE FROM {} WHERE {}").format(only(relation.target), where)
    return build.done(_found(relation.target, where, text))


def _found(target: TargetRelation, where: sql.Composed, text: sql.Composed) -> sql.Composed:
    """Make a statement count the rows it found: a row that a trigger keeps as it is was not missing (worker.c)."""
    if not target.fires:
        return text
    return sql.SQL("WITH done AS ({}) SELECT FROM {} WHERE {}").format(text, only(target), where)


def row_texts(columns: Sequence[TargetColumn], alias: str) -> sql.Composed:
    """A JSON array of the values as their types' output functions write them; very large ones as their size.

    One value, for a table may have more columns than two thirds of what a target list can.
    """
    value = sql.SQL(
        "CASE WHEN pg_catalog.pg_column_size({0}) <= {1} THEN pg_catalog.format('%s', {0})"
        " ELSE '(' || pg_catalog.pg_column_size({0}) || ' bytes)' END"
    )
    values = sql.SQL(", ").join(value.format(sql.Identifier(alias, c.name), sql.Literal(LARGEST)) for c in columns)
    return sql.SQL("pg_catalog.to_json(ARRAY[{}]::text[])").format(values)


def foreign_origin(relation: RelationMap, xmin: sql.Identifier) -> sql.Composed:
    """Compose a query that gives time and origin of a row that another origin wrote last, where the target knows.

    :param xmin: of the row. What its own transaction wrote, or what was written before anybody tracked it, is nobody's.
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


def origin_differs(relation: RelationMap, kinds: bytes, old: bool, *, lock: bool = False) -> Statement:
    """SELECT the row that an update or delete finds, if another origin wrote it last; changes nothing.

    Columns: schema and name of its table, transaction, time, origin (NULL: locally, '': dropped), :func:`row_texts`,
    time in microseconds since 2000.

    :param kinds: of the tuple that the row is searched by, the old one or the new one.
    :param lock: nobody changes the row until the transaction ends.
    """
    build = _Builder()
    where = _condition(relation, build, kinds, kinds if old else None)
    text = sql.SQL(
        "SELECT pgsub_n.nspname, pgsub_c.relname, pgsub_row.pgsub_xmin, pgsub_by.pgsub_at,"
        " CASE WHEN pgsub_by.pgsub_origin <> 0 THEN coalesce(pgsub_o.roname, '') END, {},"
        " ((extract(epoch FROM pgsub_by.pgsub_at) - 946684800) * 1000000)::bigint"
        " FROM (SELECT *, xmin AS pgsub_xmin, tableoid AS pgsub_table FROM {} WHERE {} LIMIT 1{}) AS pgsub_row"
        " CROSS JOIN LATERAL ({}) AS pgsub_by"
        " JOIN pg_catalog.pg_class pgsub_c ON pgsub_c.oid = pgsub_row.pgsub_table"
        " JOIN pg_catalog.pg_namespace pgsub_n ON pgsub_n.oid = pgsub_c.relnamespace"
        " LEFT JOIN pg_catalog.pg_replication_origin pgsub_o ON pgsub_o.roident = pgsub_by.pgsub_origin"
    ).format(
        row_texts(relation.target.columns, "pgsub_row"),
        only(relation.target),
        where,
        sql.SQL(" FOR UPDATE" if lock else ""),
        foreign_origin(relation, sql.Identifier("pgsub_row", "pgsub_xmin")),
    )
    return build.done(text)


def resulting_row(relation: RelationMap, kinds: bytes, old_kinds: bytes | None, *, inserts: bool) -> Statement:
    """SELECT of the row that a change would leave, generated columns excepted; changes nothing.

    What did not come is of the row that an update finds, whose place is in pgsub_tableoid and pgsub_ctid, and NULL for
    an insert. Parameters as of :func:`update`.
    """
    build = _Builder()
    sent = _sent(relation, kinds)
    shown: list[sql.Composable] = []
    for column in relation.target.columns:
        if column.generated:
            continue
        name = sql.Identifier(column.name)
        if column.name in sent or inserts:
            absent = column.name not in sent
            value = sql.SQL("NULL") if absent else build.value(relation, "n", sent[column.name], kinds)
            # the catalog query wrote the type as SQL
            cast = column.collated(sql.SQL("{}::{}").format(value, sql.SQL(column.full_type)))
            shown.append(sql.SQL("{} AS {}").format(cast, name))
        else:
            shown.append(sql.SQL("{0} AS {0}").format(name))
    if inserts:
        shown.append(sql.SQL("NULL::oid AS pgsub_tableoid, NULL::tid AS pgsub_ctid"))
        return build.done(sql.SQL("SELECT {}").format(sql.SQL(", ").join(shown)))
    shown.append(sql.SQL("tableoid AS pgsub_tableoid, ctid AS pgsub_ctid"))
    where = _condition(relation, build, kinds, old_kinds)
    text = sql.SQL("SELECT {} FROM {} WHERE {} LIMIT 1")
    return build.done(text.format(sql.SQL(", ").join(shown), only(relation.target), where))


def update_at(relation: RelationMap, kinds: bytes) -> Statement:
    """UPDATE of the row at a place to a remote row that was to be inserted; what did not come stays as it is.

    The last two parameters are the place: table (oid) and ctid.
    """
    build = _Builder()
    assignments = _assignments(relation, build, kinds)
    count = len(build.types)
    text = sql.SQL("UPDATE {} SET {} WHERE tableoid = {} AND ctid = {}").format(
        only(relation.target), sql.SQL(", ").join(assignments), sql.SQL(f"${count + 1}"), sql.SQL(f"${count + 2}")
    )
    build.types += [_OID, _TID]
    return build.done(text)


def lock_at(table: TargetRelation) -> sql.Composed:
    """SELECT of a row by its place and the transaction that wrote it (``%s`` both), which nobody changes then."""
    return sql.SQL("SELECT FROM ONLY {} WHERE ctid = %s::tid AND xmin = %s::xid FOR UPDATE").format(table_name(table))


def delete_at(table: TargetRelation) -> sql.Composed:
    """DELETE of the row at a place."""
    return sql.SQL("DELETE FROM ONLY {} WHERE ctid = %s::tid").format(table_name(table))


def truncate(targets: Sequence[TargetRelation], *, restart_identity: bool) -> sql.Composed:
    """One TRUNCATE for all tables, RESTRICT whatever the publisher said, as ExecuteTruncateGuts is called by apply."""
    names = sql.SQL(", ").join(only(t) for t in targets)
    return sql.SQL("TRUNCATE {}{}").format(names, sql.SQL(" RESTART IDENTITY" if restart_identity else ""))


#: Gives a row if a table (oid) still has its name (schema, name).
NAME_UNCHANGED = Statement(
    sql.SQL(
        "SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
        " WHERE c.oid = $1 AND n.nspname = $2 AND c.relname = $3"
    ).format(),
    (26, 19, 19),
    (),
)


def only(target: TargetRelation) -> sql.Composed:
    """The table as FROM and UPDATE name it, without its inheritance children."""
    # inheritance children are tables of their own; a partitioned table is nothing without its partitions
    prefix = sql.SQL("") if target.relkind == "p" else sql.SQL("ONLY ")
    return sql.Composed([prefix, table_name(target)])


class _Builder:
    def __init__(self) -> None:
        self.types: list[int] = []
        self.takes: list[tuple[str, int]] = []

    def value(self, relation: RelationMap, source: str, position: int, kinds: bytes) -> sql.Composable:
        """A value to be assigned, which brings it to the column's modifier, or one that is brought to it already."""
        if position in relation.read:
            return self._read(relation, source, position, kinds)
        return self._parameter(source, position, relation.columns[position].type_oid)

    def compared(self, relation: RelationMap, source: str, position: int, kinds: bytes) -> sql.Composable:
        """A value to be compared with those that the column has."""
        if position in relation.modified:
            return self._read(relation, source, position, kinds)
        return self.value(relation, source, position, kinds)

    def _read(self, relation: RelationMap, source: str, position: int, kinds: bytes) -> sql.Composable:
        column = relation.columns[position]
        if position in relation.read and kinds[position] != BINARY:
            return modifier.read(column, self._parameter(source, position, _TEXT))
        parameter = self._parameter(source, position, column.type_oid)
        return modifier.read(column, sql.SQL("pg_catalog.format('%s', {})").format(parameter))

    def _parameter(self, source: str, position: int, type_oid: int) -> sql.SQL:
        self.types.append(type_oid)
        self.takes.append((source, position))
        return sql.SQL(f"${len(self.types)}")

    def done(self, text: sql.Composed) -> Statement:
        return Statement(text, tuple(self.types), tuple(self.takes))


def _sent(relation: RelationMap, kinds: bytes) -> dict[str, int]:
    """Remote position of each column that a tuple has, by name."""
    return {c.name: i for i, c in enumerate(relation.columns) if kinds[i] != UNCHANGED}


def _assignments(relation: RelationMap, build: _Builder, kinds: bytes) -> list[sql.Composed]:
    """SET of every column that was sent, but for GENERATED ALWAYS identities."""
    return [
        sql.SQL("{} = {}").format(sql.Identifier(name), build.value(relation, "n", i, kinds))
        for name, i in _sent(relation, kinds).items()
        if relation.columns[i].identity != "a"
    ]


def _completed(relation: RelationMap, build: _Builder, kinds: bytes, old: str) -> tuple[sql.Composed, sql.Composed]:
    """Names and values of all columns that can be inserted; what was not sent is of the row ``old``."""
    sent, columns = _sent(relation, kinds), [c.name for c in relation.target.columns if not c.generated]
    values = [
        build.value(relation, "n", sent[name], kinds) if name in sent else sql.Identifier(old, name) for name in columns
    ]
    return sql.SQL(", ").join(map(sql.Identifier, columns)), sql.SQL(", ").join(values)


def _condition(relation: RelationMap, build: _Builder, new_kinds: bytes, old_kinds: bytes | None) -> sql.Composed:
    """Find one row, by the old tuple where there is one."""
    source, kinds = ("n", new_kinds) if old_kinds is None else ("o", old_kinds)
    parts: list[sql.Composable] = []
    for i in relation.lookup:
        column, name = relation.columns[i], sql.Identifier(relation.columns[i].name)
        if kinds[i] in (NULL, UNCHANGED):
            parts.append(sql.SQL("{} IS NULL").format(name))
        else:
            value = build.compared(relation, source, i, kinds)
            parts.append(sql.SQL("{} {} {}").format(name, equality(column), value))
    parts += [sql.SQL("{} IS NULL").format(sql.Identifier(c.name)) for c in relation.local_only]
    found = sql.SQL(" AND ").join(parts) if parts else sql.SQL("true")
    if relation.by_identity:
        return sql.Composed([found])
    # exactly one row per message, even among duplicates; a ctid alone is ambiguous among partitions, but only
    # alone is it a TID scan. Once more what it was found by: a row that another session changed while its commit was
    # waited for must not pass for it, and the recheck of a TID scan (TidRecheck) accepted any up to 17.6
    if relation.target.relkind == "p":
        row = sql.SQL("(tableoid, ctid) = (SELECT t.tableoid, t.ctid FROM {} t WHERE {} LIMIT 1) AND {}")
    else:
        row = sql.SQL("ctid = (SELECT t.ctid FROM {} t WHERE {} LIMIT 1) AND {}")
    return row.format(only(relation.target), found, found)


def equality(column: TargetColumn) -> sql.SQL:
    """The operator by which a row is found by this column.

    :raises SchemaFault: its type has none, as tuples_equal (execReplication.c).
    """
    if column.equality is None:
        raise SchemaFault(
            f"could not identify an equality operator for type {column.type_name}",
            detail=f'Without a replica identity index or primary key, rows are found by every column, "{column.name}"'
            " too.",
            sqlstate="42883",
        )
    # the catalog query quoted the schema already; an operator's name cannot be quoted
    return sql.SQL(f"OPERATOR({column.equality})")
