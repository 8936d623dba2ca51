"""What a plain copy meets on the target is told as the server tells it, and recorded with both rows."""

from __future__ import annotations

from typing import Any

import pytest

from pgsub.common.errors import ApplyError
from pgsub.tablesync.copy import conflict, plan
from pgsub.target.sql import conflict_search

COMMA = "a, b"


def met(p: Any, *names: str) -> ApplyError:
    """The error of a copy."""
    with pytest.raises(ApplyError) as caught:
        p.sync(*(names or ["t"]))
    assert caught.value.conflict is None  # the server counts an error of synchronization, no conflict
    assert "duplicate key value violates unique constraint" in caught.value.message
    return caught.value


def both(pair: Any, ddl: str, theirs: str, ours: str, *, sub: str = "", **options: Any) -> Any:
    p = pair(ddl, sub=sub, state="i", **options)
    p.pubdb.execute(theirs)
    p.subdb.execute(ours)
    return p


@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
def test_a_copy_that_meets_a_row_is_recorded_with_both_rows(pair, binary):
    p = both(
        pair,
        "CREATE TABLE t (id int PRIMARY KEY, v text, local text DEFAULT 'ours')",
        "INSERT INTO t SELECT i, 'theirs' FROM generate_series(1, 3000) i",
        r"INSERT INTO t VALUES (2500, E'mine\t\\')",
        binary=binary,
    )
    error = met(p)
    record = error.record
    assert (error.message, error.detail) == (
        'could not copy the table to the target: duplicate key value violates unique constraint "t_pkey"',
        "Key (id)=(2500) already exists.",
    )
    assert record.message == 'conflict detected on relation "public.t": conflict=insert_exists'
    assert record.context == 'processing a copied row for replication target relation "public.t"'
    assert (record.key, record.index_name, record.identical) == ("(id)=(2500)", "t_pkey", False)
    assert record.remote_tuple == {"id": "2500", "v": "theirs", "local": "ours"}
    assert record.local_conflicts[0]["row"] == {"id": "2500", "v": "mine\t\\", "local": "ours"}
    assert p.subdb.value("SELECT count(*) FROM t") == 1 and p.events() == []


def test_a_row_that_is_there_already_is_recorded_as_identical(pair):
    row = "INSERT INTO t VALUES (1, 'same')"
    p = both(pair, "CREATE TABLE t (id int PRIMARY KEY, v text)", row, row)
    assert met(p).record.identical


def test_a_copied_row_that_several_rows_stand_in_the_way_of_is_recorded_with_all_of_them(pair):
    ddl = "CREATE TABLE t (id int PRIMARY KEY, u int UNIQUE)"
    p = both(pair, ddl, "INSERT INTO t VALUES (1, 10), (2, 20)", "INSERT INTO t VALUES (2, 200), (3, 20)")
    record = met(p).record
    assert record.conflict_type == "multiple_unique_conflicts"
    assert [one["index"] for one in record.local_conflicts] == ["t_pkey", "t_u_key"]


@pytest.mark.parametrize(
    ("columns", "index", "values"),
    [
        ("a text, b text", "(a, b)", f"('{COMMA}', 'c, d')"),
        ("a text, b int", "(b, lower(a), (b + 1))", "('X, Y', 7)"),
        ('"A ""b" text, b int', '("A ""b", b) NULLS NOT DISTINCT', "('x', NULL)"),
        ("a numeric, b date", "(a, b)", "(1.50, '2026-11-22')"),
        ("a int[], b text", "(a, b)", "('{1,2}', '(3, 4)')"),
    ],
    ids=["commas", "mixed", "null and quotes", "types", "arrays"],
)
def test_keys_of_every_kind_find_the_row_that_was_copied(pair, columns, index, values):
    ddl = f"CREATE TABLE t ({columns}, v text); CREATE UNIQUE INDEX one ON t {index}"
    row = f"INSERT INTO t VALUES {values[:-1]}, '%s')"
    filler = "INSERT INTO t (v) VALUES ('another')"
    p = both(pair, ddl, f"{filler}; {row % 'theirs'}", row % "mine")
    record = met(p).record
    assert record.index_name == "one"
    assert (record.remote_tuple["v"], record.local_conflicts[0]["row"]["v"]) == ("theirs", "mine")


def test_expressions_of_an_index_are_never_run_on_the_publisher(pair):
    function = "CREATE FUNCTION f(text) RETURNS text IMMUTABLE LANGUAGE plpgsql AS 'BEGIN RETURN lower($1); END'"
    p = both(pair, f"{function}; CREATE TABLE t (a text, b int)", "INSERT INTO t VALUES ('X', 1)", "")
    p.pubdb.execute(f"ALTER DATABASE {p.pubdb.name} SET track_functions = 'pl'")
    p.subdb.execute("CREATE UNIQUE INDEX one ON t (f(a)); INSERT INTO t VALUES ('x', 2)")
    record = met(p).record
    assert (record.index_name, record.key) == ("one", "(public.f(a))=(x)")
    assert not record.local_conflicts and not record.remote_tuple
    p.pubdb.close()  # which has pending figures, too
    assert not p.pubdb.value("SELECT pg_stat_get_function_calls('f(text)'::regprocedure)")


