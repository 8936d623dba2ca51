"""Whose rows are whose: targets that are not empty, attempts that failed beside local writers, publishers that rewrite.

A failed attempt of a chunked copy removes exactly its own rows, whatever else happens in the table.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from fix_pair import MakePair

from pgsub import failpoints
from pgsub.errors import PublisherUnavailable
from pgsub.tablesync import plan

TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text)"
ROWS = "INSERT INTO t SELECT g, md5(g::text) FROM generate_series(1, 3000) g"
At = Callable[[str], None]


@pytest.fixture(autouse=True)
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of some blocks."""
    monkeypatch.setattr(plan, "CHUNK_BYTES", 50_000)
    monkeypatch.setattr(plan, "CHUNKED_FROM_BYTES", 50_000)


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> At:
    """Actions at failpoints, each counted from here."""

    def set_(actions: str) -> None:
        monkeypatch.setattr(failpoints, "_counts", {})
        monkeypatch.setenv("PGSUB_FAILPOINTS", actions)

    return set_


@pytest.mark.publishers
def test_a_table_that_is_rewritten_between_its_chunks_is_copied_anew(pair: MakePair, at: At, tmp_path: Path) -> None:
    p = pair(TABLE, pub=ROWS, state="i", copy_workers=1)
    p.pubdb.execute("DELETE FROM t WHERE id <= 1500")  # VACUUM FULL moves the others into blocks that are done
    release = tmp_path / "release"
    at(f"copy.middle=pause:{release}@2;copy.before_commit=error@2")  # the task that reads the table ends
    syncing = p.submit("sync", lambda name: p.sync(name), ["t"])
    p.until("SELECT count(xid) = 1 FROM pgsub.copy_chunk")
    with closing(p.pubdb.connect()) as session:
        rewriting = p.submit("rewrite", session.execute, ["VACUUM FULL t"])
        p.pubdb.wait("SELECT count(*) = 1 FROM pg_locks WHERE relation = 't'::regclass AND NOT granted")
        release.touch()
        with pytest.raises(PublisherUnavailable, match="was rewritten on the publisher"):
            syncing.result()
        rewriting.result()
    p.sync("t")
    assert p.subdb.rows("SELECT copy_mode, attempt FROM pgsub.subscription_rel") == [("chunked", 2)]
    p.apply()
    p.same("t")


def test_a_root_whose_partitions_may_not_be_read_by_themselves_is_copied_whole(pair: MakePair) -> None:
    partitioned = (
        "CREATE TABLE t (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);"
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (9999)"
    )
    p = pair(
        partitioned,
        pub=f"{ROWS}; CREATE PUBLICATION p FOR TABLE t WITH (publish_via_partition_root)",
        state="i",
    )
    role, owner = f"reader_{p.subid}", p.sub.connection
    p.pubdb.execute(f"CREATE ROLE {role} LOGIN REPLICATION; GRANT SELECT ON t TO {role}")
    try:
        p.set(connection=p.pubdb.server.conninfo(p.pubdb.name, role))
        p.sync("t")
        p.set(connection=owner)
    finally:
        p.pubdb.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
    p.same("t")
    assert p.subdb.value("SELECT copy_mode FROM pgsub.subscription_rel") == "atomic"
