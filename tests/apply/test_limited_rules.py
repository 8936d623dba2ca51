"""Rules with a limit: the next N rows that meet a conflict are left out and kept, then everything is as before."""

from __future__ import annotations

from typing import Any

import pytest
from apply.test_skip import finish_lsn
from fix_failpoints import At
from fix_pair import MakePair, Pair

from pgsub.common.conflict_rules import SKIP, Rule
from pgsub.common.errors import ApplyError, PgsubError
from pgsub.target.ledger import skip

TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE u (id int PRIMARY KEY)"


def rule(p: Pair, conflict: str, limit: int, table: str = "public.t") -> None:
    rules = [*skip.pending_rules(p.session, p.subid), Rule(table, conflict, SKIP, limit)]
    skip.set_rules(p.session, p.subid, rules)


def left(p: Pair) -> dict[str, int | None]:
    return {one.conflict: one.limit for one in skip.pending_rules(p.session, p.subid)}


def letters(p: Pair) -> list[dict[str, Any]]:
    return [body for (body,) in p.subdb.rows("SELECT body FROM pgsub.skipped_change ORDER BY id")]


def conflicts(p: Pair) -> list[tuple[str, str, bool]]:
    """Type, key and whether the log is spared."""
    found = [body for body in p.events() if body["kind"] == "conflict"]
    assert all(body["skipped_ref"] for body in found if body["quiet"])
    return [(body["conflict_type"], body["key"], body["quiet"]) for body in found]


def logged(p: Pair) -> list[str]:
    return [body["text"].replace("\n", " ") for body in p.events() if body["kind"] == "log"]


@pytest.mark.parametrize("streaming", ["off", "parallel"])
def test_rows_that_would_stop_apply_are_left_out_until_the_rule_is_used_up(pair: MakePair, streaming: str) -> None:
    p = pair(TABLE, streaming=streaming)
    if streaming != "off":
        p.pubdb.execute(f"ALTER DATABASE {p.pubdb.name} SET debug_logical_replication_streaming = immediate")
    p.subdb.execute("INSERT INTO t SELECT g, 'mine' FROM generate_series(1, 4) g")
    rule(p, "insert_exists", 3)
    rule(p, "insert_exists", 9, table="public.u")
    p.apply(
        "BEGIN; INSERT INTO t SELECT g, 'theirs' FROM generate_series(1, 2) g; INSERT INTO t VALUES (5, 'x'); COMMIT"
    )
    assert {one.table: one.limit for one in skip.pending_rules(p.session, p.subid)} == {"public.t": 1, "public.u": 9}
    assert [body["new"]["id"] for body in letters(p)] == ["1", "2"]
    assert logged(p)[-1].startswith('2 changes of relation "public.t" were skipped: conflict=insert_exists')
    assert logged(p)[-1].endswith("1 more will be.")
    with pytest.raises(ApplyError, match="insert_exists") as met:
        p.apply(
            "INSERT INTO t VALUES (3, 'theirs')",
            "BEGIN; INSERT INTO u VALUES (1); INSERT INTO t VALUES (4, 'y'); COMMIT",
        )
    assert met.value.record.key == "(id)=(4)" and left(p) == {"insert_exists": 9}
    assert logged(p)[-1].endswith("The limit of its rule is reached.")
    assert [body["new"]["id"] for body in letters(p)] == ["1", "2", "3"]
    assert p.subdb.rows("SELECT id FROM t WHERE v = 'mine' ORDER BY id") == [(1,), (2,), (3,), (4,)]
    assert p.subdb.rows("SELECT count(*) FROM u") == [(0,)]
    assert conflicts(p) == [("insert_exists", f"(id)=({number})", True) for number in (1, 2, 3)]


