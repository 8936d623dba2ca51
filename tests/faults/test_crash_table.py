"""The server's table of crash outcomes (tablesync.c's NOTES), row by row and for everybody who can crash.

A row names where a table's synchronization is cut, what the ledger says then, and whether the rows are copied again.
``process``: launcher and workers die by kill -9 at that point. ``publisher``, ``target``: that server crashes while
they are there. Kills of JVM and python workers under Spark are in test_kill_sync.py, those of apply in test_kill_apply.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import patience
import pytest
from fix_faults import Child, until
from fix_pair import Pair
from fix_servers import Database
from fix_servers import Pair as ServerPair
from thorough import thorough

from pgsub.apply.worker import feedback, worker
from pgsub.common import failpoints
from pgsub.common.errors import Directive, PgsubError
from pgsub.tablesync import copy_pool
from pgsub.tablesync.copy import plan

TABLES = "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE u (id int PRIMARY KEY, v text)"
ROWS = (
    "INSERT INTO t SELECT g, md5(g::text) FROM generate_series(1, 3000) g;"
    "INSERT INTO u SELECT g, md5(g::text) FROM generate_series(1, 500) g"
)
_numbers = itertools.count(1)


ALL = ("process", "publisher", "target")


@dataclass(frozen=True)
class Row:
    """One row of the table.

    :ivar point: failpoint at which the crash happens, with ``@n`` the n-th time; empty: before anything was done.
    :ivar state: what the ledger says afterwards.
    :ivar again: whether the next attempt copies the rows again.
    :ivar passed: apply is ahead of the table's snapshot, so the sync worker has to catch up.
    :ivar together: t and u share a slot and a snapshot.
    :ivar shares: and both catch up from it, not t alone.
    :ivar broken: some chunks are there since an attempt before.
    :ivar adopt: the target has rows, which are compared, and what differs is brought.
    :ivar slots: how many sync slots there are afterwards.
    :ivar victims: whose crash makes a difference here.
    """

    what: str
    point: str
    state: str
    again: bool
    passed: bool = False
    together: bool = False
    shares: bool = False
    atomic: bool = False
    broken: bool = False
    adopt: bool = False
    slots: tuple[int, ...] = (1,)
    victims: tuple[str, ...] = ("process", *thorough(("publisher", "target")))


TABLE = (
    Row("i, nothing done", "", "i", True, slots=(0,), victims=("publisher", "target")),
    Row("d, before the slot", "sync.before_slot", "d", True, slots=(0,)),
    Row("d, before the copy", "sync.after_slot", "d", True),
    Row("d, in the middle of a copy", "copy.middle", "d", True, atomic=True, victims=ALL),
    Row("d, before the copy's commit", "copy.before_commit", "d", True, atomic=True, victims=("process", "target")),
    Row("d, some chunks committed", "copy.before_commit@3", "d", True),
    Row("d, a copy that goes on is compared", "resume.compared", "d", True, broken=True, victims=ALL),
    Row("d, rows of it are removed", "resume.before_commit", "d", True, broken=True, victims=ALL),
    Row("d, some rows of it are removed", "resume.after_commit", "d", True, broken=True, victims=ALL),
    Row("d, all of them are removed", "resume.removed", "d", True, broken=True, victims=ALL),
    Row("d, rows of it are added", "resume.before_commit@4", "d", True, broken=True, victims=ALL),
    Row("d, some rows of it are added", "resume.after_commit@4", "d", True, broken=True, victims=ALL),
    Row("d, the rest of it is copied", "copy.before_commit@2", "d", True, broken=True, victims=ALL),
    Row("d, rows that differ are brought", "adopt.before_commit", "d", False, adopt=True, victims=ALL),
    Row("d, some of them were brought", "adopt.after_commit", "d", False, adopt=True, victims=ALL),
    Row("d, all of them were brought", "adopt.compared", "d", False, adopt=True, victims=ALL),
    Row("f, copy committed", "copy.after_commit", "f", False, atomic=True, victims=("process", "target")),
    Row("f, several tables copied together", "sync.after_f", "f", False, together=True, victims=("process", "target")),
    Row(
        "f, one of them passed by apply", "sync.before_separation", "f", False, passed=True, together=True, victims=ALL
    ),
    Row("f, with a slot of its own", "sync.after_separation", "f", False, passed=True, together=True, slots=(2,)),
    Row("w, before s", "sync.before_s", "f", False, victims=("process", "target")),
    Row("c, where it changes hands is fixed", "sync.after_claim", "f", False, passed=True),
    Row("c, changes applied", "apply.after_target_commit", "f", False, passed=True, victims=ALL),
    Row(
        "c, changes of tables that share a slot applied",
        "apply.after_target_commit",
        "f",
        False,
        passed=True,
        together=True,
        shares=True,
        victims=ALL,
    ),
    Row("s, slot not dropped", "sync.after_s", "s", False, victims=("process", "target")),
    Row("s, after catching up", "sync.before_slot_drop", "s", False, passed=True),
)


@pytest.fixture
def subscribed(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, crash_servers: Callable[[], ServerPair]
) -> Iterator[Callable[[str, Row], Pair]]:
    """Makes the subscription of a row between servers that may crash."""
    made: list[Pair] = []
    monkeypatch.setattr(feedback, "MIRROR_SECONDS", 0.0)

    def make(victim: str, row: Row) -> Pair:
        if victim == "process":
            pubdb, subdb = request.getfixturevalue("pubdb"), request.getfixturevalue("subdb")
        else:
            name, servers = f"row{next(_numbers)}", crash_servers()
            pubdb, subdb = Database(servers.publisher, name), Database(servers.target, name)
            request.addfinalizer(pubdb.drop)
            request.addfinalizer(subdb.drop)
        pubdb.execute(f"{TABLES}; {ROWS}; CREATE PUBLICATION p FOR ALL TABLES")
        subdb.execute(TABLES)
        made.append(Pair(pubdb, subdb, copy_atomic=row.atomic, copy_workers=1))
        return made[-1].subscribe("i", None)

    yield make
    for one in made:
        one.close()


def _foreign_slots(p: Pair) -> list[str]:
    """Slots that look like ours and are not: another group, target or subscription, a user, the server."""
    relid = p.relid("t")
    names = [
        f"pgsub_{p.subid}_sync_g7_1",
        f"pgsub_{p.subid}_sync_{relid}_2",
        f"pgsub_{p.subid + 1}_sync_{relid}_1",
        f"pgsub_{p.subid}_sync_{relid}_1x",
        f"pg_{p.subid}_sync_{relid}_1",
    ]
    for name in names:
        p.pubdb.value("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", name)
    return sorted(names)


def _slots(p: Pair) -> list[str]:
    query = "SELECT slot_name::text FROM pg_replication_slots WHERE database = current_database() AND slot_name <> %s"
    return sorted(name for (name,) in p.pubdb.rows(query, p.sub.slot_name))


_OPEN = (
    "SELECT count(*) FROM pgsub.subscription_rel WHERE srrelid = ANY (%s)"
    " AND (srsubstate NOT IN ('s', 'r') OR sync_slot IS NOT NULL OR spare_slot IS NOT NULL)"
)


def _until_done(p: Pair, relids: tuple[int, ...]) -> None:
    """Try again as the launcher does: for as long as errors say that it helps, each table alone after the first try."""
    deadline = time.monotonic() + patience.SECONDS
    tries = [relids, *([(relid,) for relid in relids] * 50)]
    for some in tries:
        if not p.subdb.value(_OPEN, list(relids)):
            return
        try:
            for error in p.try_sync(*some).values():
                raise error
        except PgsubError as error:
            if error.directive is not Directive.RETRY or time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    raise AssertionError(p.subdb.rows("SELECT relname, srsubstate, sync_slot FROM pgsub.subscription_rel"))


def _reconnect(p: Pair) -> None:
    """The test's own session may have died with the target."""
    fresh = Pair(p.pubdb, p.subdb)
    p.session.close()
    p.session = fresh.session


