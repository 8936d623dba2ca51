"""Promises of a table's description and of the COPY statements made from it: every row once, no row too many."""

from __future__ import annotations

import itertools
import pickle

import psycopg
import pytest

from pgsub.common.errors import PermissionMissing, SchemaFault, StateForbids
from pgsub.publisher.connect import connect
from pgsub.publisher.copy_statements import copy_statement
from pgsub.publisher.identity import identify
from pgsub.publisher.publication import published_tables
from pgsub.publisher.server_errors import translate
from pgsub.publisher.snapshot import SlotSnapshot
from pgsub.publisher.tables import describe_tables

pytestmark = pytest.mark.publishers


def describe_table(connection, schema, name, publications):
    """A single one, or what is wrong with it."""
    found = describe_tables(connection, [(schema, name)], publications)
    for fault in found.faults.values():
        raise fault
    return found.tables[schema, name]


@pytest.fixture(autouse=True)
def everything(pubdb):
    """A publication of all tables: what is not published cannot be described."""
    pubdb.execute("CREATE PUBLICATION everything FOR ALL TABLES WITH (publish_via_partition_root)")


@pytest.fixture
def asking(pubdb):
    with connect(pubdb.conninfo, application_name="x", replication=True) as connection:
        yield connection


def copied(connection, statement):
    """The lines of a COPY in text format."""
    with connection.cursor().copy(statement) as copy:
        return b"".join(bytes(block) for block in copy).decode().splitlines()


def text(statement):
    return statement.as_string()


def test_columns_carry_type_key_and_order_and_leave_out_what_is_not_sent(pubdb, asking):
    pubdb.execute("""
        CREATE SCHEMA "S s"; CREATE TYPE "S s".mood AS ENUM ('ok');
        CREATE TABLE "S s"."T" (gone int, "K" bigint, v varchar(7), m "S s".mood, g int GENERATED ALWAYS AS (1) STORED,
            PRIMARY KEY ("K"));
        ALTER TABLE "S s"."T" DROP gone;
        CREATE PUBLICATION p FOR TABLE "S s"."T" """)
    table = describe_table(asking, "S s", "T", ["p"])
    assert (table.schema, table.name, table.relkind, table.replica_identity) == ("S s", "T", "r", "d")
    assert table.oid == pubdb.value("""SELECT '"S s"."T"'::regclass::oid""")
    seen = [(c.attnum, c.name, c.type_schema, c.type_name, c.typmod, c.is_key, c.generated) for c in table.columns]
    assert seen == [
        (2, "K", "pg_catalog", "int8", -1, True, False),
        (3, "v", "pg_catalog", "varchar", 11, False, False),
        (4, "m", "S s", "mood", -1, False, False),
    ]
    assert table.columns[0].type_oid == 20
    assert text(copy_statement(table)) == 'COPY "S s"."T" ("K", "v", "m") TO STDOUT'
    assert text(copy_statement(table, binary=True)).endswith(" TO STDOUT WITH (FORMAT binary)")
    assert text(copy_statement(table, columns=["m"])) == 'COPY "S s"."T" ("m") TO STDOUT'


@pytest.mark.parametrize(
    ("identity", "letter", "keys"),
    [
        ("DEFAULT", "d", ["a"]),
        ("FULL", "f", []),
        ("NOTHING", "n", []),
        ("USING INDEX u", "i", ["b", "c"]),
    ],
)
def test_the_key_is_the_replica_identity_index(pubdb, asking, identity, letter, keys):
    pubdb.execute("CREATE TABLE t (a int PRIMARY KEY, b int NOT NULL, c int NOT NULL)")
    pubdb.execute(f"CREATE UNIQUE INDEX u ON t (c, b); ALTER TABLE t REPLICA IDENTITY {identity}")
    table = describe_table(asking, "public", "t", ["everything"])
    assert table.replica_identity == letter
    assert [column.name for column in table.columns if column.is_key] == keys


