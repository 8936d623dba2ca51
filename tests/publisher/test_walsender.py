"""Promises of the walsender stream: what arrives, how it ends, and what its errors are."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import patience
import pytest
from embedded import Server

from pgsub.common.errors import ApplyError, InternalError, PublisherUnavailable, ReplicationBroken, SlotLost
from pgsub.protocol.lsn import format_lsn
from pgsub.protocol.walsender_messages import Keepalive, parse, standby_status
from pgsub.publisher.connect import connect
from pgsub.publisher.slots import create_slot, drop_slot, slot_state
from pgsub.publisher.stream import walsender
from pgsub.publisher.stream.channel_libpq import LibpqChannel
from pgsub.publisher.stream.channel_socket import SocketChannel
from pgsub.publisher.stream.transport import over
from pgsub.publisher.stream.walsender import WalSender, quote_literal, start_options


@pytest.fixture(params=["socket", "tls", "libpq", "libpq over tls"])
def way(request, monkeypatch):
    """How the stream is read."""
    if "libpq" in request.param:
        monkeypatch.setattr(walsender, "reachable", lambda connection: False)
    return request.param


@pytest.fixture
def pubdb(request):
    """The shared publisher's, or one that encrypts."""
    if "way" in request.fixturenames and "tls" in request.getfixturevalue("way"):
        return request.getfixturevalue("tls_databases")[0]
    return request.getfixturevalue("pubdb")


@pytest.fixture
def feed(pubdb, way):
    """A table with a publication and a slot; the walsender is not started yet."""
    pubdb.execute('CREATE TABLE t (n int PRIMARY KEY, v text); CREATE PUBLICATION "Pub, ""one""" FOR TABLE t')
    with opened(pubdb) as sender:
        assert sender.connection.pgconn.ssl_in_use is ("tls" in way)
        create_slot(sender.connection, slot(pubdb))
        yield sender


def slot(pubdb):
    return f"slot_{pubdb.name}"


@contextlib.contextmanager
def opened(pubdb, **more):
    with contextlib.closing(connect(pubdb.conninfo, application_name="feed", replication=True)) as connection:
        yield WalSender(connection, **more)


def options(sender, publications=('Pub, "one"',), **more):
    chosen = {"binary": False, "streaming": "on", "origin": "any", **more}
    return start_options(sender.connection.info.server_version, publications, **chosen)


def kinds(messages):
    """First bytes of the pgoutput messages among some CopyData payloads."""
    envelopes = map(parse, messages)
    return "".join(chr(each.payload[0]) for each in envelopes if not isinstance(each, Keepalive))


def collect(sender, commits, seconds=None):
    """Receive until so many commits have come."""
    messages = []
    deadline = time.monotonic() + (seconds or patience.SECONDS)
    while kinds(messages).count("C") < commits:
        assert time.monotonic() < deadline
        burst = sender.receive()
        messages += burst
        if not burst:
            sender.wait(1)
    return messages


def fail(sender, seconds=None):
    """Receive until it raises."""
    deadline = time.monotonic() + (seconds or patience.SECONDS)
    while time.monotonic() < deadline:
        if not sender.receive():
            sender.wait(1)


def flood(sender):
    """Send more than all buffers on the way can hold."""
    for _ in range(200):
        sender.send(bytes(1 << 20))


def test_transactions_arrive_whole_and_in_order(pubdb, feed):
    feed.start(slot(pubdb), 0, options(feed))
    assert feed.streaming
    pubdb.execute("INSERT INTO t VALUES (1, 'a')")
    pubdb.execute("UPDATE t SET v = 'b'; DELETE FROM t")
    assert kinds(collect(feed, 2)) == "BRICBUDC"


def test_receive_never_blocks_on_an_idle_publisher(pubdb, feed):
    feed.start(slot(pubdb), 0, options(feed))
    while feed.wait(0.3):
        feed.receive()
    assert not feed.receive() and feed.wait(0) is False


