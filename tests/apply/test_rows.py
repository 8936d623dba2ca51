"""INSERT, UPDATE, DELETE and TRUNCATE under every replica identity. Mirrors t/001_rep_changes.pl and t/100_bugs.pl."""

from __future__ import annotations

import pytest
from fix_pair import MakePair

from pgsub.apply.rows import statements_by_shape
from pgsub.apply.sets import writer
from pgsub.common.errors import ApplyError, SchemaFault
from pgsub.target.catalog.relation_map import RelationMap
from pgsub.target.sql import statements
from pgsub.target.sql.statement_builder import Statement

#: Longer than what a tuple keeps inline, and not compressible.
TOAST = "(SELECT string_agg(md5(g::text), '') FROM generate_series(1, 200) g)"
EXTERNAL = "ALTER TABLE t ALTER big SET STORAGE EXTERNAL"

IDENTITIES = {
    "default": "CREATE TABLE t (id int PRIMARY KEY, v text)",
    "index": "CREATE TABLE t (id int NOT NULL, v text); CREATE UNIQUE INDEX i ON t (id);"
    "ALTER TABLE t REPLICA IDENTITY USING INDEX i",
    "full": "CREATE TABLE t (id int, v text); ALTER TABLE t REPLICA IDENTITY FULL",
    "full with a key": "CREATE TABLE t (id int PRIMARY KEY, v text); ALTER TABLE t REPLICA IDENTITY FULL",
}


@pytest.mark.parametrize("identity", IDENTITIES)
@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
def test_changes_arrive_under_every_identity(pair: MakePair, identity: str, binary: bool) -> None:
    p = pair(IDENTITIES[identity], binary=binary)
    p.apply(
        "INSERT INTO t SELECT g, 'v' || g FROM generate_series(1, 10) g",
        "UPDATE t SET v = 'changed' WHERE id IN (2, 3)",
        "UPDATE t SET id = id + 100 WHERE id > 8",
        "DELETE FROM t WHERE id = 4",
        "UPDATE t SET v = NULL WHERE id = 5",
        "BEGIN; DELETE FROM t WHERE id = 6; INSERT INTO t VALUES (6, 'again'); COMMIT",
        "UPDATE t SET id = 106, v = 'both' WHERE id = 6",
        "UPDATE t SET v = 'from null' WHERE v IS NULL",
    )
    p.same("t")
    assert p.subdb.value("SELECT count(*) FROM t") == 9
    p.apply("TRUNCATE t")
    assert p.subdb.value("SELECT count(*) FROM t") == 0
    assert p.events() == []


def test_a_table_without_identity_takes_inserts_and_truncate(pair: MakePair) -> None:
    p = pair("CREATE TABLE t (a int, b text); ALTER TABLE t REPLICA IDENTITY NOTHING")
    p.apply("INSERT INTO t VALUES (1, 'x'), (1, 'x'), (NULL, NULL)")
    p.same("t")
    p.apply("TRUNCATE t", "INSERT INTO t VALUES (2, 'y')")
    p.same("t")


@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
def test_a_message_under_full_changes_exactly_one_of_equal_rows(pair: MakePair, binary: bool) -> None:
    p = pair("CREATE TABLE t (a int, b text); ALTER TABLE t REPLICA IDENTITY FULL", binary=binary)
    p.apply(
        "INSERT INTO t SELECT 1, 'same' FROM generate_series(1, 5); INSERT INTO t VALUES (NULL, NULL), (NULL, NULL)"
    )
    p.apply("DELETE FROM t WHERE ctid = (SELECT max(ctid) FROM t WHERE a = 1)")
    p.apply("UPDATE t SET b = 'one' WHERE ctid = (SELECT min(ctid) FROM t WHERE a = 1)")
    p.apply("UPDATE t SET b = 'was null' WHERE ctid = (SELECT min(ctid) FROM t WHERE a IS NULL)")
    p.same("t")
    p.apply("DELETE FROM t WHERE ctid = (SELECT min(ctid) FROM t WHERE a IS NULL AND b IS NULL)")
    p.same("t")
    assert p.subdb.value("SELECT count(*) FROM t") == 5


