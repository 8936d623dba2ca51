"""Partitioned tables on either side, and inheritance. Mirrors t/013_partition.pl."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
from fix_pair import MakePair, Pair
from fix_servers import Database

from pgsub.common.errors import ApplyError, SchemaFault
from pgsub.target.catalog.relation import describe
from pgsub.target.ledger import subscriptions
from pgsub.target.ledger.subscriptions import RelationState
from pgsub.target.sql import partitions

RANGES = (
    "CREATE TABLE t (id int, k int, v text, PRIMARY KEY (id, k)) PARTITION BY RANGE (k);"
    "CREATE TABLE t_low PARTITION OF t FOR VALUES FROM (0) TO (100);"
    "CREATE TABLE t_high PARTITION OF t FOR VALUES FROM (100) TO (1000)"
)
HASHES = (
    "CREATE TABLE t (v text, k int, id int, PRIMARY KEY (k, id)) PARTITION BY HASH (id);"
    "CREATE TABLE t_0 (id int NOT NULL, v text, gone int, k int NOT NULL); ALTER TABLE t_0 DROP gone;"
    "ALTER TABLE t ATTACH PARTITION t_0 FOR VALUES WITH (MODULUS 2, REMAINDER 0);"
    "CREATE TABLE t_1 PARTITION OF t FOR VALUES WITH (MODULUS 2, REMAINDER 1)"
)
PLAIN = "CREATE TABLE t (id int, k int, v text, PRIMARY KEY (id, k))"
ROOT = "CREATE PUBLICATION p FOR TABLE t WITH (publish_via_partition_root)"
LEAVES = "CREATE PUBLICATION p FOR TABLE t"


def _work(p: Pair) -> None:
    p.apply(
        "INSERT INTO t (id, k, v) SELECT g, g * 10, 'v' || g FROM generate_series(1, 60) g",
        "UPDATE t SET v = 'changed' WHERE id % 3 = 0",
        "UPDATE t SET k = 999 - k WHERE id <= 20",  # moves between ranges
        "UPDATE t SET id = id + 1000 WHERE id IN (2, 4)",  # moves between hashes
        "DELETE FROM t WHERE id % 7 = 0",
    )
    p.same("t", columns="id, k, v")
    assert p.events() == []


@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
@pytest.mark.parametrize("sub", [PLAIN, RANGES, HASHES], ids=["plain", "range", "hash"])
def test_a_root_goes_to_a_table_partitioned_in_any_way(pair: MakePair, sub: str, binary: bool) -> None:
    p = pair(pub=f"{RANGES};{ROOT}", sub=sub, binary=binary)
    _work(p)
    p.apply("TRUNCATE t")
    assert p.subdb.value("SELECT count(*) FROM t") == 0


def test_leaves_go_to_leaves_of_the_same_names(pair: MakePair) -> None:
    p = pair(RANGES, pub=LEAVES)
    _work(p)
    p.apply("TRUNCATE t_low")
    p.same("t_low", "t_high")


def test_leaves_may_be_plain_tables_here(pair: MakePair) -> None:
    p = pair(
        pub=f"{RANGES};{LEAVES}",
        sub=f"{PLAIN}; ALTER TABLE t RENAME TO t_low; CREATE TABLE t_high (LIKE t_low INCLUDING ALL)",
    )
    p.apply(
        "INSERT INTO t SELECT g, g * 10, 'v' FROM generate_series(1, 60) g",
        "UPDATE t SET k = 50 WHERE k > 500",
        "DELETE FROM t WHERE id = 1",
    )
    p.same("t_low", "t_high")


def test_a_plain_table_goes_to_a_partitioned_one(pair: MakePair) -> None:
    _work(pair(pub=PLAIN, sub=HASHES))


@pytest.mark.parametrize("duplicates", [1, 3])
def test_a_partitioned_table_without_key_takes_whole_rows(pair: MakePair, duplicates: int) -> None:
    ranges = RANGES.replace(", PRIMARY KEY (id, k)", "")
    p = pair(
        pub="CREATE TABLE t (id int, k int, v text); ALTER TABLE t REPLICA IDENTITY FULL",
        sub=ranges + "; CREATE TABLE t_null PARTITION OF t DEFAULT",
    )
    p.apply(
        f"INSERT INTO t SELECT g, g * 50, 'v' FROM generate_series(1, 10) g, generate_series(1, {duplicates})",
        "INSERT INTO t VALUES (NULL, NULL, NULL), (NULL, NULL, NULL)",
        "UPDATE t SET k = 1 WHERE ctid IN (SELECT max(ctid) FROM t GROUP BY id)",
        "DELETE FROM t WHERE ctid IN (SELECT min(ctid) FROM t GROUP BY id HAVING id > 5 OR id IS NULL)",
    )
    p.same("t")
    assert p.events() == []


def test_partitions_may_have_the_key_that_their_root_cannot_have(pair: MakePair) -> None:
    # the partition key is not part of the key: only the leaves have one (check_relation_updatable looks there too)
    p = pair(
        pub="CREATE TABLE t (id int PRIMARY KEY, k int, v text)",
        sub="CREATE TABLE t (id int, k int, v text) PARTITION BY RANGE (k);"
        "CREATE TABLE t_low PARTITION OF t FOR VALUES FROM (0) TO (100); ALTER TABLE t_low ADD PRIMARY KEY (id);"
        "CREATE TABLE t_high PARTITION OF t FOR VALUES FROM (100) TO (1000); ALTER TABLE t_high ADD PRIMARY KEY (id)",
    )
    _work(p)


#: Partitions with the same key: of partitions, with other columns, with an index as replica identity.
KEYED = """
CREATE TABLE t (id int, k int, l text, v text, j json, mine int DEFAULT 7) PARTITION BY RANGE (k);
CREATE TABLE t_low PARTITION OF t FOR VALUES FROM (0) TO (100) PARTITION BY LIST (l);
CREATE TABLE t_a PARTITION OF t_low FOR VALUES IN ('a'); ALTER TABLE t_a ADD PRIMARY KEY (id);
CREATE TABLE t_b (gone int, v text, mine int, j json, l text, id int NOT NULL, k int); ALTER TABLE t_b DROP gone;
CREATE UNIQUE INDEX t_b_id ON t_b (id); ALTER TABLE t_b REPLICA IDENTITY USING INDEX t_b_id;
ALTER TABLE t_low ATTACH PARTITION t_b DEFAULT;
CREATE TABLE t_high PARTITION OF t FOR VALUES FROM (100) TO (1000); ALTER TABLE t_high ADD PRIMARY KEY (id)
"""
WHOLE = "CREATE TABLE t (id int, k int, l text, v text, j json); ALTER TABLE t REPLICA IDENTITY FULL"


@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
def test_a_whole_row_is_found_by_the_key_that_all_partitions_have(pair: MakePair, binary: bool) -> None:
    """As FindLogicalRepLocalIndex: what only the target has, or has changed, hides no row."""
    p = pair(pub=WHOLE, sub=KEYED, binary=binary)
    p.apply(
        "INSERT INTO t SELECT g % 20, g, CASE WHEN g % 40 < 20 THEN 'a' END, 'v', '{}' FROM generate_series(1, 40) g",
        "INSERT INTO t SELECT g, 100 + g, 'a', 'v', '{}' FROM generate_series(1, 60) g",
    )
    p.subdb.execute("UPDATE t SET v = 'local', mine = 8 WHERE id < 10")
    p.apply(
        "UPDATE t SET v = 'new' WHERE id % 3 = 0",
        "UPDATE t SET k = k + 80, id = 1000 + k WHERE id = 4",  # moves between ranges
        "UPDATE t SET l = 'b', id = 1000 + k WHERE id = 5; UPDATE t SET id = 1000 + k, j = '[]' WHERE id = 6",
        "DELETE FROM t WHERE id % 7 = 0 AND k < 100",
    )
    p.same("t", columns="id, k, l, CASE WHEN v <> 'local' OR id % 3 = 0 THEN v ELSE 'v' END, j::text")
    assert p.subdb.value("SELECT count(*) FROM t WHERE mine = 8 AND v = 'local'") > 0
    assert {one["conflict_type"] for one in p.events()} == {"update_origin_differs", "delete_origin_differs"}


@pytest.mark.parametrize(
    "alter",
    [
        "ALTER TABLE t_high DROP CONSTRAINT t_high_pkey",
        "ALTER TABLE t_high DROP CONSTRAINT t_high_pkey, ADD PRIMARY KEY (id, k)",
        "ALTER TABLE t_high DROP CONSTRAINT t_high_pkey, ADD PRIMARY KEY (id) DEFERRABLE",
    ],
    ids=["none", "another", "deferrable"],
)
def test_partitions_without_the_same_key_are_searched_for_whole_rows(pair: MakePair, alter: str) -> None:
    p = pair(pub=WHOLE.replace(", j json", ""), sub=f"{KEYED.replace(' DEFAULT 7', '')};{alter}")
    copies = 3 if alter.endswith("pkey") else 1
    p.apply(
        f"INSERT INTO t SELECT 1, 200, 'a', 'v' || g FROM generate_series(1, {copies}) g; INSERT INTO t VALUES (2, 1)"
    )
    p.apply(f"UPDATE t SET l = 'new' WHERE v = 'v{copies}'", "UPDATE t SET v = 'new' WHERE k = 1")
    p.same("t", columns="id, k, l, v")
    p.subdb.execute("UPDATE t SET mine = 1")
    p.apply("DELETE FROM t")
    assert {one["conflict_type"] for one in p.events()} == {"delete_missing"}


def test_a_partition_without_the_key_that_is_attached_later_is_searched_for_whole_rows(pair: MakePair) -> None:
    p = pair(pub=WHOLE, sub=KEYED.replace(", j json", ", j jsonb").replace("j json,", "j jsonb,"))
    p.apply("INSERT INTO t VALUES (1, 1, 'a', 'v')")
    task = p.start()
    p.pubdb.execute("UPDATE t SET v = 'w'")
    p.until("SELECT v = 'w' FROM t", task=task)
    p.subdb.execute("CREATE TABLE t_x PARTITION OF t DEFAULT; ALTER TABLE t ALTER mine DROP DEFAULT")
    p.pubdb.execute("INSERT INTO t VALUES (2, 2000, 'a', 'v'), (2, 2000, 'a', 'v'), (2, 2000, 'a', 'w')")
    p.pubdb.execute("UPDATE t SET l = 'new' WHERE id = 2 AND v = 'w'")
    p.pubdb.execute("DELETE FROM t WHERE ctid IN (SELECT min(ctid) FROM t WHERE v = 'v')")
    p.until("SELECT count(*) = 2 FROM t_x", task=task)
    p.stop(task)
    p.same("t", columns="id, k, l, v, j::text")


def test_partitions_with_partitions_of_their_own(pair: MakePair) -> None:
    nested = (
        "CREATE TABLE t (id int, k int, v text, PRIMARY KEY (id, k)) PARTITION BY RANGE (k);"
        "CREATE TABLE t_low PARTITION OF t FOR VALUES FROM (0) TO (500) PARTITION BY LIST (id);"
        "CREATE TABLE t_low_1 PARTITION OF t_low FOR VALUES IN (1, 2, 3, 1002, 1004);"
        "CREATE TABLE t_low_n PARTITION OF t_low DEFAULT;"
        "CREATE TABLE t_high PARTITION OF t FOR VALUES FROM (500) TO (5000)"
    )
    _work(pair(nested, pub=ROOT))


def test_inheritance_children_are_tables_of_their_own(pair: MakePair) -> None:
    p = pair(
        "CREATE TABLE parent (id int, v text); CREATE TABLE child (more int) INHERITS (parent);"
        "ALTER TABLE parent REPLICA IDENTITY FULL; ALTER TABLE child REPLICA IDENTITY FULL"
    )
    p.apply(
        "INSERT INTO parent VALUES (1, 'same'), (2, 'x'); INSERT INTO child VALUES (1, 'same', 7), (3, 'y', 8)",
        "UPDATE ONLY parent SET v = 'of the parent' WHERE id = 1",
        "UPDATE parent SET v = 'both' WHERE id IN (2, 3)",
        "DELETE FROM child WHERE id = 1",
    )
    p.same("ONLY parent", "child")
    p.apply("TRUNCATE ONLY parent")
    p.same("ONLY parent", "child")
    assert p.subdb.value("SELECT count(*) FROM child") == 1


TELLS = """
CREATE TABLE told (n serial, op text, name text);
CREATE FUNCTION tell() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
 INSERT INTO public.told (op, name) VALUES (TG_OP, TG_TABLE_NAME);
 IF TG_OP = 'DELETE' THEN RETURN OLD; END IF; RETURN NEW; END $$;