@pytest.mark.since(15)
def test_a_column_list_and_row_filters_restrict_the_copy(pubdb, asking):
    pubdb.execute(
        "CREATE TABLE t (a int, b text, c int); INSERT INTO t SELECT g, 'v' || g, g FROM generate_series(1, 9) g"
    )
    pubdb.execute("CREATE PUBLICATION p1 FOR TABLE t (a, b) WHERE (a < 3)")
    pubdb.execute("CREATE PUBLICATION p2 FOR TABLE t (a, b) WHERE (a > 8 AND b IS NOT NULL)")
    pubdb.execute("CREATE PUBLICATION p3 FOR TABLE t (a, b)")
    both = describe_table(asking, "public", "t", ["p1", "p2"])
    assert [column.name for column in both.columns] == ["a", "b"]
    assert sorted(copied(asking, copy_statement(both))) == ["1\tv1", "2\tv2", "9\tv9"]
    for leaf in both.leaves:
        assert copied(asking, copy_statement(both, leaf=leaf, ctid_from=0, ctid_to=0)) == []
        assert len(copied(asking, copy_statement(both, leaf=leaf, ctid_from=0, ctid_to=1))) == 3
    assert describe_table(asking, "public", "t", ["p1", "p3"]).row_filter is None


@pytest.mark.since(15)
def test_different_column_lists_of_one_table_are_refused(pubdb, asking):
    pubdb.execute("CREATE TABLE t (a int, b int)")
    pubdb.execute("CREATE PUBLICATION p1 FOR TABLE t (a); CREATE PUBLICATION p2 FOR TABLE t (b)")
    with pytest.raises(StateForbids, match="cannot use different column lists for table"):
        describe_table(asking, "public", "t", ["p1", "p2"])
    pubdb.execute("CREATE PUBLICATION p3 FOR TABLE t; CREATE PUBLICATION p4 FOR TABLE t (b, a)")
    with pytest.raises(StateForbids, match="cannot use different column lists for table"):
        describe_table(asking, "public", "t", ["p1", "p3"])
    assert len(describe_table(asking, "public", "t", ["p3", "p4"]).columns) == 2


@pytest.mark.since(18)
def test_a_published_generated_column_is_read_by_select(pubdb, asking):
    pubdb.execute("CREATE TABLE t (a int, g int GENERATED ALWAYS AS (a * 2) STORED); INSERT INTO t VALUES (4)")
    pubdb.execute("CREATE PUBLICATION p FOR TABLE t WITH (publish_generated_columns = stored)")
    table = describe_table(asking, "public", "t", ["p"])
    assert [column.generated for column in table.columns] == [False, True]
    assert copied(asking, copy_statement(table)) == ["4\t8"]
    assert text(copy_statement(table, columns=["a"])) == 'COPY "public"."t" ("a") TO STDOUT'


