"""What is too much for the target at once goes in smaller parts: the same batch would fail again for ever."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING

import psycopg
import pytest
from fix_pair import Pair

from pgsub.apply.worker import feedback

if TYPE_CHECKING:
    from fix_servers import Pair as Servers

TABLES, PARTITIONS, LEFT = 150, 400, 50


@pytest.mark.long
def test_a_batch_that_needs_more_locks_than_there_are_goes_in_smaller_ones(
    own_pair: Callable[..., Servers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feedback, "MIRROR_SECONDS", 0.0)
    servers = own_pair(target={"max_locks_per_transaction": 10, "max_connections": 20})
    pubdb, subdb = servers.pubdb, servers.subdb
    for database in (pubdb, subdb):
        database.execute("; ".join(f"CREATE TABLE t{number} (id int PRIMARY KEY)" for number in range(TABLES)))
    pubdb.execute("CREATE PUBLICATION p FOR ALL TABLES")
    p = Pair(pubdb, subdb).subscribe("r", None)
    for number in range(TABLES):
        pubdb.execute(f"INSERT INTO t{number} VALUES (1)")
    with closing(subdb.connect()) as session:
        with pytest.raises(psycopg.errors.OutOfMemory):
            session.execute("SELECT count(pg_advisory_lock(g)) FROM generate_series(1, 100000) g")
        session.execute("SELECT pg_advisory_unlock(objid::bigint) FROM pg_locks WHERE objid BETWEEN 1 AND %s", (LEFT,))
        assert p.catch_up().outcome == "reached"
    p.same(*(f"t{number}" for number in range(TABLES)))
    p.close()


@pytest.mark.long
def test_a_missing_row_of_a_table_with_more_partitions_than_there_are_locks_is_recorded(
    own_pair: Callable[..., Servers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feedback, "MIRROR_SECONDS", 0.0)
    servers = own_pair(target={"max_locks_per_transaction": 10, "max_connections": 20})
    pubdb, subdb = servers.pubdb, servers.subdb
    pubdb.execute("CREATE TABLE t (id int PRIMARY KEY, v int); CREATE PUBLICATION p FOR ALL TABLES")
    subdb.execute("CREATE TABLE t (id int PRIMARY KEY, v int) PARTITION BY LIST (id)")
    for number in range(PARTITIONS):
        subdb.execute(f"CREATE TABLE t{number} PARTITION OF t FOR VALUES IN ({number})")
    p = Pair(pubdb, subdb).subscribe("r", None)
    p.apply(f"INSERT INTO t SELECT g, 0 FROM generate_series(0, {PARTITIONS - 1}) g")
    subdb.execute("DELETE FROM t7 WHERE id = 7")
    with closing(subdb.connect()) as session:
        with pytest.raises(psycopg.errors.OutOfMemory):
            session.execute("SELECT count(pg_advisory_lock(g)) FROM generate_series(1, 100000) g")
        session.execute(
            "SELECT pg_advisory_unlock(objid::bigint) FROM pg_locks WHERE objid BETWEEN 1 AND %s", (2 * LEFT,)
        )
        p.apply("UPDATE t SET v = 1 WHERE id = 7", "UPDATE t SET v = 1 WHERE id = 8")
    p.same("(SELECT * FROM t WHERE id <> 7)")
    assert [(one["conflict_type"], one["relname"]) for one in p.events()] == [("update_missing", "t7")]
    p.close()
