"""Columns pair by name: order, extra ones, identities, generated ones, names that need quotes, very many, none."""

from __future__ import annotations

import pytest
from fix_pair import MakePair, foreign_keys_fire

from pgsub.common.errors import SchemaFault

NAMES = [
    "tab'le",
    "B",
    "select",
    "a.b",
    "two words",
    "50%",
    "%s",
    "{}",
    "grün",
    "back\\slash",
    'dou"ble',
    "$1",
    "new\nline",
]


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def test_columns_pair_by_name_and_extra_ones_keep_their_defaults(pair: MakePair) -> None:
    p = pair(
        pub="CREATE TABLE t (id int PRIMARY KEY, a text, gone int, b numeric); ALTER TABLE t DROP gone",
        sub="CREATE TABLE t"
        " (extra text DEFAULT 'mine', b numeric, gone int, id int PRIMARY KEY, at int DEFAULT 7, a text);"
        "ALTER TABLE t DROP gone",
    )
    p.apply("INSERT INTO t SELECT g, 'a' || g, g FROM generate_series(1, 60) g", "INSERT INTO t VALUES (100, 'x', 1)")
    p.subdb.execute("UPDATE t SET extra = 'kept' WHERE id = 5")
    p.apply("UPDATE t SET b = -1 WHERE id IN (5, 6)", "UPDATE t SET id = 500 WHERE id = 5")
    p.same("t", columns="id, a, b")
    assert p.subdb.rows("SELECT extra, at FROM t WHERE id = 500") == [("kept", 7)]
    assert p.subdb.value("SELECT count(*) FROM t WHERE extra = 'mine' AND at = 7") == 60


@pytest.mark.parametrize("rows", [1, 60], ids=["insert", "copy"])
@pytest.mark.parametrize("kind", ["ALWAYS", "BY DEFAULT"])
def test_an_identity_column_takes_the_publishers_values(pair: MakePair, kind: str, rows: int) -> None:
    p = pair(f"CREATE TABLE t (id int GENERATED {kind} AS IDENTITY PRIMARY KEY, v text)")
    p.apply(
        f"INSERT INTO t (id, v) OVERRIDING SYSTEM VALUE SELECT 1000 + g, 'a' FROM generate_series(1, {rows}) g",
        "UPDATE t SET v = 'b' WHERE id = 1001",
        "UPDATE t SET id = DEFAULT, v = 'moved' WHERE id = 1001",  # the only change of it that SQL allows
    )
    p.same("t")
    assert p.subdb.value("SELECT v FROM t WHERE id < 1000") == "moved"


def test_an_identity_column_that_is_no_key_follows_the_publisher(pair: MakePair) -> None:
    p = pair(
        pub="CREATE TABLE t (id int PRIMARY KEY, n int NOT NULL, big text);"
        "ALTER TABLE t ALTER big SET STORAGE EXTERNAL",
        sub="CREATE TABLE t (id int PRIMARY KEY, n int GENERATED ALWAYS AS IDENTITY, big text, mine int DEFAULT 3)",
    )
    p.apply("INSERT INTO t SELECT g, g, repeat(md5(g::text), 100) FROM generate_series(1, 3) g")
    p.subdb.execute("UPDATE t SET mine = 4 WHERE id = 1")
    p.apply("UPDATE t SET n = 11 WHERE id = 1", "UPDATE t SET id = 22 WHERE id = 2", "UPDATE t SET n = n + 100")
    p.same("t", columns="id, n, big")
    assert p.subdb.rows("SELECT mine FROM t ORDER BY id") == [(4,), (3,), (3,)]
    p.subdb.execute("DELETE FROM t WHERE id = 3")
    p.apply("UPDATE t SET n = 5 WHERE id = 3")
    kinds = [event["conflict_type"] for event in p.events()]
    assert kinds == ["update_origin_differs", "update_missing"]


def test_a_row_whose_identity_column_stays_as_it_is_is_not_deleted(pair: MakePair) -> None:
    p = pair(
        pub="CREATE TABLE t (id int PRIMARY KEY, n int, v text); INSERT INTO t VALUES (1, 7, 'a')",
        sub="CREATE TABLE t (id int PRIMARY KEY, n int GENERATED ALWAYS AS IDENTITY, v text);"
        "CREATE TABLE child (id int REFERENCES t ON DELETE CASCADE)",
    )
    p.subdb.execute("INSERT INTO t OVERRIDING SYSTEM VALUE VALUES (1, 7, 'a'); INSERT INTO child VALUES (1)")
    foreign_keys_fire(p.subdb)
    p.apply("UPDATE t SET v = 'b'")
    p.same("t")
    assert p.subdb.value("SELECT count(*) FROM child") == 1