CREATE TRIGGER tell BEFORE INSERT OR UPDATE OR DELETE ON t FOR EACH ROW EXECUTE FUNCTION tell();
ALTER TABLE t ENABLE ALWAYS TRIGGER tell;
"""
SECRETS = (
    "CREATE TABLE t (id int PRIMARY KEY, v text, own int DEFAULT 7, g int GENERATED ALWAYS AS (id * 2) STORED)"
    " PARTITION BY LIST (id); CREATE TABLE t_1 PARTITION OF t FOR VALUES IN (1, 2);"
    "CREATE TABLE t_d PARTITION OF t DEFAULT;"
)


@pytest.mark.parametrize("full", [False, True], ids=["key", "full"])
def test_a_row_that_goes_to_another_partition_is_deleted_and_inserted_for_triggers(pair: MakePair, full: bool) -> None:
    """As apply_handle_tuple_routing: no UPDATE trigger fires; what only the target has goes with the row."""
    identity = "ALTER TABLE t REPLICA IDENTITY FULL" if full else ""
    p = pair(pub=f"CREATE TABLE t (id int PRIMARY KEY, v text); {identity}", sub=SECRETS + TELLS)
    p.apply("INSERT INTO t VALUES (1, 'x'), (5, 'y')")
    p.subdb.execute("TRUNCATE told; SET session_replication_role = replica; UPDATE t SET own = 8; TRUNCATE told")
    p.apply("UPDATE t SET id = 7 WHERE id = 1", "UPDATE t SET v = 'z' WHERE id = 7", "UPDATE t SET id = 6 WHERE id = 5")
    assert p.subdb.rows("SELECT op, name FROM told ORDER BY n") == [
        ("DELETE", "t_1"),
        ("INSERT", "t_d"),
        ("UPDATE", "t_d"),
        ("UPDATE", "t_d"),
    ]
    assert p.subdb.rows("SELECT id, v, own, g FROM t ORDER BY 1") == [(6, "y", 8, 12), (7, "z", 8, 14)]
    assert {one["conflict_type"] for one in p.events()} <= {"update_origin_differs"}  # of the local UPDATE


def test_a_trigger_that_keeps_updates_off_does_not_keep_a_row_in_its_partition(pair: MakePair) -> None:
    keep = (
        "CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;"
        "CREATE TRIGGER keep BEFORE UPDATE ON t FOR EACH ROW EXECUTE FUNCTION keep();"
        "ALTER TABLE t ENABLE REPLICA TRIGGER keep;"
    )
    p = pair(pub="CREATE TABLE t (id int PRIMARY KEY, v text)", sub=SECRETS + keep)
    p.apply("INSERT INTO t VALUES (1, 'x')", "UPDATE t SET id = 7", "UPDATE t SET v = 'kept off'")
    assert p.subdb.rows("SELECT id, v FROM t") == [(7, "x")]
    p.apply("DELETE FROM t")
    assert p.subdb.rows("SELECT id, v FROM t") == [] and p.events() == []


#: A partitioned table, a partition that comes later, and a row of it.
NEW_PARTITIONS = {
    "range": ("k date", "RANGE (k)", "FROM ('2026-12-01') TO (MAXVALUE)", "'2026-12-24'"),
    "range of two": ("k int, l numeric", "RANGE (k, l)", "FROM (-5, MINVALUE) TO (10, 1.5)", "0, 1"),
    "list": ("k text", "LIST (k)", r"IN ('it''s', E'a\\b', NULL, '%')", "'it''s'"),
    "hash": ("k int", "HASH (k)", "WITH (MODULUS 1, REMAINDER 0)", "7"),
    "default": ("k timestamptz", "RANGE (k)", "DEFAULT", "now()"),
}


_NOT_OURS = (
    "The table of this name on the target is partitioned, but neither it nor any partition of it is subscribed: see"
    " first that it is the same table."
)


def _missing_partition(p: Pair) -> SchemaFault:
    with pytest.raises(SchemaFault, match=r'"My\.s\.T new" does not exist') as caught:
        p.catch_up()
    assert caught.value.absent is None and (caught.value.hint or "").endswith(f"\npgsub refresh {p.sub.name}")
    return caught.value


@pytest.mark.parametrize("kind", NEW_PARTITIONS)
def test_a_partition_that_the_target_lacks_comes_with_the_statement_that_makes_it_one(
    pair: MakePair, kind: str
) -> None:
    columns, how, bound, values = NEW_PARTITIONS[kind]
    parent = '"My.s"."T all"'
    made = f'CREATE SCHEMA "My.s"; CREATE TABLE {parent} (id int NOT NULL DEFAULT 1, {columns}) PARTITION BY {how};'
    key = "ALTER TABLE {} ADD PRIMARY KEY (k, id);".format(parent if kind in ("hash", "range") else '"My.s"."T new"')
    made, later = (f"{made}{key}", "") if parent in key else (made, key.replace("k, ", ""))
    p = pair(f"{made} CREATE TABLE u (id int)", names=[("public", "u")])
    bound = bound if bound == "DEFAULT" else f"FOR VALUES {bound}"
    p.pubdb.execute(f'CREATE TABLE "My.s"."T new" PARTITION OF {parent} {bound}; {later}')
    p.pubdb.execute(f"INSERT INTO {parent} VALUES (1, {values})")
    error = _missing_partition(p)
    assert error.detail == f"On the publisher it is a partition of {parent}. {_NOT_OURS}"
    [statement] = [line for line in (error.hint or "").splitlines() if line.endswith(";")]
    p.subdb.execute(statement)
    look = (
        "SELECT c.relispartition, pg_get_expr(c.relpartbound, c.oid), pg_get_constraintdef(k.oid)"
        " FROM pg_class c LEFT JOIN pg_constraint k ON k.conrelid = c.oid AND k.contype = 'p'"
        " WHERE c.relname = 'T new'"
    )
    assert p.subdb.rows(look) == p.pubdb.rows(look)
    oid = p.subdb.value("SELECT oid::bigint FROM pg_class WHERE relname = 'T new'")
    subscriptions.add_relations(p.session, p.subid, [RelationState(oid, "My.s", "T new", "r")])
    p.apply()
    p.same(parent)


@pytest.mark.parametrize("subscribed", ["t", "t_1"])
def test_a_partition_of_a_table_that_is_subscribed_is_told_without_a_doubt(pair: MakePair, subscribed: str) -> None:
    made = "CREATE TABLE t (k int) PARTITION BY LIST (k); CREATE TABLE t_1 PARTITION OF t FOR VALUES IN (1)"
    p = pair(f'{made}; CREATE SCHEMA "My.s"', names=[("public", subscribed)])
    p.pubdb.execute('CREATE TABLE "My.s"."T new" PARTITION OF t DEFAULT; INSERT INTO t VALUES (2)')
    assert _missing_partition(p).detail == 'On the publisher it is a partition of "public"."t".'


@pytest.mark.parametrize(
    ("there", "said"),
    [("", "does not exist on the target"), ("CREATE TABLE t (id int, k int)", "is not partitioned on the target")],
    ids=["no table", "a plain table"],
)
def test_a_partition_of_what_the_target_has_not_partitioned_is_told_as_such(
    pair: MakePair, there: str, said: str
) -> None:
    p = pair("CREATE TABLE u (id int)", sub=there, names=[("public", "u")])
    p.pubdb.execute('CREATE TABLE t (id int, k int) PARTITION BY LIST (k); CREATE SCHEMA "My.s"')
    p.pubdb.execute('CREATE TABLE "My.s"."T new" PARTITION OF t DEFAULT; INSERT INTO t VALUES (1, 1)')
    error = _missing_partition(p)
    assert f'is a partition of "public"."t", which {said}.' in (error.detail or "")
    assert 'CREATE TABLE "My.s"."T new" ("id" integer, "k" integer);' in (error.hint or "")
    assert 'queries of "public"."t" do not see its rows' in (error.detail or "")


def test_a_lock_on_a_partition_holds_up_no_change_of_another_one(pair: MakePair) -> None:
    """A generic plan, which a prepared statement has after some executions, locks all partitions."""
    p = pair(RANGES, pub=ROOT)
    p.apply("INSERT INTO t SELECT g, g, 'v' FROM generate_series(1, 99) g")
    task = p.start()
    with closing(p.subdb.connect()) as session:
        for number in range(20):
            p.pubdb.execute(f"UPDATE t SET v = 'w' WHERE id = {number + 1}")
        p.until("SELECT v = 'w' FROM t WHERE id = 20", task=task)
        session.execute("BEGIN; LOCK TABLE t_high")
        p.pubdb.execute("UPDATE t SET v = 'w' WHERE id = 40")
        p.pubdb.execute("DELETE FROM t WHERE id = 41")
        p.pubdb.execute("INSERT INTO t VALUES (41, 41, 'new')")
        p.until("SELECT v = 'new' FROM t_low WHERE id = 41", task=task)
        session.execute("ROLLBACK")
    p.stop(task)
    p.same("t")


#: Tables with a partition t_x, the bounds and a row of it, and the table and the key that the error names.
DETACHED = {
    "range": (RANGES.replace("t_high", "t_x"), "FROM (100) TO (1000)", "2, 102", "t", "(k) = (102)"),
    "below": (
        "CREATE TABLE t (id int, k int, v text, PRIMARY KEY (k, id)) PARTITION BY LIST (id);"
        "CREATE TABLE t_2 PARTITION OF t DEFAULT PARTITION BY RANGE (k, id);"
        "CREATE TABLE t_x PARTITION OF t_2 FOR VALUES FROM (1, 1) TO (9, 9);",
        "FROM (1, 1) TO (9, 9)",
        "2, 3",
        "t_2",
        "(k, id) = (3, 2)",
    ),
    "type": (
        "CREATE TYPE e AS ENUM ('a', 'b'); CREATE TABLE t (id int, \"K\" e, v text) PARTITION BY LIST (\"K\");"
        "CREATE TABLE t_x PARTITION OF t FOR VALUES IN ('b', NULL); ALTER TABLE t REPLICA IDENTITY FULL;"
        "ALTER TABLE t_x REPLICA IDENTITY FULL",
        "IN ('b', NULL)",
        "2, 'b'",
        "t",
        '("K") = (b)',
    ),
    "long": (
        "CREATE TABLE t (id int, k text, v text) PARTITION BY RANGE (length(k));"
        "CREATE TABLE t_x PARTITION OF t FOR VALUES FROM (20000) TO (20001);"
        "CREATE TABLE t_y PARTITION OF t FOR VALUES FROM (1) TO (20000); ALTER TABLE t REPLICA IDENTITY FULL;"
        "ALTER TABLE t_x REPLICA IDENTITY FULL; ALTER TABLE t_y REPLICA IDENTITY FULL",
        "FROM (20000) TO (20001)",
        "2, repeat('x', 20000)",
        "t",
        f"(k) = ({'x' * 64}...)",
    ),
}
_CHANGES = ("UPDATE t SET v = 'new' WHERE id = 2", "DELETE FROM t WHERE id = 2")


@pytest.mark.parametrize(
    "options",
    [{}, {"binary": True}, {"on_conflict": ("update_missing=skip", "delete_missing=skip")}],
    ids=["text", "binary", "rules"],
)
@pytest.mark.parametrize("case", DETACHED)
def test_a_row_whose_partition_is_detached_stops_apply_and_is_not_missing(
    pair: MakePair, case: str, options: dict[str, Any]
) -> None:
    """As ExecFindPartition: once the partition is attached again, nothing is lost."""
    tables, bounds, row, fails, key = DETACHED[case]
    p = pair(
        f"{tables}; CREATE TABLE u (id int PRIMARY KEY, v text)", pub=ROOT.replace("TABLE t", "TABLE t, u"), **options
    )
    p.apply(f"INSERT INTO t VALUES ({row}, 'b')", "INSERT INTO u SELECT g, 'u' FROM generate_series(1, 50) g")
    parent = p.subdb.value("SELECT inhparent::regclass::text FROM pg_inherits WHERE inhrelid = 't_x'::regclass")
    for change in _CHANGES:
        p.subdb.execute(f"ALTER TABLE {parent} DETACH PARTITION t_x")
        p.pubdb.execute("UPDATE u SET v = 'before'")
        p.pubdb.execute(f"BEGIN; UPDATE u SET v = 'with'; {change}; COMMIT")
        with pytest.raises(ApplyError, match=f'no partition of relation "{fails}" found for row') as caught:
            p.catch_up()
        assert (caught.value.sqlstate, caught.value.relation) == ("23514", "public.t")
        assert caught.value.detail == f"Partition key of the failing row contains {key}."
        assert "Attach the row's partition again" in (caught.value.hint or "")
        assert p.subdb.rows("SELECT DISTINCT v FROM u") == [("before",)]
        p.subdb.execute(f"ALTER TABLE {parent} ATTACH PARTITION t_x FOR VALUES {bounds}")
        p.apply()
        p.same("t", "u")
    assert p.events() == []


@pytest.mark.parametrize("change", _CHANGES, ids=["update", "delete"])
def test_a_row_that_another_partition_would_take_is_missing(pair: MakePair, change: str) -> None:
    p = pair(f"{RANGES}; CREATE TABLE t_default PARTITION OF t DEFAULT", pub=ROOT)
    p.apply("INSERT INTO t VALUES (1, 1, 'a'), (2, 102, 'b')")
    p.subdb.execute("ALTER TABLE t DETACH PARTITION t_high")
    p.apply(change)
    assert [one["conflict_type"] for one in p.events()] == [f"{change[:6].lower()}_missing"]


_REGIONS = "CREATE TABLE t (region text, id int, v text, PRIMARY KEY (region, id)) PARTITION BY LIST (region);"


@pytest.mark.parametrize("change", ["UPDATE t SET v = 'new' WHERE id = 2", "DELETE FROM t WHERE id = 2"])
def test_a_row_that_a_partition_of_partitions_lacks_is_missing(pair: MakePair, change: str) -> None:
    """The constraints of these partitions read the key of the table above as well."""
    p = pair(
        pub=f"{_REGIONS} CREATE TABLE t_eu PARTITION OF t FOR VALUES IN ('eu'); CREATE PUBLICATION p FOR TABLE t",
        sub=f"{_REGIONS} CREATE TABLE t_eu PARTITION OF t FOR VALUES IN ('eu') PARTITION BY RANGE (id);"
        "CREATE TABLE t_eu_low PARTITION OF t_eu FOR VALUES FROM (0) TO (100)",
    )
    p.apply("INSERT INTO t VALUES ('eu', 1, 'a'), ('eu', 2, 'b')")
    p.subdb.execute("DELETE FROM t WHERE id = 2")
    p.apply(change)
    assert [one["conflict_type"] for one in p.events()] == [f"{change[:6].lower()}_missing"]


_MANY = (
    "CREATE TABLE t (id int, k int, v text, PRIMARY KEY (id, k)) PARTITION BY RANGE (k);"
    "DO $$ BEGIN FOR n IN 0..19 LOOP EXECUTE"
    " format('CREATE TABLE t_%s PARTITION OF t FOR VALUES FROM (%s) TO (%s)', n, n * 10, n * 10 + 10);"
    " END LOOP; END $$"
)


@pytest.mark.parametrize("rules", [(), ("update_missing=skip", "delete_missing=skip")], ids=["records", "rules"])
def test_a_lock_on_a_partition_holds_up_no_missing_row_of_another_one(pair: MakePair, rules: tuple[str, ...]) -> None:
    """The constraints of partitions are read only of those that a change has locked itself."""
    p = pair(_MANY, pub=ROOT, on_conflict=rules)
    p.apply("INSERT INTO t SELECT g, g, 'v' FROM generate_series(0, 49) g")
    p.subdb.execute("DELETE FROM t WHERE id IN (1, 2)")
    with closing(p.subdb.connect()) as session:
        session.execute("BEGIN; LOCK TABLE t_3, t_19")
        task = p.start()
        p.pubdb.execute("UPDATE t SET v = 'w' WHERE id = 1")
        p.pubdb.execute("DELETE FROM t WHERE id = 2")
        p.pubdb.execute("UPDATE t SET v = 'w' WHERE id = 21")
        p.until("SELECT v = 'w' FROM t_2 WHERE id = 21", task=task)
        session.execute("ROLLBACK")
    p.stop(task)
    found = [(one["conflict_type"], one["relname"]) for one in p.events()]
    assert found == [("update_missing", "t_0"), ("delete_missing", "t_0")]


def test_a_lock_on_a_partition_holds_up_no_row_that_goes_from_another_one_to_a_third(pair: MakePair) -> None:
    """For triggers, it is found out before the UPDATE whether its row leaves its partition."""
    p = pair(_MANY, pub=ROOT, sub=TELLS)
    p.apply("INSERT INTO t VALUES (1, 1, 'v'), (2, 2, 'v'), (41, 41, 'v')")
    p.subdb.execute("TRUNCATE told")
    with closing(p.subdb.connect()) as session:
        session.execute("BEGIN; LOCK TABLE t_3")
        task = p.start()
        p.pubdb.execute("UPDATE t SET k = 11 WHERE id = 1")
        p.pubdb.execute("UPDATE t SET k = 3 WHERE id = 2")
        p.pubdb.execute("UPDATE t SET k = 12 WHERE id = 41")
        p.until("SELECT k = 12 FROM t_1 WHERE id = 41", task=task)
        session.execute("ROLLBACK")
    p.stop(task)
    told = [("DELETE", "t_0"), ("INSERT", "t_1"), ("UPDATE", "t_0"), ("DELETE", "t_4"), ("INSERT", "t_1")]
    assert p.subdb.rows("SELECT op, name FROM told ORDER BY n") == told
    p.same("t")


def test_a_row_whose_partition_is_detached_is_not_missing_though_another_partition_is_locked(pair: MakePair) -> None:
    p = pair(_MANY, pub=ROOT)
    p.apply("INSERT INTO t SELECT g, g, 'v' FROM generate_series(0, 49) g")
    p.subdb.execute("ALTER TABLE t DETACH PARTITION t_1")
    with closing(p.subdb.connect()) as session:
        session.execute("BEGIN; LOCK TABLE t_3")
        p.pubdb.execute("UPDATE t SET v = 'w' WHERE id = 11")
        with pytest.raises(ApplyError, match='no partition of relation "t" found for row'):
            p.catch_up()
        session.execute("ROLLBACK")


def test_partitions_that_somebody_keeps_locked_are_not_waited_for_to_name_one(subdb: Database) -> None:
    """As for the rows of a prepared transaction, whose locks another session cannot use."""
    subdb.execute(_MANY)
    table = describe(subdb.connection, "public", "t")
    assert table is not None
    rows = [{"id": "1", "k": "15"}, {"id": "2", "k": "33"}]
    subdb.execute("SET statement_timeout = '30s'")
    with closing(subdb.connect()) as session, subdb.connection.transaction():
        assert partitions.leaves(subdb.connection, table, rows) == [("public", "t_1"), ("public", "t_3")]
        session.execute("BEGIN; LOCK TABLE t_3 NOWAIT")  # the locks were given back
        subdb.connection.execute("UPDATE t SET v = 'w' WHERE k = 15")
        assert partitions.leaves(subdb.connection, table, rows) == [("public", "t_1"), None]
        assert subdb.value("SHOW lock_timeout") == "0"
        session.execute("ROLLBACK")


@pytest.mark.parametrize("name", ["pgsub_level", "pgsub_number"])
def test_the_columns_of_a_partition_key_may_have_any_name(pair: MakePair, name: str) -> None:
    p = pair(RANGES.replace("k int", f"{name} int").replace("k)", f"{name})"), pub=ROOT)
    p.apply("INSERT INTO t VALUES (1, 1, 'a'), (2, 102, 'b')")
    p.subdb.execute("DELETE FROM t WHERE id = 1")
    p.apply("UPDATE t SET v = 'new' WHERE id = 1")
    assert [(one["conflict_type"], one["relname"]) for one in p.events()] == [("update_missing", "t_low")]


@pytest.mark.parametrize("change", ["UPDATE t SET k = k + 1 WHERE id = 1", "DELETE FROM t WHERE id = 1"])
def test_a_row_that_no_row_of_the_target_can_be_is_missing(pair: MakePair, change: str) -> None:
    """The planner knows that nothing is searched, and locks no partition."""
    tables = """
        CREATE TABLE t (id int, k int, v text) PARTITION BY RANGE (k);
        CREATE TABLE t_low PARTITION OF t FOR VALUES FROM (0) TO (100);
        CREATE TABLE t_high PARTITION OF t FOR VALUES FROM (100) TO (200);
        ALTER TABLE t REPLICA IDENTITY FULL; ALTER TABLE t_low REPLICA IDENTITY FULL;
        ALTER TABLE t_high REPLICA IDENTITY FULL"""
    p = pair(tables, pub="CREATE PUBLICATION p FOR TABLE t WITH (publish_via_partition_root)")
    p.apply("INSERT INTO t VALUES (1, 1, NULL), (2, 102, 'b')")
    p.subdb.execute("DELETE FROM t WHERE id = 1; ALTER TABLE t ALTER v SET NOT NULL")
    p.apply(change)
    (event,) = p.events()
    assert f"conflict={change[:6].lower()}_missing" in event["message"]


def test_a_transaction_of_many_tables_reaches_partitions_in_which_a_trigger_fires(pair: MakePair) -> None:
    names = [f"u{number}" for number in range(7)]  # what is asked for each is asked more often than psycopg's threshold
    plain = "".join(f"CREATE TABLE {name} (id int PRIMARY KEY, v text);" for name in names)
    trigger = (
        "CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NEW; END $$;"
        "CREATE TRIGGER fires BEFORE UPDATE ON t FOR EACH ROW EXECUTE FUNCTION f();"
        "ALTER TABLE t ENABLE ALWAYS TRIGGER fires"
    )
    p = pair(plain, pub=PLAIN, sub=f"{RANGES};{trigger}")
    p.apply("INSERT INTO t VALUES (1, 1, 'a'), (2, 200, 'b')")
    inserts = "; ".join(f"INSERT INTO {name} VALUES (1, 'new')" for name in names)
    updates = "; ".join(f"UPDATE t SET v = 'x' WHERE id = {id}" for id in (1, 2))
    p.apply(f"BEGIN; {inserts}; {updates}; UPDATE u0 SET v = 'y'; COMMIT")
    p.same("t", *names)
    assert p.events() == []


def test_a_row_whose_partition_is_detached_is_not_missing_though_the_table_is_itself_a_partition(
    pair: MakePair,
) -> None:
    above = (
        "CREATE TABLE top (id int, a int, b int, v text) PARTITION BY RANGE (a);"
        "CREATE TABLE t PARTITION OF top FOR VALUES FROM (0) TO (100) PARTITION BY LIST (b);"
        "CREATE TABLE t_1 PARTITION OF t FOR VALUES IN (1); ALTER TABLE t_1 ADD PRIMARY KEY (id);"
        "CREATE TABLE t_2 PARTITION OF t FOR VALUES IN (2); ALTER TABLE t_2 ADD PRIMARY KEY (id)"
    )
    plain = "CREATE TABLE t (id int PRIMARY KEY, a int, b int, v text); ALTER TABLE t REPLICA IDENTITY FULL"
    p = pair(pub=plain, sub=above)
    p.apply("INSERT INTO t VALUES (1, 7, 1, 'x'), (2, 7, 2, 'y')")
    p.subdb.execute("ALTER TABLE t DETACH PARTITION t_2")
    p.pubdb.execute("UPDATE t SET v = 'z' WHERE id = 2")
    with pytest.raises(ApplyError, match="no partition of relation"):
        p.catch_up()
    p.subdb.execute("ALTER TABLE t ATTACH PARTITION t_2 FOR VALUES IN (2)")
    p.apply()
    p.same("t")
    assert p.events() == []


@pytest.mark.parametrize("k", [10, 20])
def test_where_only_the_partitions_have_the_key_a_conflicting_row_keeps_columns_of_the_target(
    pair: MakePair, k: int
) -> None:
    p = pair(
        pub="CREATE TABLE t (id int PRIMARY KEY, k int, v text); ALTER TABLE t REPLICA IDENTITY FULL",
        sub="CREATE TABLE t (id int, k int, v text, mine int) PARTITION BY RANGE (k);"
        "CREATE TABLE low PARTITION OF t (PRIMARY KEY (id)) FOR VALUES FROM (0) TO (100);"
        "CREATE TABLE other PARTITION OF t (PRIMARY KEY (id)) DEFAULT; INSERT INTO t VALUES (1, 10, 'local', 42)",
        on_conflict=("insert_exists=apply_remote",),
    )
    p.apply(f"INSERT INTO t VALUES (1, {k}, 'remote')")
    assert p.subdb.rows("SELECT * FROM t") == [(1, k, "remote", 42)]
