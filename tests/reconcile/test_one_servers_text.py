"""What one server says of its tables is no SQL of the other, whatever it says."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, get_type_hints

import psycopg
from fix_servers import Database
from psycopg import sql
from psycopg.postgres import types
from verified import compare

from pgsub.publisher.copy_statements import copy_statement, selection
from pgsub.publisher.tables import Leaf, RemoteColumn, RemoteTable
from pgsub.reconcile import built_in_types, expressions
from pgsub.reconcile.comparison import sources
from pgsub.reconcile.expressions import ComparedTable, compared
from pgsub.reconcile.hashes import hashes
from pgsub.reconcile.reading.source import Piece
from pgsub.target.catalog.relation import TargetColumn, TargetRelation, describe

_POISON = "x\"'); DROP TABLE secret; --"
_QUOTED = re.compile(r"""[eE]?'(?:[^'\\]|''|\\.)*'|"(?:[^"]|"")*\"""")


def _poisoned(one: Any, *, but: tuple[str, ...] = ()) -> Any:
    """Fill each text of a description with what would be a statement of its own."""
    texts = [
        field.name
        for field in fields(one)
        if get_type_hints(type(one))[field.name] in (str, str | None) and field.name not in but
    ]
    assert texts
    return replace(one, **dict.fromkeys(texts, _POISON))


def _unquoted(query: sql.Composable) -> str:
    return _QUOTED.sub("", query.as_string(None))


# each type of which something is composed, and others, with modifiers and without
_HERE = (20, 1042, 1700, 16500)
_THERE = (16, 20, 25, 114, 700, 1015, 1042, 1043, 1114, 1186, 1231, 1560, 1700, 9999, 13500, 16500)


def _pairs() -> Iterator[ComparedTable]:
    for here in _HERE:
        for there in _THERE:
            for typmod in (-1, 327686):
                # what the publisher has is poisoned, too, but for the name by which the columns are paired
                column = RemoteColumn(1, _POISON, here, "pg_catalog", "int4", -1, True, False)
                leaf = Leaf(1, _POISON, _POISON, 1, 1, 1)
                remote = RemoteTable(1, _POISON, _POISON, "r", "d", (column,), None, (leaf,), 1, 1)
                ours = _poisoned(TargetColumn("", there, "", False, "", None, typmod=typmod))
                ours = replace(ours, generated=False)
                local = TargetRelation(17000, "s", "t", "r", False, False, False, (ours,), (_POISON,))
                yield compared(remote, _poisoned(local, but=("relkind",)))


def test_no_text_of_a_table_on_the_target_is_sql_of_the_publisher() -> None:
    composed = 0
    for table in _pairs():
        for values in (expressions.publisher_values(table), expressions.exact_values(table)[0]):
            for value in values:
                parts = [one for one in (value.text, value.null, value.typed) if one is not None]
                parts += hashes([value], [0], in_utf8=False)
                for one in parts:
                    assert "DROP" not in _unquoted(one), one.as_string(None)
                    composed += 1
        publisher, target = sources(table, in_utf8=True, as_sent=True)
        found = expressions.found_again(table.remote.columns[0], table.columns[0])
        names = [column.name for column in table.columns]
        queries = [
            publisher.rows(Piece(), None, values=True),
            publisher.rows(Piece(), 10.0),
            *expressions.rewritten(table).values(),
            *([] if found is None else [found]),
            copy_statement(table.remote, columns=names),
            selection(table.remote, names),
            target.relation,
        ]
        for query in queries:
            assert "DROP" not in _unquoted(query), query.as_string(None)
    assert composed > 1000


def test_no_text_of_a_table_on_the_publisher_is_sql_of_the_target() -> None:
    for oid in _THERE:
        for typmod in (-1, 327686):
            column = _poisoned(RemoteColumn(1, "", oid, "", "", typmod, True, False))
            remote = RemoteTable(1, "s", "t", "r", "d", (column,), "true", (), 1, 1)
            remote = _poisoned(remote, but=("relkind", "replica_identity"))
            ours = TargetColumn(_POISON, 25, "text", False, "", "pg_catalog.=", full_type="text", cast_type="text")
            local = TargetRelation(17000, "s", "t", "r", False, False, False, (ours,), (_POISON,))
            table = compared(remote, local)
            _, target = sources(table, in_utf8=True, as_sent=True)
            values = [*expressions.target_values(table), *expressions.exact_values(table)[1]]
            queries = [
                target.rows(Piece(), None, values=True),
                *expressions.plain(table).values(),
                *(one for value in values for one in (value.text, value.null, value.typed) if one is not None),
            ]
            for query in queries:
                assert "DROP" not in _unquoted(query), query.as_string(None)