def test_an_identity_column_follows_a_publisher_that_sends_whole_rows(pair: MakePair) -> None:
    p = pair(
        pub="CREATE TABLE t (n int, v text); ALTER TABLE t REPLICA IDENTITY FULL",
        sub="CREATE TABLE t (n int GENERATED ALWAYS AS IDENTITY, v text)",
    )
    p.apply(
        "INSERT INTO t VALUES (1, 'a'), (1, 'a'), (2, 'b')", "UPDATE t SET n = 9 WHERE v = 'b'", "UPDATE t SET v = 'c'"
    )
    p.apply("UPDATE t SET n = 10 WHERE ctid = (SELECT min(ctid) FROM t WHERE n = 1)")
    p.same("t")


def test_no_setting_of_the_database_lets_an_index_leave_out_the_row_of_a_change(pair: MakePair) -> None:
    p = pair(
        "CREATE TABLE t (a int[], n int)",
        pub="ALTER TABLE t REPLICA IDENTITY FULL",
        sub="CREATE INDEX ON t USING gin (a) WITH (fastupdate = off)",
    )
    p.subdb.execute(f"ALTER DATABASE {p.subdb.name} SET gin_fuzzy_search_limit = 1")
    p.apply(
        "INSERT INTO t SELECT ARRAY[1, g % 7], g FROM generate_series(1, 3000) g",
        "UPDATE t SET n = -n WHERE n % 100 = 0",
        "DELETE FROM t WHERE n % 70 = 1",
    )
    p.same("t")
    assert p.events() == []


def test_generated_columns_are_computed_here(pair: MakePair) -> None:
    p = pair("CREATE TABLE t (id int PRIMARY KEY, a int, twice int GENERATED ALWAYS AS (a * 2) STORED)")
    p.apply(
        "INSERT INTO t SELECT g, g FROM generate_series(1, 60) g",
        "UPDATE t SET a = 0 WHERE id = 1",
        "INSERT INTO t VALUES (99, 9)",
    )
    p.same("t")


def test_generated_columns_of_the_target_do_not_find_rows(pair: MakePair) -> None:
    p = pair(
        pub="CREATE TABLE t (a int); ALTER TABLE t REPLICA IDENTITY FULL",
        sub="CREATE TABLE t"
        " (s int GENERATED ALWAYS AS (a * 2) STORED, a int, v int GENERATED ALWAYS AS (a * 3) VIRTUAL)",
    )
    p.apply(
        "INSERT INTO t VALUES (1), (1), (2), (NULL)", "UPDATE t SET a = 5 WHERE a = 2", "DELETE FROM t WHERE a IS NULL"
    )
    assert p.subdb.rows("SELECT * FROM t ORDER BY a") == [(2, 1, 3), (2, 1, 3), (10, 5, 15)]


def test_a_published_generated_column_fills_a_plain_one_and_clashes_with_a_generated_one(pair: MakePair) -> None:
    p = pair(
        pub="CREATE TABLE t (id int PRIMARY KEY, g int GENERATED ALWAYS AS (id * 2) STORED);"
        "CREATE TABLE u (id int PRIMARY KEY, g int GENERATED ALWAYS AS (id * 2) STORED);"
        "CREATE PUBLICATION p FOR ALL TABLES WITH (publish_generated_columns = stored)",
        sub="CREATE TABLE t (id int PRIMARY KEY, g int);"
        "CREATE TABLE u (id int PRIMARY KEY, g int GENERATED ALWAYS AS (id * 2) STORED)",
    )
    p.apply("INSERT INTO t VALUES (1), (2)", "UPDATE t SET id = 3 WHERE id = 2")
    p.same("t")
    p.pubdb.execute("INSERT INTO u VALUES (1)")
    with pytest.raises(SchemaFault, match='has incompatible generated column: "g"') as caught:
        p.catch_up()
    assert caught.value.relation == "public.u"


@pytest.mark.parametrize("identity", ["", "FULL"], ids=["key", "full"])
def test_every_name_arrives_in_its_quotes(pair: MakePair, identity: str) -> None:
    columns = ", ".join(f"{_quoted(name)} text" for name in NAMES)
    key = f"ALTER TABLE %s REPLICA IDENTITY {identity}" if identity else "ALTER TABLE %s ADD PRIMARY KEY (id)"
    tables = [f"{_quoted('Sch ema')}.{_quoted(name)}" for name in NAMES]
    ddl = f"CREATE SCHEMA {_quoted('Sch ema')};"
    for table in tables:
        ddl += f"CREATE TABLE {table} (id int, {columns}); {key.replace('%s', table)};"
    p = pair(ddl)
    values = ", ".join(f"'{number}'" for number in range(len(NAMES)))
    for table in tables:
        p.pubdb.execute(f"INSERT INTO {table} SELECT g, {values} FROM generate_series(1, 51) g")
        p.pubdb.execute(f"UPDATE {table} SET {_quoted(NAMES[5])} = 'new', id = 100 WHERE id = 1")
        p.pubdb.execute(f"DELETE FROM {table} WHERE id = 2; INSERT INTO {table} (id) VALUES (3000)")
    p.pubdb.execute(f"TRUNCATE {tables[0]}, {tables[1]}")
    p.apply()
    p.same(*tables)
    assert p.events() == []