def test_the_ranges_of_a_tables_blocks_are_the_table(pubdb, asking):
    pubdb.execute(
        "CREATE TABLE t (n int, v text); INSERT INTO t SELECT g, repeat('x', 500) FROM generate_series(1, 1000) g"
    )
    table = describe_table(asking, "public", "t", ["everything"])
    (leaf,) = table.leaves
    assert leaf.pages > 60 and leaf.bytes >= leaf.pages * 8192
    assert (leaf.oid, leaf.schema, leaf.name) == (table.oid, "public", "t")
    cuts = [0, 1, leaf.pages // 2, leaf.pages - 1, None]
    pieces = [
        copied(asking, copy_statement(table, columns=["n"], leaf=leaf, ctid_from=start, ctid_to=end))
        for start, end in itertools.pairwise(cuts)
    ]
    assert all(pieces)
    assert sorted(int(n) for piece in pieces for n in piece) == list(range(1, 1001))


def test_a_range_of_blocks_is_read_by_a_tid_range_scan(pubdb, asking):
    pubdb.execute("CREATE TABLE t (n int); INSERT INTO t SELECT generate_series(1, 10000)")
    table = describe_table(asking, "public", "t", ["everything"])
    copy = text(copy_statement(table, leaf=table.leaves[0], ctid_from=1, ctid_to=2))
    select = copy.removeprefix("COPY (").removesuffix(") TO STDOUT")
    assert "Tid Range Scan" in pubdb.value(f"EXPLAIN {select}")


def test_the_last_range_has_no_end(pubdb, asking):
    pubdb.execute("CREATE TABLE t (n int); INSERT INTO t VALUES (1)")
    table = describe_table(asking, "public", "t", ["everything"])
    pubdb.execute("INSERT INTO t SELECT generate_series(2, 1000)")
    statement = copy_statement(table, leaf=table.leaves[0], ctid_from=0)
    assert len(copied(asking, statement)) == 1000


@pytest.mark.since(15)
def test_a_partitioned_root_is_all_of_its_leaves(pubdb, asking):
    pubdb.execute("""
        CREATE SCHEMA parts; CREATE TABLE root (n int, m int) PARTITION BY LIST (n);
        CREATE TABLE parts.p1 (m int, gone int, n int); ALTER TABLE parts.p1 DROP gone;
        ALTER TABLE root ATTACH PARTITION parts.p1 FOR VALUES IN (1);
        CREATE TABLE p2 PARTITION OF root FOR VALUES IN (2) PARTITION BY LIST (m);
        CREATE TABLE p2a PARTITION OF p2 DEFAULT;
        INSERT INTO root SELECT 1 + g % 2, g FROM generate_series(1, 5000) g; ANALYZE;
        CREATE PUBLICATION p FOR TABLE root WHERE (m > 100) WITH (publish_via_partition_root)""")
    table = describe_table(asking, "public", "root", ["p"])
    assert table.relkind == "p"
    assert {(leaf.schema, leaf.name) for leaf in table.leaves} == {("parts", "p1"), ("public", "p2a")}
    assert table.bytes == sum(leaf.bytes for leaf in table.leaves) and table.reltuples == 5000
    whole = sorted(copied(asking, copy_statement(table)))
    by_leaf = sorted(row for leaf in table.leaves for row in copied(asking, copy_statement(table, leaf=leaf)))
    assert whole == by_leaf and len(whole) == 4900


def test_a_root_without_partitions_has_no_leaves_and_an_empty_copy(pubdb, asking):
    pubdb.execute("CREATE TABLE root (n int) PARTITION BY LIST (n)")
    table = describe_table(asking, "public", "root", ["everything"])
    assert table.leaves == () and (table.bytes, table.reltuples) == (0, -1)
    assert copied(asking, copy_statement(table)) == []


def test_inheritance_children_are_not_copied_with_their_parent(pubdb, asking):
    pubdb.execute("CREATE TABLE t (n int); CREATE TABLE child () INHERITS (t)")
    pubdb.execute("INSERT INTO t VALUES (1); INSERT INTO child VALUES (2)")
    table = describe_table(asking, "public", "t", ["everything"])
    assert len(table.leaves) == 1
    for statement in (copy_statement(table), copy_statement(table, leaf=table.leaves[0], ctid_to=9)):
        assert copied(asking, statement) == ["1"]


@pytest.mark.parametrize("options", [{}, {"ctid_from": 0}, {"ctid_from": 0, "ctid_to": 1}])
def test_rows_of_a_table_without_columns_are_copied(pubdb, asking, options):
    pubdb.execute("CREATE TABLE t (); INSERT INTO t DEFAULT VALUES; INSERT INTO t DEFAULT VALUES")
    pubdb.execute("CREATE PUBLICATION p FOR TABLE t")
    table = describe_table(asking, "public", "t", ["p"])
    assert table.columns == ()
    assert copied(asking, copy_statement(table, leaf=table.leaves[0], **options)) == ["", ""]


def test_toast_counts_in_the_bytes_and_a_table_never_analyzed_has_no_estimate(pubdb, asking):
    pubdb.execute("CREATE TABLE t (v text); ALTER TABLE t ALTER v SET STORAGE EXTERNAL")
    pubdb.execute("INSERT INTO t VALUES (repeat('x', 1000000))")
    table = describe_table(asking, "public", "t", ["everything"])
    assert table.leaves[0].pages == 1 and table.bytes > 1_000_000 and table.reltuples == -1


@pytest.mark.since(15)
def test_names_with_quotes_and_percent_signs_reach_the_server_as_they_are(pubdb, asking):
    pubdb.execute('CREATE TABLE "we""ird %s" ("a%b" int, "c""d" int); INSERT INTO "we""ird %s" VALUES (1, 2)')
    pubdb.execute('CREATE PUBLICATION p FOR TABLE "we""ird %s" WHERE ("a%b" % 2 = 1)')
    table = describe_table(asking, "public", 'we"ird %s', ["p"])
    assert copied(asking, copy_statement(table, leaf=table.leaves[0], ctid_to=1)) == ["1\t2"]


def test_a_table_that_is_gone_is_a_fault_that_names_it(asking):
    with pytest.raises(SchemaFault, match="not found on publisher") as raised:
        describe_table(asking, "public", "gone", ["everything"])
    assert raised.value.message == 'table "public.gone" not found on publisher'
    assert raised.value.relation == "public.gone"


def test_a_table_described_in_a_snapshot_is_readable_there(pubdb):
    pubdb.execute("CREATE TABLE t (n int); INSERT INTO t VALUES (1)")
    with SlotSnapshot.open(pubdb.conninfo, pubdb.name, "sync", verify=identify) as snapshot:
        pubdb.execute("INSERT INTO t VALUES (2)")
        table = describe_table(snapshot.connection, "public", "t", ["everything"])
        assert copied(snapshot.connection, copy_statement(table)) == ["1"]


def test_a_role_that_may_not_read_is_told_the_grant_when_the_copy_starts(pubdb):
    role = f"r_{pubdb.name}"
    pubdb.execute(f"CREATE TABLE t (n int); CREATE ROLE {role} LOGIN")
    with connect(pubdb.conninfo.replace("user=postgres", f"user={role}"), application_name="x") as limited:
        table = describe_table(limited, "public", "t", ["everything"])
        with pytest.raises(psycopg.errors.InsufficientPrivilege) as raised:
            copied(limited, copy_statement(table))
    pubdb.execute(f"DROP ROLE {role}")
    error = translate(raised.value, "start initial contents copy", table=("public", "t"), user=role)
    assert isinstance(error, PermissionMissing)
    assert error.hint.splitlines()[-1] == f'GRANT SELECT ON TABLE "public"."t" TO "{role}";'


def test_a_row_security_policy_of_the_publisher_fails_the_copy_instead_of_filtering_it(pubdb):
    role = f"r_{pubdb.name}"
    pubdb.execute(f"CREATE TABLE t (n int); CREATE ROLE {role} LOGIN; GRANT SELECT ON t TO {role}")
    pubdb.execute("ALTER TABLE t ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON t USING (n > 1)")
    with connect(pubdb.conninfo.replace("user=postgres", f"user={role}"), application_name="x") as limited:
        table = describe_table(limited, "public", "t", ["everything"])
        with pytest.raises(psycopg.errors.InsufficientPrivilege) as raised:
            copied(limited, copy_statement(table))
    pubdb.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
    error = translate(raised.value, "start initial contents copy", table=("public", "t"), user=role)
    assert error.hint.splitlines()[-1] == f'ALTER ROLE "{role}" BYPASSRLS;'


@pytest.mark.since(15)
def test_descriptions_travel_between_processes(pubdb, asking):
    pubdb.execute("CREATE TABLE t (n int); CREATE PUBLICATION p FOR TABLE t WHERE (n > 0)")
    for value in (describe_table(asking, "public", "t", ["p"]), *published_tables(asking, ["p"]), identify(asking)):
        assert pickle.loads(pickle.dumps(value)) == value
