"""What the target checks and does by itself: constraints that the publisher's rows keep only together, and triggers.

Mirrors t/003_constraints.pl, and what t/001_rep_changes.pl leaves to chance.
"""

from __future__ import annotations

import pytest
from fix_pair import MakePair, foreign_keys_fire

from pgsub.apply.rows import insert_run
from pgsub.common.errors import ApplyError

#: A log of what fired, and the function that writes it.
FIRED = """
CREATE TABLE fired (n serial, name text, op text, id int);
CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_LEVEL = 'STATEMENT' THEN
        INSERT INTO public.fired (name, op) VALUES (TG_NAME, TG_OP);
    ELSE
        INSERT INTO public.fired (name, op, id) VALUES (TG_NAME, TG_OP, coalesce(NEW.id, OLD.id));
    END IF;
    RETURN CASE WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END;
END $$;
"""
TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text)"
MODES = ["batched", "transactional"]


def _trigger(name: str, when: str, enabled: str) -> str:
    return (
        f"CREATE TRIGGER {name} {when} ON t FOR EACH ROW EXECUTE FUNCTION note();"
        f"ALTER TABLE t ENABLE {enabled} TRIGGER {name};"
    )


def test_row_triggers_fire_where_they_are_enabled_for_a_replica_and_only_there(pair: MakePair) -> None:
    every = "BEFORE INSERT OR UPDATE OR DELETE"
    p = pair(
        TABLE,
        sub=FIRED
        + _trigger("plain", every, "")
        + _trigger("replica", every, "REPLICA")
        + _trigger("always", every.replace("BEFORE", "AFTER"), "ALWAYS")
        + _trigger("off", every, "").replace("ENABLE", "DISABLE"),
    )
    p.apply("INSERT INTO t VALUES (1, 'a')", "UPDATE t SET v = 'b'", "UPDATE t SET id = 2", "DELETE FROM t")
    fired = p.subdb.rows("SELECT name, op, id FROM fired ORDER BY n")
    expected = [("INSERT", 1), ("UPDATE", 1), ("UPDATE", 2), ("DELETE", 2)]
    assert fired == [(name, op, key) for op, key in expected for name in ("replica", "always")]


@pytest.mark.parametrize("rows", [1, insert_run.COPY_FROM], ids=["insert", "copy"])
def test_what_a_row_trigger_makes_of_a_row_stays(pair: MakePair, rows: int) -> None:
    p = pair(
        TABLE,
        sub="CREATE FUNCTION shout() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN NEW.v := upper(NEW.v); RETURN NEW; END $$;"
        "CREATE TRIGGER x BEFORE INSERT OR UPDATE OF v ON t FOR EACH ROW EXECUTE FUNCTION shout();"
        "ALTER TABLE t ENABLE ALWAYS TRIGGER x",
    )
    p.apply(
        f"INSERT INTO t SELECT g, 'inserted' FROM generate_series(1, {rows}) g", "UPDATE t SET v = 'set' WHERE id = 1"
    )
    assert p.subdb.value("SELECT count(*) FROM t WHERE v = 'INSERTED'") == rows - 1
    assert p.subdb.rows("SELECT v FROM t WHERE id = 1") == [("SET",)]


def test_a_row_that_a_trigger_keeps_as_it_is_is_no_missing_row(pair: MakePair) -> None:
    # the server finds the row first and asks the trigger then
    p = pair(
        TABLE,
        sub="CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;"
        "CREATE TRIGGER x BEFORE UPDATE OR DELETE ON t FOR EACH ROW WHEN (OLD.id < 3) EXECUTE FUNCTION no();"
        "ALTER TABLE t ENABLE REPLICA TRIGGER x",
    )
    p.apply("INSERT INTO t SELECT g, 'kept' FROM generate_series(1, 4) g", "UPDATE t SET v = 'new'")
    p.apply("UPDATE t SET id = id + 10 WHERE id IN (2, 4)", "DELETE FROM t WHERE id IN (1, 3)")
    assert p.subdb.rows("SELECT id, v FROM t ORDER BY id") == [(1, "kept"), (2, "kept"), (14, "new")]
    assert p.events() == []
    p.subdb.execute("DELETE FROM t WHERE id = 14")
    p.apply("DELETE FROM t WHERE id = 14")
    assert [event["conflict_type"] for event in p.events()] == ["delete_missing"]