def test_null_the_empty_string_and_backslash_n_are_three_values(pair: MakePair) -> None:
    p = pair("CREATE TABLE t (id int PRIMARY KEY, v text)")
    values = r"(NULL), (''), ('\N'), ('\\N'), (E'a\tb\nc\rd\\.'), ('\.'), (E'\\x41'), ('null'), ('{}'), ('%s %(a)s')"
    insert = f"INSERT INTO t SELECT row_number() OVER () + (SELECT count(*) FROM t), v FROM (VALUES {values}) AS x(v)"
    p.apply(insert)  # one by one
    p.apply(f"DO $$ BEGIN FOR i IN 1..10 LOOP {insert}; END LOOP; END $$")  # by COPY
    p.same("t")
    assert p.subdb.value("SELECT count(*) FROM t WHERE v IS NULL") == 11
    assert p.subdb.value("SELECT count(*) FROM t WHERE v = ''") == 11


@pytest.mark.parametrize("identity", ["", "ALTER TABLE t REPLICA IDENTITY FULL"], ids=["default", "full"])
@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
def test_a_value_that_was_not_sent_again_stays(pair: MakePair, identity: str, binary: bool) -> None:
    p = pair(f"CREATE TABLE t (id int PRIMARY KEY, n int, big text); {EXTERNAL}; {identity}", binary=binary)
    p.apply(f"INSERT INTO t SELECT g, 0, {TOAST} || g FROM generate_series(1, 4) g")
    p.apply(
        "UPDATE t SET n = 1 WHERE id = 1", "UPDATE t SET id = 20 WHERE id = 2", "UPDATE t SET big = 'x' WHERE id = 3"
    )
    p.apply("BEGIN; UPDATE t SET id = 40, n = 4 WHERE id = 4; UPDATE t SET n = 5 WHERE id = 40; COMMIT")
    p.same("t")
    assert p.subdb.value("SELECT count(*) FROM t WHERE length(big) > 6000") == 3


def test_a_row_without_key_is_found_by_a_value_that_was_not_sent_again(pair: MakePair) -> None:
    p = pair(f"CREATE TABLE t (n int, big text); {EXTERNAL}; ALTER TABLE t REPLICA IDENTITY FULL")
    p.apply(f"INSERT INTO t SELECT g, {TOAST} || g FROM generate_series(1, 3) g")
    p.apply("UPDATE t SET n = 10 WHERE n = 1", "DELETE FROM t WHERE n = 2", "UPDATE t SET big = NULL WHERE n = 3")
    p.same("t")


def test_a_large_value_in_the_key_finds_its_row(pair: MakePair) -> None:
    # an external value in the key comes in a key tuple of its own even where the key does not change
    p = pair("CREATE TABLE t (big text PRIMARY KEY, n int); ALTER TABLE t ALTER big SET STORAGE EXTERNAL")
    p.apply("INSERT INTO t SELECT (SELECT string_agg(md5(g::text), '') FROM generate_series(1, 70) g), 1")
    p.apply("UPDATE t SET n = 2", "UPDATE t SET big = big || 'x'", "UPDATE t SET n = 3")
    p.same("t")
    assert p.subdb.rows("SELECT n, length(big) FROM t") == [(3, 2241)]


def test_keys_may_pass_through_each_other_in_one_transaction(pair: MakePair) -> None:
    p = pair("CREATE TABLE t (id int PRIMARY KEY, v text)")
    p.apply("INSERT INTO t VALUES (1, 'a'), (2, 'b'), (3, 'c')")
    p.apply(
        "BEGIN; UPDATE t SET id = -1 WHERE id = 1; UPDATE t SET id = 1 WHERE id = 2; UPDATE t SET id = 2 WHERE id = -1;"
        "DELETE FROM t WHERE id = 3; INSERT INTO t VALUES (3, 'd'); UPDATE t SET id = 4 WHERE id = 3; COMMIT"
    )
    p.same("t")


