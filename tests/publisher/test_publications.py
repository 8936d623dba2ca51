"""Promises of the publication queries, on whatever version the publisher runs."""

from __future__ import annotations

import pytest

from pgsub.common.errors import PermissionMissing, StateForbids
from pgsub.publisher.connect import connect
from pgsub.publisher.prerequisites import check_replication_role, check_wal_level
from pgsub.publisher.publication import (
    OtherOrigin,
    PublishedTable,
    missing_publications,
    missing_warning,
    published_tables,
    tables_with_other_origins,
)

pytestmark = pytest.mark.publishers


@pytest.fixture
def asking(pubdb):
    with connect(pubdb.conninfo, application_name="x", replication=True) as connection:
        yield connection


def test_the_tables_of_several_publications_come_once_and_in_order(pubdb, asking):
    pubdb.execute("CREATE SCHEMA s; CREATE TABLE s.b (n int); CREATE TABLE a (n int, m int); CREATE TABLE c (n int)")
    pubdb.execute('CREATE PUBLICATION "P, ""1""" FOR TABLE s.b, a; CREATE PUBLICATION p2 FOR TABLE a')
    assert published_tables(asking, ['P, "1"', "p2"]) == [
        PublishedTable("public", "a", "r", None),
        PublishedTable("s", "b", "r", None),
    ]


def test_no_publication_and_a_missing_one_have_no_tables(pubdb, asking):
    assert published_tables(asking, []) == []
    assert published_tables(asking, ["nothing"]) == []


def test_the_ledgers_own_schema_is_never_published(pubdb, asking):
    pubdb.execute("CREATE SCHEMA pgsub; CREATE TABLE pgsub.progress (n int); CREATE TABLE t (n int)")
    pubdb.execute("CREATE PUBLICATION p FOR ALL TABLES")
    assert [table.name for table in published_tables(asking, ["p"])] == ["t"]


def test_unlogged_and_temporary_tables_and_what_is_no_table_are_left_out(pubdb, asking):
    pubdb.execute("CREATE TABLE t (n int); CREATE UNLOGGED TABLE u (n int); CREATE TEMPORARY TABLE x (n int)")
    pubdb.execute("CREATE VIEW v AS SELECT 1 AS n; CREATE MATERIALIZED VIEW m AS SELECT 1 AS n; CREATE SEQUENCE s")
    pubdb.execute("CREATE FOREIGN DATA WRAPPER w; CREATE SERVER far FOREIGN DATA WRAPPER w")
    pubdb.execute("CREATE FOREIGN TABLE f (n int) SERVER far; CREATE PUBLICATION p FOR ALL TABLES")
    assert [table.name for table in published_tables(asking, ["p"])] == ["t"]


def test_a_partitioned_table_is_its_leaves_or_its_root_as_published(pubdb, asking):
    partitions(pubdb)
    pubdb.execute("CREATE PUBLICATION leaves FOR TABLE root")
    pubdb.execute("CREATE PUBLICATION whole FOR TABLE root WITH (publish_via_partition_root)")
    assert [table[1:3] for table in published_tables(asking, ["leaves"])] == [("p1", "r"), ("p2a", "r")]
    assert [table[1:3] for table in published_tables(asking, ["whole"])] == [("root", "p")]


def partitions(pubdb):
    pubdb.execute("""
        CREATE TABLE root (n int, m int) PARTITION BY LIST (n);
        CREATE TABLE p1 PARTITION OF root FOR VALUES IN (1);
        CREATE TABLE p2 PARTITION OF root FOR VALUES IN (2) PARTITION BY LIST (m);
        CREATE TABLE p2a PARTITION OF p2 DEFAULT""")


@pytest.mark.parametrize("child", ["p1", "p2", "p2a"])
def test_data_published_by_a_root_and_by_a_child_is_not_copied_twice(pubdb, asking, child):
    partitions(pubdb)
    pubdb.execute("CREATE PUBLICATION whole FOR TABLE root WITH (publish_via_partition_root)")
    pubdb.execute(f"CREATE PUBLICATION child FOR TABLE {child} WITH (publish_via_partition_root)")
    pubdb.execute(f"CREATE PUBLICATION plain FOR TABLE {child}")
    for publications in (["whole", "child"], ["child", "whole"], ["whole", "plain"]):
        assert [table[1:3] for table in published_tables(asking, publications)] == [("root", "p")]


@pytest.mark.since(15)
def test_column_lists_are_told_and_no_list_is_none(pubdb, asking):
    pubdb.execute("CREATE TABLE t (a int, b int, gone int, c int GENERATED ALWAYS AS (1) STORED)")
    pubdb.execute("ALTER TABLE t DROP gone")
    pubdb.execute("CREATE PUBLICATION p1 FOR TABLE t (b, a); CREATE PUBLICATION p2 FOR TABLE t (b)")
    pubdb.execute("CREATE PUBLICATION p3 FOR TABLE t")
    assert published_tables(asking, ["p3"])[0].columns is None
    assert published_tables(asking, ["p2"])[0].columns == ("b",)
    if pubdb.server.version >= 16:  # 15 keeps a list of all columns apart from no list
        assert published_tables(asking, ["p1", "p3"])[0].columns is None


