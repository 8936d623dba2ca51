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

TABLES, LEFT = 150, 50


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
