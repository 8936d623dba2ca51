"""The comparison of single tables, between two databases and without replication: what is found, and how it is told."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fix_servers import Database, Servers, other_servers
from psycopg import sql
from swapped import Swapped
from verified import compare, exported

from pgsub.apply.conflicts import conflict_text
from pgsub.common.errors import PgsubError, SchemaFault, StateForbids
from pgsub.publisher import connect as publisher
from pgsub.publisher.server_errors import translate
from pgsub.reconcile import buckets, comparison, explained_differences, expressions, rows
from pgsub.reconcile.comparison import TableResult
from pgsub.reconcile.hashes import hashes
from pgsub.reconcile.reading import read_rate
from pgsub.reconcile.reading.recorded_rows import CONFLICT, LOCAL, NEW, OLD, SKIPPED, Recorded
from pgsub.reconcile.reading.side import Side
from pgsub.reconcile.reading.source import Piece, Source
from pgsub.target.ledger.schema import installation
from pgsub.target.ledger.skipped_changes import Covered
from pgsub.target.session import connect as target

Compare = Callable[..., TableResult]


@pytest.fixture
def both(pubdb: Database, subdb: Database) -> Compare:
    """``both(ddl, pub=…, sub=…)`` makes tables and compares ``t``; with no arguments only the latter."""

    def run(ddl: str = "", *, pub: str = "", sub: str = "", table: str = "t", **options: Any) -> TableResult:
        for database, own in ((pubdb, pub), (subdb, sub)):
            for statements in (ddl, own):
                if statements:
                    database.execute(statements)
        if not pubdb.value("SELECT count(*) FROM pg_publication"):
            pubdb.execute("CREATE PUBLICATION p FOR ALL TABLES")
        return compare(pubdb, subdb, table, **options)

    return run


def counts(result: TableResult) -> tuple[int, int, int]:
    """Rows that are missing, extra, different."""
    found = result.differences.counts
    return found["missing"], found["extra"], found["different"]


TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text, n numeric(12,4), at timestamptz)"
FILL = "INSERT INTO t SELECT g, md5(g::text), g / 7.0, timestamptz '2026-01-01 00:00+00' + g * interval '1 h'"
ROWS = f"{FILL} FROM generate_series(1, 3000) g"


def test_equal_tables_are_equal_whatever_their_order_on_disk(both: Compare) -> None:
    result = both(TABLE, pub=ROWS, sub=f"{FILL} FROM generate_series(3000, 1, -1) g")
    assert counts(result) == (0, 0, 0)
    assert (result.publisher_rows, result.target_rows) == (3000, 3000)


def test_each_row_that_differs_is_found_with_both_versions(both: Compare) -> None:
    result = both(
        TABLE,
        pub=ROWS,
        sub=f"{ROWS}; DELETE FROM t WHERE id = 5; INSERT INTO t VALUES (-1, 'extra');"
        "UPDATE t SET v = NULL WHERE id = 7",
    )
    assert counts(result) == (1, 1, 1)
    found = {one.kind: one for one in result.differences.listed}
    assert found["missing"].publisher is not None and found["missing"].publisher[0] == "5"
    assert found["missing"].target is None
    assert found["extra"].target == ("-1", "extra", None, None) and found["extra"].publisher is None
    assert found["different"].publisher is not None and found["different"].target is not None
    assert (
        found["different"].publisher[1] == "8f14e45fceea167a5a36dedd4bea2543" and found["different"].target[1] is None
    )


def test_an_exchange_of_a_value_between_two_rows_is_found(both: Compare) -> None:
    # sums of hashes that are linear in the values would be the same
    exchanged = "UPDATE t SET v = (SELECT o.v FROM t o WHERE o.id = 3 - t.id) WHERE id IN (1, 2)"
    assert counts(both("CREATE TABLE t (id int PRIMARY KEY, v text)",
                       pub="INSERT INTO t VALUES (1, 'a'), (2, 'b')",
                       sub=f"INSERT INTO t VALUES (1, 'a'), (2, 'b'); {exchanged}")) == (0, 0, 2)  # fmt: skip


_WIDE = 70  #: columns: more than are hashed in one go


@pytest.mark.parametrize(("one", "other"), [(1, 2), (1, _WIDE), (40, 41), (2, 40)])
def test_an_exchange_of_values_between_two_columns_is_found(both: Compare, one: int, other: int) -> None:
    columns = ", ".join(f"c{n} int NOT NULL DEFAULT 0" for n in range(1, _WIDE + 1))
    table = f"CREATE TABLE t (id int PRIMARY KEY, {columns}); INSERT INTO t (id, c{{}}) VALUES (1, 7)"
    assert counts(both(pub=table.format(one), sub=table.format(other))) == (0, 0, 1)


@pytest.mark.long
def test_a_table_of_as_many_columns_as_there_can_be_is_compared(both: Compare) -> None:
    columns = ", ".join(f"c{n} int" for n in range(1, 1600))
    table = f"CREATE TABLE t (id int PRIMARY KEY, {columns}); INSERT INTO t (id) VALUES (1)"
    assert counts(both(pub=table, sub=f"{table}; UPDATE t SET c1599 = 0")) == (0, 0, 1)


@pytest.mark.long
def test_hashes_of_keys_and_rows_have_64_bits(pubdb: Database, subdb: Database, both: Compare) -> None:
    filled = (
        "CREATE TABLE t (id bigint PRIMARY KEY, v text); INSERT INTO t SELECT g, 'row' FROM generate_series(1, {}) g"
    )
    table = both(filled.format(300_000)).table
    for hashed in hashes(expressions.target_values(table), table.key, in_utf8=False):
        different = f"SELECT count(DISTINCT {hashed.as_string(None)}) FROM t"
        assert subdb.value(different) == pubdb.value(different) == 300_000  # of 32 bits some ten would be the same


def test_nobody_can_choose_values_that_give_a_row_the_same_hash(both: Compare) -> None:
    after = "pg_catalog.hashint4extended(0, pg_catalog.hashint4extended(id, 1) # {}::bigint)"  # were the first seed 1
    made = "CREATE TABLE t (id int PRIMARY KEY, a bigint, b bigint)"
    made += "; INSERT INTO t SELECT g, g, g FROM generate_series(1, 9) g"
    forged = f"UPDATE t SET a = 1000, b = b # {after.format('a')} # {after.format(1000)}"
    assert counts(both(made, sub=forged)) == (0, 0, 9)


def test_a_type_of_the_publisher_that_has_the_name_of_a_built_in_one_is_compared_with_that(both: Compare) -> None:
    result = both(
        pub="CREATE DOMAIN public.int4 AS pg_catalog.int4; CREATE TABLE t (id int PRIMARY KEY, v public.int4);"
        "INSERT INTO t VALUES (1, 1), (2, NULL), (3, 0)",
        sub="CREATE TABLE t (id int PRIMARY KEY, v int); INSERT INTO t VALUES (1, 1), (2, NULL), (3, NULL)",
    )
    assert counts(result) == (0, 0, 1)


def test_null_is_not_the_empty_string(both: Compare) -> None:
    made = "CREATE TABLE t (id int PRIMARY KEY, v text, w text)"
    result = both(made, pub="INSERT INTO t VALUES (1, '', NULL)", sub="INSERT INTO t VALUES (1, NULL, '')")
    assert counts(result) == (0, 0, 1)


def test_a_table_without_a_key_is_compared_as_rows_and_how_often_they_occur(both: Compare) -> None:
    made = "CREATE TABLE t (v text, n int)"
    result = both(
        made,
        pub="INSERT INTO t VALUES ('a', 1), ('a', 1), ('b', 2), (NULL, NULL), ('c', 3)",
        sub="INSERT INTO t VALUES ('a', 1), ('b', 2), ('b', 2), ('b', 2), (NULL, NULL), ('d', 3)",
    )
    assert counts(result) == (2, 3, 0)
    assert sorted(str(one.publisher) for one in result.differences.listed if one.publisher) == [
        "('a', '1')",
        "('c', '3')",
    ]


def test_rows_that_all_have_one_key_are_not_collected_without_end(
    both: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "OF_ONE_KEY", 50)
    fill = "INSERT INTO t SELECT 1, 'row ' || g FROM generate_series(1, {}) g"
    table = "CREATE TABLE t (id int{}, v text); ALTER TABLE t REPLICA IDENTITY FULL"
    with pytest.raises(SchemaFault, match="more than 50 different rows have the same key"):
        both(pub=f"{table.format('')}; {fill.format(51)}", sub=f"{table.format(' PRIMARY KEY')}; {fill.format(1)}")
    assert counts(both(pub="DELETE FROM t WHERE v = 'row 51'")) == (49, 0, 0)


def test_a_key_that_is_not_published_as_a_whole_is_none(both: Compare) -> None:
    result = both(
        pub="CREATE TABLE t (a int, v text); CREATE PUBLICATION p FOR TABLE t; INSERT INTO t VALUES (1, 'x'), (1, 'x')",
        sub="CREATE TABLE t (a int, v text, mine serial PRIMARY KEY); INSERT INTO t VALUES (1, 'x'), (1, 'x')",
    )
    assert not result.table.keyed and counts(result) == (0, 0, 0)


_VALUES = (
    ("numeric", "1.0", "1.00", True),
    ("numeric", "1.0", "1.01", False),
    ("float8", "0", "-0", True),
    ("float8", "'NaN'", "'NaN'", True),
    ("float4", "1.1", "1.1000001", False),
    ("interval", "'1 day'", "'24 hours'", True),
    ("interval", "'1 day'", "'25 hours'", False),
    ("jsonb", """'{"a": 1.0}'""", """'{"a": 1.00}'""", True),
    ("jsonb", """'{"a": 1}'""", """'{"a": 2}'""", False),
    ("json", """'{"a":1}'""", """'{"a": 1}'""", False),
    ("numeric[]", "'{1.0,NULL}'", "'{1.00,NULL}'", True),
    ("numeric[]", "'{1.0,NULL}'", "'{1.00,2}'", False),
    ("char(5)", "'ab'", "'ab  '", True),
    ("bytea", r"'\x00ff'", r"'\x00fe'", False),
    ("timestamptz", "'2026-01-01 00:00+00'", "'2026-01-01 01:00+01'", True),
    ("point", "'(1,2)'", "'(1,3)'", False),
    ("int4range", "'[1,3)'", "'[1,2]'", True),
    ("money", "1.50", "1.5", True),
    ("bool", "true", "false", False),
    ('"char"', "'a'", "'b'", False),
    ("bit(3)", "B'101'", "B'100'", False),
    ("inet", "'10.0.0.1'", "'10.0.0.1/32'", True),
    ("int2", "0", "NULL", False),
    ("int4", "0", "NULL", False),
    ("int8", "0", "NULL", False),
    ("int8", "1", "4294967296", False),  # hashint8 takes them for the same
    ("int8", "-1", "0", False),
    ("oid", "0", "NULL", False),
    ("bool", "false", "NULL", False),
    ("text", "''", "NULL", False),
    ("char(5)", "''", "NULL", False),
    ("uuid", "'00000000-0000-0000-0000-000000000000'", "NULL", False),
    ("uuid", "'00000000-0000-0000-0000-000000000001'", "'00000000-0000-0000-0000-000000000002'", False),
    ("numeric", "5", "-5", False),  # hash_numeric takes them for the same
    ("numeric", "'NaN'", "'Infinity'", False),
    ("numeric", "'NaN'", "'NaN'", True),
    ("numeric", "1e-1000", "1e-1001", False),
    ("numeric", "100", "1e2", True),
    ("float4", "'-Infinity'", "'-infinity'", True),
    ("float8", "0.1::float8 + 0.2::float8", "0.3", False),
    ("float8", "4.9e-324", "5e-324", True),
    ("float8[]", "'{0,NaN}'", "'{-0,NaN}'", True),
    ("date", "'infinity'", "'-infinity'", False),
    ("timestamp", "'0044-03-15 00:00 BC'", "'0044-03-15 BC'", True),
    ("timetz", "'12:00+00'", "'13:00+01'", False),  # another zone is another value
    ("time", "'24:00'", "'00:00'", False),
    ("varchar(9)", "'a '", "'a'", False),
    ("varbit", "B'1'", "B'10'", False),
    ("name", "'a'", "'A'", False),
    ("macaddr8", "'08:00:2b:01:02:03:04:05'", "'0800.2b01.0203.0405'", True),
    ("cidr", "'10/8'", "'10.0.0.0/8'", True),
    ("pg_lsn", "'0/1'", "'00/01'", True),
    ("xid8", "'18446744073709551615'", "'1'", False),
    ("int4multirange", "'{[1,3),[3,5)}'", "'{[1,5)}'", True),
    ("numrange", "'[1.0,2)'", "'[1.00,2.0)'", True),
    ("tstzrange", "'[2026-01-01 00:00+00,)'", "'[2026-01-01 01:00+01,)'", True),
    ("tsvector", "'a:1 b'", "'b a:1'", True),
    ("jsonpath", "'$.a'", "'$.\"a\"'", True),
    ("jsonb", """'{"a":1,"b":2}'""", """'{"b":2,"a":1}'""", True),
    ("jsonb", """'{"a":null}'""", """'{}'""", False),
    ("text", "'a'", "'A'", False),
    ('text COLLATE "C"', "'straße'", "'strasse'", False),
    ("int4[]", "'[0:1]={1,2}'", "'{1,2}'", False),
    ("text[]", "'{NULL}'", "'{\"NULL\"}'", False),
    ("box", "'(0,0),(1,1)'", "'(1,1),(0,0)'", True),
    ("interval[]", "'{1 day}'", "'{24 h}'", True),
    ("char(3)[]", "'{a}'", "'{a  }'", True),
    ("regtype", "'int'", "'integer'", True),
    ("int8", "9223372036854775807", "-9223372036854775808", False),
    ("int8", "-4294967297", "4294967296", False),
    ("oid", "4294967295", "0", False),
)


def _fill_values(pubdb: Database, subdb: Database) -> None:
    """One row for each of the pairs, on each side one of both."""
    columns = ", ".join(f"c{n} {kind}" for n, (kind, *_) in enumerate(_VALUES))
    for number, database in enumerate((pubdb, subdb)):
        rows = [f"INSERT INTO t (id, c{n}) VALUES ({n}, {values[1 + number]})" for n, values in enumerate(_VALUES)]
        database.execute(f"CREATE TABLE t (id int PRIMARY KEY, {columns}); {'; '.join(rows)}")


def _check_values(result: TableResult) -> None:
    differ = {int(str(one.publisher[0])) for one in result.differences.listed if one.publisher}
    assert differ == {number for number, (*_, same) in enumerate(_VALUES) if not same}
    assert counts(result) == (0, 0, len(differ))


def test_values_are_equal_where_the_type_takes_them_for_equal(both: Compare, pubdb: Database, subdb: Database) -> None:
    _fill_values(pubdb, subdb)
    _check_values(both())


def test_keys_that_the_target_takes_for_equal_are_one_key(both: Compare) -> None:
    result = both(
        "CREATE TABLE t (k interval, l numeric, v text, PRIMARY KEY (k, l))",
        pub="INSERT INTO t VALUES ('1 day', 1.0, 'same'), ('2 days', 1, 'here'), ('3 days', 1, 'x'), ('5 days', 1, '')",
        sub="INSERT INTO t VALUES ('24 h', 1.00, 'same'), ('48 h', 1, 'there'), ('72 h', 2, 'x'), ('4 days', 1, '')",
    )
    assert counts(result) == (2, 2, 1)
    [different] = [one for one in result.differences.listed if one.kind == "different"]
    assert (different.publisher, different.target) == (("2 days", "1", "here"), ("48:00:00", "1", "there"))


def test_rows_without_a_key_are_equal_as_often_as_the_target_takes_them_for_equal(both: Compare) -> None:
    result = both(
        "CREATE TABLE t (k interval, j jsonb, v text)",
        pub="""INSERT INTO t VALUES ('1 day', '{"a": 1.0}', NULL), ('1 day', '{"a": 1.0}', NULL), ('2 days', NULL, 'x'),
               (NULL, '1', '')""",
        sub="""INSERT INTO t VALUES ('24 h', '{"a": 1.00}', NULL), ('48 h', NULL, 'x'), (NULL, '1.0', NULL)""",
    )
    assert counts(result) == (2, 1, 0)


def test_no_sample_is_taken_of_keys_that_have_several_texts(both: Compare) -> None:
    result = both(
        "CREATE TABLE t (k interval PRIMARY KEY)",
        pub="INSERT INTO t SELECT make_interval(days => g) FROM generate_series(1, 500) g",
        sub="INSERT INTO t SELECT make_interval(hours => 24 * g) FROM generate_series(1, 500) g",
        sample=10.0,
    )
    assert counts(result) == (0, 0, 0) and result.publisher_rows == result.target_rows == 500


def test_other_types_on_the_target_hold_what_apply_makes_of_the_values(both: Compare) -> None:
    result = both(
        pub="CREATE TABLE t (id int PRIMARY KEY, b bool, n numeric, c char(4), i int, x int, r numeric(6,3));"
        "INSERT INTO t VALUES (1, true, 1.50, 'ab', 7, 9, 1.257)",
        sub="CREATE TABLE t (x text, id bigint PRIMARY KEY, b text, n float8, c text, i numeric(5,2), r numeric(6,1));"
        "INSERT INTO t VALUES ('9', 1, 't', 1.5, 'ab  ', 7, 1.3)",
    )
    assert counts(result) == (0, 0, 0)
    assert counts(both(sub="UPDATE t SET b = 'true'")) == (0, 0, 1)


@pytest.mark.parametrize(
    ("there", "here", "sent", "cut"),
    [
        ("text", "code", "abcdef", "abcd"),
        ("varchar(8)[]", "varchar(4)[]", "{abcdef}", "{abcd}"),
        ("bit(8)", "bits", "11110000", "1111"),
        ("code", "code", "abcdef", "abcd"),
    ],
)
def test_what_somebody_cut_to_a_narrower_column_is_different(
    both: Compare, there: str, here: str, sent: str, cut: str
) -> None:
    domains = (
        "CREATE DOMAIN code AS varchar({}); CREATE DOMAIN bits AS varbit(4); CREATE TABLE t (id int PRIMARY KEY, v {})"
    )
    row = "INSERT INTO t VALUES (1, '{}'), (2, NULL)"
    result = both(
        pub=f"{domains.format(8, there)}; {row.format(sent)}", sub=f"{domains.format(4, here)}; {row.format(cut)}"
    )
    assert counts(result) == (0, 0, 1)


def test_row_filters_and_column_lists_decide_what_is_compared(both: Compare) -> None:
    result = both(
        "CREATE TABLE t (id int PRIMARY KEY, v text, secret text)",
        pub="CREATE PUBLICATION p FOR TABLE t (id, v) WHERE (id > 10);"
        "INSERT INTO t VALUES (1, 'filtered', 'x'), (11, 'sent', 'x'), (12, 'sent', 'x')",
        sub="INSERT INTO t VALUES (11, 'sent', 'y'), (12, 'other', 'x'), (2, 'mine', NULL)",
    )
    assert counts(result) == (0, 1, 1)


def test_a_partitioned_table_is_compared_as_a_whole_however_it_is_divided(both: Compare) -> None:
    result = both(
        pub="CREATE TABLE t (id int PRIMARY KEY, v text) PARTITION BY HASH (id);"
        "CREATE TABLE t0 PARTITION OF t FOR VALUES WITH (MODULUS 2, REMAINDER 0);"
        "CREATE TABLE t1 PARTITION OF t FOR VALUES WITH (MODULUS 2, REMAINDER 1);"
        "INSERT INTO t SELECT g, 'x' FROM generate_series(1, 500) g;"
        "CREATE PUBLICATION p FOR TABLE t WITH (publish_via_partition_root)",
        sub="CREATE TABLE t (v text, id int PRIMARY KEY) PARTITION BY RANGE (id);"
        "CREATE TABLE low PARTITION OF t FOR VALUES FROM (MINVALUE) TO (100);"
        "CREATE TABLE high PARTITION OF t FOR VALUES FROM (100) TO (MAXVALUE);"
        "INSERT INTO t SELECT 'x', g FROM generate_series(1, 500) g; DELETE FROM t WHERE id = 400",
    )
    assert counts(result) == (1, 0, 0)


_LEAVES = (
    "CREATE TABLE t (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);"
    "CREATE TABLE low (v text, id int NOT NULL); ALTER TABLE t ATTACH PARTITION low FOR VALUES FROM (0) TO (1000);"
    "CREATE TABLE mid PARTITION OF t FOR VALUES FROM (1000) TO (2000) PARTITION BY RANGE (id);"
    "CREATE TABLE mid1 PARTITION OF mid FOR VALUES FROM (1000) TO (2000);"
    "INSERT INTO t SELECT g, 'x' FROM generate_series(1, 1999) g"
)


def test_partitions_are_read_in_pieces_of_their_own(both: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_rate, "MOST_BLOCKS", 2)
    seen: list[int] = []
    result = both(
        _LEAVES,
        pub="CREATE PUBLICATION p FOR TABLE t WHERE (id > 5) WITH (publish_via_partition_root)",
        sub="DELETE FROM t WHERE id < 6; DELETE FROM t WHERE id = 1500; UPDATE t SET v = 'y' WHERE id = 7",
        progress=lambda done, total: seen.append(total),
    )
    assert counts(result) == (1, 0, 1) and seen[-1] >= 8
    assert (result.publisher_rows, result.target_rows) == (1994, 1993)


def test_a_partition_that_may_not_be_read_by_itself_is_read_through_its_table(
    both: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_rate, "MOST_BLOCKS", 2)
    seen: list[int] = []
    result = both(
        _LEAVES,
        pub="ALTER TABLE low ENABLE ROW LEVEL SECURITY;"
        "CREATE PUBLICATION p FOR TABLE t WITH (publish_via_partition_root)",
        sub="ALTER TABLE mid1 ENABLE ROW LEVEL SECURITY; DELETE FROM t WHERE id = 1500",
        progress=lambda done, total: seen.append(total),
    )
    assert counts(result) == (1, 0, 0) and seen[0] == 0  # how much it is, its partitions do not tell


def test_children_by_inheritance_are_tables_of_their_own(both: Compare) -> None:
    made = "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE child () INHERITS (t)"
    filled = "INSERT INTO t VALUES (1, 'x')"
    assert counts(both(made, pub=filled, sub=f"{filled}; INSERT INTO child VALUES (2, 'child')")) == (0, 0, 0)


def test_a_large_table_is_read_in_pieces_and_divided_until_few_rows_are_left(
    both: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_rate, "MOST_BLOCKS", 3)
    monkeypatch.setattr(buckets, "MANY_ROWS", 2)
    monkeypatch.setattr(buckets, "BITS", 4)
    monkeypatch.setattr(buckets, "_worth", lambda count, rows: 4)
    monkeypatch.setattr(buckets, "_MOST_BITS", 16)
    seen: list[tuple[int, int]] = []
    result = both(
        TABLE,
        pub=ROWS,
        sub=f"{ROWS}; UPDATE t SET v = 'x' WHERE id IN (17, 2222)",
        progress=lambda done, total: seen.append((done, total)),
    )
    assert counts(result) == (0, 0, 2)
    assert seen[-1][0] == seen[-1][1] > 10


@pytest.mark.long
def test_all_rows_that_differ_are_counted_and_a_bounded_number_is_listed(both: Compare) -> None:
    result = both(TABLE, pub=ROWS, sub=f"{FILL} FROM generate_series(1, 3500) g; UPDATE t SET v = 'x' WHERE id < 2900")
    assert counts(result) == (0, 500, 2899)
    assert len(result.differences.listed) == rows.LISTED


@pytest.mark.long
def test_more_rows_than_addresses_are_kept_of_are_read_in_one_go(
    both: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "MOST_HASHES", 100)
    result = both(TABLE, pub=ROWS, sub=f"{FILL} FROM generate_series(1, 3500) g; UPDATE t SET v = 'x' WHERE id < 2900")
    assert counts(result) == (0, 500, 2899)


def test_one_row_too_many_of_very_many_equal_ones_is_found(both: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "MOST_HASHES", 100)
    monkeypatch.setattr(buckets, "MANY_ROWS", 50)
    filled = "CREATE TABLE t (v text); INSERT INTO t SELECT 'same' FROM generate_series(1, {}) g"
    assert counts(both(pub=filled.format(2000), sub=filled.format(2001))) == (0, 1, 0)


def test_a_sample_takes_the_same_keys_on_both_sides(both: Compare) -> None:
    result = both(TABLE, pub=ROWS, sub=f"{ROWS}; UPDATE t SET v = 'x'", sample=10.0)
    assert 200 < result.publisher_rows < 400
    assert result.publisher_rows == result.target_rows == counts(result)[2]


def test_what_the_record_explains_is_counted_apart_and_listed_last(
    both: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "LISTED", 3)
    first: list[int] = []

    def explain(key: int, kind: str, row: rows.Values | None) -> str | None:
        first.append(key)
        return "skipped_change" if len(first) <= 5 else None

    result = both(TABLE, pub=ROWS, sub=f"{ROWS}; DELETE FROM t WHERE id <= 8", explain=explain)
    assert counts(result) == (8, 0, 0)
    assert result.differences.explained["missing"] == 5 and result.differences.unexplained == 3
    assert [one.explained for one in result.differences.listed] == [None] * 3


@pytest.mark.long
@pytest.mark.parametrize("where", ["publisher", "target"])
@pytest.mark.parametrize(
    "what",
    [
        "TRUNCATE t",
        "ALTER TABLE t ALTER id TYPE bigint",
        "ALTER TABLE t RENAME v TO old; ALTER TABLE t ADD v text DEFAULT 'new'",
    ],
)
def test_a_table_that_is_emptied_or_rewritten_meanwhile_is_not_judged(
    both: Compare, pubdb: Database, subdb: Database, where: str, what: str
) -> None:
    changed = pubdb if where == "publisher" else subdb
    with pytest.raises(StateForbids, match=f"was truncated, rewritten or renamed on the {where}"):
        both(TABLE, pub=ROWS, sub=ROWS, meanwhile=lambda: changed.execute(what))


@pytest.mark.parametrize("where", ["publisher", "target"])
@pytest.mark.parametrize("name", ["t", "t1"], ids=["table", "partition"])
def test_nothing_of_a_table_that_took_a_name_meanwhile_is_run(
    both: Compare, pubdb: Database, subdb: Database, where: str, name: str
) -> None:
    parted = f"{TABLE} PARTITION BY RANGE (id); CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (10000)"
    swapped: list[Swapped] = []

    def meanwhile(done: int, total: int) -> None:
        if not swapped:
            swapped.append(Swapped(pubdb if where == "publisher" else subdb, name))

    with pytest.raises(StateForbids, match=f"was truncated, rewritten or renamed on the {where}"):
        both(TABLE if name == "t" else parted, pub=ROWS, sub=f"{ROWS}; DELETE FROM t WHERE id = 7", progress=meanwhile)
    assert not swapped[0].ran


def test_a_partition_that_is_being_emptied_is_not_read_through_its_table_as_an_empty_one(pubdb: Database) -> None:
    pubdb.execute(_LEAVES)
    oid = pubdb.value("SELECT 't'::regclass::oid")
    none = sql.SQL("0::bigint")
    source = Source(oid, ("public", "t"), sql.SQL("public.t"), (), (sql.SQL("id::text"),), none, none)
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as threads:
        seen = exported(pubdb, stack)
        one = Side("publisher", lambda: publisher.connect(pubdb.conninfo, application_name="v"), seen, translate)
        session = stack.enter_context(contextlib.closing(one.connect()))
        emptying = stack.enter_context(contextlib.closing(pubdb.connect()))
        emptying.execute("BEGIN; TRUNCATE mid1")
        query = source.rows(Piece(), None, values=True)
        read = threads.submit(lambda: list(one.stream(session, source, query, "t", [Piece()])))
        pubdb.wait("SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND pid = %s)", session.info.backend_pid)
        emptying.execute("COMMIT")
        with pytest.raises(StateForbids, match="was truncated, rewritten or renamed"):
            read.result()


def test_a_table_that_gives_its_name_to_another_meanwhile_is_not_judged(both: Compare, subdb: Database) -> None:
    other = "CREATE TABLE s (LIKE t INCLUDING ALL); INSERT INTO s SELECT * FROM t; DELETE FROM t WHERE id = 7"
    exchange = ["ALTER TABLE t RENAME TO u; ALTER TABLE s RENAME TO t"]

    def meanwhile(done: int, total: int) -> None:
        for statement in exchange:
            subdb.execute(statement)
        exchange.clear()

    with pytest.raises(StateForbids, match="was truncated, rewritten or renamed on the target"):
        both(TABLE, pub=ROWS, sub=f"{ROWS}; {other}", progress=meanwhile)
    assert not exchange


def test_rows_that_change_after_the_point_are_not_seen(both: Compare, pubdb: Database) -> None:
    def change() -> None:
        pubdb.execute("UPDATE t SET v = 'later'; DELETE FROM t WHERE id = 3")

    assert counts(both(TABLE, pub=ROWS, sub=ROWS, meanwhile=change)) == (0, 0, 0)


def test_an_error_of_one_side_is_told_with_its_name(both: Compare, subdb: Database) -> None:
    with pytest.raises(PgsubError) as raised:
        both(
            pub="CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t VALUES (1, 'no number')",
            sub="CREATE TABLE t (id int PRIMARY KEY, v int)",
        )
    assert "This happened on the publisher." in str(raised.value.detail)


def test_odd_names_are_quoted(both: Compare) -> None:
    name = 'od"d %s {}'
    quoted = '"' + name.replace('"', '""') + '"'
    made = f"CREATE TABLE {quoted} ({quoted} int PRIMARY KEY, v text)"
    filled = f"INSERT INTO {quoted} VALUES (1, 'x')"
    assert counts(both(made, pub=filled, sub=f"{filled}; INSERT INTO {quoted} VALUES (2)", table=name)) == (0, 1, 0)


@pytest.fixture
def versions(shared_servers: Servers) -> Iterator[Callable[[str | None, str, str | None, str], Compare]]:
    """Compares between databases of given versions and encodings."""
    made: list[Database] = []

    def make(one: str | None, encoding: str, other: str | None, its: str) -> Compare:
        number = random.randrange(10**9)
        made.append(Database(shared_servers("publisher", one), f"cmp_pub_{number}", encoding))
        made.append(Database(shared_servers("target", other), f"cmp_sub_{number}", its))
        return lambda: compare(made[-2], made[-1])

    make.made = made  # type: ignore[attr-defined]
    yield make
    for database in made:
        database.drop()


_WAYS = [(None, "UTF8", None, "LATIN1"), (None, "LATIN1", None, "UTF8")]
_WAYS += [(version, "UTF8", None, "UTF8") for version in other_servers()]


@pytest.mark.long
@pytest.mark.parametrize(("one", "encoding", "other", "its"), _WAYS)
def test_hashes_are_the_same_on_all_versions_and_in_all_encodings(
    versions: Any, one: str | None, encoding: str, other: str | None, its: str
) -> None:
    run = versions(one, encoding, other, its)
    pubdb, subdb = versions.made
    for database in (pubdb, subdb):
        database.execute(f"{TABLE}; {ROWS}; INSERT INTO t VALUES (0, 'Grüße, Ægir')")
    pubdb.execute("CREATE PUBLICATION p FOR ALL TABLES")
    assert counts(run()) == (0, 0, 0)
    subdb.execute("UPDATE t SET v = 'Grüsse, Ægir' WHERE id = 0; DELETE FROM t WHERE id = 9")
    assert counts(run()) == (1, 0, 1)
    for database in (pubdb, subdb):
        database.execute("DROP TABLE t")
    _fill_values(pubdb, subdb)
    _check_values(run())


@pytest.mark.parametrize("version", {"17"} & set(other_servers()))  # the embedded server is built without ICU
def test_a_collation_that_ignores_case_takes_such_values_for_equal(versions: Any, version: str) -> None:
    run = versions(version, "UTF8", version, "UTF8")
    pubdb, subdb = versions.made
    made = """CREATE COLLATION ci (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
        CREATE TABLE t (id int PRIMARY KEY, v text COLLATE ci)"""
    pubdb.execute(f"{made}; INSERT INTO t VALUES (1, 'Bob'), (2, 'Bob'); CREATE PUBLICATION p FOR ALL TABLES")
    subdb.execute(f"{made}; INSERT INTO t VALUES (1, 'bob'), (2, 'ben')")
    result = run()
    assert counts(result) == (0, 0, 1)
    assert result.differences.listed[0].publisher == ("2", "Bob")


@pytest.mark.parametrize("version", {"17"} & set(other_servers()))
@pytest.mark.parametrize(("one", "other"), [("de", '"C"'), ('"C"', "de"), ("ci", '"C"')])
def test_keys_that_the_servers_order_otherwise_are_compared_all_the_same(
    versions: Any, version: str, one: str, other: str
) -> None:
    run = versions(version, "UTF8", version, "UTF8")
    pubdb, subdb = versions.made
    words = (
        "SELECT w || g FROM unnest('{Zebra,apfel,Äpfel,-x,_x,straße,Strasse,ｚ}'::text[]) w, generate_series(1, 600) g"
    )
    for database, collation in ((pubdb, one), (subdb, other)):
        database.execute(f"""CREATE COLLATION de (provider = icu, locale = 'de');
            CREATE COLLATION ci (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
            CREATE TABLE t (k text COLLATE {collation} PRIMARY KEY, v text); INSERT INTO t {words} ORDER BY 1""")
    pubdb.execute("CREATE PUBLICATION p FOR ALL TABLES")
    assert counts(run()) == (0, 0, 0)
    subdb.execute("UPDATE t SET v = 'x' WHERE k = 'Äpfel1'; DELETE FROM t WHERE k = 'Zebra1'")
    subdb.execute("UPDATE t SET k = 'APFEL1' WHERE k = 'apfel1'; INSERT INTO t VALUES ('zebra', 'extra')")
    assert counts(run()) == (2, 2, 1)


EVIL_CAST = """
CREATE TYPE mood AS ENUM ('good', 'bad');
CREATE FUNCTION called(mood) RETURNS text LANGUAGE plpgsql AS
    $$ BEGIN RAISE EXCEPTION 'code of the owner of a type ran as %', current_user; END $$;
CREATE CAST (mood AS text) WITH FUNCTION called(mood);
CREATE DOMAIN yes AS bool;
CREATE TABLE t (id int PRIMARY KEY, m mood, n mood[], y yes);
INSERT INTO t VALUES (1, 'good', '{bad,good}', true), (2, NULL, NULL, NULL), (3, 'bad', '{}', false)
"""


def test_no_cast_that_the_owner_of_a_type_made_is_called_on_either_server(both: Compare) -> None:
    assert counts(both(EVIL_CAST)) == (0, 0, 0)
    assert counts(both(sub="UPDATE t SET m = 'bad' WHERE id = 1; UPDATE t SET y = NULL WHERE id = 3")) == (0, 0, 2)


def test_a_user_defined_type_is_compared_with_the_built_in_one_of_the_target(both: Compare) -> None:
    made = "CREATE TABLE t (id int PRIMARY KEY, y {}, m {}); INSERT INTO t VALUES (1, true, 'good'), (2, NULL, NULL)"
    of_user = "CREATE DOMAIN yes AS bool; CREATE TYPE mood AS ENUM ('good')"
    result = both(pub=f"{of_user}; {made.format('yes', 'mood')}", sub=made.format("bool", "text"))
    assert counts(result) == (0, 0, 0)


@pytest.mark.long
def test_a_server_that_invents_the_size_of_a_table_gets_no_more_pieces_than_one_can_have(pubdb: Database) -> None:
    genuine = pubdb.value("SELECT pg_get_functiondef('pg_catalog.pg_relation_size(regclass)'::regprocedure)")
    with contextlib.ExitStack() as stack:
        stack.callback(pubdb.execute, genuine)  # other tests use this database, too
        pubdb.execute(
            "CREATE TABLE t (id int);"
            "CREATE OR REPLACE FUNCTION pg_catalog.pg_relation_size(regclass) RETURNS bigint LANGUAGE sql"
            f" AS 'SELECT {1 << 47}::bigint'"
        )
        seen = exported(pubdb, stack)
        one = Side("publisher", lambda: publisher.connect(pubdb.conninfo, application_name="v"), seen, translate)
        session = stack.enter_context(contextlib.closing(one.connect()))
        nothing = sql.SQL("")
        source = Source(
            pubdb.value("SELECT 't'::regclass::oid"), ("public", "t"), nothing, (), (), nothing, nothing, True
        )
        pieces = one.pieces(session, source)
    assert len(pieces) == (1 << 32) // read_rate.MOST_BLOCKS and pieces[-1].until is None


def test_names_of_types_and_columns_are_no_templates(both: Compare, subdb: Database) -> None:
    made = """CREATE TYPE "m{}%s" AS ENUM ('good', 'bad');
        CREATE TABLE t ("100 %s" "m{}%s", "{}%" int, v "m{}%s", PRIMARY KEY ("100 %s", "{}%"));
        INSERT INTO t VALUES ('good', 1, 'bad')"""
    result = both(made, sub="""UPDATE t SET v = 'good'""")
    assert counts(result) == (0, 0, 1)
    result = both(sub="""UPDATE t SET "100 %s" = 'bad'""")
    assert counts(result) == (1, 1, 0)
    with contextlib.closing(target.connect(subdb.conninfo, "verify")) as session:
        installation.install(session)
        known = explained_differences.explained(
            session,
            1,
            result.table,
            [Recorded(CONFLICT, NEW, {"100 %s": "bad", "{}%": "1"})],
            names=[("public", "t")],
            in_utf8=False,
        )
    assert len(known.described) == len(known.in_the_way) == 1


#: Types, a value of each that the target does not have, and a later one of the publisher.
_RECORDED = {
    "bool": ("true", "false"),
    "char(9)": ("abc", "abd"),
    "inet": ("10.0.0.1", "10.0.0.2"),
    "numeric": ("1.50", "1.51"),
    "float8": ("0.1", "0.2"),
    "timestamptz": ("2026-01-01 12:00+03", "2026-01-01 12:00+02"),
    "interval": ("1 mon", "2 mon"),
    "jsonb": ('{"a": 1.0}', '{"a": 2}'),
    "int[]": ("{1,2}", "{1,3}"),
    "m": ("good", "bad"),
    "bytea": ("\\x4142", "\\x4143"),
    "text": ("x" * 5000, "y" * 5000),
    "varchar": ("\\x4142", "\\x4143"),
}


def test_a_record_explains_a_row_only_while_the_publisher_has_it_as_recorded(
    both: Compare, pubdb: Database, subdb: Database
) -> None:
    columns = ", ".join(f"c{n} {of}" for n, of in enumerate(_RECORDED))
    first = ", ".join(f"'{one}'" for one, _ in _RECORDED.values())
    made = f"CREATE TYPE m AS ENUM ('good', 'bad'); CREATE TABLE t (id int PRIMARY KEY, {columns})"
    rows_of = f"INSERT INTO t SELECT g, {first} FROM generate_series(0, {len(_RECORDED)}) g"
    table = both(made, pub=rows_of, sub="INSERT INTO t (id) VALUES (0), (1)").table
    sent = ", ".join(["id::text", *(f"concat(c{n})" for n in range(len(_RECORDED)))])
    pubdb.execute("SET timezone = 'UTC'")
    recorded = []
    for key, *values in pubdb.rows(f"SELECT {sent} FROM t"):
        row = {"id": key, **{f"c{n}": conflict_text.kept(value) for n, value in enumerate(values)}}
        row["c3"] = row["c3"] if key == "0" else "1.500"
        recorded.append(Recorded(CONFLICT, NEW, row))
    # what was not sent is not compared, an invalid value is unknown, and only the last record of a row counts
    recorded.append(Recorded(CONFLICT, NEW, {"id": "100", "c3": "1.5"}))
    recorded.append(Recorded(CONFLICT, NEW, {"id": "101", "c3": "none", "c0": "t"}))
    recorded.append(Recorded(CONFLICT, NEW, {"id": "100", "c3": "earlier"}))
    recorded.append(Recorded(CONFLICT, OLD, {"id": "102"}))
    recorded.append(Recorded(CONFLICT, LOCAL, {"id": "104"}))
    recorded += [Recorded(None, NEW, {"id": "103"}), Recorded(CONFLICT, NEW, {"id": "103"})]
    with contextlib.closing(target.connect(subdb.conninfo, "verify")) as session:
        installation.install(session)
        session.execute(
            "SET timezone = 'UTC'; SET intervalstyle = 'postgres'; SET bytea_output = 'hex'; SET datestyle = 'ISO'"
        )
        known = explained_differences.explained(session, 1, table, recorded, names=[("public", "t")], in_utf8=False)

    def differing() -> dict[str | None, str | None]:
        result = both(explain=lambda key, kind, row: known.reason(key, row))
        listed = result.differences.listed
        return {(one.publisher or one.target or ("",))[0]: one.explained for one in listed}

    pubdb.execute("INSERT INTO t (id, c3) VALUES (100, 1.5), (101, 1.5), (103, 1.5)")
    subdb.execute("INSERT INTO t (id) VALUES (102), (104)")
    every = [str(n) for n in (*range(len(_RECORDED) + 1), 100, 101, 102, 104)]
    assert differing() == {**dict.fromkeys(every, CONFLICT), "103": None}
    for n, (_, later) in enumerate(_RECORDED.values()):
        pubdb.execute(f"UPDATE t SET c{n} = '{later}' WHERE id = {n + 1}")
    pubdb.execute("UPDATE t SET c3 = 1.6 WHERE id = 100; INSERT INTO t (id, c0) VALUES (102, 't'), (104, 't')")
    assert {row for row, reason in differing().items() if reason} == {"0", "101"}
    subdb.execute("DELETE FROM t WHERE id = 0")
    assert differing()["0"] == CONFLICT
    pubdb.execute("DELETE FROM t WHERE id IN (0, 1)")
    assert differing()["1"] is None


def test_of_all_records_of_a_row_since_the_copy_of_its_table_the_last_decides(both: Compare, subdb: Database) -> None:
    made = "CREATE TABLE t (id int PRIMARY KEY, v text)"
    table = both(made, pub="INSERT INTO t SELECT g, 'theirs' FROM generate_series(1, 7) g").table

    def recorded(reason: str | None, key: int, lsn: int = 0, at: str | None = None) -> Recorded:
        return Recorded(reason, NEW, {"id": str(key), "v": "theirs" if reason else "others"}, lsn, at)

    conflicts = [
        recorded(None, 1, 0x200),
        recorded(None, 2, 0x10),
        recorded(None, 3, at="2026-02-01T00:00:00.000000Z"),
        recorded(None, 4, at="2025-12-01T00:00:00.000000Z"),
        recorded(CONFLICT, 5, 0x10),
        recorded(CONFLICT, 6, 0x200),
        recorded(None, 7, 0x100),
    ]
    with contextlib.closing(target.connect(subdb.conninfo, "verify")) as session:
        installation.install(session)
        session.execute(
            "INSERT INTO pgsub.skipped_change (subid, finish_lsn, xid, schemaname, relname, skipped_at, body)"
            " SELECT 1, '0/100', 1, 'public', 't', '2026-01-01 00:00+00',"
            ' format(\'{"new": {"id": "%s", "v": "theirs"}}\', g)::jsonb FROM generate_series(1, 7) g ORDER BY g'
        )
        last = session.execute("SELECT max(id) FROM pgsub.skipped_change").fetchone()

        def reasons(copied: int) -> dict[str, str | None]:
            known = explained_differences.explained(
                session, 1, table, conflicts, names=[("public", "t")], in_utf8=False, covered=Covered(copied)
            )
            listed = both(explain=lambda key, kind, row: known.reason(key, row)).differences.listed
            return {(one.publisher or ("",))[0]: one.explained for one in listed}

        before = dict.fromkeys("2457", SKIPPED) | {"1": None, "3": None, "6": CONFLICT}
        assert (last, reasons(0)) == ((7,), before)
        assert reasons(6) == {**dict.fromkeys("1234"), "5": CONFLICT, "6": CONFLICT, "7": SKIPPED}
        assert reasons(7)["7"] is None


def test_servers_that_hash_otherwise_are_not_compared(both: Compare, subdb: Database) -> None:
    genuine = subdb.value("SELECT pg_get_functiondef('pg_catalog.hashtextextended(text, bigint)'::regprocedure)")
    with contextlib.ExitStack() as stack:
        stack.callback(subdb.execute, genuine)
        subdb.execute(
            "CREATE OR REPLACE FUNCTION pg_catalog.hashtextextended(text, bigint) RETURNS bigint LANGUAGE sql"
            " AS 'SELECT -length($1)::bigint'"  # put in its place, where the server would call its own
        )
        with pytest.raises(StateForbids, match="do not give the same hashes"):
            both(TABLE, pub=ROWS, sub=ROWS)
    assert counts(both()) == (0, 0, 0)


def test_large_values_count_as_what_is_read(both: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_rate, "MOST_BLOCKS", 16)
    waited: list[int] = []
    wait = read_rate.RateLimit.wait
    monkeypatch.setattr(
        read_rate.RateLimit, "wait", lambda self, blocks, over: waited.append(blocks) or wait(self, blocks, over)
    )
    filled = """CREATE TABLE t (id int PRIMARY KEY, v text); ALTER TABLE t ALTER v SET STORAGE EXTERNAL;
        INSERT INTO t SELECT g, repeat(md5(g::text), 1000) FROM generate_series(1, 40) g"""
    result = both(filled, sub="UPDATE t SET v = v || 'x' WHERE id = 7")
    assert counts(result) == (0, 0, 1)
    whole = 40 * 32_000 // read_rate.BLOCK  # of each side; the rows themselves are in one block
    assert sum(waited) >= 2 * whole and max(waited) > 16


@pytest.mark.parametrize("where", ["publisher", "target"])
def test_a_table_of_which_some_columns_may_be_read_is_read_in_one_go(
    both: Compare, pubdb: Database, subdb: Database, where: str
) -> None:
    database = pubdb if where == "publisher" else subdb
    role = f"reader_{random.randrange(10**9)}"
    columns = "CREATE TABLE t (id int PRIMARY KEY, v text, secret text)"
    both(columns, pub="CREATE PUBLICATION p FOR TABLE t (id, v); INSERT INTO t VALUES (1, 'x', 'y')",
         sub="INSERT INTO t VALUES (1, 'z', 'mine')")  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.callback(database.execute, f"DROP OWNED BY {role}; DROP ROLE {role}")
        database.execute(f"CREATE ROLE {role}; GRANT SELECT (id, v) ON t TO {role}")
        result = both(becoming={where: role})
    assert counts(result) == (0, 0, 1)
