"""A target with as few replication origins as a server has by default: none is free, or only some are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import pytest
from embedded import Server
from fix_pair import Pair
from fix_servers import Database

from pgsub.apply.worker import feedback
from pgsub.common.errors import Directive, TargetUnavailable
from pgsub.tablesync.copy import plan
from pgsub.target.session import origins

if TYPE_CHECKING:
    Make = Callable[..., Pair]

TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text)"


@pytest.fixture(scope="module")
def ten() -> Iterator[Server]:
    """A target as PostgreSQL comes; before 18 replication slots are counted."""
    limits = {"max_active_replication_origins": 10, "track_commit_timestamp": True}
    with Server(fast=True, settings=limits) as server:
        yield server


@pytest.fixture
def few(pubdb: Database, ten: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """``few(free, table, **options)``: a pair whose target has so many origins left."""
    monkeypatch.setattr(feedback, "MIRROR_SECONDS", 0.0)
    with ExitStack() as stack:

        def make(left: int, state: str = "r", sub: str = "", **options: Any) -> Pair:
            database = Database(ten, f"few_{len(ten.folder.name)}_{id(options)}")
            stack.callback(database.drop)
            pubdb.execute(f"{TABLE}; CREATE PUBLICATION p FOR TABLE t")
            database.execute(f"{TABLE};{sub}")
            number = 0
            while (origins.free(database.connection) or 0) > left:
                number += 1
                with closing(database.connect()) as session:
                    session.execute("SELECT pg_replication_origin_create(%s)", (f"taken{number}",))
                    session.execute("SELECT pg_replication_origin_session_setup(%s)", (f"taken{number}",))
            pair = Pair(pubdb, database, **options)
            stack.callback(pair.close)
            return pair.subscribe(state, [("public", "t")])

        yield make


@pytest.mark.parametrize(
    ("sub", "origin"),
    [("", "none"), ("CREATE PUBLICATION mine FOR TABLE t", "any")],
    ids=["origin-none", "published-on"],
)
def test_apply_does_not_go_on_untagged_where_somebody_tells_its_rows_by_their_origin(
    few: Make, sub: str, origin: str
) -> None:
    p = few(0, sub=sub, origin=origin)
    p.pubdb.execute("INSERT INTO t VALUES (1, 'x')")
    with pytest.raises(TargetUnavailable, match="could not find free replication state slot") as caught:
        p.catch_up()
    assert caught.value.directive is Directive.RETRY and "max_active_replication_origins" in (caught.value.hint or "")
    assert p.subdb.rows("SELECT * FROM t") == []
    p.subdb.rows("SELECT pg_replication_origin_drop('taken1')")
    assert p.catch_up().outcome == "reached"
    assert p.subdb.value("SELECT roident > 0 FROM t, pg_xact_commit_timestamp_origin(t.xmin)")


def test_a_copy_does_not_go_on_untagged_either(few: Make) -> None:
    p = few(0, state="i", origin="none")
    p.pubdb.execute("INSERT INTO t VALUES (1, 'x')")
    with pytest.raises(TargetUnavailable, match="could not find free replication state slot"):
        p.sync("t")
    assert p.subdb.rows("SELECT * FROM t") == []


def test_where_nobody_asks_apply_goes_on_and_the_log_says_so(few: Make) -> None:
    p = few(0)
    p.apply("INSERT INTO t VALUES (1, 'x')")
    assert p.subdb.rows("SELECT id, roident FROM t, pg_xact_commit_timestamp_origin(t.xmin)") == [(1, 0)]
    [said] = p.events()
    assert said["level"] == "WARNING" and said["text"].startswith("no replication origin is free on the target")


def test_a_copy_in_chunks_leaves_origins_to_others(few: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tasks are fewer; the table is copied all the same, and every row carries the subscription's origin."""
    monkeypatch.setattr(plan, "CHUNK_BYTES", 20_000)
    monkeypatch.setattr(plan, "CHUNKED_FROM_BYTES", 20_000)
    p = few(origins.LEFT_TO_OTHERS + 1, state="i", origin="none", copy_workers=4)
    p.pubdb.execute("INSERT INTO t SELECT g, repeat('x', 100) FROM generate_series(1, 2000) g; ANALYZE t")
    p.sync("t")
    p.same("t")
    assert p.subdb.value("SELECT count(*) FROM pgsub.copy_chunk WHERE subid = %s", p.subid) == 0
    assert origins.free(p.subdb.connection) == origins.LEFT_TO_OTHERS
    tagged = "SELECT bool_and((pg_xact_commit_timestamp_origin(xmin)).roident > 0) FROM t"
    assert p.subdb.value(tagged)