def _marks(row: Row, victim: str) -> list[pytest.MarkDecorator]:
    """A process that is killed stands for the servers too, a whole copy for one that goes on, a commit for others."""
    stands_for_others = not (row.broken or row.adopt) and (not row.passed or row.point == "apply.after_target_commit")
    return [] if victim == "process" and stands_for_others else [pytest.mark.long]


@pytest.mark.parametrize(
    ("row", "victim"),
    [
        pytest.param(row, victim, id=f"{row.what}-{victim}", marks=_marks(row, victim))
        for row in TABLE
        for victim in row.victims
    ],
)
def test_a_crash_leaves_what_the_table_says_and_the_next_attempt_ends_well(
    subscribed: Callable[[str, Row], Pair],
    child: Callable[..., Child],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    row: Row,
    victim: str,
) -> None:
    monkeypatch.setenv("PGSUB_CHUNK_BYTES", "50000")  # of the child
    monkeypatch.setattr(plan, "CHUNK_BYTES", 50_000)
    monkeypatch.setattr(plan, "CHUNKED_FROM_BYTES", 50_000)
    p = subscribed(victim, row)
    foreign = _foreign_slots(p)
    relids = (p.relid("t"), p.relid("u")) if row.together else (p.relid("t"),)
    if row.passed:
        _copied_and_passed(p, relids, monkeypatch)
        relids = relids if row.shares else relids[:1]
    if row.broken:
        _broken_off(p, monkeypatch)
    if row.adopt:
        _filled(p)
    before = _rows_as_copied(p) if row.passed else None

    _crash(p, child, row, victim, relids, tmp_path)
    states = p.subdb.rows("SELECT srsubstate::text FROM pgsub.subscription_rel WHERE srrelid = ANY (%s)", list(relids))
    assert {state for (state,) in states} <= {row.state, "s" if victim != "process" else row.state}, states
    ours = set(_slots(p)) - set(foreign)
    assert len(ours) in row.slots or victim != "process", ours
    before = before or _rows_as_copied(p)

    _until_done(p, (p.relid("t"), p.relid("u")) if row.together else relids)
    if not row.again and row.point != "apply.after_target_commit":
        after = _rows_as_copied(p)
        assert before and before == {key: after.get(key) for key in before}  # what is copied is never copied again
    if not row.together:
        p.sync("u")
    p.apply("INSERT INTO t VALUES (9000, 'streamed'); DELETE FROM u WHERE id = 4; UPDATE t SET v = 'x' WHERE id = 77")
    p.same("t", "u")
    assert _slots(p) == foreign
    assert p.subdb.value("SELECT count(*) FROM pgsub.copy_chunk") == 0
    # each row that differed once, however often it was tried
    assert p.subdb.value("SELECT adopted::text FROM pgsub.subscription_rel WHERE relname = 't'") == (
        "{2598,3,2}" if row.adopt else None
    )
    replaced = [one["key"] for one in p.events() if one.get("action") == "repaired"]
    assert len(set(replaced)) == len(replaced) == 5 * row.adopt
    assert row.adopt or p.events() == []  # row 77 of those that are adopted is nobody's but the target's


