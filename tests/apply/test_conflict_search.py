"""Rows that stand in the way are found whatever the index is like, and what cannot be read does no harm."""

from __future__ import annotations

import pytest
from fix_pair import MakePair, Pair

from pgsub.common.errors import ApplyError


def _stopped(p: Pair, change: str) -> ApplyError:
    p.pubdb.execute(change)
    with pytest.raises(ApplyError) as caught:
        p.catch_up()
    assert caught.value.record is not None and caught.value.unique_failure is None
    return caught.value


ODD = '"s.%"."a ""b"""'


def test_odd_names_types_without_equality_and_keys_of_null_are_found(pair: MakePair) -> None:
    ddl = f"""
    CREATE SCHEMA "s.%"; CREATE TYPE mood AS ENUM ('ok', 'bad'); CREATE DOMAIN small AS int CHECK (value < 100);
    CREATE TABLE {ODD} (id small PRIMARY KEY, "x%s" json, m mood, b bool, n int)"""
    p = pair(ddl, sub=f'CREATE UNIQUE INDEX "n?" ON {ODD} (n, m) NULLS NOT DISTINCT')
    insert = f"INSERT INTO {ODD} VALUES (1, '{{\"a\": 1}}', 'ok', true, NULL)"
    p.subdb.execute(insert)
    error = _stopped(p, insert)
    assert error.conflict == "multiple_unique_conflicts" and error.record.index_name == 'a "b"_pkey, n?'
    assert (error.record.schemaname, error.record.relname, error.record.identical) == ("s.%", 'a "b"', True)
    assert error.record.local_conflicts[1]["key"] == "(n, m)=(null, ok)"
    row = {"id": "1", "x%s": '{"a": 1}', "m": "ok", "b": "t", "n": None}
    assert [one["row"] for one in error.record.local_conflicts] == [row, row]


def test_very_large_values_are_not_read(pair: MakePair) -> None:
    p = pair("CREATE TABLE t (id int PRIMARY KEY, v bytea); ALTER TABLE t ALTER v SET STORAGE EXTERNAL")
    large = "decode(repeat('ab', 200000), 'hex')"
    p.subdb.execute(f"INSERT INTO t VALUES (1, {large})")
    error = _stopped(p, f"INSERT INTO t VALUES (1, {large})")
    [there] = error.record.local_conflicts
    assert there["row"] == {"id": "1", "v": "(200000 bytes)"} and there["identical"]
    assert len(error.record.remote_tuple["v"]) < 5000 and len(error.detail or "") < 1000


def test_an_update_that_leaves_a_large_value_alone_is_compared_with_what_it_would_be(pair: MakePair) -> None:
    p = pair("CREATE TABLE t (id int PRIMARY KEY, k int UNIQUE, v text); ALTER TABLE t ALTER v SET STORAGE EXTERNAL")
    p.apply("INSERT INTO t VALUES (1, 1, repeat('long ', 1000))")
    p.subdb.execute("INSERT INTO t VALUES (2, 2, 'mine')")
    error = _stopped(p, "UPDATE t SET k = 2")
    assert (error.conflict, error.record.remote_tuple) == ("update_exists", {"id": "1", "k": "2"})
    assert "remote row (1, 2, long long" in (error.detail or "")


def test_a_default_that_nobody_knows_leaves_its_index_to_what_the_statement_said(pair: MakePair) -> None:
    p = pair("CREATE TABLE t (id int PRIMARY KEY)", sub="ALTER TABLE t ADD own int UNIQUE DEFAULT 7")
    p.subdb.execute("INSERT INTO t VALUES (1)")
    error = _stopped(p, "INSERT INTO t VALUES (2)")
    assert (error.conflict, error.record.index_name) == ("insert_exists", "t_own_key")
    assert [(one["key"], one["row"]) for one in error.record.local_conflicts] == [("(own)=(7)", None)]
    met = 'Key already exists in unique index "t_own_key"'
    assert error.detail in (
        f"{met}.\nKey (own)=(7); remote row (2, null).",
        f"Could not apply remote change: remote row (2, null).\n{met}: key (own)=(7).",  # from 19 on
    )


def test_a_row_of_the_same_transaction_is_gone_with_it_but_its_key_is_told(pair: MakePair) -> None:
    p = pair("CREATE TABLE t (id int PRIMARY KEY, k int)", sub="CREATE UNIQUE INDEX k ON t (k)")
    error = _stopped(p, "INSERT INTO t VALUES (1, 5), (2, 5)")
    assert [(one["index"], one["key"], one["row"]) for one in error.record.local_conflicts] == [("k", "(k)=(5)", None)]
    assert error.record.remote_tuple == {"id": "2", "k": "5"}