def test_truncate_takes_its_tables_together_and_nothing_else(pair: MakePair) -> None:
    p = pair(
        "CREATE TABLE a (id int PRIMARY KEY, n int GENERATED BY DEFAULT AS IDENTITY);"
        "CREATE TABLE b (id int PRIMARY KEY REFERENCES a); CREATE TABLE c (id int PRIMARY KEY)"
    )
    p.apply("INSERT INTO a VALUES (1, 1), (2, 2); INSERT INTO b VALUES (1); INSERT INTO c VALUES (1)")
    p.subdb.execute("SELECT setval('a_n_seq', 50)")
    p.apply("TRUNCATE a, b")
    assert [p.subdb.value(f"SELECT count(*) FROM {t}") for t in "abc"] == [0, 0, 1]
    assert p.subdb.value("SELECT last_value FROM a_n_seq") == 50
    p.apply("TRUNCATE a, b RESTART IDENTITY")
    assert p.subdb.value("SELECT last_value FROM a_n_seq") == 1


def test_truncate_cascade_of_the_publisher_never_cascades_here(pair: MakePair) -> None:
    p = pair(
        "CREATE TABLE a (id int PRIMARY KEY)", sub="CREATE TABLE mine (id int REFERENCES a)", names=[("public", "a")]
    )
    p.apply("INSERT INTO a VALUES (1)")
    p.subdb.execute("INSERT INTO mine VALUES (1)")
    p.pubdb.execute("TRUNCATE a CASCADE")
    with pytest.raises(Exception, match="referenced in a foreign key"):
        p.catch_up()
    assert p.subdb.value("SELECT count(*) FROM mine") == 1


def test_truncate_leaves_tables_that_are_not_subscribed(pair: MakePair) -> None:
    p = pair("CREATE TABLE a (id int); CREATE TABLE b (id int)", names=[("public", "a")])
    p.subdb.execute("INSERT INTO b VALUES (7)")
    p.apply("INSERT INTO a VALUES (1)", "TRUNCATE a, b")
    assert p.subdb.value("SELECT count(*) FROM a") == 0
    assert p.subdb.value("SELECT count(*) FROM b") == 1


def test_a_row_is_found_by_the_targets_own_key(pair: MakePair) -> None:
    # the publisher sends whole rows, the target has a key: two publisher rows may then meet in one (as on the server)
    p = pair(
        pub="CREATE TABLE t (id int, v text); ALTER TABLE t REPLICA IDENTITY FULL",
        sub="CREATE TABLE t (id int PRIMARY KEY, v text)",
    )
    p.apply("INSERT INTO t VALUES (1, 'a'), (2, 'b')")
    p.subdb.execute("UPDATE t SET v = 'changed here' WHERE id = 1")
    p.apply("UPDATE t SET v = 'c' WHERE id = 1")
    p.same("t")
    assert [event["conflict_type"] for event in p.events()] == ["update_origin_differs"]


def test_a_full_row_without_the_targets_whole_key_is_refused(pair: MakePair) -> None:
    # check_relation_updatable: else one message would change every row that shares the part that was sent
    p = pair(
        pub="CREATE TABLE t (id int, v text); ALTER TABLE t REPLICA IDENTITY FULL",
        sub="CREATE TABLE t (id int, v text, tenant int DEFAULT 1, PRIMARY KEY (id, tenant))",
    )
    p.apply("INSERT INTO t VALUES (1, 'a')")
    p.subdb.execute("INSERT INTO t VALUES (1, 'other', 2)")
    p.pubdb.execute("UPDATE t SET v = 'b'")
    with pytest.raises(SchemaFault, match="publisher did not send replica identity column expected") as caught:
        p.catch_up()
    assert caught.value.relation == "public.t" and caught.value.finish_lsn
    assert p.subdb.rows("SELECT id, v, tenant FROM t ORDER BY tenant") == [(1, "a", 1), (1, "other", 2)]