def test_changes_of_missing_rows_are_kept_and_the_log_is_told_once(pair: MakePair) -> None:
    p = pair(TABLE)
    p.apply("INSERT INTO t SELECT g, 'both' FROM generate_series(1, 500) g")
    p.subdb.execute("DELETE FROM t WHERE id <= 400")
    rule(p, "delete_missing", 100)
    rule(p, "update_missing", 150)
    p.apply(
        "UPDATE t SET v = 'newer' WHERE id <= 50",
        "BEGIN; UPDATE t SET v = 'newest' WHERE id > 450; DELETE FROM t WHERE id <= 103; COMMIT",
    )
    assert left(p) == {"update_missing": 100}
    found = conflicts(p)
    assert [kind for kind, _, quiet in found if quiet] == ["update_missing"] * 50 + ["delete_missing"] * 100
    assert [kind for kind, _, quiet in found if not quiet] == ["delete_missing"] * 3  # as without a rule
    kept = letters(p)
    assert [body["operation"] for body in kept] == ["UPDATE"] * 50 + ["DELETE"] * 100
    assert kept[0]["new"] == {"id": "1", "v": "newer"} and kept[50]["old"]["v"] is None
    assert p.subdb.value("SELECT count(*) FROM t WHERE v = 'newest'") == 50
    assert [text.split(" ")[0] for text in logged(p)] == ["50", "100"]


@pytest.mark.parametrize("point", ["apply.before_target_commit", "apply.after_target_commit"])
def test_a_crash_uses_the_rule_and_keeps_the_changes_or_neither(pair: MakePair, at: At, point: str) -> None:
    p = pair(TABLE)
    p.subdb.execute("INSERT INTO t VALUES (1, 'mine'), (2, 'mine')")
    rule(p, "insert_exists", 5)
    at(f"{point}=error")
    with pytest.raises(PgsubError, match="failpoint"):
        p.apply("INSERT INTO t VALUES (1, 'theirs'), (2, 'theirs'), (3, 'x')")
    at("")
    done = point == "apply.after_target_commit"
    assert (left(p), len(letters(p))) == (({"insert_exists": 3}, 2) if done else ({"insert_exists": 5}, 0))
    p.apply()
    assert (left(p), len(letters(p))) == ({"insert_exists": 3}, 2)
    assert p.subdb.rows("SELECT id, v FROM t ORDER BY id") == [(1, "mine"), (2, "mine"), (3, "x")]


def test_what_a_prepared_transaction_leaves_out_uses_the_rule_once(pair: MakePair) -> None:
    p = pair(TABLE, two_phase="p")
    p.subdb.execute("INSERT INTO t VALUES (1, 'mine')")
    rule(p, "insert_exists", 2)
    p.apply("BEGIN; INSERT INTO t VALUES (1, 'theirs'), (2, 'x'); PREPARE TRANSACTION 'f'")
    assert left(p) == {"insert_exists": 1} and letters(p) == []
    p.apply("COMMIT PREPARED 'f'")
    assert left(p) == {"insert_exists": 1} and len(letters(p)) == 1
    assert p.subdb.rows("SELECT id, v FROM t ORDER BY id") == [(1, "mine"), (2, "x")]


def test_the_limit_holds_for_the_whole_commit_where_a_part_of_it_is_skipped(pair: MakePair) -> None:
    p = pair(TABLE)
    p.subdb.execute("INSERT INTO t VALUES (1, 'mine'), (2, 'mine')")
    rule(p, "insert_exists", 1)
    p.pubdb.execute("INSERT INTO t VALUES (1, 'theirs')")
    lsn = finish_lsn(p, "INSERT INTO t VALUES (2, 'theirs'), (3, 'x')")
    skip.set_pending(p.session, p.subid, skip.of([lsn, lsn + 10_000_000], skip.CONFLICTING))
    p.apply()
    assert left(p) == {} and [body["skipped"] for body in letters(p)] == ["rule", "row"]
    assert p.subdb.rows("SELECT id, v FROM t ORDER BY id") == [(1, "mine"), (2, "mine"), (3, "x")]
