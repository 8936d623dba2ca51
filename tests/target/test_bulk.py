"""Promises of reading many target tables at once: each comes out as if it had been read alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import psycopg
import pytest

from pgsub.target.catalog.relation import describe, describe_many
from pgsub.target.session import connect as target

if TYPE_CHECKING:
    from fix_servers import Database

_KINDS = """
    CREATE SCHEMA x; CREATE EXTENSION citext SCHEMA x; CREATE TYPE public.mood AS ENUM ('a');
    CREATE FUNCTION public.f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
    CREATE TABLE public.plain (gone int, a int PRIMARY KEY, v x.citext, m public.mood, j json);
    ALTER TABLE public.plain DROP gone;
    CREATE TABLE public."od%d ""one" ("B" text, n int GENERATED ALWAYS AS IDENTITY,
        g int GENERATED ALWAYS AS (1) STORED);
    CREATE TABLE public.empty ();
    CREATE TABLE public.by_index (a int PRIMARY KEY, b int NOT NULL UNIQUE);
    ALTER TABLE public.by_index REPLICA IDENTITY USING INDEX by_index_b_key;
    CREATE TABLE public.late (b int, a int, PRIMARY KEY (a, b) DEFERRABLE);
    CREATE TABLE public.root (a int PRIMARY KEY, b int) PARTITION BY LIST (a);
    CREATE TABLE public.leaf PARTITION OF public.root DEFAULT;
    CREATE TRIGGER t BEFORE INSERT ON public.leaf FOR EACH ROW EXECUTE FUNCTION public.f();
    ALTER TABLE public.leaf ENABLE REPLICA TRIGGER t;
    CREATE TABLE public.own_key (a int PRIMARY KEY, up int REFERENCES public.own_key);
    CREATE TABLE public.up (a int PRIMARY KEY); CREATE TABLE public.down (a int REFERENCES public.up);
    CREATE TABLE public.into_leaf (a int REFERENCES public.leaf);
    CREATE TABLE public.ruled (a int); CREATE RULE r AS ON INSERT TO public.ruled DO ALSO NOTHING;
    CREATE VIEW public.view AS SELECT 1 AS a;"""
_NAMES = [
    ("public", name)
    for name in (
        *("plain", 'od%d "one', "empty", "by_index", "late", "root", "leaf", "own_key", "up", "down", "into_leaf"),
        *("ruled", "view"),
    )
]


@pytest.fixture
def full(connect: Callable[..., psycopg.Connection]) -> psycopg.Connection:
    session = connect()
    session.execute(_KINDS.encode())
    return session


@pytest.mark.parametrize("replica", [True, False])
def test_every_kind_of_table_read_with_others_is_as_if_read_alone(full: psycopg.Connection, replica: bool) -> None:
    found = describe_many(full, [*_NAMES, ("public", "nowhere"), *_NAMES], replica=replica)
    assert sorted(found) == sorted(_NAMES)
    for schema, name in _NAMES:
        assert found[schema, name] == describe(full, schema, name, replica=replica)


def test_what_distinguishes_tables_stays_with_its_table(full: psycopg.Connection) -> None:
    found = {name: table for (_, name), table in describe_many(full, _NAMES).items()}
    assert {name for name, table in found.items() if table.fires} == {"root", "leaf"}
    assert {name for name, table in describe_many(full, _NAMES, replica=False).items() if table.rules} == {
        ("public", "ruled"),
        ("public", "view"),
    }
    assert {name: table.identity for name, table in found.items() if table.identity} == {
        "plain": ("a",),
        "by_index": ("b",),
        "late": ("a", "b"),
        "root": ("a",),
        "leaf": ("a",),
        "own_key": ("a",),
        "up": ("a",),
    }
    assert {name for name, table in found.items() if table.deferrable} == {"late"}
    assert [(c.name, c.equality) for c in found["plain"].columns] == [
        ("a", "pg_catalog.="),
        ("v", "x.="),
        ("m", "pg_catalog.="),
        ("j", None),
    ]
    assert [(c.name, c.generated, c.identity) for c in found['od%d "one'].columns] == [
        ("B", False, ""),
        ("n", False, "a"),
        ("g", True, ""),
    ]
    assert found["empty"].columns == () and found["view"].relkind == "v"


def test_row_security_is_said_of_the_roles_that_a_policy_applies_to(subdb: Database) -> None:
    owner, other = f"{subdb.name}_owner", f"{subdb.name}_other"
    subdb.execute(f"""
        CREATE ROLE {owner} LOGIN; CREATE ROLE {other} LOGIN; CREATE TABLE guarded (a int); CREATE TABLE forced (a int);
        ALTER TABLE guarded OWNER TO {owner}; ALTER TABLE forced OWNER TO {owner};
        ALTER TABLE guarded ENABLE ROW LEVEL SECURITY; ALTER TABLE forced ENABLE ROW LEVEL SECURITY;
        ALTER TABLE forced FORCE ROW LEVEL SECURITY""")
    names = [("public", "guarded"), ("public", "forced")]

    def applies(user: str) -> list[bool]:
        with target.connect(subdb.server.conninfo(subdb.name, user), "test") as session:
            found = describe_many(session, names)
            return [found[name].row_security for name in names]

    assert {user: applies(user) for user in ("postgres", owner, other)} == {
        "postgres": [False, False],
        owner: [False, True],
        other: [True, True],
    }
    subdb.execute(f"DROP OWNED BY {owner}; DROP ROLE {owner}, {other}")


def test_no_tables_are_no_question(full: psycopg.Connection) -> None:
    full.close()
    assert describe_many(full, []) == {}
