"""One point: what the target's snapshot holds is what the publisher's does, whatever is written meanwhile."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import psycopg
import pytest
from fix_engine import Task
from fix_failpoints import At
from fix_pair import MakePair, Pair, elsewhere
from fix_transaction_kinds import KINDS
from thorough import long
from verified import point_of, repaired, results

from pgsub.apply.worker import held_release
from pgsub.common.errors import PgsubError, ThreadDied, TimeoutExpired, WrongSystem
from pgsub.publisher.snapshot import SlotSnapshot
from pgsub.reconcile import point as points
from pgsub.reconcile import point_attempt
from pgsub.reconcile.point_attempt import Point
from pgsub.target.ledger.maintenance import barrier
from pgsub.target.ledger.tables import held_tables, states

TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text)"
_ROWS = "SELECT t::text FROM t ORDER BY id"


def rows_at(p: Pair, point: Point, query: str = _ROWS) -> tuple[list[object], list[object]]:
    """What both snapshots see."""
    found = []
    for database, snapshot in ((p.pubdb, point.publisher), (p.subdb, point.target)):
        with contextlib.closing(database.connect()) as session:
            session.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            session.execute(snapshot.importing())
            found.append(session.execute(query.encode()).fetchall())
    return found[0], found[1]


class Writer(threading.Thread):
    """Writes until it is told to stop, and never far ahead of apply: a point is no race that the faster one wins."""

    AHEAD = 5  #: of its committed transactions, that apply has not made yet

    def __init__(self, p: Pair, number: int, prepare: bool) -> None:
        super().__init__(daemon=True)
        self._random = random.Random(number)
        self._p, self._number, self._prepare = p, number, prepare
        self._committed = 0
        self.enough = threading.Event()
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            with (
                contextlib.closing(self._p.pubdb.connect()) as session,
                contextlib.closing(self._p.subdb.connect()) as other,
            ):
                while not self.enough.is_set():
                    if self._committed - self._applied(other) < self.AHEAD:
                        self._write(session)
                    else:
                        self.enough.wait(0.01)
        except Exception as error:
            self.error = error

    @property
    def _counter(self) -> int:
        return self._number * 1000 + 999

    def _applied(self, session: psycopg.Connection) -> int:
        row = session.execute("SELECT v FROM t WHERE id = %s", (self._counter,)).fetchone()
        return 0 if row is None else int(row[0])

    def _write(self, session: psycopg.Connection) -> None:
        keys = [self._number * 1000 + self._random.randrange(100) for _ in range(self._random.randrange(1, 4))]
        commits = self._random.random() < 0.7
        session.execute("BEGIN")
        for key in (*keys, self._counter):
            value = str(self._committed + 1 if key == self._counter else self._random.random())
            session.execute("INSERT INTO t VALUES (%s, %s) ON CONFLICT (id) DO UPDATE SET v = excluded.v", (key, value))
        if self._prepare and self._random.random() < 0.5:
            session.execute(f"PREPARE TRANSACTION 'w{self._number}'".encode())
            session.execute(f"{'COMMIT' if commits else 'ROLLBACK'} PREPARED 'w{self._number}'".encode())
        else:
            session.execute(b"COMMIT" if commits else b"ROLLBACK")
        self._committed += commits


@pytest.fixture
def writing() -> Iterator[Callable[[Pair, bool], list[Writer]]]:
    """Three writers at a time, all of which end with the test."""
    made: list[Writer] = []

    def start(p: Pair, prepare: bool = False) -> list[Writer]:
        made.extend(Writer(p, number, prepare) for number in range(3))
        return made

    yield start
    for one in made:
        one.enough.set()
        one.join(30)
        assert one.error is None, one.error


#: What these have, the kind that is both has, too.
_SELDOM = ("streamed", "prepared")


@pytest.mark.parametrize("kind", [*long(_SELDOM), *(kind for kind in KINDS if kind not in _SELDOM)])
def test_both_snapshots_hold_the_same_while_the_publisher_is_written_to(
    pair_of_kind: Callable[..., Pair], kind: str, writing: Callable[[Pair, bool], list[Writer]]
) -> None:
    p = pair_of_kind(kind, TABLE)
    task = p.start()
    if "prepared" in kind:  # pending until a worker has begun anew with all tables ready
        assert p.stop(task)
        task = p.start()
    writing(p, "prepared" in kind)
    p.until("SELECT count(*) > 20 FROM t", task=task)
    before = 0
    for _ in range(4):
        with point_of(p) as point:
            publisher, target_ = rows_at(p, point)
            assert publisher == target_
            assert before < point.lsn
            before = point.lsn
            assert barrier.read(p.session, p.subid) is None
    assert task.error is None
    p.stop(task)


def test_an_idle_publisher_comes_to_a_point_in_moments(pair: MakePair) -> None:
    p = pair(TABLE)
    task = p.start()
    p.pubdb.execute("INSERT INTO t VALUES (1, 'x')")
    p.until("SELECT count(*) = 1 FROM t", task=task)
    with point_of(p) as point:
        assert rows_at(p, point) == ([("(1,x)",)], [("(1,x)",)])
        assert 0 < point.pause < points.STAND_SECONDS
    with point_of(p) as again:
        assert again.lsn > point.lsn
    p.stop(task)


def test_a_point_shows_what_lay_before_it_and_apply_goes_on_behind_it(pair: MakePair) -> None:
    p = pair(TABLE)
    task = p.start()
    with point_of(p) as point:
        p.pubdb.execute("INSERT INTO t VALUES (1, 'later')")
        p.until("SELECT count(*) = 1 FROM t", task=task)
        assert rows_at(p, point) == ([], [])
    p.stop(task)


def test_nothing_is_left_on_the_publisher(pair: MakePair) -> None:
    p = pair(TABLE)
    task = p.start()
    with point_of(p):
        assert p.pubdb.value("SELECT count(*) FROM pg_replication_slots WHERE slot_name LIKE '%%verify%%'") == 0
    p.stop(task)


def _standing(p: Pair, task: Task) -> None:
    p.until("SELECT coalesce((SELECT reached_lsn = lsn FROM pgsub.barrier), false)", task=task)


def _stopped_at_now(p: Pair, seconds: float = 60.0) -> str:
    """Put a barrier at the end of the WAL; what is written from now on stays behind it."""
    return barrier.put(p.session, p.subid, p.published(), seconds)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_barrier_does_not_cover_waits_until_it_is_released(pair_of_kind: Callable[..., Pair], kind: str) -> None:
    p = pair_of_kind(kind, TABLE)
    p.apply("INSERT INTO t VALUES (0, 'before')")
    if "prepared" in kind:
        p.apply("BEGIN; INSERT INTO t VALUES (1, 'prepared'); PREPARE TRANSACTION 'one'")
    token = _stopped_at_now(p)
    task = p.start()
    if "prepared" in kind:
        p.pubdb.execute("COMMIT PREPARED 'one'")
    for number in range(2, 40):  # enough for a run
        p.pubdb.execute(f"INSERT INTO t VALUES ({number}, 'beyond')")
    _standing(p, task)
    position = p.progress()[0]
    time.sleep(0.5)  # it has every reason to go on
    assert p.subdb.rows(_ROWS) == [("(0,before)",)] and p.progress()[0] == position
    assert barrier.remove(p.session, p.subid, token)
    p.until("SELECT count(*) FROM t", value=39 + ("prepared" in kind), task=task)
    p.stop(task)


def test_a_worker_that_begins_at_a_barrier_stands_there(pair: MakePair) -> None:
    p = pair(TABLE)
    token = _stopped_at_now(p)
    p.pubdb.execute("INSERT INTO t VALUES (1, 'beyond')")
    for _ in range(2):
        task = p.start()
        _standing(p, task)
        assert p.stop(task).outcome == "stopped"
        assert p.subdb.value("SELECT count(*) FROM t") == 0
    lsn = p.published()
    assert barrier.move(p.session, p.subid, token, lsn)
    task = p.start()
    p.until("SELECT count(*) = 1 FROM t", task=task)
    _standing(p, task)
    p.stop(task)


def test_a_worker_that_dies_before_it_says_where_it_stands_is_followed_by_one_that_does(pair: MakePair, at: At) -> None:
    p = pair(TABLE)
    p.pubdb.execute("INSERT INTO t VALUES (1, 'before')")
    token = _stopped_at_now(p)
    p.pubdb.execute("INSERT INTO t VALUES (2, 'beyond')")
    at("apply.before_barrier_reached=error")
    with pytest.raises(PgsubError, match="failpoint"):
        p.catch_up()
    at("")
    assert p.subdb.value("SELECT reached_lsn IS NULL FROM pgsub.barrier")
    task = p.start()
    _standing(p, task)
    assert p.subdb.rows(_ROWS) == [("(1,before)",)]
    assert barrier.remove(p.session, p.subid, token)
    p.until("SELECT count(*) FROM t", value=2, task=task)
    p.stop(task)


def test_apply_goes_on_by_itself_when_nobody_releases_it(pair: MakePair) -> None:
    p = pair(TABLE)
    token = _stopped_at_now(p, 0.5)
    p.pubdb.execute("INSERT INTO t VALUES (1, 'beyond')")
    task = p.start()
    p.until("SELECT count(*) = 1 FROM t", task=task)
    assert barrier.read(p.session, p.subid) is None
    assert not barrier.move(p.session, p.subid, token, p.published())
    assert not barrier.remove(p.session, p.subid, token)
    p.stop(task)


def test_an_idle_apply_worker_takes_a_forgotten_barrier_away(pair: MakePair) -> None:
    p = pair(TABLE)
    task = p.start()
    _stopped_at_now(p, 0.2)
    p.until("SELECT count(*) = 0 FROM pgsub.barrier", task=task)
    p.stop(task)


@pytest.mark.long
def test_a_point_that_takes_longer_than_apply_stands_is_none(pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    p = pair(TABLE)
    task = p.start()
    moved: set[point_attempt.Attempt] = set()
    move, reach = point_attempt.Attempt._move, point_attempt.Attempt._reach

    def to_the_point(self: point_attempt.Attempt, lsn: int, **options: bool) -> None:
        move(self, lsn, **options)
        moved.add(self)

    def slowly(self: point_attempt.Attempt) -> float:
        stood = reach(self)
        if self in moved:  # the target's snapshot is taken only after apply has gone on
            p.until("SELECT count(*) = 0 FROM pgsub.barrier", task=task)
        return stood

    monkeypatch.setattr(point_attempt.Attempt, "_move", to_the_point)
    monkeypatch.setattr(point_attempt.Attempt, "_reach", slowly)
    with pytest.raises(TimeoutExpired, match="could not be brought to one point"), point_of(p, seconds=2.0):
        pass
    assert moved
    p.pubdb.execute("INSERT INTO t VALUES (-1, 'goes on')")
    p.until("SELECT count(*) = 1 FROM t WHERE id = -1", task=task)
    p.stop(task)


def test_only_the_worker_of_the_present_epoch_says_where_it_stands(pair: MakePair) -> None:
    p = pair(TABLE)
    old, _ = p.take_over(), _stopped_at_now(p)
    p.take_over()
    found = barrier.read(p.session, p.subid)
    assert found is not None
    barrier.stands(p.session, old, found, 0.0)
    barrier.give_up(p.session, old, found)
    assert barrier.read(p.session, p.subid) == found and not found.reached


def test_a_barrier_of_another_takes_the_place_of_the_first(pair: MakePair) -> None:
    p = pair(TABLE)
    first, second = _stopped_at_now(p), _stopped_at_now(p)
    assert not barrier.remove(p.session, p.subid, first)
    assert barrier.remove(p.session, p.subid, second)


def _open_transaction(p: Pair) -> AbstractContextManager[psycopg.Connection]:
    session = p.pubdb.connect()
    session.execute("BEGIN")
    session.execute("INSERT INTO t VALUES (-1, 'long')")
    return contextlib.closing(session)


def test_apply_goes_on_while_the_snapshot_waits_for_a_long_transaction(pair: MakePair) -> None:
    p = pair(TABLE)
    task = p.start()
    found: list[object] = []

    def look() -> None:
        with point_of(p) as point:
            found.extend([*rows_at(p, point), point])

    with _open_transaction(p) as session:
        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        _waits(p)
        for number in range(5):  # each is applied although the point is not found yet
            p.pubdb.execute(f"INSERT INTO t VALUES ({number}, 'meanwhile')")
            p.until("SELECT count(*) FROM t", value=number + 1, task=task)
        assert not found
        session.execute("COMMIT")
        thread.join(60)
    publisher, target_, point = found
    assert publisher == target_ and len(publisher) == 6  # type: ignore[arg-type]
    assert isinstance(point, Point)
    p.stop(task)


def _waits(p: Pair) -> None:
    query = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'CREATE_REPLICATION_SLOT%verify%'"
    query += " AND wait_event_type = 'Lock'"
    deadline = time.monotonic() + 60
    while not p.pubdb.value(query):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_transaction_that_does_not_end_is_named_when_the_time_is_over(pair: MakePair) -> None:
    p = pair(TABLE)
    task = p.start()
    with (
        _open_transaction(p),
        pytest.raises(TimeoutExpired, match="replication slot") as raised,
        point_of(p, timeout=3),
    ):
        pass
    assert "It waits for the transaction of PID" in str(raised.value.detail)
    assert barrier.read(p.session, p.subid) is None
    p.stop(task)


def test_a_barrier_is_taken_away_after_the_time_is_over_though_apply_holds_its_row(
    pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = pair(TABLE)
    monkeypatch.setattr(point_attempt, "RELEASE_SECONDS", 60.0)
    refused = threading.Event()
    remove = barrier.remove

    def watched(*of: Any) -> bool:
        try:
            return remove(*of)
        except psycopg.errors.LockNotAvailable:
            refused.set()
            raise

    monkeypatch.setattr(barrier, "remove", watched)
    with contextlib.closing(p.subdb.connect()) as apply:

        def commit() -> None:
            p.until("SELECT count(*) = 1 FROM pgsub.barrier")
            apply.execute("BEGIN")
            apply.execute("SELECT FROM pgsub.progress WHERE subid = %s AND worker = 0 FOR UPDATE", (p.subid,))
            refused.wait(60)
            apply.execute("COMMIT")

        holding = threading.Thread(target=commit)
        holding.start()
        with pytest.raises(TimeoutExpired, match="timeout while bringing"), point_of(p, timeout=2):
            pass
        holding.join()
    assert refused.is_set() and barrier.read(p.session, p.subid) is None


def test_a_subscription_that_is_always_far_behind_the_publisher_comes_to_no_point(
    pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = pair(TABLE)
    flushed = point_attempt.Attempt._flushed
    ahead = iter(range(0, 1 << 62, point_attempt.NEAR_BYTES + 1))
    monkeypatch.setattr(point_attempt.Attempt, "_flushed", lambda self: flushed(self) + next(ahead))
    monkeypatch.setattr(point_attempt.Attempt, "_reach", lambda self: 0.0)  # apply is there each time it is looked at
    with pytest.raises(TimeoutExpired, match="timeout while bringing"), point_of(p, timeout=1):
        pass
    assert barrier.read(p.session, p.subid) is None
    assert p.pubdb.value("SELECT count(*) FROM pg_replication_slots WHERE slot_name LIKE '%verify%'") == 0


def test_a_subscription_that_nobody_applies_comes_to_no_point(pair: MakePair) -> None:
    p = pair(TABLE)
    with pytest.raises(TimeoutExpired, match="timeout while bringing"), point_of(p, timeout=1):
        pass
    assert barrier.read(p.session, p.subid) is None


def test_the_thread_that_moves_the_barrier_along_does_not_end_unnoticed(pair: MakePair, at: At) -> None:
    p = pair(TABLE)
    task = p.start()
    at("thread.barrier=die@1")
    with pytest.raises(ThreadDied, match='"barrier"'), point_of(p):
        pass
    at("")
    with point_of(p):
        pass
    p.stop(task)


def test_kept_changes_of_a_released_table_wait_at_a_barrier_too(pair: MakePair) -> None:
    p = pair(TABLE)
    with states.changing(p.session, p.subid):
        held_tables.hold(p.session, p.subid, [p.relid("t")])
    p.apply("INSERT INTO t VALUES (1, 'kept')")
    token = _stopped_at_now(p)
    with states.changing(p.session, p.subid):
        held_tables.release(p.session, p.subid, [p.relid("t")])
    task = p.start()
    _standing(p, task)
    time.sleep(3 * held_release.PAUSE_SECONDS)
    assert p.subdb.value("SELECT count(*) FROM t") == 0
    assert barrier.remove(p.session, p.subid, token)
    p.until("SELECT count(*) = 1 FROM t", task=task)
    p.stop(task)


def test_a_snapshot_behind_the_barrier_is_not_taken(pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    p = pair(TABLE)
    task = p.start()
    flushed = point_attempt.flushed_position
    monkeypatch.setattr(point_attempt, "flushed_position", lambda connection: flushed(connection) + (1 << 30))
    opened = SlotSnapshot.open
    seen: list[SlotSnapshot] = []

    def open_(*args: Any, on_open: Callable[[int], object], **options: Any) -> SlotSnapshot:
        def reached(pid: int) -> None:  # apply comes to a barrier that lies ahead of what the slot will be at
            monkeypatch.setattr(point_attempt.Attempt, "_reach", lambda self: 0.0)
            on_open(pid)

        seen.append(opened(*args, on_open=reached, **options))
        return seen[-1]

    monkeypatch.setattr(SlotSnapshot, "open", open_)
    with pytest.raises(TimeoutExpired, match="could not be brought") as raised, point_of(p):
        pass
    assert "The snapshot is of" in str(raised.value.detail) and len(seen) == 3
    assert all(one.connection.closed for one in seen)
    p.stop(task)


def test_no_row_is_repaired_by_what_another_publisher_has(pair: MakePair) -> None:
    p = pair(TABLE)
    task = p.start()
    p.pubdb.execute("INSERT INTO t VALUES (1, 'ours'), (2, 'ours')")
    p.until("SELECT count(*) = 2 FROM t", task=task)
    p.subdb.execute("UPDATE t SET v = 'differs' WHERE id = 1")
    found = list(results(p, [("public", "t")]))
    with elsewhere(p, f"{TABLE}; INSERT INTO t VALUES (1, 'theirs')") as there:
        with pytest.raises(WrongSystem):
            repaired(p, found)
        with pytest.raises(WrongSystem), point_of(p):
            pass
        assert there.value("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == 0
    assert p.subdb.rows("SELECT * FROM t ORDER BY id") == [(1, "differs"), (2, "ours")]
    assert p.subdb.value("SELECT count(*) FROM pgsub.barrier") == 0
    repaired(p, found)
    p.same("t")
    p.stop(task)


def test_a_row_that_an_index_of_the_publisher_does_not_find_is_not_deleted_from_the_target(pair: MakePair) -> None:
    p = pair(TABLE)
    task = p.start()
    p.pubdb.execute("INSERT INTO t SELECT g, 'same' FROM generate_series(1, 3000) g")
    p.until("SELECT count(*) = 3000 FROM t", task=task)
    # the index has its keys in another order than they are searched in, as where a system orders texts otherwise by now
    p.pubdb.execute("UPDATE pg_index SET indoption = '1' WHERE indexrelid = 't_pkey'::regclass")
    p.subdb.execute("UPDATE t SET v = 'differs' WHERE id IN (5, 2500); INSERT INTO t VALUES (-1, 'extra')")
    repaired(p, list(results(p, [("public", "t")])))
    assert p.subdb.rows("SELECT * FROM t WHERE v <> 'same' ORDER BY id") == [(5, "differs"), (2500, "differs")]
    p.pubdb.execute("UPDATE pg_index SET indoption = '0' WHERE indexrelid = 't_pkey'::regclass")
    repaired(p, list(results(p, [("public", "t")])))
    p.same("t")
    p.stop(task)
