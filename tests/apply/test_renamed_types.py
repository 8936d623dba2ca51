"""A name that another type or operator bears when a statement uses it: no code of that one is run.

Whoever owns the schema of a type, or may create schemas and owns that one, may give its name to another one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from fix_pair import MakePair
from swapped import CODE, Ran

from pgsub.apply.rows import relation_cache
from pgsub.common.errors import TableReplaced
from pgsub.reconcile.equality import Equality
from pgsub.target.catalog import ddl_watch
from pgsub.target.catalog.relation import TargetRelation, describe
from pgsub.target.sql import partitions
from pgsub.target.sql.row_lookup import InTransaction, ReadOnlySession, TableLookup

if TYPE_CHECKING:
    from fix_servers import Database

TYPES = "CREATE SCHEMA kinds; CREATE TYPE kinds.mood AS ENUM ('a', 'b', 'c'); CREATE EXTENSION citext SCHEMA kinds;"
MOODS = "CREATE TABLE public.t (id int PRIMARY KEY, m kinds.mood, n int)"
WORDS = "CREATE TABLE public.t (id kinds.citext PRIMARY KEY, m kinds.mood, n int)"
_SWAP = """
BEGIN;
ALTER SCHEMA kinds RENAME TO old;
CREATE SCHEMA kinds;
CREATE DOMAIN kinds.mood AS old.mood CHECK (public.said());
CREATE DOMAIN kinds.citext AS old.citext CHECK (public.said());
CREATE FUNCTION kinds.equal(old.citext, old.citext) RETURNS bool LANGUAGE sql AS 'SELECT public.said()';
CREATE OPERATOR kinds.= (LEFTARG = old.citext, RIGHTARG = old.citext, FUNCTION = kinds.equal);
COMMIT
"""


def _swap(database: Database) -> Ran:
    database.execute(CODE)
    database.execute(_SWAP)
    return Ran(database)


@pytest.fixture
def _nobody_looks_before_the_names_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relation_cache, "CHECK_SECONDS", 1e9)


@pytest.mark.usefixtures("_nobody_looks_before_the_names_are_used")
@pytest.mark.parametrize(
    ("tables", "statement"),
    [
        pytest.param(MOODS, "UPDATE t SET m = 'b'", id="a type in a set"),
        pytest.param(WORDS, "UPDATE t SET m = 'b'", id="an operator"),
        pytest.param(WORDS, "UPDATE t SET m = 'b' WHERE n = 7", id="an operator for a row"),
    ],
)
def test_nothing_of_a_type_or_operator_that_took_a_name_is_run(pair: MakePair, tables: str, statement: str) -> None:
    p = pair(TYPES + tables)
    task = p.start()
    p.pubdb.execute("INSERT INTO t SELECT g, 'a', g FROM generate_series(1, 300) g")
    p.until("SELECT count(*) = 300 FROM t", task=task)
    p.pubdb.execute("UPDATE t SET m = 'c'")
    p.until("SELECT bool_and(m::text = 'c') FROM t", task=task)
    swapped = _swap(p.subdb)
    p.pubdb.execute(statement)
    p.until("SELECT count(*) > 0 FROM t WHERE m::text = 'b'", task=task)
    p.same("t", columns="id::text, m::text, n")
    assert not swapped.ran


@pytest.fixture
def table(subdb: Database) -> TargetRelation:
    subdb.execute(f"SET search_path = ''; {TYPES} {WORDS} PARTITION BY LIST (id)")
    subdb.execute(
        "CREATE TABLE public.part PARTITION OF public.t FOR VALUES IN ('x'); INSERT INTO public.t VALUES ('x')"
    )
    found = describe(subdb.connection, "public", "t")
    assert found is not None
    return found


@pytest.mark.parametrize("session", [ReadOnlySession, InTransaction])
def test_a_preview_names_no_type_that_took_a_name(
    subdb: Database, table: TargetRelation, session: Callable[..., ReadOnlySession | InTransaction]
) -> None:
    lookup = TableLookup(session(subdb.connection), table)
    assert lookup.find({"id": "X"})
    if session is ReadOnlySession:
        lookup._session.catalog("SELECT %s::oid", table.oid)  # as time passes
    swapped = _renamed_by_another(subdb)
    for asked in (lambda: lookup.find({"id": "X"}), lambda: lookup.read({"m": "b"})):
        with pytest.raises(TableReplaced, match="a type or operator of"):
            asked()
    assert not swapped.ran


def test_values_are_not_compared_by_a_type_that_took_a_name(subdb: Database, table: TargetRelation) -> None:
    asked = Equality(subdb.connection, lambda _: subdb.connection.transaction(), table)
    assert asked.of_pairs(table.columns[0], [("a", "A")]) == [True]
    swapped = _renamed_by_another(subdb)
    with pytest.raises(TableReplaced, match="a type or operator of"):
        asked.of_pairs(table.columns[0], [("a", "A")])
    with pytest.raises(TableReplaced, match="a type or operator of"):
        asked.groups(table.columns[:1], [("a",), ("A",)])
    assert not swapped.ran


def test_rows_are_not_routed_by_a_type_that_took_a_name(subdb: Database, table: TargetRelation) -> None:
    rows = [{"id": "X", "m": "b"}]
    assert partitions.leaves(subdb.connection, table, rows) == [("public", "part")]
    swapped = _renamed_by_another(subdb)
    assert partitions.leaves(subdb.connection, table, rows) == [None]
    assert not swapped.ran


def _renamed_by_another(subdb: Database) -> Ran:
    with subdb.connect() as other:
        other.execute(CODE.encode())
        other.execute(_SWAP.encode())
    return Ran(subdb)


@pytest.mark.parametrize(
    "statement",
    [
        "ALTER SCHEMA kinds RENAME TO old",
        "ALTER TYPE kinds.mood RENAME TO temper",
        "ALTER TYPE kinds.mood SET SCHEMA public",
        "ALTER OPERATOR kinds.= (kinds.citext, kinds.citext) SET SCHEMA public",
    ],
)
def test_renaming_what_statements_name_changes_the_definition(subdb: Database, statement: str) -> None:
    subdb.execute(f"{TYPES} CREATE DOMAIN public.work AS kinds.citext; CREATE TABLE public.plain (id int)")
    subdb.execute("CREATE TABLE public.t (id public.work PRIMARY KEY, m kinds.mood[])")
    oids = [subdb.value(f"SELECT 'public.{name}'::regclass::oid::bigint") for name in ("t", "plain")]
    before = ddl_watch.definition_versions(subdb.connection, oids)
    assert ddl_watch.definition_versions(subdb.connection, oids) == before
    if "OPERATOR" in statement:
        subdb.execute("ALTER EXTENSION citext DROP OPERATOR kinds.= (kinds.citext, kinds.citext)")
    subdb.execute(statement)
    after = ddl_watch.definition_versions(subdb.connection, oids)
    assert after[oids[0]] != before[oids[0]]
    assert after[oids[1]] == before[oids[1]]


def test_tables_whose_types_are_the_servers_own_have_nothing_to_verify(subdb: Database) -> None:
    subdb.execute("CREATE TABLE t (a int, b text, c varchar(3), d int[], e numeric(10, 2), f jsonb, g int4range[])")
    found = describe(subdb.connection, "public", "t")
    assert found is not None and found.named_types is None
