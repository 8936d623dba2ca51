"""Promises of reading many tables at once: each comes out as if it had been read alone, and none spoils the others."""

from __future__ import annotations

import pytest

from pgsub.common.errors import SchemaFault, StateForbids
from pgsub.publisher.connect import connect
from pgsub.publisher.tables import describe_tables

pytestmark = [pytest.mark.publishers, pytest.mark.since(15)]  # column lists

_KINDS = """
    CREATE SCHEMA "S s"; CREATE TYPE "S s".mood AS ENUM ('ok');
    CREATE TABLE "S s"."T%" (gone int, "K" bigint, v varchar(7), m "S s".mood, PRIMARY KEY ("K"));
    ALTER TABLE "S s"."T%" DROP gone;
    CREATE TABLE full_identity (a int PRIMARY KEY, b text); ALTER TABLE full_identity REPLICA IDENTITY FULL;
    CREATE TABLE index_identity (a int PRIMARY KEY, b int NOT NULL UNIQUE, g int GENERATED ALWAYS AS (1) STORED);
    ALTER TABLE index_identity REPLICA IDENTITY USING INDEX index_identity_b_key;
    CREATE TABLE nothing ();
    CREATE TABLE filtered (a int, b int); INSERT INTO filtered SELECT g, g FROM generate_series(1, 5000) g;
    CREATE TABLE parent (n int); CREATE TABLE child (m int) INHERITS (parent);
    CREATE TABLE root (n int, m int) PARTITION BY LIST (n);
    CREATE TABLE p1 PARTITION OF root FOR VALUES IN (1) PARTITION BY LIST (m);
    CREATE TABLE p1a PARTITION OF p1 DEFAULT;
    CREATE TABLE p2 PARTITION OF root FOR VALUES IN (2);
    INSERT INTO root SELECT 1 + g % 2, g FROM generate_series(1, 999) g;
    CREATE TABLE rootless (n int) PARTITION BY LIST (n);
    CREATE TABLE torn (a int, b int);
    ANALYZE;
    CREATE PUBLICATION p FOR TABLE "S s"."T%", full_identity, index_identity, nothing, filtered (a) WHERE (a > 7),
        parent, root, rootless, torn (a) WITH (publish_via_partition_root);
    CREATE PUBLICATION q FOR TABLE filtered (a) WHERE (a < 3), torn (b);"""
_NAMES = [
    ("S s", "T%"),
    *[("public", name) for name in ("full_identity", "index_identity", "nothing", "filtered", "parent", "child")],
    *[("public", name) for name in ("root", "p1", "p2", "rootless")],
]


@pytest.fixture
def asking(pubdb):
    pubdb.execute(_KINDS)
    with connect(pubdb.conninfo, application_name="x", replication=True) as connection:
        yield connection


@pytest.mark.parametrize("publications", [["p", "q"], ["p"]])
def test_every_kind_of_table_read_with_others_is_as_if_read_alone(asking, publications):
    found = describe_tables(asking, [*_NAMES, *_NAMES], publications)
    assert list(found.tables) == _NAMES and found.faults == {}
    for schema, name in _NAMES:
        assert (
            found.tables[schema, name] == describe_tables(asking, [(schema, name)], publications).tables[schema, name]
        )


@pytest.mark.parametrize("publications", [["none"], []])
def test_tables_that_no_publication_has_are_not_read(asking, publications):
    found = describe_tables(asking, _NAMES, publications)
    assert found.tables == {} and list(found.faults) == _NAMES
    assert {str(fault).partition('" ')[2] for fault in found.faults.values()} == {
        "is not published by the publications of the subscription"
    }


def test_what_distinguishes_tables_stays_with_its_table(asking):
    found = {name: table for (_, name), table in describe_tables(asking, _NAMES, ["p", "q"]).tables.items()}
    assert {name: [c.name for c in table.columns] for name, table in found.items()} == {
        "T%": ["K", "v", "m"],
        "full_identity": ["a", "b"],
        "index_identity": ["a", "b"],
        "nothing": [],
        "filtered": ["a"],
        "parent": ["n"],
        "child": ["n", "m"],
        "root": ["n", "m"],
        "p1": ["n", "m"],
        "p2": ["n", "m"],
        "rootless": ["n"],
    }
    keys = {name: [c.name for c in table.columns if c.is_key] for name, table in found.items()}
    assert {name: key for name, key in keys.items() if key} == {"T%": ["K"], "index_identity": ["b"]}
    assert {name: {leaf.name for leaf in table.leaves} for name, table in found.items()} == {
        **{name: {name} for name in found},
        "root": {"p1a", "p2"},
        "p1": {"p1a"},
        "rootless": set(),
    }
    assert found["filtered"].row_filter == "((a < 3) OR (a > 7))"
    assert [name for name, table in found.items() if table.row_filter] == ["filtered"]
    assert (found["filtered"].reltuples, found["root"].reltuples) == (5000, 999)
    assert found["filtered"].bytes == found["filtered"].leaves[0].bytes > 100_000


def test_a_table_that_is_gone_or_torn_is_a_fault_of_its_own(asking):
    found = describe_tables(asking, [("public", "gone"), ("public", "torn"), ("public", "root")], ["p", "q"])
    assert list(found.tables) == [("public", "root")]
    gone, torn = found.faults["public", "gone"], found.faults["public", "torn"]
    assert isinstance(gone, SchemaFault) and gone.message == 'table "public.gone" not found on publisher'
    assert isinstance(torn, StateForbids) and "cannot use different column lists" in torn.message


def test_no_tables_are_no_question(asking):
    asking.execute("BEGIN")
    assert describe_tables(asking, [], ["p"]) == ({}, {})