@pytest.mark.since(18)
def test_a_published_generated_column_is_told(pubdb, asking):
    pubdb.execute("CREATE TABLE t (a int, c int GENERATED ALWAYS AS (1) STORED)")
    pubdb.execute("CREATE PUBLICATION p FOR TABLE t WITH (publish_generated_columns = stored)")
    assert published_tables(asking, ["p"])[0].columns == ("a", "c")


@pytest.mark.since(15)
def test_different_column_lists_are_refused_with_the_servers_words(pubdb, asking):
    pubdb.execute('CREATE TABLE "T" (a int, b int)')
    pubdb.execute('CREATE PUBLICATION p1 FOR TABLE "T" (a); CREATE PUBLICATION p2 FOR TABLE "T"')
    with pytest.raises(StateForbids) as raised:
        published_tables(asking, ["p1", "p2"])
    assert raised.value.message == 'cannot use different column lists for table "public.T" in different publications'


def test_missing_publications_are_told_in_the_order_given(pubdb, asking):
    pubdb.execute('CREATE PUBLICATION "There"')
    assert missing_publications(asking, ["z", "There", "there", "a"]) == ["z", "there", "a"]
    assert missing_publications(asking, ["There"]) == []


def test_the_warning_for_missing_publications_reads_like_the_servers():
    assert missing_warning(["a"]) == 'publication "a" does not exist on the publisher'
    assert missing_warning(["a", "b"]) == 'publications "a", "b" do not exist on the publisher'


def test_tables_that_a_native_subscription_writes_are_found_with_their_partitions(pubdb, asking):
    partitions(pubdb)
    pubdb.execute("CREATE TABLE t (n int); CREATE TABLE own (n int)")
    pubdb.execute("CREATE PUBLICATION p FOR TABLE t, own, p2; CREATE PUBLICATION q FOR TABLE p1")
    assert tables_with_other_origins(asking, ["p", "q"]) == []
    subscribe(pubdb, "t", "root")
    found = [OtherOrigin("p", "public", "p2a"), OtherOrigin("p", "public", "t"), OtherOrigin("q", "public", "p1")]
    assert tables_with_other_origins(asking, ["p", "q"]) == found
    assert tables_with_other_origins(asking, ["p"], known={("public", "t")}) == found[:1]


def subscribe(pubdb, *tables):
    """A native subscription that names tables and never connects."""
    pubdb.execute("CREATE SUBSCRIPTION far CONNECTION 'dbname=x' PUBLICATION x WITH (connect = false)")
    for table in tables:
        pubdb.execute(
            "INSERT INTO pg_subscription_rel (srsubid, srrelid, srsubstate) "
            "SELECT s.oid, %s::regclass, 'r' FROM pg_subscription s WHERE subname = 'far'",
            table,
        )


def test_tables_in_a_ledger_of_pgsub_are_found_where_the_role_may_read_it(pubdb, asking):
    pubdb.execute("CREATE TABLE t (n int); CREATE PUBLICATION p FOR ALL TABLES")
    pubdb.execute("CREATE SCHEMA pgsub; CREATE TABLE pgsub.subscription_rel (srrelid oid)")
    pubdb.execute("INSERT INTO pgsub.subscription_rel VALUES ('t'::regclass)")
    assert tables_with_other_origins(asking, ["p"], ledger=True) == [OtherOrigin("p", "public", "t")]
    role = f"r_{pubdb.name}"
    pubdb.execute(f"CREATE ROLE {role} LOGIN REPLICATION")
    conninfo = pubdb.conninfo.replace("user=postgres", f"user={role}")
    with connect(conninfo, application_name="x") as limited:
        assert tables_with_other_origins(limited, ["p"], ledger=True) == []
    pubdb.execute(f"DROP ROLE {role}")


def test_a_publisher_that_decodes_passes(asking):
    check_wal_level(asking)
    check_replication_role(asking)


def test_a_role_without_replication_is_told_the_statement(pubdb):
    role = f"r_{pubdb.name}"
    pubdb.execute(f"CREATE ROLE {role} LOGIN")
    conninfo = pubdb.conninfo.replace("user=postgres", f"user={role}")
    with connect(conninfo, application_name="x") as limited:
        with pytest.raises(PermissionMissing) as raised:
            check_replication_role(limited)
        pubdb.execute(f"ALTER ROLE {role} REPLICATION")
        check_replication_role(limited)
        pubdb.execute(f"ALTER ROLE {role} NOREPLICATION; CREATE ROLE rds_replication; GRANT rds_replication TO {role}")
        try:
            check_replication_role(limited)
        finally:
            pubdb.execute("DROP ROLE rds_replication")
    pubdb.execute(f"DROP ROLE {role}")
    assert raised.value.hint.splitlines()[-1] == f'ALTER ROLE "{role}" REPLICATION;'