def test_a_row_that_the_transaction_had_removed_before_is_not_in_the_way(pair: MakePair) -> None:
    p = pair("CREATE TABLE t (id int PRIMARY KEY, k int)", sub="CREATE UNIQUE INDEX k ON t (k)")
    p.apply("INSERT INTO t VALUES (1, 5)")
    p.subdb.execute("INSERT INTO t VALUES (2, 6)")
    error = _stopped(p, "BEGIN; DELETE FROM t; INSERT INTO t VALUES (1, 6); COMMIT")
    assert (error.conflict, error.record.index_name) == ("insert_exists", "k")
    assert error.record.local_conflicts[0]["row"] == {"id": "2", "k": "6"}


def test_a_user_that_may_not_read_the_row_is_told_what_the_statement_said(pair: MakePair) -> None:
    p = pair("CREATE TABLE t (id int PRIMARY KEY, v text)")
    role = f"writer_{p.subid}"
    p.subdb.execute(f"INSERT INTO t VALUES (1, 'secret'); CREATE ROLE {role} LOGIN")
    try:
        p.subdb.execute(f"GRANT INSERT ON t TO {role}; GRANT USAGE ON SCHEMA pgsub TO {role}")
        p.subdb.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA pgsub TO {role}")
        p.set(target=p.subdb.conninfo.replace("user=postgres", f"user={role}"))
        error = _stopped(p, "INSERT INTO t VALUES (1, 'x')")
        assert error.conflict == "insert_exists" and "secret" not in str(error.record)
        assert 'unique index "t_pkey"' in (error.detail or "") and "--runbook" in (error.hint or "")
    finally:
        p.subdb.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_a_deferrable_constraint_is_no_conflict_in_the_servers_sense(pair: MakePair) -> None:
    p = pair(
        "CREATE TABLE t (id int PRIMARY KEY, k int)",
        sub="ALTER TABLE t ADD CONSTRAINT late UNIQUE (k) DEFERRABLE; INSERT INTO t VALUES (1, 5);"
        "UPDATE pg_trigger SET tgenabled = 'A' WHERE tgrelid = 't'::regclass",
    )
    p.pubdb.execute("INSERT INTO t VALUES (2, 5)")
    with pytest.raises(ApplyError, match="duplicate key value violates unique constraint") as caught:
        p.catch_up()
    assert (caught.value.conflict, caught.value.record, caught.value.sqlstate) == (None, None, "23505")


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ("(v)", ["v"]),
        ("(id, v)", ["id", "v"]),
        ("(v) WHERE id > 0", None),
        ("(lower(v))", None),
        ("(v, length(v))", None),
    ],
)
def test_columns_of_a_key_are_named_only_where_they_find_one_row(
    pair: MakePair, index: str, expected: list[str] | None
) -> None:
    value = 'x"status")=('
    p = pair("CREATE TABLE t (id int, v text, status text)", sub=f"CREATE UNIQUE INDEX i ON t {index}")
    p.subdb.execute("INSERT INTO t VALUES (1, %s, 'active')", value)
    error = _stopped(p, f"INSERT INTO t VALUES (1, '{value}', 'new')")
    assert [one["key_columns"] for one in error.record.local_conflicts] == [expected]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("interval", None),
        ("spans", None),
        ("span[]", None),
        ("priced", None),
        ("timestamptz", ["k"]),
        ("tstzrange", ["k"]),
        ("named", ["k"]),
    ],
)
def test_columns_whose_text_another_session_reads_as_another_value_are_not_named(
    pair: MakePair, kind: str, expected: list[str] | None
) -> None:
    kinds = (
        "CREATE DOMAIN span AS interval; CREATE TYPE spans AS RANGE (subtype = span);"
        "CREATE TYPE priced AS (name text, price money); CREATE TYPE named AS (name text, at date)"
    )
    values = {
        "interval": "-1 days +02:03:04",
        "spans": '["-1 days +02:03:04",)',
        "span[]": '{"-1 days +02:03:04"}',
        "priced": '(a,"$1,234.56")',
        "timestamptz": "2026-03-02 01:00+00",
        "tstzrange": '["2026-03-02 01:00+00",)',
        "named": "(a,2026-03-02)",
    }
    p = pair(f"{kinds}; CREATE TABLE t (k {kind} PRIMARY KEY, v text)")
    p.subdb.execute("INSERT INTO t VALUES (%s, 'here')", values[kind])
    error = _stopped(p, f"INSERT INTO t VALUES ('{values[kind]}', 'there')")
    assert [one["key_columns"] for one in error.record.local_conflicts] == [expected]
    assert error.record.local_conflicts[0]["row"]["v"] == "here"