def test_waiting_does_not_overlook_what_came_together_with_the_start(pubdb, feed):
    pubdb.execute("INSERT INTO t VALUES (1, 'a')")
    feed.start(slot(pubdb), 0, options(feed))
    assert feed.wait(patience.SECONDS)
    feed.receive()


def test_receive_returns_what_is_here_within_its_limits_and_loses_nothing(pubdb, feed):
    pubdb.execute("INSERT INTO t SELECT g, 'v' FROM generate_series(1, 5000) g")
    feed.start(slot(pubdb), 0, options(feed, streaming="off"))
    total, largest = "", 0
    while "C" not in total:
        burst = feed.receive(limit_messages=10)
        assert len(burst) <= 10
        largest = max(largest, len(burst))
        total += kinds(burst)
        if not burst:
            feed.wait(1)
    assert total.count("I") == 5000 and largest == 10


def test_one_call_empties_what_has_arrived_not_only_one_buffer(pubdb, feed):
    pubdb.execute("INSERT INTO t SELECT g, 'v' FROM generate_series(1, 3000) g")
    feed.start(slot(pubdb), 0, options(feed, streaming="off"))
    sent = "SELECT sent_lsn >= %s::pg_lsn FROM pg_stat_replication WHERE pid = %s"
    pubdb.wait(sent, pubdb.value("SELECT pg_current_wal_lsn()"), feed.connection.info.backend_pid)
    largest, total = 0, ""
    while "C" not in total:
        burst = feed.receive()
        largest = max(largest, len(burst))
        total += kinds(burst)
    assert largest > 2000


def test_waiting_does_not_overlook_what_a_limit_left_in_the_buffer(pubdb, feed):
    pubdb.execute("INSERT INTO t SELECT g, 'v' FROM generate_series(1, 100) g")
    feed.start(slot(pubdb), 0, options(feed, streaming="off"))
    total = ""
    while "C" not in total:
        if burst := feed.receive(limit_messages=1):
            total += kinds(burst)
        else:
            assert feed.wait(patience.SECONDS)
    assert total.count("I") == 100


def test_the_byte_limit_ends_a_burst_after_the_message_that_reaches_it(pubdb, feed):
    pubdb.execute("INSERT INTO t SELECT g, repeat('x', 1000) FROM generate_series(1, 100) g")
    feed.start(slot(pubdb), 0, options(feed, streaming="off"))
    total = ""
    while "C" not in total:
        burst = feed.receive(limit_bytes=2000)
        assert sum(map(len, list(burst)[:-1])) < 2000
        total += kinds(burst)
        if not burst:
            feed.wait(1)
    assert total.count("I") == 100


def test_a_message_larger_than_every_buffer_arrives_whole(pubdb, feed):
    pubdb.execute("ALTER TABLE t ALTER v SET STORAGE EXTERNAL")
    pubdb.execute("INSERT INTO t VALUES (1, repeat('x', 20000000))")
    feed.start(slot(pubdb), 0, options(feed, streaming="off"))
    assert max(map(len, collect(feed, 1))) > 20_000_000


def test_feedback_moves_the_slot_and_a_new_stream_begins_after_it(pubdb, feed):
    feed.start(slot(pubdb), 0, options(feed))
    pubdb.execute("INSERT INTO t VALUES (1, 'a')")
    end = max(parse(message).wal_end for message in collect(feed, 1))
    feed.send(standby_status(end, end, end, 0, True))
    pubdb.wait(
        "SELECT confirmed_flush_lsn >= %s::pg_lsn FROM pg_replication_slots WHERE slot_name = %s", *at(end, pubdb)
    )
    feed.stop()
    assert not feed.streaming
    pubdb.execute("INSERT INTO t VALUES (2, 'b')")
    with opened(pubdb) as second:
        second.start(slot(pubdb), 0, options(second))
        assert kinds(collect(second, 1)) == "BRIC"


