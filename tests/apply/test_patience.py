"""A publisher or a target that is slow is waited for, one that is gone is not: timeouts of both ends of a stream."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import patience
import pytest
from embedded import Server
from fix_pair import MakePair, Pair
from fix_proxy import Proxy
from fix_servers import Database

from pgsub.apply.stream import receiver, synchronous_standby
from pgsub.apply.worker import feedback, start
from pgsub.common.errors import PublisherUnavailable
from pgsub.protocol.frames import Frames
from pgsub.publisher import connect as publisher
from pgsub.publisher.stream.walsender import WalSender, start_options

TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text); ALTER TABLE t ALTER v SET STORAGE EXTERNAL"
#: Both ends give up after two seconds of silence: more than a busy machine keeps a thread waiting.
PUBLISHER = {"wal_sender_timeout": "2s"}
TARGET = {"wal_receiver_timeout": "2s"}
_numbers = itertools.count()


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Server, Server]]:
    """Two servers of this module."""
    with Server(fast=True, settings=PUBLISHER) as publishing, Server(fast=True, settings=TARGET) as taking:
        yield publishing, taking


@pytest.fixture
def subscribed(servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """A subscription to one of two tables between them."""
    monkeypatch.setattr(feedback, "MIRROR_SECONDS", 0.0)
    name = f"d{next(_numbers)}"
    pubdb, subdb = Database(servers[0], name), Database(servers[1], name)
    p = Pair(pubdb, subdb, synchronous_commit="off")
    p.ddl(TABLE)
    pubdb.execute("CREATE TABLE private (id int); CREATE PUBLICATION p FOR TABLE t")
    p.subscribe("r", None)
    yield p
    p.close()
    pubdb.drop()
    subdb.drop()


@contextmanager
def _one_stream(p: Pair) -> Iterator[None]:
    """One walsender streams the slot from begin to end."""
    query = "SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s"
    p.pubdb.wait(f"{query} AND active", p.sub.slot_name, value=(pid := p.pubdb.value(query, p.sub.slot_name)))
    assert pid is not None
    yield
    assert p.pubdb.value(query, p.sub.slot_name) == pid


@pytest.mark.long
def test_the_publisher_hears_of_a_worker_whose_target_is_slow(
    subscribed: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    # also when so much has come that the stream is left alone, and a request to answer with it
    monkeypatch.setattr(receiver, "QUEUE_BYTES", 200_000)
    p = subscribed
    task = p.start()
    p.pubdb.execute("INSERT INTO t VALUES (0, 'first')")
    p.until("SELECT count(*) = 1 FROM t", task=task)
    with closing(p.subdb.connect()) as session, _one_stream(p):
        session.execute("BEGIN; LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
        for number in range(1, 16):
            p.pubdb.execute(f"INSERT INTO t VALUES ({number}, repeat('x', 1000000))")
        p.subdb.wait("SELECT count(*) > 0 FROM pg_locks WHERE NOT granted")
        p.pubdb.execute("SELECT pg_sleep(4)")  # twice as long as it is patient
        session.execute("COMMIT")
        p.until("SELECT count(*) = 16 FROM t", task=task)
    p.stop(task)
    p.same("t")


@pytest.mark.long
@pytest.mark.parametrize(("from_", "much", "sleeps"), [(1, 1 << 40, True), (1, 1, False), (1 << 40, 1 << 41, False)])
def test_what_flows_is_left_to_gather_unless_it_floods_or_is_next_to_nothing(
    subscribed: Pair, monkeypatch: pytest.MonkeyPatch, from_: int, much: int, sleeps: bool
) -> None:
    looks: list[bool | None] = []  # whether anything came with each, None: nothing was read for a while
    held = 0

    def fill(walsender: WalSender) -> int:
        nonlocal held
        before, held = held, own_fill(walsender)
        looks.append(held > before)
        return held

    def receive(walsender: WalSender) -> Frames:
        nonlocal held
        burst = own_receive(walsender)
        held = 0 if len(burst) else held
        return burst

    def sleep(seconds: float) -> None:
        if seconds == receiver.FLOW_SECONDS:
            looks.append(None)
        own_sleep(seconds)

    own_fill, own_receive, own_sleep = WalSender.fill, WalSender.receive, time.sleep
    monkeypatch.setattr(receiver, "FLOW_SECONDS", 0.0123)
    monkeypatch.setattr(receiver, "FLOW_BYTES", from_)
    monkeypatch.setattr(receiver, "MUCH_BYTES", much)
    monkeypatch.setattr(WalSender, "fill", fill)
    monkeypatch.setattr(WalSender, "receive", receive)
    monkeypatch.setattr(time, "sleep", sleep)
    p = subscribed
    p.pubdb.execute("INSERT INTO t SELECT i, repeat('x', 300000) FROM generate_series(1, 20) i")
    p.pubdb.execute("INSERT INTO t SELECT i, 'x' FROM generate_series(100, 5000) i")
    p.apply()
    pairs = list(itertools.pairwise(looks))
    assert {after is None for came, after in pairs if came} == {sleeps}
    assert not [after for came, after in pairs if came is False and after is None]


@pytest.mark.long
def test_a_value_that_takes_longer_than_every_timeout_arrives(subscribed: Pair, proxy: Callable[[str], Proxy]) -> None:
    p = subscribed
    between = proxy(p.sub.connection)
    p.sub = replace(p.sub, connection=between.conninfo)
    task = p.start()
    p.pubdb.execute("INSERT INTO t VALUES (0, 'first')")
    p.until("SELECT count(*) = 1 FROM t", task=task)
    with _one_stream(p):
        between.slice, between.pause = lambda: 8000, 0.04
        p.pubdb.execute("INSERT INTO t VALUES (1, repeat('x', 1000000))")  # five seconds
        p.until("SELECT count(*) = 2 FROM t", task=task)
    p.stop(task)
    p.same("t")


@pytest.mark.long
@pytest.mark.parametrize(("setting", "option"), [("3s", "-1"), ("1h", "3000"), ("0", "3 s")])
def test_a_publisher_that_vanished_without_a_word_is_given_up(
    subscribed: Pair, servers: tuple[Server, Server], proxy: Callable[[str], Proxy], setting: str, option: str
) -> None:
    p = subscribed
    between = proxy(p.sub.connection)
    p.sub = replace(p.sub, connection=between.conninfo, wal_receiver_timeout=option)
    servers[1].append_conf({"wal_receiver_timeout": setting})
    servers[1].reload()
    task = p.start()
    p.pubdb.execute("INSERT INTO t VALUES (0, 'first')")
    p.until("SELECT count(*) = 1 FROM t", task=task)
    p.pubdb.execute("SELECT pg_sleep(4)")
    assert not task.done()  # an idle publisher that answers is not silent
    between.stall()
    p.pubdb.execute("INSERT INTO t VALUES (1, 'on its way')")
    with pytest.raises(PublisherUnavailable, match="due to timeout"):
        task.result()
    between.cut()
    between.resume()
    p.apply("INSERT INTO t VALUES (2, 'later')")
    p.same("t")


def test_a_slot_that_another_streams_is_waited_for_and_then_its_process_is_named(
    pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = pair(TABLE)
    slot = p.sub.slot_name
    assert slot is not None
    with closing(publisher.connect(p.sub.connection, application_name="another", replication=True)) as another:
        version = another.info.server_version
        options = start_options(version, ["p"], binary=False, streaming="off", origin="any")
        WalSender(another).start(slot, 0, options)
        monkeypatch.setattr(start, "BUSY_SECONDS", 0.2)
        p.pubdb.execute("INSERT INTO t VALUES (1, 'x')")
        with pytest.raises(PublisherUnavailable, match=f"is active for PID {another.info.backend_pid}") as caught:
            p.start().result()
        assert caught.value.sqlstate == "55006"
        monkeypatch.setattr(start, "BUSY_SECONDS", 20.0)
        task = p.start()
        p.subdb.wait("SELECT claimed_by IS NOT NULL FROM pgsub.control WHERE worker = 0")
    p.until("SELECT count(*) = 1 FROM t", task=task)
    p.stop(task)


@pytest.mark.long
def test_a_commit_waits_for_the_subscription_from_the_moment_that_the_setting_says_so(
    subscribed: Pair, servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    # of an unpublished table nothing is sent, and its commit waits for a flush position all the same
    monkeypatch.setattr(synchronous_standby, "CHECK_SECONDS", 0.5)
    p = subscribed
    task = p.start()
    p.pubdb.execute("INSERT INTO t VALUES (1, 'before')")
    p.until("SELECT count(*) = 1 FROM t", task=task)
    for named in (p.sub.name.upper(), "", f'ANY 1 (other, "{p.sub.name}")', ""):
        servers[0].append_conf({"synchronous_standby_names": named})
        servers[0].reload()
        p.pubdb.wait("SELECT current_setting('synchronous_standby_names')", value=named)
        if "ANY" in named:  # a worker that starts finds it so
            p.stop(task)
            task = p.start()
        statements = "INSERT INTO private VALUES (1)", "UPDATE t SET v = v || 'x'", "INSERT INTO private VALUES (2)"
        for statement in statements:
            commit = threading.Thread(target=p.pubdb.execute, args=(statement,), daemon=True)
            commit.start()
            commit.join(patience.SECONDS)
            assert not commit.is_alive(), (named, statement)
    p.stop(task)