def _copied_and_passed(p: Pair, relids: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """State ``f``, and apply beyond what the slot has: the rows of t that changed wait for the sync worker."""
    monkeypatch.setattr(failpoints, "_counts", {})
    monkeypatch.setenv("PGSUB_FAILPOINTS", "sync.after_f=error")
    with pytest.raises(PgsubError, match="failpoint"):
        p.try_sync(*relids)
    monkeypatch.delenv("PGSUB_FAILPOINTS")
    monkeypatch.setattr(worker, "CLAIM_PATIENCE", 0.0)
    for v in "xy":
        p.apply(f"UPDATE t SET v = v || '{v}' WHERE id > 1500; UPDATE u SET v = '{v}' WHERE id > 100")


def _broken_off(p: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some chunks of t are there, of which rows went, came and moved meanwhile."""
    monkeypatch.setattr(copy_pool, "TRIES", 1)
    monkeypatch.setattr(failpoints, "_counts", {})
    monkeypatch.setenv("PGSUB_FAILPOINTS", "copy.before_commit=error@4")
    with pytest.raises(PgsubError, match="failpoint"):
        p.sync("t")
    monkeypatch.delenv("PGSUB_FAILPOINTS")
    p.pubdb.execute("DELETE FROM t WHERE id IN (1, 2, 3, 700, 701, 702, 1200, 1201, 1202)")
    p.pubdb.execute("VACUUM t")
    for number in range(5001, 5010):
        p.pubdb.execute(f"INSERT INTO t VALUES ({number}, 'new')")


def _filled(p: Pair) -> None:
    """The target has some rows of t, some of them other ones: more than are brought in one transaction."""
    p.subdb.execute(
        "INSERT INTO t SELECT g, md5(g::text) FROM generate_series(1, 400) g;"
        "INSERT INTO t VALUES (1600, 'other'), (1700, 'other'), (8001, 'extra'), (8002, 'extra'), (8003, 'extra')"
    )
    p.subdb.execute("UPDATE pgsub.subscription_rel SET adopt = true, keep = 100 WHERE relname = 't'")


def _rows_as_copied(p: Pair) -> dict[int, str]:
    """The transactions that wrote those rows which no change touches."""
    rows = p.subdb.rows("SELECT id, xmin::text FROM t WHERE id < 1500 AND id <> 77")
    return dict(rows)


def _crash(p: Pair, child: Callable[..., Child], row: Row, victim: str, relids: tuple[int, ...], folder: Path) -> None:
    point, _, nth = row.point.partition("@")
    release = folder / "release"
    action = ("kill" if victim == "process" else f"pause:{release}") + (f"@{nth}" if nth else "")
    if point:
        running = child("tests.crash_tasks:synchronize", (p.sub, relids), {point: action})
        until(lambda: (folder / point).exists() or running.process.poll() is not None, f"{point} is not reached")
        assert (folder / point).exists(), running.outcome()
    if victim == "process":
        assert running.process.wait(patience.SECONDS) == -9
        return
    server = p.pubdb.server if victim == "publisher" else p.subdb.server
    server.stop("immediate")
    server.start()
    if victim == "target":
        _reconnect(p)
    if point:
        release.touch()
        running.outcome()  # what it made of it; the ledger tells what was done