def test_truncate_fires_its_triggers_once_for_each_table(pair: MakePair) -> None:
    p = pair(
        f"{TABLE}; CREATE TABLE u (id int)",
        sub=FIRED
        + "".join(
            f"CREATE TRIGGER x BEFORE TRUNCATE ON {t} FOR EACH STATEMENT EXECUTE FUNCTION note();"
            f"ALTER TABLE {t} ENABLE REPLICA TRIGGER x;"
            for t in "tu"
        ),
    )
    p.apply("INSERT INTO t VALUES (1, 'a'); INSERT INTO u VALUES (1)", "TRUNCATE t, u")
    assert p.subdb.rows("SELECT name, op FROM fired") == [("x", "TRUNCATE")] * 2
    p.same("t", "u")


def test_a_trigger_of_the_root_fires_for_rows_of_its_partitions(pair: MakePair) -> None:
    p = pair(
        pub=TABLE,
        sub="CREATE TABLE t (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);"
        "CREATE TABLE t0 PARTITION OF t FOR VALUES FROM (0) TO (10);"
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (10) TO (100);"
        + FIRED
        + _trigger("x", "AFTER INSERT OR UPDATE OR DELETE", "ALWAYS")
        + "ALTER TABLE t0 ENABLE ALWAYS TRIGGER x; ALTER TABLE t1 ENABLE ALWAYS TRIGGER x",
    )
    p.apply("INSERT INTO t VALUES (1, 'a')", "UPDATE t SET id = 11", "DELETE FROM t")
    assert p.subdb.rows("SELECT op, id FROM fired ORDER BY n") == [
        ("INSERT", 1),
        ("DELETE", 1),  # a row that moves leaves one partition and enters another
        ("INSERT", 11),
        ("DELETE", 11),
    ]
    p.same("t")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("initially", ["DEFERRED", "IMMEDIATE"])
def test_unique_values_may_be_swapped_where_they_are_not_checked_row_by_row(
    pair: MakePair, initially: str, mode: str
) -> None:
    # what checks them later is a trigger, and silent under session_replication_role = replica, as in the server
    p = pair(
        f"CREATE TABLE t (id int PRIMARY KEY, n int UNIQUE DEFERRABLE INITIALLY {initially}, v text)", apply_mode=mode
    )
    p.apply(
        "INSERT INTO t SELECT g, g FROM generate_series(1, 60) g",
        "UPDATE t SET n = 61 - n",
        "BEGIN; SET CONSTRAINTS ALL DEFERRED; UPDATE t SET n = 2 WHERE id = 1; INSERT INTO t VALUES (100, 1);"
        "DELETE FROM t WHERE n = 2 AND id <> 1; DELETE FROM t WHERE n = 1 AND id <> 100; COMMIT",
        "UPDATE t SET n = n % 59 + 1000",
    )
    p.same("t")


@pytest.mark.parametrize("mode", MODES)
def test_unique_values_may_be_swapped_over_a_third_one(pair: MakePair, mode: str) -> None:
    p = pair("CREATE TABLE t (id int PRIMARY KEY, code text NOT NULL UNIQUE, n int)", apply_mode=mode)
    p.apply(
        "INSERT INTO t VALUES (1, 'a', 0), (2, 'b', 0), (3, 'c', 0)",
        "BEGIN; UPDATE t SET code = '' WHERE id = 1; UPDATE t SET code = 'a' WHERE id = 2;"
        "UPDATE t SET code = 'b' WHERE id = 1; DELETE FROM t WHERE id = 3; INSERT INTO t VALUES (4, 'c', 1); COMMIT",
        "BEGIN; DELETE FROM t WHERE code = 'c'; UPDATE t SET code = 'c' WHERE id = 1;"
        "INSERT INTO t SELECT g, 'g' || g, g FROM generate_series(10, 80) g; UPDATE t SET code = 'b' WHERE id = 80;"
        "COMMIT",
        *[f"UPDATE t SET code = code || 'x' WHERE n % 3 = {n}" for n in range(3)],
    )
    p.same("t")


def test_partial_and_expression_indexes_let_through_what_they_let_through_on_the_publisher(pair: MakePair) -> None:
    p = pair(
        "CREATE TABLE t (id int PRIMARY KEY, owner int, active bool, name text);"
        "CREATE UNIQUE INDEX one_active ON t (owner) WHERE active;"
        "CREATE UNIQUE INDEX lower_name ON t (lower(name), owner) NULLS NOT DISTINCT"
    )
    p.apply(
        "INSERT INTO t SELECT g, g % 5, g <= 5, 'Name' || g FROM generate_series(1, 70) g",
        "BEGIN; UPDATE t SET active = false WHERE id = 1; UPDATE t SET active = true WHERE id = 6; COMMIT",
        "BEGIN; DELETE FROM t WHERE id = 6; INSERT INTO t VALUES (100, 1, true, 'NAME6'); COMMIT",
        "UPDATE t SET name = upper(name)",
        "UPDATE t SET name = NULL WHERE id = 2",
    )
    p.same("t")
    p.subdb.execute("INSERT INTO t VALUES (500, 9, true, 'x')")
    p.pubdb.execute("INSERT INTO t VALUES (501, 9, true, 'y')")
    with pytest.raises(ApplyError, match="conflict=insert_exists") as caught:
        p.catch_up()
    assert 'unique index "one_active"' in (caught.value.detail or "")
    p.subdb.execute("UPDATE t SET active = false WHERE id = 500")
    p.apply()
    p.subdb.execute("DELETE FROM t WHERE id = 500")
    p.same("t")