def test_a_row_of_a_partition_is_recorded_as_the_partitions(pair):
    ddl = (
        "CREATE TABLE t (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);"
        " CREATE TABLE low PARTITION OF t FOR VALUES FROM (0) TO (1000);"
        " CREATE TABLE high PARTITION OF t FOR VALUES FROM (1000) TO (9999)"
    )
    p = both(
        pair,
        ddl,
        "INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(1, 2000) i",
        "INSERT INTO t VALUES (1500, 'mine')",
        pub="CREATE PUBLICATION p FOR TABLE t WITH (publish_via_partition_root)",
    )
    record = met(p).record
    assert (record.schemaname, record.relname, record.key) == ("public", "high", "(id)=(1500)")
    assert record.remote_tuple["v"] == "x" * 100 and record.local_conflicts[0]["row"]["v"] == "mine"


@pytest.mark.parametrize("chunk", [64 << 20, 64 << 10], ids=["whole", "in chunks"])
def test_rows_of_the_publisher_that_meet_each_other_are_recorded_by_their_key(pair, monkeypatch, chunk):
    monkeypatch.setattr(plan, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(plan, "CHUNKED_FROM_BYTES", chunk)
    p = both(
        pair,
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT i, repeat('x', 100) || i FROM generate_series(1, 2000) i;"
        " INSERT INTO t VALUES (2001, 'twice'), (2002, 'twice')",
        "",
        sub="ALTER TABLE t ADD CONSTRAINT one UNIQUE (v)",
    )
    record = met(p).record
    assert (record.index_name, record.key, record.local_conflicts) == ("one", "(v)=(twice)", [])
    assert record.detail == 'Key already exists in unique index "one".\nKey (v)=(twice) already exists.'
    assert p.subdb.value("SELECT count(*) FROM t WHERE v = 'twice'") == 0  # one was tried alone, and fitted


def test_what_a_trigger_met_in_another_table_is_recorded_as_no_conflict(pair):
    log = (
        "CREATE TABLE log (v text PRIMARY KEY); INSERT INTO log VALUES ('x');"
        " CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS"
        " $$BEGIN INSERT INTO public.log VALUES (NEW.v); RETURN NEW; END$$;"
        " CREATE TRIGGER f BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION f();"
        " ALTER TABLE t ENABLE ALWAYS TRIGGER f"
    )
    ddl = "CREATE TABLE t (id int PRIMARY KEY, v text)"
    p = both(pair, ddl, "INSERT INTO t VALUES (1, 'x')", "", sub=log, names=[("public", "t")])
    assert met(p).record is None


def test_of_tables_that_are_copied_together_the_one_that_met_a_row_is_recorded(pair):
    ddl = "CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE u (id int PRIMARY KEY)"
    p = both(pair, ddl, "INSERT INTO t VALUES (1); INSERT INTO u VALUES (2)", "INSERT INTO u VALUES (2)")
    errors = p.try_sync(p.relid("t"), p.relid("u"))
    assert list(errors) == [p.relid("u")]
    assert errors[p.relid("u")].record.identical and p.state("t") in "fs"


def test_the_look_for_the_rows_is_bounded_and_its_failure_hides_nothing(pair, monkeypatch):
    monkeypatch.setattr(conflict_search, "TIMEOUT", 1)
    slow = "CREATE FUNCTION slow(int) RETURNS int IMMUTABLE LANGUAGE sql AS 'SELECT $1 FROM pg_catalog.pg_sleep(0.01)'"
    ddl = f"CREATE TABLE t (id int, v text); {slow}; CREATE UNIQUE INDEX one ON t (slow(id))"
    p = both(pair, ddl, "INSERT INTO t VALUES (1, 'theirs')", "INSERT INTO t VALUES (1, 'mine')")
    record = met(p).record
    assert (record.index_name, record.key, record.remote_tuple) == ("one", "(public.slow(id))=(1)", None)


@pytest.mark.parametrize(
    ("key", "names", "readings"),
    [
        ("(a)=(1, 2)", ["a"], [["1, 2"]]),
        ("(a, b)=(1, 2)", ["a", "b"], [["1", "2"]]),
        ("(a, b)=(x, y, z)", ["a", "b"], [["x", "y, z"], ["x, y", "z"]]),
        ("(a, b)=(1)", ["a", "b"], []),
        ("(other)=(1)", ["a"], []),
        ("", ["a"], []),
    ],
)
def test_a_key_is_read_in_every_way_that_its_commas_allow(key, names, readings):
    assert list(conflict._readings(key, names)) == readings


@pytest.mark.parametrize(("kind", "value"), [("spied[]", "{x}"), ("pairs", "(x,1)"), ("spied", "x")])
def test_the_owner_of_a_type_of_the_publisher_runs_nothing_when_a_copy_meets_a_row(pair, kind, value):
    types = (
        "CREATE FUNCTION spy(text) RETURNS boolean LANGUAGE plpgsql AS"
        " 'BEGIN RAISE LOG $$captured by %$$, current_user; RETURN true; END';"
        "CREATE DOMAIN spied AS text CHECK (public.spy(VALUE)); CREATE TYPE pairs AS (a spied, b int);"
    )
    row = f"INSERT INTO t (v) VALUES ('{value}')"
    p = both(pair, f"{types} CREATE TABLE t (id int, v {kind} UNIQUE)", row, row)
    log = p.pubdb.server.log
    before = log.stat().st_size
    record = met(p).record
    assert record.key == f"(v)=({value})" and record.remote_tuple is None
    assert "captured" not in log.read_bytes()[before:].decode(errors="replace")