def at(lsn, pubdb):
    return format_lsn(lsn), slot(pubdb)


def test_a_stream_stops_in_the_middle_of_a_backlog_and_nothing_of_it_is_lost(pubdb, feed):
    pubdb.execute("INSERT INTO t SELECT g, repeat('x', 100) FROM generate_series(1, 50000) g")
    feed.start(slot(pubdb), 0, options(feed, streaming="off"))
    while not feed.receive():
        feed.wait(1)
    feed.stop()
    with opened(pubdb) as second:
        second.start(slot(pubdb), 0, options(second, streaming="off"))
        assert kinds(collect(second, 1)).count("I") == 50000


def test_a_publication_that_is_dropped_and_made_again_is_noticed_in_the_stream(pubdb, feed):
    if pubdb.connection.info.server_version < 180000:
        pytest.skip("the publisher refuses to go on without it")
    feed.start(slot(pubdb), 0, options(feed))
    pubdb.execute("INSERT INTO t VALUES (1, 'sent')")
    collect(feed, 1)
    assert not feed.take_skipped_publication()
    pubdb.execute('DROP PUBLICATION "Pub, ""one"""')
    pubdb.execute("INSERT INTO t VALUES (2, 'left out')")
    pubdb.execute('CREATE PUBLICATION "Pub, ""one""" FOR TABLE t')
    pubdb.execute("INSERT INTO t VALUES (3, 'sent')")
    collect(feed, 1)
    assert feed.take_skipped_publication()
    assert not feed.take_skipped_publication()
    pubdb.execute("INSERT INTO t VALUES (4, 'sent')")
    collect(feed, 1)
    assert not feed.take_skipped_publication()


def test_after_a_stop_the_connection_takes_commands_and_can_drop_its_slot(pubdb, feed):
    feed.start(slot(pubdb), 0, options(feed))
    feed.stop()
    assert feed.connection.execute("SELECT 1").fetchone() == (1,)
    assert drop_slot(feed.connection, slot(pubdb))


def test_a_second_stream_on_one_connection_is_refused_because_the_server_would_end_it_at_once(pubdb, feed):
    feed.start(slot(pubdb), 0, options(feed))
    feed.stop()
    with pytest.raises(InternalError):
        feed.start(slot(pubdb), 0, options(feed))
    pubdb.execute("INSERT INTO t VALUES (1, 'a')")
    again = WalSender(feed.connection)
    again.start(slot(pubdb), 0, options(feed))
    with pytest.raises(PublisherUnavailable, match="has ended"):
        fail(again)


def test_stop_without_a_stream_does_nothing(feed):
    feed.stop()
    assert feed.connection.execute("SELECT 1").fetchone() == (1,)


def test_a_missing_slot_is_a_lost_slot_and_leaves_the_connection_usable(feed):
    with pytest.raises(SlotLost, match='could not start WAL streaming: replication slot "no_such" does not exist'):
        feed.start("no_such", 0, options(feed))
    assert feed.connection.execute("SELECT 1").fetchone() == (1,)


def test_a_slot_that_somebody_else_streams_from_is_worth_a_retry(pubdb, feed):
    feed.start(slot(pubdb), 0, options(feed))
    with opened(pubdb) as other, pytest.raises(PublisherUnavailable) as raised:
        other.start(slot(pubdb), 0, options(other))
    assert raised.value.sqlstate == "55006" and str(feed.connection.info.backend_pid) in raised.value.message


def test_the_server_error_inside_the_stream_keeps_its_sqlstate_and_comes_after_the_messages(pubdb, feed):
    pubdb.execute("CREATE TABLE f (n int); CREATE PUBLICATION filtered FOR TABLE f WHERE (1 / n > 0)")
    pubdb.execute("INSERT INTO f VALUES (1)")
    pubdb.execute("INSERT INTO f VALUES (0)")
    names = ("filtered",)
    if feed.connection.info.server_version < 180000:
        pytest.skip("an older publisher knows only publications that are older than the slot")
    feed.start(slot(pubdb), 0, options(feed, names))
    time.sleep(0.5)
    assert kinds(collect(feed, 1)) == "BRIC"
    with pytest.raises(ApplyError, match="could not receive data from WAL stream: division by zero") as raised:
        fail(feed)
    assert raised.value.sqlstate == "22012"
    assert not feed.streaming