def test_a_deferrable_key_does_not_find_the_rows_of_a_publisher_that_sends_whole_ones(pair: MakePair) -> None:
    # such a key is not unique inside a transaction: RelationGetPrimaryKeyIndex leaves it out
    p = pair(
        "CREATE TABLE t (id int PRIMARY KEY DEFERRABLE INITIALLY DEFERRED, v text); ALTER TABLE t REPLICA IDENTITY FULL"
    )
    p.apply("INSERT INTO t VALUES (1, 'a'), (2, 'b'), (3, 'c')", "UPDATE t SET id = id + 1")
    p.same("t")


def test_columns_that_only_the_target_has_must_be_null_in_a_row_found_by_all_columns(pair: MakePair) -> None:
    p = pair(pub="CREATE TABLE t (a int); ALTER TABLE t REPLICA IDENTITY FULL", sub="CREATE TABLE t (a int, mine text)")
    p.apply("INSERT INTO t VALUES (1), (2)")
    p.subdb.execute("UPDATE t SET mine = 'x' WHERE a = 1")
    p.apply("UPDATE t SET a = a * 10")
    assert p.subdb.rows("SELECT a, mine FROM t ORDER BY a") == [(1, "x"), (20, None)]
    assert [event["conflict_type"] for event in p.events()] == ["update_missing"]


@pytest.mark.parametrize("kind", ["box", "json", "point", "path"])
def test_a_type_without_equality_is_named_rather_than_guessed(pair: MakePair, kind: str) -> None:
    # box has an operator = that compares areas: only operators of a default operator class count
    values = {
        "box": ("(1,1),(0,0)", "(6,6),(5,5)"),
        "json": ("1", "2"),
        "point": ("(1,1)", "(2,2)"),
        "path": ("[(0,0),(1,1)]", "[(5,5),(6,6)]"),
    }[kind]
    p = pair(f"CREATE TABLE t (v {kind}, n int); ALTER TABLE t REPLICA IDENTITY FULL")
    p.apply(
        f"INSERT INTO t VALUES ('{values[0]}', 1), ('{values[1]}', 2), (NULL, 3)", "UPDATE t SET n = 30 WHERE n = 3"
    )
    p.same("t", columns="v::text, n")
    p.pubdb.execute("DELETE FROM t WHERE n = 2")
    with pytest.raises(Exception, match=f"could not identify an equality operator for type {kind}") as caught:
        p.catch_up()
    assert caught.value.relation == "public.t"  # type: ignore[attr-defined]
    assert p.subdb.value("SELECT count(*) FROM t") == 3


def test_a_type_without_equality_does_no_harm_beside_a_key(pair: MakePair) -> None:
    p = pair("CREATE TABLE t (id int PRIMARY KEY, v json, w point); ALTER TABLE t REPLICA IDENTITY FULL")
    p.apply("INSERT INTO t VALUES (1, '{}', '(1,1)')", "UPDATE t SET v = '[]'", "UPDATE t SET id = 2")
    p.same("t", columns="id, v::text, w::text")


def test_equality_is_the_types_own(pair: MakePair) -> None:
    # of an extension in a schema off the search path, of a domain over its type, and of a float's not-a-number
    p = pair(
        "CREATE SCHEMA x; CREATE EXTENSION citext SCHEMA x; CREATE DOMAIN x.inner AS x.citext;"
        "CREATE DOMAIN x.word AS x.inner; CREATE TABLE t (v x.citext, w x.word, f float8);"
        "ALTER TABLE t REPLICA IDENTITY FULL"
    )
    p.apply("INSERT INTO t VALUES ('Word', 'Word', 'NaN'), ('other', 'other', '-0')")
    p.subdb.execute("UPDATE t SET v = 'wORD', w = 'WORD' WHERE f = 'NaN'; UPDATE t SET f = 0 WHERE f = '-0'")
    p.apply("UPDATE t SET f = 1 WHERE f = 'NaN'", "DELETE FROM t WHERE f = 0")
    kinds = [event["conflict_type"] for event in p.events()]
    assert kinds == ["update_origin_differs", "delete_origin_differs"]  # both were found
    assert p.subdb.rows("SELECT v::text, w::text, f FROM t") == [("Word", "Word", 1.0)]