def test_a_table_without_columns_has_rows(pair: MakePair) -> None:
    p = pair("CREATE TABLE t (); ALTER TABLE t REPLICA IDENTITY FULL")
    p.apply("INSERT INTO t DEFAULT VALUES", "INSERT INTO t SELECT FROM generate_series(1, 70)")
    assert p.subdb.value("SELECT count(*) FROM t") == 71
    p.apply("DELETE FROM t WHERE ctid = (SELECT min(ctid) FROM t)")
    assert p.subdb.value("SELECT count(*) FROM t") == 70


def test_a_table_without_columns_fills_one_with_defaults(pair: MakePair) -> None:
    p = pair(pub="CREATE TABLE t ()", sub="CREATE TABLE t (a int DEFAULT 5, b text)")
    p.apply("INSERT INTO t DEFAULT VALUES", "INSERT INTO t SELECT FROM generate_series(1, 70)")
    assert p.subdb.rows("SELECT a, b, count(*) FROM t GROUP BY 1, 2") == [(5, None, 71)]


@pytest.mark.long
@pytest.mark.parametrize("identity", ["", "; ALTER TABLE t REPLICA IDENTITY FULL"], ids=["key", "full"])
def test_as_many_columns_as_a_table_can_have(pair: MakePair, identity: str) -> None:
    columns = ", ".join(f"c{number} int2" for number in range(1599))
    key = "" if identity else " PRIMARY KEY"
    p = pair(f"CREATE TABLE t (id int{key}, {columns}){identity}")
    p.apply(
        "INSERT INTO t (id, c0, c1598) SELECT g, g, -g FROM generate_series(1, 55) g",
        "UPDATE t SET c1598 = 0, c7 = 7 WHERE id = 1",
        "DELETE FROM t WHERE id = 2",
    )
    p.same("t", columns="id, c0, c7, c1598")


def test_a_column_list_and_a_row_filter_hold(pair: MakePair) -> None:
    p = pair(
        "CREATE TABLE t (id int PRIMARY KEY, a int, secret text)",
        pub="CREATE PUBLICATION p FOR TABLE t (id, a) WHERE (id < 10)",
    )
    p.apply(
        "INSERT INTO t SELECT g, g, 'x' FROM generate_series(1, 12) g",
        "UPDATE t SET id = 100 WHERE id = 1",  # leaves the filter: arrives as a delete
        "UPDATE t SET id = 5000 WHERE id = 12; UPDATE t SET id = 0 WHERE id = 11",  # enters it: arrives as an insert
        "UPDATE t SET secret = 'y'",
    )
    query = "SELECT id, a FROM t WHERE id < 10 ORDER BY id"
    assert p.subdb.rows(query) == p.pubdb.rows(query)
    assert p.subdb.value("SELECT count(*) FROM t WHERE id >= 10 OR secret IS NOT NULL") == 0


def test_a_row_filter_and_a_column_list_that_change_hold_for_what_is_written_from_then_on(pair: MakePair) -> None:
    p = pair(
        "CREATE TABLE t (id int PRIMARY KEY, a int, b text)",
        pub="CREATE PUBLICATION p FOR TABLE t WHERE (id < 10)",
    )
    task = p.start()
    p.pubdb.execute("INSERT INTO t VALUES (1, 1, 'x'), (20, 1, 'x')")
    p.until("SELECT count(*) = 1 FROM t WHERE b = 'x'", task=task)
    p.pubdb.execute("ALTER PUBLICATION p SET TABLE t (id, a) WHERE (id >= 10)")
    p.pubdb.execute("INSERT INTO t VALUES (2, 2, 'y'), (21, 2, 'y'), (22, 2, 'y')")
    p.pubdb.execute("UPDATE t SET a = 3")
    p.until("SELECT count(*) = 2 FROM t WHERE id > 20 AND a = 3", task=task)
    p.stop(task)
    # row 1 left the filter before its update, row 20 was never sent as an insert
    assert p.subdb.rows("SELECT id, a, b FROM t ORDER BY id") == [(1, 1, "x"), (21, 3, None), (22, 3, None)]
    assert [one["conflict_type"] for one in p.events()] == ["update_missing"]