def test_a_terminated_walsender_is_worth_a_retry(pubdb, feed):
    feed.start(slot(pubdb), 0, options(feed))
    pubdb.execute("SELECT pg_terminate_backend(%s)", feed.connection.info.backend_pid)
    with pytest.raises(PublisherUnavailable) as raised:
        fail(feed)
    assert raised.value.sqlstate == "57P01"


def test_a_publication_that_an_old_publisher_cannot_see_yet_is_explained(pubdb, feed):
    if feed.connection.info.server_version >= 180000:
        pytest.skip("from 18 the publisher only warns")
    pubdb.execute("INSERT INTO t VALUES (1, 'a')")
    feed.start(slot(pubdb), 0, options(feed, ("missing",)))
    with pytest.raises(ReplicationBroken, match='publication "missing" does not exist') as raised:
        fail(feed)
    assert "older than the position" in raised.value.hint


@pytest.fixture
def own(request):
    """A private publisher with a publication and a slot of the name ``s``; the parameter is its settings."""
    with Server(fast=True, settings=getattr(request, "param", None)) as server:
        server.query("CREATE TABLE t (n int PRIMARY KEY, v text)")
        server.query("ALTER TABLE t ALTER v SET STORAGE EXTERNAL")
        server.query("CREATE PUBLICATION p FOR TABLE t")
        server.query("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
        connection = connect(server.conninfo(), application_name="feed", replication=True)
        yield server, WalSender(connection)
        connection.close()


def test_an_orderly_shutdown_of_the_publisher_ends_the_stream_after_the_last_change(own):
    server, sender = own
    sender.start("s", 0, options(sender, ("p",)))
    server.query("INSERT INTO t VALUES (1)")
    os.kill(server.pid, signal.SIGINT)
    messages = []

    def follow():
        while True:
            messages.extend(burst := sender.receive())
            for envelope in map(parse, burst):
                sender.send(standby_status(*[envelope.wal_end] * 3, 0))
            sender.wait(0.2)

    with pytest.raises(PublisherUnavailable, match=r"data stream from publisher has ended|Broken pipe|reset by peer"):
        follow()  # the end may come before the last answer is sent
    assert kinds(messages) == "BRIC"


def test_a_crash_of_the_publisher_is_worth_a_retry(own):
    server, sender = own
    sender.start("s", 0, options(sender, ("p",)))
    server.kill9()
    with pytest.raises(PublisherUnavailable):
        fail(sender)
    with pytest.raises(PublisherUnavailable):
        sender.receive()
    with pytest.raises(PublisherUnavailable):
        flood(sender)


@pytest.mark.parametrize("way", ["tls", "libpq over tls"], indirect=True)
def test_over_tls_nothing_waits_unseen_inside_the_library(pubdb, feed):
    sizes = [1000, 7000, 8100, 8192, 9000, 16000, 16384, 17000, 33000, 100000] * 3
    for number, size in enumerate(sizes):
        pubdb.execute("INSERT INTO t VALUES (%s, repeat('x', %s))", number, size)
    feed.start(slot(pubdb), 0, options(feed))
    messages = []
    while kinds(messages).count("C") < len(sizes):
        if not (burst := feed.receive(3, 20_000)):
            assert feed.wait(patience.SECONDS), "bytes are kept back"
        messages += burst


LITTLE_WAL = {"max_slot_wal_keep_size": "1MB", "min_wal_size": "32MB", "max_wal_size": "32MB"}


@pytest.mark.parametrize("own", [LITTLE_WAL], indirect=True)
def test_an_invalidated_slot_is_lost(own):
    server, sender = own
    for number in range(4):
        server.query("INSERT INTO t VALUES (%s)", params=[number])
        server.query("SELECT pg_switch_wal()")
    server.query("CHECKPOINT")
    state = slot_state(sender.connection, "s")
    assert (state.wal_status, state.invalidation_reason) == ("lost", "wal_removed")
    with pytest.raises(SlotLost) as raised:
        sender.start("s", 0, options(sender, ("p",)))
    assert raised.value.sqlstate == "55000" and raised.value.exit_code == 7


def test_a_peer_that_does_not_read_does_not_hold_us_for_ever(pubdb, feed):
    sender = WalSender(feed.connection, send_timeout=0.3)
    sender.start(slot(pubdb), 0, options(sender))
    pid = feed.connection.info.backend_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(PublisherUnavailable, match="the publisher does not read"):
            flood(sender)
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_publisher_that_does_not_answer_does_not_hold_the_stop_for_ever(pubdb, feed):
    feed.start(slot(pubdb), 0, options(feed))
    pid = feed.connection.info.backend_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(PublisherUnavailable, match="could not end WAL streaming: no answer"):
            feed.stop(timeout=0.3)
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("kind", [SocketChannel, LibpqChannel])
def test_a_publisher_that_does_not_answer_does_not_hold_the_start_for_ever(pubdb, monkeypatch, kind):
    name = slot(pubdb)
    monkeypatch.setattr(f"{kind.__module__}.START_SECONDS", 0.3)
    with opened(pubdb) as sender:
        pid = sender.connection.info.backend_pid
        os.kill(pid, signal.SIGSTOP)
        try:
            channel = kind(sender.connection, *([over(sender.connection.pgconn)] if kind is SocketChannel else []), 30)
            with pytest.raises(PublisherUnavailable, match="could not start WAL streaming: no answer"):
                channel.start(f"START_REPLICATION SLOT {name} LOGICAL 0/0".encode())
        finally:
            os.kill(pid, signal.SIGCONT)


def test_options_that_the_publisher_refuses_are_its_own_words(pubdb, feed):
    pubdb.execute("INSERT INTO t VALUES (1, 'a')")

    def ask():  # where the server says it depends on its version
        feed.start(slot(pubdb), 0, {**options(feed), "proto_version": "99"})
        fail(feed)

    with pytest.raises(ReplicationBroken, match="proto_version=99"):
        ask()


def test_literals_of_the_replication_grammar_double_the_single_quote_only():
    assert quote_literal("a'b\\c\"d") == "'a''b\\c\"d'"


@pytest.mark.parametrize(
    ("version", "streaming", "expected"),
    [
        (140011, "parallel", {"proto_version": "2", "streaming": "on", "binary": "true"}),
        (150004, "parallel", {"proto_version": "3", "streaming": "on", "binary": "true", "two_phase": "on"}),
        (160000, "parallel", {"proto_version": "4", "streaming": "parallel", "binary": "true"}),
        (160000, "on", {"proto_version": "4", "streaming": "on", "binary": "true"}),
        (180006, "off", {"proto_version": "4", "binary": "true"}),
    ],
)
def test_options_fit_the_publishers_version(version, streaming, expected):
    chosen = start_options(version, ["a", 'B"c'], binary=True, streaming=streaming, origin="none", two_phase=True)
    assert chosen.pop("publication_names") == '"a","B""c"'
    newer = {"origin": "none", "two_phase": "on"} if version >= 160000 else {}
    assert chosen == {**expected, **newer}


def test_streaming_is_what_the_publisher_can_not_what_was_wanted():
    def ask(version, streaming):
        options = start_options(version, ["p"], binary=False, streaming=streaming, origin="any")
        return options["proto_version"], options.get("streaming")

    assert ask(180000, "parallel") == ("4", "parallel")
    assert ask(150000, "parallel") == ("3", "on")
    assert ask(180000, "off") == ("4", None)