def test_exclusion_constraints_hold_and_name_the_row_that_breaks_them(pair: MakePair) -> None:
    p = pair(
        "CREATE TABLE t (id int PRIMARY KEY, during int4range NOT NULL, EXCLUDE USING gist (during WITH &&));"
        "CREATE TABLE later (id int PRIMARY KEY, during int4range,"
        " EXCLUDE USING gist (during WITH &&) DEFERRABLE INITIALLY DEFERRED)"
    )
    p.apply(
        "INSERT INTO t SELECT g, int4range(g * 10, g * 10 + 10) FROM generate_series(1, 60) g",
        "BEGIN; UPDATE t SET during = 'empty' WHERE id = 1; UPDATE t SET during = '[10,30)' WHERE id = 2;"
        "UPDATE t SET during = '[0,10)' WHERE id = 1; COMMIT",
        "INSERT INTO later SELECT * FROM t",
        "UPDATE later SET during = int4range(lower(during) + 5, upper(during) + 5)",
    )
    p.same("t", "later")
    p.subdb.execute("INSERT INTO t VALUES (500, '[10000,10010)')")
    p.pubdb.execute("INSERT INTO t VALUES (501, '[10005,10006)')")
    with pytest.raises(ApplyError, match="conflicting key value violates exclusion constraint") as caught:
        p.catch_up()
    assert caught.value.relation == "public.t" and caught.value.sqlstate == "23P01"
    p.subdb.execute("DELETE FROM t WHERE id = 500")
    p.apply()
    p.same("t", "later")


def test_foreign_keys_are_the_publishers_business(pair: MakePair) -> None:
    # session_replication_role = replica: a child may come before its parent, as when only some tables are subscribed
    p = pair(
        "CREATE TABLE parent (id int PRIMARY KEY);"
        "CREATE TABLE child (id int PRIMARY KEY, parent int REFERENCES parent ON DELETE CASCADE ON UPDATE CASCADE)",
        names=[("public", "child")],
    )
    p.apply(
        "INSERT INTO parent VALUES (1), (2), (3); INSERT INTO child SELECT g, 1 + g % 3 FROM generate_series(1, 60) g",
        "UPDATE parent SET id = 30 WHERE id = 3",
        "DELETE FROM parent WHERE id = 2",
    )
    p.same("child")
    assert p.subdb.value("SELECT count(*) FROM parent") == 0


@pytest.mark.parametrize("away", ["DELETE FROM parent WHERE id = 1", "UPDATE parent SET id = 2 WHERE id = 1"])
def test_a_foreign_key_that_is_enforced_acts_in_its_place_among_the_changes(pair: MakePair, away: str) -> None:
    p = pair(
        pub="CREATE TABLE parent (id int PRIMARY KEY); CREATE TABLE child (id int PRIMARY KEY, p int)",
        sub="CREATE TABLE parent (id int PRIMARY KEY);"
        "CREATE TABLE child (id int PRIMARY KEY, p int REFERENCES parent ON DELETE CASCADE ON UPDATE CASCADE)",
    )
    foreign_keys_fire(p.subdb)
    p.apply(
        "INSERT INTO parent VALUES (1), (7); INSERT INTO child VALUES (0, 7)",  # a description ends a set
        f"{away}; INSERT INTO parent VALUES (1); INSERT INTO child SELECT g, 1 FROM generate_series(1, 60) g",
    )
    p.same("parent", "child")


@pytest.mark.parametrize("keys", ["PRIMARY KEY (id), UNIQUE (ref)", "CONSTRAINT a UNIQUE (ref), PRIMARY KEY (id)"])
@pytest.mark.parametrize("action", ["CASCADE", "SET NULL"])
def test_a_foreign_key_that_acts_while_rows_are_deleted_takes_nothing_of_the_remote_row(
    pair: MakePair, action: str, keys: str
) -> None:
    first, second = keys.split("), ")
    p = pair(
        f"CREATE TABLE t (id int, ref text, parent int, v text, {first})); ALTER TABLE t ADD {second}",
        sub=f"ALTER TABLE t ADD FOREIGN KEY (parent) REFERENCES t ON DELETE {action}",
        on_conflict=("insert_exists=apply_remote", "multiple_unique_conflicts=apply_remote"),
    )
    foreign_keys_fire(p.subdb)
    p.subdb.execute("INSERT INTO t VALUES (1, 'x', NULL, 'local'), (2, 'y', 1, 'local')")
    p.apply("INSERT INTO t VALUES (2, 'x', NULL, 'remote')")
    p.same("t")
    assert [one["action"] for one in p.events() if one["kind"] == "conflict"] == ["applied"]


