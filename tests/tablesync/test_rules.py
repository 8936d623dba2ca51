"""Rows that the target has already are dealt with by the same rules in the copy as in apply, and as safely."""

from __future__ import annotations

from typing import Any

import pytest

from pgsub.common import failpoints
from pgsub.common.errors import ApplyError, PgsubError
from pgsub.tablesync.copy import plan, row_by_row

TABLE = "CREATE TABLE t (id int PRIMARY KEY, u int UNIQUE, v text)"


def both(pair: Any, *rules: str, ddl: str = TABLE, sub: str = "", **options: Any) -> Any:
    return pair(ddl, sub=sub, state="i", on_conflict=rules, **options)


def rows(p: Any) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = p.subdb.rows("SELECT * FROM t ORDER BY 1")
    return found


def conflicts(p: Any) -> list[tuple[str, str]]:
    return [(body["conflict_type"], body["action"]) for body in p.events() if body["kind"] == "conflict"]


def test_a_copy_obeys_the_rules_and_records_what_it_did(pair):
    p = both(pair, "insert_exists=apply_remote", "multiple_unique_conflicts=skip", "identical=keep_local")
    p.pubdb.execute("INSERT INTO t SELECT i, i, 'theirs' FROM generate_series(1, 300) i")
    p.pubdb.execute(r"INSERT INTO t VALUES (301, NULL, E'tab\tback\\slash\nline'), (302, 302, NULL), (303, 303, '\N')")
    p.subdb.execute("INSERT INTO t VALUES (1, 1, 'theirs'), (2, 1000, 'mine'), (3, 3, 'mine'), (999, 999, 'local')")
    p.sync("t")
    expected = p.pubdb.rows("SELECT * FROM t WHERE id <> 3 ORDER BY 1")
    assert rows(p) == [*expected[:2], (3, 3, "mine"), *expected[2:], (999, 999, "local")]
    assert conflicts(p) == [
        ("multiple_unique_conflicts", "kept"),
        ("insert_exists", "applied"),
        ("multiple_unique_conflicts", "skipped"),
    ]
    [(body,)] = p.subdb.rows("SELECT body FROM pgsub.skipped_change")
    assert body["new"] == {"id": "3", "u": "3", "v": "theirs"}
    assert 'copied row for replication target relation "public.t"' in p.events()[0]["context"]
    p.apply("UPDATE t SET v = 'again'")
    assert p.subdb.value("SELECT count(*) FROM t WHERE v = 'again'") == 303


def test_a_conflict_without_a_rule_ends_the_copy_and_leaves_nothing(pair):
    p = both(pair, "identical=keep_local")
    p.pubdb.execute("INSERT INTO t VALUES (1, 1, 'theirs'), (2, 2, 'theirs')")
    p.subdb.execute("INSERT INTO t VALUES (1, 1, 'theirs'), (2, 20, 'mine')")
    with pytest.raises(ApplyError) as met:
        p.sync("t")
    error = met.value
    assert (error.conflict, error.relation, error.xid) == ("insert_exists", "public.t", None)
    assert (error.context or "").startswith('synchronizing table "public.t"')
    assert rows(p) == [(1, 1, "theirs"), (2, 20, "mine")]
    assert p.events() == []
    p.set(on_conflict=("identical=keep_local", "insert_exists=keep_local"))
    p.sync("t")
    assert rows(p) == [(1, 1, "theirs"), (2, 20, "mine")]


@pytest.mark.parametrize("point", ["copy.middle", "copy.before_commit", "copy.after_commit"])
def test_a_copy_with_rules_that_is_cut_anywhere_is_made_once(pair, monkeypatch, point):
    p = both(pair, "insert_exists=keep_local")
    p.pubdb.execute("INSERT INTO t SELECT i, i, 'theirs' FROM generate_series(1, 100) i")
    p.subdb.execute("INSERT INTO t VALUES (7, 1007, 'mine')")
    armed = [True]

    def cut(name: str) -> None:
        if name == point and armed:
            armed.clear()
            raise PgsubError("cut")

    monkeypatch.setattr(failpoints, "point", cut)
    with pytest.raises(PgsubError, match="cut"):
        p.sync("t")
    p.sync("t")
    assert p.state("t") == "s"
    assert p.subdb.value("SELECT count(*) FROM t") == 100
    assert p.subdb.value("SELECT v FROM t WHERE id = 7") == "mine"
    assert conflicts(p) == [("insert_exists", "kept")]


@pytest.mark.long
def test_a_large_table_with_rules_is_copied_as_a_whole_and_anew_where_that_fails(pair, monkeypatch, at):
    monkeypatch.setattr(plan, "CHUNK_BYTES", 64 << 10)
    monkeypatch.setattr(plan, "CHUNKED_FROM_BYTES", 64 << 10)
    # found empty, but the publisher's own rows are in each other's way
    p = both(pair, "insert_exists=apply_remote", sub="ALTER TABLE t ADD CONSTRAINT one UNIQUE (v)")
    p.pubdb.execute("INSERT INTO t SELECT i, i, repeat('x', 100) || i % 1000 FROM generate_series(1, 2000) i")
    at("copy.before_commit=error@1")
    p.sync("t")
    [(count, different)] = p.subdb.rows("SELECT count(*), count(DISTINCT v) FROM t")
    assert count == different == 1000
    assert p.subdb.value("SELECT copy_mode FROM pgsub.subscription_rel WHERE subid = %s", p.subid) == "atomic"
    assert conflicts(p) == [("insert_exists", "applied")] * 1000


def test_a_copied_row_is_older_than_every_change_that_follows_whenever_its_copy_committed(pair, at):
    newest = ("insert_exists", "update_exists", "update_origin_differs", "delete_origin_differs")
    p = both(pair, *(f"{kind}=last_update_wins" for kind in newest))
    p.pubdb.execute("INSERT INTO t VALUES (1, 1, 'theirs'), (2, 2, 'theirs'), (3, 3, 'theirs')")
    at("sync.before_slot=error")
    with pytest.raises(PgsubError):
        p.sync("t")
    p.sync("t")
    p.apply("UPDATE t SET v = 'later' WHERE id = 1", "DELETE FROM t WHERE id = 2", "UPDATE t SET id = 4 WHERE id = 3")
    p.same("t")
    assert conflicts(p) == []


def test_a_publisher_without_times_does_not_win_against_a_row_with_one(pair):
    p = both(pair, "insert_exists=last_update_wins")
    p.subdb.execute("INSERT INTO t VALUES (1, 10, 'mine')")
    p.pubdb.execute("INSERT INTO t VALUES (1, 11, 'theirs'), (2, 2, 'theirs')")
    p.sync("t")
    # this publisher does not know its times: what is known to be local stays
    assert rows(p) == [(1, 10, "mine"), (2, 2, "theirs")]


def test_a_row_of_a_copy_is_read_as_the_server_writes_it(pubdb):
    pubdb.execute("CREATE TABLE t (a text, b bytea, c text[])")
    values = ("\b\f\n\r\t\v\\ \\N é", b"\x00\\\xff", ["a\tb", None, "\\N"])
    pubdb.execute("INSERT INTO t VALUES (%s, %s, %s), (NULL, '', '{}')", *values)
    with pubdb.connect() as connection, connection.cursor() as cursor, cursor.copy("COPY t TO STDOUT") as copy:
        lines = [bytes(line) for line in copy]
    read = [[row_by_row._value(field) for field in line[:-1].split(b"\t")] for line in lines]
    texts = pubdb.rows("SELECT a::text, b::text, c::text FROM t")
    assert read == [[None if v is None else v.encode() for v in row] for row in texts]