_EXACTLY = """
CREATE SCHEMA x; CREATE EXTENSION citext; CREATE DOMAIN x.word AS citext;
CREATE FUNCTION x.same(citext, citext) RETURNS bool LANGUAGE sql IMMUTABLE AS 'SELECT $1::text = $2::text';
CREATE FUNCTION x.cmp(citext, citext) RETURNS int LANGUAGE sql IMMUTABLE AS 'SELECT bttextcmp($1::text, $2::text)';
CREATE OPERATOR x.= (LEFTARG = citext, RIGHTARG = citext, FUNCTION = x.same);
CREATE OPERATOR CLASS x.exact_ops FOR TYPE citext USING btree AS OPERATOR 3 x.=, FUNCTION 1 x.cmp(citext, citext);
"""


@pytest.mark.parametrize("kind", ["citext", "x.word"])
@pytest.mark.parametrize("ops", ["text_ops", "x.exact_ops"])
def test_rows_are_found_by_the_operators_of_the_keys_index(pair: MakePair, ops: str, kind: str) -> None:
    key = "CREATE UNIQUE INDEX k ON t (code {}); ALTER TABLE t REPLICA IDENTITY USING INDEX k"
    p = pair(
        pub=f"CREATE TABLE t (code text NOT NULL, v int); {key.format('')}",
        sub=f"{_EXACTLY} CREATE TABLE t (code {kind} NOT NULL, v int); {key.format(ops)}",
    )
    p.apply("INSERT INTO t VALUES ('Bob', 1), ('bob', 2), ('Al', 3), ('al', 4), ('Eve', 6), ('eve', 7)")
    p.subdb.execute("DELETE FROM t WHERE v IN (3, 7)")
    p.apply("DELETE FROM t WHERE code IN ('bob', 'eve')")
    p.apply("UPDATE t SET v = 5 WHERE code IN ('Al', 'al')")
    assert p.subdb.rows("SELECT code::text, v FROM t ORDER BY v") == [("Bob", 1), ("al", 5), ("Eve", 6)]
    assert [event["conflict_type"] for event in p.events()] == ["delete_missing", "update_missing"]


def test_a_period_that_only_overlaps_is_not_the_row_that_was_changed(pair: MakePair) -> None:
    table = "CREATE TABLE t (id int4range, valid daterange, v text, PRIMARY KEY (id, valid WITHOUT OVERLAPS))"
    p = pair(
        pub=f"{table}; INSERT INTO t VALUES ('[1,3)', '[2022-01-01,2024-01-01)', 'shorter')",
        sub=f"{table}; INSERT INTO t VALUES ('[1,3)', '[2020-01-01,2024-01-01)', 'longer')",
    )
    p.apply("UPDATE t SET v = 'changed'", "DELETE FROM t")
    assert p.subdb.rows("SELECT v FROM t") == [("longer",)]
    assert [event["conflict_type"] for event in p.events()] == ["update_missing", "delete_missing"]


_CI = "CREATE COLLATION ci (provider = icu, locale = 'und-u-ks-level2', deterministic = false);"


@pytest.mark.parametrize("target", ["17"], indirect=True)  # built with ICU
def test_rows_are_found_by_the_collation_of_the_keys_index(pair: MakePair) -> None:
    key = "CREATE UNIQUE INDEX k ON t (code {}); ALTER TABLE t REPLICA IDENTITY USING INDEX k"
    p = pair(
        pub=f"CREATE TABLE t (code text NOT NULL, v int); {key.format('')}",
        sub=f'{_CI} CREATE TABLE t (code text COLLATE ci NOT NULL, v int); {key.format("""COLLATE "C" """)}',
    )
    p.apply("INSERT INTO t VALUES ('Bob', 1), ('bob', 2), ('Al', 3), ('al', 4)")
    p.apply("DELETE FROM t WHERE code = 'bob'")
    p.apply("UPDATE t SET v = 5 WHERE code = 'al'")
    p.apply("UPDATE t SET code = 'BOB' WHERE code = 'Bob'")
    assert p.subdb.rows("SELECT code, v FROM t ORDER BY v") == [("BOB", 1), ("Al", 3), ("al", 5)]


