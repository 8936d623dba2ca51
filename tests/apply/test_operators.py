"""Operators that somebody made for a domain over an extension's type are not taken for those of the extension.

Whoever may create in the schema of an extension can make an operator of the same name there. The parser prefers one
that takes the domain itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest
from fix_pair import MakePair
from psycopg import sql

from pgsub.reconcile.equality import Equality
from pgsub.target.catalog.relation import TargetRelation, describe
from pgsub.target.sql.row_lookup import InTransaction, TableLookup

if TYPE_CHECKING:
    from fix_servers import Database

TYPES = (
    "CREATE EXTENSION citext SCHEMA public;"
    "CREATE DOMAIN public.email AS public.citext; CREATE DOMAIN public.work AS public.email;"
)
KEYED = "CREATE TABLE t (mail work PRIMARY KEY, n int, u email UNIQUE)"
FULL = "CREATE TABLE t (mail work, n int, u email); ALTER TABLE t REPLICA IDENTITY FULL"
CODE = "LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'captured'; END $$"


def _plant(database: Database) -> None:
    types = ("email", "work", "citext")
    for one, other in {(one, other) for one in types for other in types} - {("citext", "citext")}:
        database.execute(
            f"CREATE FUNCTION public.{one}_{other}({one}, {other}) RETURNS bool {CODE};"
            f"CREATE OPERATOR public.= (LEFTARG = {one}, RIGHTARG = {other}, FUNCTION = public.{one}_{other})"
        )
    with pytest.raises(psycopg.errors.RaiseException, match="captured"):
        database.value("SELECT 'a'::work = 'a'::work")


@pytest.fixture
def table(subdb: Database) -> TargetRelation:
    subdb.execute(TYPES + KEYED)
    subdb.execute("INSERT INTO t VALUES ('a@x', 1, 'a'), ('b@x', 2, 'b')")
    _plant(subdb)
    subdb.execute("SET search_path = ''")  # as sessions of pgsub have it
    found = describe(subdb.connection, "public", "t")
    assert found is not None
    return found


@pytest.mark.parametrize("tables", [KEYED, FULL], ids=["by a key", "by all columns"])
def test_rows_are_found_by_the_operator_of_the_extension(pair: MakePair, tables: str) -> None:
    p = pair(TYPES + tables)
    _plant(p.subdb)
    p.apply(
        "INSERT INTO t SELECT g || '@x', g, g FROM generate_series(1, 300) g",
        "UPDATE t SET n = -n WHERE mail::text = '7@x'",
        "UPDATE t SET n = n + 1",
        "UPDATE t SET mail = mail || 'y' WHERE n < 0",
        "DELETE FROM t WHERE n > 100",
    )
    p.same("t")


@pytest.mark.parametrize("rule", ["skip", "apply_remote"])
def test_rows_in_the_way_are_found_by_the_operator_of_the_extension(pair: MakePair, rule: str) -> None:
    p = pair(TYPES + KEYED, on_conflict=(f"insert_exists={rule}",))
    p.subdb.execute("INSERT INTO t VALUES ('here', 0, 'U')")
    _plant(p.subdb)
    p.apply("INSERT INTO t VALUES ('there', 1, 'u')")
    assert p.subdb.value("SELECT mail::text FROM t") == {"skip": "here", "apply_remote": "there"}[rule]


def test_a_preview_finds_rows_by_the_operator_of_the_extension(subdb: Database, table: TargetRelation) -> None:
    with subdb.connection.transaction():
        lookup = TableLookup(InTransaction(subdb.connection), table)
        found = lookup.find({"mail": "A@X"})
        assert found is not None and found.values["n"] == "1"
        assert [index.keys for index, _ in lookup.taken({"mail": "c@x", "n": "3", "u": "B"})] == [["u"]]


def test_values_are_compared_by_the_operator_of_the_extension(subdb: Database, table: TargetRelation) -> None:
    asked = Equality(subdb.connection, lambda _: subdb.connection.transaction(), table)
    assert asked.of_pairs(table.columns[0], [("a", "A"), ("a", "b")]) == [True, False]


def test_an_index_on_a_domain_is_used(subdb: Database, table: TargetRelation) -> None:
    condition = table.columns[0].equal(sql.Identifier("mail"), sql.SQL("$1"))
    subdb.connection.execute("SET enable_seqscan = off")
    prepare = sql.SQL("PREPARE found (public.work) AS SELECT FROM public.t WHERE {}").format(condition)
    subdb.connection.execute(prepare)
    plan = "\n".join(line for (line,) in subdb.connection.execute("EXPLAIN EXECUTE found ('a@x')"))
    assert "Index Cond" in plan and "Filter" not in plan, plan


def test_conditions_on_types_that_have_an_operator_of_their_own_are_as_short_as_before(subdb: Database) -> None:
    subdb.execute(f"SET search_path = ''; {TYPES}")
    subdb.execute("CREATE TABLE public.t (a int, b text, c varchar(3), d int[], e public.citext, f public.email)")
    found = describe(subdb.connection, "public", "t")
    assert found is not None
    assert {c.name: (c.equality, c.operand) for c in found.columns} == {
        "a": ("pg_catalog.=", None),
        "b": ("pg_catalog.=", None),
        "c": ("pg_catalog.=", None),
        "d": ("pg_catalog.=", None),
        "e": ("public.=", None),
        "f": ("public.=", "public.citext"),
    }