@pytest.mark.parametrize("change", ["INSERT INTO t VALUES (3, 10, 20, NULL)", "UPDATE t SET u = 10, w = 20"])
@pytest.mark.parametrize("action", ["CASCADE", "SET NULL"])
def test_of_several_rows_in_the_way_a_foreign_key_may_change_one_while_another_is_deleted(
    pair: MakePair, action: str, change: str
) -> None:
    p = pair(
        "CREATE TABLE t (id int PRIMARY KEY, u int UNIQUE, w int UNIQUE, parent int)",
        sub=f"ALTER TABLE t ADD FOREIGN KEY (parent) REFERENCES t ON DELETE {action}",
        on_conflict=("multiple_unique_conflicts=apply_remote",),
    )
    foreign_keys_fire(p.subdb)
    row = "INSERT INTO t VALUES (3, 3, 3, NULL)"
    if change.startswith("UPDATE"):
        p.apply(row)
    else:
        p.subdb.execute(row)
    p.subdb.execute("INSERT INTO t VALUES (1, 10, 1, NULL), (2, 2, 20, 1)")
    p.apply(change)
    p.same("t")
    assert [one["action"] for one in p.events() if one["kind"] == "conflict"] == ["applied"]


def test_a_row_in_the_way_that_a_trigger_keeps_stops_apply(pair: MakePair) -> None:
    p = pair(
        "CREATE TABLE t (id int PRIMARY KEY, u int UNIQUE, w int UNIQUE)",
        sub="CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';"
        "CREATE TRIGGER k BEFORE DELETE ON t FOR EACH ROW WHEN (OLD.id = 2) EXECUTE FUNCTION keep();"
        "ALTER TABLE t ENABLE ALWAYS TRIGGER k",
        on_conflict=("multiple_unique_conflicts=apply_remote", "insert_exists=apply_remote"),
    )
    p.subdb.execute("INSERT INTO t VALUES (1, 10, 1), (2, 2, 20), (3, 3, 3)")
    with pytest.raises(ApplyError) as met:
        p.apply("INSERT INTO t VALUES (3, 10, 20)")
    assert met.value.sqlstate == "23505"
    assert p.subdb.rows("SELECT id FROM t ORDER BY id") == [(1,), (2,), (3,)]


@pytest.mark.parametrize("rows", [10, 60])
def test_what_a_rule_or_a_trigger_does_depends_on_no_number_of_rows(pair: MakePair, rows: int) -> None:
    p = pair(
        pub="CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE u (id int PRIMARY KEY)",
        sub="""CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE u (id int PRIMARY KEY);
            CREATE TABLE told (id int); CREATE TABLE seen (count int);
            CREATE RULE tells AS ON INSERT TO t DO ALSO INSERT INTO told VALUES (NEW.id);
            ALTER TABLE t ENABLE ALWAYS RULE tells;
            CREATE FUNCTION count_all() RETURNS trigger LANGUAGE plpgsql AS
                'BEGIN INSERT INTO public.seen SELECT count(*) FROM public.u; RETURN NULL; END';
            CREATE TRIGGER counts AFTER INSERT ON u FOR EACH ROW EXECUTE FUNCTION count_all();
            ALTER TABLE u ENABLE ALWAYS TRIGGER counts""",
    )
    p.apply(f"INSERT INTO t SELECT generate_series(1, {rows}); INSERT INTO u SELECT generate_series(1, {rows})")
    p.same("t", "u")
    assert p.subdb.value("SELECT count(*) FROM told") == rows
    assert p.subdb.rows("SELECT count FROM seen ORDER BY 1") == [(n,) for n in range(1, rows + 1)]


def test_a_check_that_only_the_target_has_names_relation_and_transaction(pair: MakePair) -> None:
    p = pair(TABLE, sub="ALTER TABLE t ADD CHECK (v <> 'bad')")
    p.apply("INSERT INTO t VALUES (1, 'good')")
    p.pubdb.execute("INSERT INTO t SELECT g, CASE g WHEN 70 THEN 'bad' ELSE 'good' END FROM generate_series(10, 80) g")
    with pytest.raises(ApplyError, match="violates check constraint") as caught:
        p.catch_up()
    assert caught.value.relation == "public.t" and caught.value.sqlstate == "23514"
    assert p.subdb.value("SELECT count(*) FROM t") == 1
