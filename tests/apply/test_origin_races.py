"""Rows that a local transaction writes while their change waits for its lock: a conflict, as without the wait.

Mirrors GetTupleTransactionInfo of the row that RelationFindReplTupleByIndex has locked (worker.c, execReplication.c).
"""

from __future__ import annotations

from typing import Any

import pytest
from fix_pair import MakePair, Pair

_WAITS = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
_WRITES = {
    "an update": ("UPDATE t SET v = 'local' WHERE id = 1",),
    "a deletion and an insertion": ("DELETE FROM t WHERE id = 1", "INSERT INTO t VALUES (1, 'local')"),
}
_LOCAL = {**_WRITES, "a deletion": ("DELETE FROM t WHERE id = 1",)}
_REMOTE = {"update": "UPDATE t SET v = 'remote'", "delete": "DELETE FROM t"}


def _race(
    pair: MakePair, rule: str | None, local: str, remote: str, rows: int = 1, **options: Any
) -> tuple[Pair, list[tuple[Any, Any]]]:
    """Apply changes, of which one waits for a local transaction, until a later one is there; return the conflicts."""
    p = pair("CREATE TABLE t (id int PRIMARY KEY, v text)", on_conflict=(rule,) if rule else (), **options)
    p.apply("INSERT INTO t SELECT g, 'old' FROM generate_series(1, 100) g")
    with p.subdb.connect() as other:
        other.execute("BEGIN")
        for statement in _LOCAL[local]:
            other.execute(statement.encode())
        p.pubdb.execute(f"{_REMOTE[remote]} WHERE id <= {rows}")
        task = p.start()
        p.until(_WAITS, value=1, task=task)
        other.execute("COMMIT")
    p.pubdb.execute("INSERT INTO t VALUES (999, 'later')")
    p.until("SELECT count(*) FROM t WHERE id = 999", value=1, task=task)
    p.stop(task)
    return p, [(one["conflict_type"], one["action"]) for one in p.events() if one["kind"] == "conflict"]


@pytest.mark.parametrize("local", _WRITES)
@pytest.mark.parametrize("remote", _REMOTE)
def test_a_row_that_a_local_transaction_writes_while_its_change_waits_stays_if_the_rule_says_so(
    pair: MakePair, local: str, remote: str
) -> None:
    p, conflicts = _race(pair, f"{remote}_origin_differs=keep_local", local, remote)
    assert p.subdb.rows("SELECT v FROM t WHERE id = 1") == [("local",)]
    assert conflicts == [(f"{remote}_origin_differs", "kept")]


def test_the_newer_of_two_writes_wins_though_the_older_one_waits_for_it(pair: MakePair) -> None:
    p, conflicts = _race(pair, "update_origin_differs=last_update_wins", "an update", "update")
    assert p.subdb.rows("SELECT v FROM t WHERE id = 1") == [("local",)]
    assert conflicts == [("update_origin_differs", "kept")]


def test_a_change_whose_row_a_local_transaction_deletes_meanwhile_is_missing(pair: MakePair) -> None:
    p, conflicts = _race(pair, "update_origin_differs=keep_local", "a deletion", "update")
    assert p.subdb.rows("SELECT v FROM t WHERE id = 1") == []
    assert [kind for kind, _ in conflicts] == ["update_missing"]


@pytest.mark.parametrize("rule", [None, "update_missing=keep_local"], ids=["no-rule", "another-rule"])
@pytest.mark.parametrize("rows", [1, 60], ids=["row", "set"])
@pytest.mark.parametrize("local", _WRITES)
@pytest.mark.parametrize("remote", _REMOTE)
def test_a_conflict_without_a_rule_is_recorded_though_it_appears_only_while_its_change_waits(
    pair: MakePair, local: str, remote: str, rows: int, rule: str | None
) -> None:
    p, conflicts = _race(pair, rule, local, remote, rows)
    assert [kind for kind, _ in conflicts] == [f"{remote}_origin_differs"]
    p.same("t")


@pytest.mark.parametrize("remote", _REMOTE)
def test_a_row_that_nobody_else_wrote_is_no_conflict_though_its_change_waits(pair: MakePair, remote: str) -> None:
    p = pair("CREATE TABLE t (id int PRIMARY KEY, v text)")
    p.apply("INSERT INTO t VALUES (1, 'old')")
    with p.subdb.connect() as other:
        other.execute("BEGIN; SELECT FROM t FOR UPDATE")
        p.pubdb.execute(_REMOTE[remote])
        task = p.start()
        p.until(_WAITS, value=1, task=task)
        other.execute("COMMIT")
    p.pubdb.execute("INSERT INTO t VALUES (999, 'later')")
    p.until("SELECT count(*) FROM t WHERE id = 999", value=1, task=task)
    p.stop(task)
    assert p.events() == []
    p.same("t")