@pytest.mark.long
def test_updates_share_a_statement_whatever_is_null_in_them(pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[bytes] = []
    original = statements.update

    def update(relation: RelationMap, kinds: bytes, old_kinds: bytes | None) -> Statement:
        built.append(kinds)
        return original(relation, kinds, old_kinds)

    monkeypatch.setattr(statements, "update", update)
    monkeypatch.setattr(writer, "PAYS_FROM", 10**9)
    columns = ", ".join(f"c{n} int" for n in range(8))
    p = pair(
        f"CREATE TABLE t (id int PRIMARY KEY, {columns}, big text); {EXTERNAL};"
        f"CREATE TABLE f (id int, {columns}); ALTER TABLE f REPLICA IDENTITY FULL"
    )
    nulls = ", ".join(f"c{n} = CASE WHEN id & {1 << n} > 0 THEN NULL ELSE id END" for n in range(8))
    p.apply(
        f"INSERT INTO t SELECT g FROM generate_series(1, 256) g; UPDATE t SET big = {TOAST};"
        "INSERT INTO f SELECT id FROM t",
        f"UPDATE t SET {nulls}, big = NULL WHERE id % 2 = 0",
        f"UPDATE t SET {nulls} WHERE id % 2 = 1",
    )
    assert len(built) == 2  # with the large value and without
    p.same("t")
    monkeypatch.setattr(statements_by_shape, "STATEMENTS", 20)
    p.apply(f"UPDATE f SET {nulls}", "UPDATE f SET c0 = 1", "DELETE FROM f WHERE id < 200")
    assert len(built) > 200
    p.same("f")
    assert p.events() == []


def test_a_table_that_grows_within_a_transaction_is_not_read_whole_for_each_row(pair: MakePair) -> None:
    p = pair("CREATE TABLE t (id int PRIMARY KEY, v text)")
    p.apply("INSERT INTO t VALUES (0, 'x')")
    p.subdb.execute("VACUUM ANALYZE t")  # known to be of one row
    p.apply(
        "UPDATE t SET v = 'y'; UPDATE t SET v = 'z'; UPDATE t SET v = 'a'; UPDATE t SET v = 'b'; UPDATE t SET v = 'c';"
        "UPDATE t SET v = 'd'; INSERT INTO t SELECT g, 'x' FROM generate_series(1, 3000) g;"
        "UPDATE t SET v = v || '!'; DELETE FROM t WHERE id % 2 = 0"
    )
    p.same("t")
    p.subdb.execute("SELECT pg_stat_force_next_flush()")
    read = "SELECT seq_tup_read < 100000 FROM pg_stat_user_tables WHERE relname = 't'"  # else nine million
    p.subdb.wait("SELECT n_tup_del > 0 FROM pg_stat_user_tables WHERE relname = 't'")
    assert p.subdb.value(read)


_WAITS = "SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"


@pytest.mark.parametrize("rows", [1, 60], ids=["row", "set"])
@pytest.mark.parametrize("kind", ["plain", "prepared", "trigger"])
@pytest.mark.usefixtures("commit_times")
def test_a_row_that_somebody_puts_in_the_place_of_another_meanwhile_is_not_missing(
    pair: MakePair, rows: int, kind: str
) -> None:
    prepared = kind == "prepared"
    options = {"two_phase": "p"} if prepared else {}
    p = pair("CREATE TABLE t (id int PRIMARY KEY, v text)", **options)
    if kind == "trigger":
        p.subdb.execute(
            "CREATE FUNCTION same() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';"
            "CREATE TRIGGER x BEFORE UPDATE ON t FOR EACH ROW EXECUTE FUNCTION same();"
            "ALTER TABLE t ENABLE ALWAYS TRIGGER x"
        )
    p.apply("INSERT INTO t SELECT g, 'old' FROM generate_series(1, 100) g")
    with p.subdb.connect() as other:
        other.execute("BEGIN")
        other.execute("DELETE FROM t WHERE id = 1")
        other.execute("INSERT INTO t VALUES (1, 'local')")
        end = "PREPARE TRANSACTION 'x'" if prepared else "COMMIT"
        p.pubdb.execute(f"BEGIN; UPDATE t SET v = 'new' WHERE id <= {rows}; {end}")
        task = p.start()
        p.until(_WAITS, task=task)
        other.execute("COMMIT")
    if prepared:
        p.pubdb.execute("COMMIT PREPARED 'x'")
    p.until("SELECT v = 'new' FROM t WHERE id = 1", task=task)
    p.stop(task)
    p.same("t")
    assert "update_missing" not in [event.get("conflict_type") for event in p.events()]


def test_of_equal_rows_the_other_is_taken_where_somebody_deletes_the_one(pair: MakePair) -> None:
    p = pair("CREATE TABLE t (v text); ALTER TABLE t REPLICA IDENTITY FULL")
    p.apply("INSERT INTO t VALUES ('a'), ('a'), ('b')")
    with p.subdb.connect() as other:
        other.execute("BEGIN")
        other.execute("DELETE FROM t WHERE ctid = (SELECT min(ctid) FROM t WHERE v = 'a')")
        p.pubdb.execute("DELETE FROM t WHERE ctid = (SELECT min(ctid) FROM t WHERE v = 'a')")
        task = p.start()
        p.until(_WAITS, task=task)
        other.execute("COMMIT")
    p.until("SELECT count(*) FROM t", value=1, task=task)
    p.stop(task)


@pytest.mark.parametrize("end", ["COMMIT", "PREPARE TRANSACTION 'x'; COMMIT PREPARED 'x'"])
def test_a_row_that_comes_later_in_a_transaction_whose_conflict_is_skipped_ends_the_skip_well(
    pair: MakePair, end: str
) -> None:
    p = pair("CREATE TABLE t (id int PRIMARY KEY, v text)", **({"two_phase": "p"} if "PREPARE" in end else {}))
    p.apply("INSERT INTO t SELECT g, 'old' FROM generate_series(1, 9) g")
    p.subdb.execute("DELETE FROM t WHERE id = 1; INSERT INTO t VALUES (100, 'in the way')")
    first, *then = end.split("; ")
    changes = "DELETE FROM t WHERE id = 1; INSERT INTO t VALUES (1, 'again'), (100, 'theirs')"
    for statement in (f"BEGIN; {changes}; {first}", *then):
        p.pubdb.execute(statement)
    with pytest.raises(ApplyError) as failure:
        p.catch_up()
    p.subdb.execute(
        "UPDATE pgsub.control SET skip_lsn = %s, skip_rows = 'conflicting' WHERE worker = 0", failure.value.finish_lsn
    )
    assert p.catch_up().outcome == "reached"
    assert p.subdb.rows("SELECT id, v FROM t WHERE id IN (1, 100) ORDER BY 1") == [(1, "again"), (100, "in the way")]


def test_a_row_that_is_missing_is_told_once_and_the_others_are_applied(pair: MakePair) -> None:
    p = pair("CREATE TABLE t (id int PRIMARY KEY, v text)")
    p.apply("INSERT INTO t SELECT g, 'old' FROM generate_series(1, 9) g")
    p.subdb.execute("DELETE FROM t WHERE id = 1")
    # the row that comes later in the transaction is another one
    p.apply("UPDATE t SET v = 'new'; DELETE FROM t WHERE id = 1; INSERT INTO t VALUES (1, 'again')")
    p.same("t")
    assert [event["conflict_type"] for event in p.events()] == ["update_missing", "delete_missing"]