_INJECTED = (
    "bigint), 0)) AS r FROM ONLY public.c) AS s GROUP BY 1; COMMIT;"
    " CREATE TABLE public.pwned AS SELECT session_user::text AS who; --"
)


def test_a_target_that_answers_a_type_with_statements_runs_none_on_the_publisher(
    pubdb: Database, subdb: Database
) -> None:
    pubdb.execute(
        "CREATE TABLE c (id int PRIMARY KEY, n int); INSERT INTO c VALUES (1, 1); CREATE PUBLICATION p FOR TABLE c"
    )
    subdb.execute("CREATE TABLE c (id int PRIMARY KEY, n bigint)")
    subdb.execute(
        "SET allow_system_table_mods = on; CREATE SCHEMA evil;"
        "CREATE FUNCTION evil.orig(oid, integer) RETURNS text LANGUAGE internal STABLE AS 'format_type';"
        "ALTER FUNCTION pg_catalog.format_type(oid, integer) RENAME TO format_type_was;"
        "CREATE FUNCTION pg_catalog.format_type(oid, integer) RETURNS text LANGUAGE sql STABLE AS"
        f" $f$ SELECT CASE WHEN $1 = 20 AND $2 = -1 THEN '{_INJECTED}' ELSE evil.orig($1, $2) END $f$"
    )
    result = compare(pubdb, subdb, "c")
    assert pubdb.value("SELECT pg_catalog.to_regclass('public.pwned')") is None
    assert result.differences.counts["missing"] == 1


_MODIFIED = {
    "numeric(5,2)": "numeric(5,2)",
    "numeric(1000,0)[]": "numeric(1000,0)[]",
    "numeric(2,-3)": "numeric(2,-3)",
    "time(0)": "time(0) without time zone",
    "timetz(6)": "time(6) with time zone",
    "timestamp(3)[]": "timestamp(3) without time zone[]",
    "timestamptz(2)": "timestamp(2) with time zone",
    "interval(1)": "interval(1)",
    "interval year to month": "interval year to month",
    "interval day to second(4)": "interval day to second(4)",
    "interval hour[]": "interval hour[]",
    "varchar(7)": "character varying",
    "char(7)[]": "bpchar[]",
    "bit(3)": '"bit"',
    "bit varying(3)": "bit varying",
}


def test_a_built_in_type_is_written_as_the_server_has_it(subdb: Database) -> None:
    signed = subdb.connection.info.server_version >= 150000
    kinds = {kind: wanted for kind, wanted in _MODIFIED.items() if signed or "-" not in kind}
    columns = ", ".join(f"c{n} {kind}" for n, kind in enumerate(kinds))
    subdb.execute(f"CREATE TABLE modified ({columns})")
    with contextlib.closing(subdb.connect()) as connection:
        local = describe(connection, "public", "modified")
        assert local is not None
        shown = [_read_as(connection, column.type_oid, column.typmod) for column in local.columns]
        assert dict(zip(kinds, shown, strict=True)) == kinds


def _read_as(connection: psycopg.Connection, type_oid: int, typmod: int) -> str:
    text = built_in_types.written(type_oid, typmod)
    assert text is not None
    query = sql.SQL(
        "SELECT pg_catalog.format_type(a.atttypid, a.atttypmod) FROM pg_attribute a WHERE a.attrelid = 'r'::regclass"
    )
    with connection.transaction(force_rollback=True):
        connection.execute(sql.SQL("CREATE TEMP VIEW r AS SELECT NULL::{} AS v").format(text))
        found = connection.execute(query).fetchone()
    assert found is not None
    return str(found[0])


def test_each_built_in_type_bears_its_name(subdb: Database) -> None:
    oids = [oid for one in types for oid in (one.oid, one.array_oid) if oid]
    texts = []
    for oid in oids:
        text = built_in_types.written(oid, -1)
        assert text is not None
        texts.append(text.as_string(None))
    assert subdb.rows("SELECT n::regtype::oid::bigint FROM unnest(%s::text[]) AS n", texts) == [(oid,) for oid in oids]
    assert len(oids) > 100
