"""Rows that a local transaction replaces while their change waits for its lock: the change finds the new row.

Mirrors RelationFindReplTupleByIndex and RelationFindReplTupleSeq (execReplication.c), which lock the row that
they find, and search again if another transaction was faster. Triggers are asked afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from fix_pair import MakePair, Pair

_WAITS = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
_TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text)"
_KEYLESS = "CREATE TABLE t (id int, v text); ALTER TABLE t REPLICA IDENTITY FULL"
_FUNCTION = "CREATE FUNCTION same() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN coalesce(NEW, OLD); END';"
_TRIGGER = (
    "CREATE TRIGGER x {} UPDATE OR DELETE ON t FOR EACH ROW EXECUTE FUNCTION same();"
    "ALTER TABLE t ENABLE ALWAYS TRIGGER x"
)
_TRIGGERS = {"none": "", "after": _FUNCTION + _TRIGGER.format("AFTER"), "before": _FUNCTION + _TRIGGER.format("BEFORE")}
_REMOTE = {"update": "UPDATE t SET v = 'remote'", "delete": "DELETE FROM t"}
_REPLACED = ("DELETE FROM t WHERE id = 1", "INSERT INTO t VALUES (1, 'local')")


def _race(p: Pair, local: Sequence[str], remote: str) -> list[str]:
    """Apply a change that waits for a local transaction, and a later one; return the conflicts."""
    with p.subdb.connect() as other:
        other.execute("BEGIN")
        for statement in local:
            other.execute(statement.encode())
        p.pubdb.execute(remote)
        task = p.start()
        p.until(_WAITS, value=1, task=task)
        other.execute("COMMIT")
    p.pubdb.execute("INSERT INTO t VALUES (999, 'later')")
    p.until("SELECT count(*) FROM t WHERE id = 999", value=1, task=task)
    p.stop(task)
    return [event["conflict_type"] for event in p.events()]


@pytest.mark.usefixtures("commit_times")
@pytest.mark.parametrize("rows", [1, 60], ids=["row", "set"])
@pytest.mark.parametrize("remote", _REMOTE)
@pytest.mark.parametrize("triggers", _TRIGGERS)
def test_a_change_finds_the_row_that_a_local_transaction_put_in_the_place_of_its_own(
    pair: MakePair, triggers: str, remote: str, rows: int
) -> None:
    p = pair(_TABLE, sub=_TRIGGERS[triggers])
    p.apply("INSERT INTO t SELECT g, 'old' FROM generate_series(1, 100) g")
    conflicts = _race(p, _REPLACED, f"{_REMOTE[remote]} WHERE id <= {rows}")
    p.same("t")
    assert f"{remote}_missing" not in conflicts


@pytest.mark.usefixtures("commit_times")
@pytest.mark.parametrize("remote", _REMOTE)
@pytest.mark.parametrize("triggers", _TRIGGERS)
def test_of_equal_rows_a_change_finds_the_one_that_a_local_transaction_left(
    pair: MakePair, triggers: str, remote: str
) -> None:
    p = pair(_KEYLESS, sub=_TRIGGERS[triggers])
    p.apply("INSERT INTO t VALUES (1, 'a'), (1, 'a'), (2, 'b')")
    one = "WHERE ctid = (SELECT min(ctid) FROM t WHERE id = 1)"
    conflicts = _race(p, [f"UPDATE t SET v = 'local' {one}"], f"{_REMOTE[remote]} {one}")
    left = [("local",), ("remote",)] if remote == "update" else [("local",)]
    assert p.subdb.rows("SELECT v FROM t WHERE id = 1 ORDER BY v") == left
    assert f"{remote}_missing" not in conflicts


@pytest.mark.parametrize("triggers", ["after", "before"])
def test_a_row_that_a_local_transaction_deletes_while_its_deletion_waits_is_missing(
    pair: MakePair, triggers: str
) -> None:
    p = pair(_TABLE, sub=_TRIGGERS[triggers])
    p.apply("INSERT INTO t VALUES (1, 'old'), (2, 'old')")
    assert _race(p, _REPLACED[:1], f"{_REMOTE['delete']} WHERE id = 1") == ["delete_missing"]
    p.same("t")


@pytest.mark.parametrize("remote", _REMOTE)
def test_a_change_finds_the_row_that_took_the_place_of_its_own_in_a_partition(pair: MakePair, remote: str) -> None:
    parts = (
        "CREATE TABLE t (id int PRIMARY KEY, v text) PARTITION BY RANGE (id); CREATE TABLE t1 PARTITION OF t DEFAULT;"
    )
    p = pair(pub=_TABLE, sub=parts + _TRIGGERS["before"].replace(" t ", " t1 "))
    p.apply("INSERT INTO t VALUES (1, 'old'), (2, 'old')")
    conflicts = _race(p, _REPLACED, f"{_REMOTE[remote]} WHERE id = 1")
    p.same("t")
    assert f"{remote}_missing" not in conflicts


_KEYED = "CREATE TABLE t (id int, v text, region int DEFAULT 1, PRIMARY KEY (id, region))"
_REGIONS = f"""
{_KEYED} PARTITION BY LIST (region);
CREATE TABLE t1 PARTITION OF t FOR VALUES IN (1); CREATE TABLE t2 PARTITION OF t FOR VALUES IN (2)
"""
_MOVED = "UPDATE t SET region = 2 WHERE id = 1"


@pytest.mark.parametrize("rules", [(), ("update_missing=error", "delete_missing=error")], ids=["plain", "rules"])
@pytest.mark.parametrize("remote", _REMOTE)
def test_a_row_that_a_local_transaction_moves_to_another_partition_and_back_while_its_change_waits_is_found(
    pair: MakePair, remote: str, rules: tuple[str, ...]
) -> None:
    p = pair(pub=_KEYED, sub=_REGIONS, on_conflict=rules)
    p.apply("INSERT INTO t VALUES (1, 'old'), (2, 'old')")
    conflicts = _race(p, [_MOVED, "UPDATE t SET region = 1 WHERE id = 1"], f"{_REMOTE[remote]} WHERE id = 1")
    p.same("t")
    assert f"{remote}_missing" not in conflicts


def test_a_row_that_moved_to_another_partition_and_no_longer_has_its_key_is_missing(pair: MakePair) -> None:
    p = pair(pub=_KEYED, sub=_REGIONS)
    p.apply("INSERT INTO t VALUES (1, 'old')")
    assert _race(p, [_MOVED], _REMOTE["delete"]) == ["delete_missing"]
    assert p.subdb.rows("SELECT id, region FROM t ORDER BY id") == [(1, 2), (999, 1)]


def test_a_row_that_a_trigger_keeps_is_not_missing_though_its_deletion_waited(pair: MakePair) -> None:
    keeps = _FUNCTION.replace("coalesce(NEW, OLD)", "NULL") + _TRIGGER.format("BEFORE").replace("UPDATE OR ", "")
    p = pair(_TABLE, sub=keeps)
    p.apply("INSERT INTO t VALUES (1, 'old'), (2, 'old')")
    conflicts = _race(p, ["UPDATE t SET v = 'local' WHERE id = 1"], _REMOTE["delete"])
    assert p.subdb.rows("SELECT id, v FROM t ORDER BY id") == [(1, "local"), (2, "old"), (999, "later")]
    assert "delete_missing" not in conflicts
