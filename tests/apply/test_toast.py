"""A large value that the publisher does not send again stays what it was, whatever else happens to its row."""

from __future__ import annotations

import contextlib

import pytest
from fix_pair import MakePair, Pair
from fix_servers import Database

from pgsub.apply.worker import feedback

BIG = "(SELECT string_agg(md5((g + {seed})::text), '') FROM generate_series(1, 200) g)"
EXTERNAL = "ALTER TABLE t ALTER big SET STORAGE EXTERNAL; ALTER TABLE t ALTER more SET STORAGE EXTERNAL"
COLUMNS = "id int, k int NOT NULL, n int, big text, more bytea"
TABLE = f"CREATE TABLE t ({COLUMNS}, PRIMARY KEY (id, k)); {EXTERNAL}"
PARTITIONED = (
    f"CREATE TABLE t ({COLUMNS}, PRIMARY KEY (id, k)) PARTITION BY RANGE (k); {EXTERNAL};"
    "CREATE TABLE t0 PARTITION OF t FOR VALUES FROM (0) TO (10); CREATE TABLE t1 PARTITION OF t DEFAULT;"
)
ROOT = "CREATE PUBLICATION p FOR TABLE t WITH (publish_via_partition_root)"
SHAPES = {
    "a plain table": (TABLE, "", TABLE),
    "a whole-row identity": (TABLE, "ALTER TABLE t REPLICA IDENTITY FULL", TABLE),
    "a target without key": (TABLE, "ALTER TABLE t REPLICA IDENTITY FULL", f"CREATE TABLE t ({COLUMNS})"),
    "a partitioned target": (TABLE, "", PARTITIONED),
    "partitions on both sides": (PARTITIONED, "", PARTITIONED),
    "a partitioned root": (PARTITIONED, ROOT, PARTITIONED),
    "a root to a plain table": (PARTITIONED, ROOT, TABLE),
    "an identity column": (
        TABLE,
        "",
        f"CREATE TABLE t ({COLUMNS.replace('n int,', 'n int GENERATED ALWAYS AS IDENTITY,')}, PRIMARY KEY (id, k))",
    ),
}


@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_value_that_is_not_sent_again_stays(pair: MakePair, shape: str, binary: bool) -> None:
    pub, more, sub = SHAPES[shape]
    p = pair(pub=f"{pub};{more}", sub=sub, binary=binary, streaming="on")
    big = BIG.format(seed="0")
    p.apply(
        f"INSERT INTO t SELECT i, i, i, {BIG.format(seed='i * 1000')}, {big}::bytea FROM generate_series(1, 12) i",
        "UPDATE t SET n = 100 WHERE id = 1",
        "UPDATE t SET id = 20 WHERE id = 2",  # its key
        "UPDATE t SET k = 50 WHERE id = 3",  # its partition
        "UPDATE t SET id = 40, k = 60, n = 4 WHERE id = 4",
        f"UPDATE t SET more = {BIG.format(seed='7')}::bytea WHERE id = 5",  # one of two
        "UPDATE t SET big = NULL WHERE id = 6",
        "UPDATE t SET big = 'short' WHERE id = 7",
        "DELETE FROM t WHERE id = 8",
        # all of it in one transaction, after the insert too
        f"BEGIN; INSERT INTO t VALUES (100, 5, 1, {big}, {big}::bytea); UPDATE t SET n = 2 WHERE id = 100;"
        "UPDATE t SET k = 70 WHERE id = 100; UPDATE t SET id = 101 WHERE id = 100; UPDATE t SET n = 3 WHERE id = 101;"
        f"UPDATE t SET big = big || 'x' WHERE id = 101; UPDATE t SET k = 6 WHERE id = 101; COMMIT",
        f"BEGIN; SAVEPOINT a; UPDATE t SET big = {BIG.format(seed='9')} WHERE id = 9; ROLLBACK TO a;"
        "UPDATE t SET n = 900 WHERE id = 9; SAVEPOINT b; UPDATE t SET k = 90 WHERE id = 9; RELEASE b; COMMIT",
        "BEGIN; UPDATE t SET id = -id WHERE id = 10; UPDATE t SET id = 10, k = 1 WHERE id = 11;"
        "UPDATE t SET id = 11 WHERE id = -10; COMMIT",
        "BEGIN; DELETE FROM t WHERE id = 12; INSERT INTO t VALUES (12, 12, 0, 'new', NULL); UPDATE t SET n = 1"
        " WHERE id = 12; COMMIT",
    )
    p.same("t", columns="id, k, n, big, more")
    assert p.subdb.value("SELECT count(*) FROM t WHERE length(big) >= 6400") == 9
    assert p.events() == []


def test_a_missing_row_is_not_made_of_the_values_that_came(pair: MakePair) -> None:
    p = pair(TABLE)
    p.apply(f"INSERT INTO t VALUES (1, 1, 1, {BIG.format(seed='0')}, NULL)")
    p.subdb.execute("DELETE FROM t")
    p.apply("UPDATE t SET n = 2", "UPDATE t SET id = 2")
    assert p.subdb.value("SELECT count(*) FROM t") == 0
    assert [event["conflict_type"] for event in p.events()] == ["update_missing"] * 2


@pytest.mark.parametrize("full", [False, True], ids=["key", "full"])
@pytest.mark.parametrize("many", [1, 80])
def test_two_databases_agree_about_a_large_value_that_the_winner_did_not_change_if_their_identity_is_full(
    subdb: Database, monkeypatch: pytest.MonkeyPatch, full: bool, many: int
) -> None:
    monkeypatch.setattr(feedback, "MIRROR_SECONDS", 0.0)
    rules = tuple(f"{kind}=last_update_wins" for kind in ("insert_exists", "update_origin_differs"))
    with contextlib.ExitStack() as stack:
        other = Database(subdb.server, f"{subdb.name}_other")
        stack.callback(other.drop)
        sides = (subdb, other)
        for side in sides:
            side.execute("CREATE TABLE t (id int PRIMARY KEY, n int, big text); CREATE PUBLICATION p FOR TABLE t")
            side.execute(f"ALTER TABLE t REPLICA IDENTITY {'FULL' if full else 'DEFAULT'}")
        pairs = [
            stack.enter_context(contextlib.closing(Pair(*both, origin="none", on_conflict=rules)))
            for both in (sides, sides[::-1])
        ]
        for pair in pairs:
            pair.subscribe("r", [("public", "t")])
        for n, side in enumerate(sides):
            side.execute(f"INSERT INTO t SELECT g, {n}, {BIG.format(seed=n * 1000)} FROM generate_series(1, {many}) g")
        subdb.execute("UPDATE t SET n = 7")
        for pair in (*pairs, *pairs):
            pair.catch_up()
        mine, theirs = (side.rows("SELECT id, n, md5(big) FROM t ORDER BY 1") for side in sides)
        assert (mine == theirs, [n for _, n, _ in theirs]) == (full, [7] * many)
        details = {e["detail"] for pair in pairs for e in pair.events() if e.get("action") == "applied"}
        assert {"left out unchanged large values: big stay" in detail for detail in details} == {not full}
