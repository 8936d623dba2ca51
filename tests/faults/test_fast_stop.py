"""``pg_ctl stop -m fast`` of a publisher ends whatever state a subscription is in, and loses nothing.

The publisher's wal_sender_timeout is an hour, so it is never the server that loses its patience, and so is the target's
wal_receiver_status_interval, so it is never chance that confirms. Where apply can go on the server ends because all its
WAL is confirmed; where it cannot, because the connection ends.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
import pytest
from embedded import Server
from fix_engine import Task
from fix_failpoints import At
from fix_pair import Pair
from fix_parallel import AT_ONCE, wait_open
from fix_servers import Database

from pgsub.apply.preview import slot_reader
from pgsub.apply.stream import publisher_shutdown, receiver
from pgsub.apply.worker import feedback
from pgsub.common.errors import ApplyError, PgsubError, PublisherUnavailable, TargetUnavailable
from pgsub.protocol.lsn import MAX_LSN
from pgsub.target.ledger import subscriptions
from pgsub.target.ledger.tables import held_tables, states

TABLES = "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE u (id int PRIMARY KEY)"
SETTINGS = {"max_prepared_transactions": 5, "wal_sender_timeout": "1h", "wal_receiver_status_interval": "1h"}
LOCKED = "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted"
_numbers = itertools.count()


@dataclass
class Scene:
    """A subscription to table t, whose publisher is about to stop.

    :ivar stack: what is to be ended afterwards.
    :ivar file: where failpoints pause until it exists.
    """

    p: Pair
    servers: tuple[Server, Server]
    at: At
    monkeypatch: pytest.MonkeyPatch
    file: Path
    stack: ExitStack = field(default_factory=ExitStack)

    def follows(self, rows: int = 1) -> Task:
        """A worker that has applied some rows."""
        task = self.p.start()
        self.p.pubdb.execute(f"INSERT INTO t SELECT i, 'x' FROM generate_series(1, {rows}) i")
        self.p.until("SELECT count(*) FROM t", value=rows, task=task)
        return task

    def session(self, database: Database, statements: str) -> psycopg.Connection:
        """A session with an open transaction."""
        session = self.stack.enter_context(closing(database.connect()))
        session.execute(f"BEGIN; {statements}".encode())
        return session

    def stop(self) -> None:
        """``pg_ctl stop -m fast`` of the publisher; it must end."""
        stopping = threading.Thread(target=self.servers[0].stop, daemon=True)
        stopping.start()
        stopping.join(60)
        if stopping.is_alive():
            self.servers[0].kill9()
            pytest.fail("the publisher waits")


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Server, Server]]:
    """Two servers of this module, of which each test stops the first."""
    with Server(fast=True, settings=SETTINGS) as first, Server(fast=True, settings=SETTINGS) as second:
        yield first, second


@pytest.fixture
def scene(servers: tuple[Server, Server], at: At, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Scene]:
    """A scene in which nobody records conflicts."""
    monkeypatch.setattr(feedback, "MIRROR_SECONDS", 0.0)
    monkeypatch.setattr(publisher_shutdown, "STANDSTILL_SECONDS", 3600.0)
    servers[0].start()
    made = _pair(servers)
    made.pubdb.execute("CREATE PUBLICATION p FOR TABLE t")
    one = Scene(made.subscribe("r", [("public", "t")]), servers, at, monkeypatch, tmp_path / "go")
    yield one
    one.file.touch()
    at("")
    one.stack.close()
    _remove(servers, made)


def _pair(servers: tuple[Server, Server]) -> Pair:
    name = f"f{next(_numbers)}"
    made = Pair(Database(servers[0], name), Database(servers[1], f"{name}_target"), synchronous_commit="off")
    made.ddl(TABLES)
    return made


def _remove(servers: tuple[Server, Server], made: Pair) -> None:
    made.close()
    for server in servers:
        server.start()
    made.pubdb.drop()
    made.subdb.drop()


# Where apply goes on: everything is applied and confirmed, then the server ends.


def _idle(scene: Scene) -> Task:
    task = scene.follows()
    for _ in range(3):
        scene.p.pubdb.execute("INSERT INTO u SELECT coalesce(max(id), 0) + 1 FROM u")
    return task


def _behind(scene: Scene) -> Task:
    task = scene.follows()
    for number in range(2, 300):
        scene.p.pubdb.execute(
            f"INSERT INTO t SELECT {number} * 1000 + i, repeat('x', 200) FROM generate_series(1, 20) i"
        )
    return task


def _held(scene: Scene) -> Task:
    task = scene.follows()
    with states.changing(scene.p.session, scene.p.subid):
        held_tables.hold(scene.p.session, scene.p.subid, [scene.p.relid("t")])
    scene.p.pubdb.execute("INSERT INTO t VALUES (2, 'kept')")
    scene.p.until("SELECT count(*) FROM pgsub.held_change WHERE subid = %s", scene.p.subid, value=1, task=task)
    return task


def _spooled(scene: Scene) -> Task:
    scene.p.pubdb.execute(f"ALTER DATABASE {scene.p.pubdb.name} SET {AT_ONCE}")
    scene.p.pubdb.close()
    scene.p.set(streaming="on")
    task = scene.follows()
    scene.session(scene.p.pubdb, "INSERT INTO t SELECT i, 'x' FROM generate_series(1000, 2000) i")
    _sent(scene)
    return task


def _sent(scene: Scene) -> None:
    query = "SELECT sent_lsn - '0/0'::pg_lsn >= %s FROM pg_stat_replication WHERE application_name = %s"
    scene.p.pubdb.wait(query, scene.p.published(), scene.p.sub.name)


def _parallel(scene: Scene) -> Task:
    scene.p.pubdb.execute(f"ALTER DATABASE {scene.p.pubdb.name} SET {AT_ONCE}")
    scene.p.pubdb.close()
    scene.p.set(streaming="parallel")
    task = scene.follows()
    scene.session(scene.p.pubdb, "INSERT INTO t SELECT i, 'x' FROM generate_series(1000, 2000) i")
    wait_open(scene.p, task)
    return task


def _prepared(scene: Scene) -> Task:
    scene.p.session.execute("UPDATE pgsub.subscription SET two_phase = 'p' WHERE subid = %s", (scene.p.subid,))
    scene.p.set(two_phase="p")
    task = scene.follows()
    scene.p.until("DELETE FROM pgsub.event RETURNING true", task=task)  # as the launcher does
    scene.p.pubdb.execute("BEGIN; INSERT INTO t VALUES (2, 'x'); PREPARE TRANSACTION 'g'")
    scene.p.subdb.wait("SELECT count(*) = 1 FROM pg_prepared_xacts WHERE database = current_database()")
    return task


def _sync_worker(scene: Scene) -> Task:
    """A sync worker that streams its own slot, and is not to hand its table over yet."""
    p = scene.p
    _to_copy(scene)
    task = scene.follows()
    scene.at(f"copy.middle=pause:{scene.file.with_suffix('.copy')};sync.before_s=pause:{scene.file}")
    p.submit("copy", lambda _: p.sync("copied"), [None])
    # a slot is in the view before it stands anywhere
    p.pubdb.wait("SELECT count(confirmed_flush_lsn) > 1 FROM pg_replication_slots WHERE database = current_database()")
    p.pubdb.execute("INSERT INTO t VALUES (2, 'x')")
    p.until("SELECT count(*) FROM t", value=2, task=task)  # apply has passed where the copy will stand
    scene.file.with_suffix(".copy").touch()
    p.pubdb.wait("SELECT count(*) = 2 FROM pg_stat_replication WHERE state = 'streaming'")
    return task


def _to_copy(scene: Scene) -> None:
    """A further table, in state i."""
    p = scene.p
    p.ddl("CREATE TABLE copied (id int PRIMARY KEY)")
    p.pubdb.execute("INSERT INTO copied SELECT generate_series(1, 1000); ALTER PUBLICATION p ADD TABLE copied")
    p.add("copied")
    p.session.execute("UPDATE pgsub.subscription_rel SET srsubstate = 'i' WHERE relname = 'copied'")


def _preview(scene: Scene) -> Task:
    """A copy of the slot is read as well."""
    task = scene.follows()
    p = scene.p

    def read(_: object) -> None:
        known = subscriptions.identity(p.session, p.subid)
        with slot_reader.reading(p.sub, known, p.progress()[0], two_phase=False) as opened:
            opened.flush_lsn = MAX_LSN
            for _step in opened.steps():
                pass

    p.submit("preview", read, [None])
    p.pubdb.wait("SELECT count(*) = 2 FROM pg_stat_replication WHERE state = 'streaming'")
    p.pubdb.execute("INSERT INTO u VALUES (1)")
    return task


@pytest.mark.parametrize(
    "state",
    [_idle, _behind, _held, _spooled, _parallel, _prepared, _sync_worker, _preview],
    ids=lambda one: one.__name__,
)
def test_a_fast_stop_ends_once_everything_is_applied_and_confirmed(
    scene: Scene, state: Callable[[Scene], Task]
) -> None:
    task = state(scene)
    rows = scene.p.pubdb.value("SELECT count(*) FROM t")
    scene.stop()
    if state is not _held:
        assert scene.p.subdb.value("SELECT count(*) FROM t") == rows
    with pytest.raises(PublisherUnavailable):
        task.result()
    _, reported = scene.p.progress()
    scene.servers[0].start()
    assert scene.p.confirmed() == reported
    for (gid,) in scene.p.pubdb.rows("SELECT gid FROM pg_prepared_xacts"):
        scene.p.pubdb.execute(f"ROLLBACK PREPARED '{gid}'")


def test_a_fast_stop_ends_where_two_subscriptions_feed_each_other(scene: Scene) -> None:
    p = scene.p
    task = scene.follows()
    p.subdb.execute("CREATE PUBLICATION p FOR TABLE u")
    back = Pair(p.subdb, p.pubdb, synchronous_commit="off").subscribe("r", [("public", "u")])
    returning = back.start()
    p.subdb.execute("INSERT INTO u VALUES (1)")
    back.until("SELECT count(*) FROM u", value=1, task=returning)
    scene.stop()
    with pytest.raises(PublisherUnavailable):
        task.result()
    with pytest.raises(TargetUnavailable):
        returning.result()
    scene.servers[0].start()
    back.renew()
    back.close()


def test_a_fast_stop_ends_where_publisher_and_target_live_in_one_cluster(scene: Scene) -> None:
    p = scene.p
    own = Database(scene.servers[0], f"{p.pubdb.name}_own")
    own.execute(TABLES)
    near = Pair(p.pubdb, own, synchronous_commit="off").subscribe("r", [("public", "t")])
    task = near.start()
    p.pubdb.execute("INSERT INTO t VALUES (1, 'x')")
    near.until("SELECT count(*) FROM t", value=1, task=task)
    scene.stop()
    with pytest.raises((PublisherUnavailable, TargetUnavailable)):
        task.result()
    scene.servers[0].start()
    near.renew()
    near.close()
    p.pubdb.execute("SELECT pg_drop_replication_slot(%s)", near.sub.slot_name)
    own.drop()


def test_a_fast_stop_ends_while_a_copy_is_under_way(scene: Scene) -> None:
    p = scene.p
    _to_copy(scene)
    task = scene.follows()
    scene.at(f"copy.middle=pause:{scene.file}")
    copying = p.submit("copy", lambda _: p.sync("copied"), [None])
    p.until("SELECT srsubstate::text FROM pgsub.subscription_rel WHERE relname = 'copied'", value="d")
    p.pubdb.wait("SELECT count(*) = 2 FROM pg_replication_slots WHERE database = current_database()")
    scene.stop()
    with pytest.raises(PublisherUnavailable):
        task.result()
    scene.file.touch()
    with pytest.raises(PgsubError):
        copying.result()


def test_a_fast_stop_waits_for_no_subscription_that_was_disabled_in_the_midst_of_a_stream(scene: Scene) -> None:
    scene.p.stop(_spooled(scene))
    scene.stop()


def test_a_fast_stop_ends_while_apply_fails_and_is_tried_again(scene: Scene) -> None:
    p = scene.p
    p.subdb.execute("INSERT INTO t VALUES (1, 'in the way')")
    p.pubdb.execute("INSERT INTO t VALUES (1, 'x')")
    failures: list[PgsubError] = []

    def retry(_: object) -> None:
        while True:
            try:
                p.start().result()
            except ApplyError as error:
                failures.append(error)
            except PublisherUnavailable:
                return

    retrying = p.submit("retry", retry, [None])
    while len(failures) < 2:
        assert not retrying.ends_within(0.02), retrying.error
    scene.stop()
    retrying.result()


# Where apply stands still: the connection ends, and what was received is applied once it can be.


def _locked(scene: Scene) -> Task:
    task = scene.follows()
    scene.session(scene.p.subdb, "LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
    scene.p.pubdb.execute("INSERT INTO t VALUES (2, 'x')")
    scene.p.subdb.wait(LOCKED)
    return task


def _locked_and_full(scene: Scene) -> Task:
    """So much waits for apply that no request of the publisher can be read."""
    scene.monkeypatch.setattr(receiver, "QUEUE_BYTES", 200_000)
    scene.monkeypatch.setattr(publisher_shutdown, "_CHECK_SECONDS", 0.2)
    task = _locked(scene)
    for number in range(3, 40):
        scene.p.pubdb.execute(f"INSERT INTO t VALUES ({number}, repeat(md5('{number}'), 30000))")
    return task


def _parallel_locked(scene: Scene) -> Task:
    """What a parallel worker has done waits for the worker, and that for somebody else."""
    task = _parallel(scene)
    scene.session(scene.p.subdb, "LOCK TABLE pgsub.progress IN ACCESS EXCLUSIVE MODE")
    scene.p.pubdb.execute("INSERT INTO t VALUES (2, 'x')")
    scene.p.subdb.wait(LOCKED)
    return task


def _unrecorded(scene: Scene) -> Task:
    """Nobody writes down a conflict that was met."""
    task = scene.follows()
    scene.p.subdb.execute("DELETE FROM t")
    scene.p.pubdb.execute("UPDATE t SET v = 'y'")
    scene.p.until("SELECT count(*) FROM pgsub.event WHERE subid = %s", scene.p.subid, value=1, task=task)
    return task


@pytest.mark.parametrize(
    "state", [_locked, _locked_and_full, _parallel_locked, _unrecorded], ids=lambda one: one.__name__
)
def test_a_fast_stop_ends_where_apply_stands_still(scene: Scene, state: Callable[[Scene], Task]) -> None:
    scene.monkeypatch.setattr(publisher_shutdown, "STANDSTILL_SECONDS", 1.0)
    scene.monkeypatch.setattr(publisher_shutdown, "_ASKS_SECONDS", 0.3)
    task = state(scene)
    scene.stop()
    scene.stack.close()
    with pytest.raises(PublisherUnavailable) as raised:
        task.result()
    assert raised.value.message == "terminating logical replication worker because the publisher is shutting down"
    scene.servers[0].start()
    if state is _unrecorded:
        return
    assert scene.p.subdb.value("SELECT count(*) > 1 FROM t")  # what was received was applied all the same
    scene.p.apply("INSERT INTO t VALUES (900, 'later')")
    scene.p.same("t")


@pytest.mark.long
def test_a_publisher_that_does_not_stop_is_not_left_by_a_subscription_whose_apply_stands_still(scene: Scene) -> None:
    scene.monkeypatch.setattr(publisher_shutdown, "STANDSTILL_SECONDS", 0.1)
    looks: list[bool] = []
    refuses = publisher_shutdown.publisher.refuses

    def look(conninfo: str) -> bool:
        looks.append(refuses(conninfo))
        return looks[-1]

    scene.monkeypatch.setattr(publisher_shutdown.publisher, "refuses", look)
    task = _locked_and_full(scene)
    query = "SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s"
    pid = scene.p.pubdb.value(query, scene.p.sub.slot_name)
    while len(looks) < 3:
        assert not task.ends_within(0.02), task.error
    assert not any(looks)
    assert scene.p.pubdb.value(query, scene.p.sub.slot_name) == pid
    scene.stack.close()
    scene.p.until("SELECT count(*) FROM t", value=39, task=task)
    scene.p.stop(task)
