"""The slow link of the benchmarks: all arrives, no connection is faster than its rate, none waits for another."""

from __future__ import annotations

import hashlib
import threading
import time
from contextlib import closing

import psycopg

from benchmarks.link import Link

RATE = 1_000_000
_TEXT = "SELECT string_agg(md5(g::text), '') FROM generate_series(1, %s) g"


def _expected(count: int) -> str:
    return "".join(hashlib.md5(str(number).encode()).hexdigest() for number in range(1, count + 1))


def test_what_goes_through_a_link_arrives_unchanged_both_ways(pubdb):
    with Link(pubdb.server.port, 50_000_000) as link, psycopg.connect(link.through(pubdb.conninfo)) as session:
        text = _expected(30_000)
        assert session.execute(_TEXT, (30_000,)).fetchone() == (text,)
        assert session.execute("SELECT md5(%s)", (text,)).fetchone() == (hashlib.md5(text.encode()).hexdigest(),)


def test_no_connection_is_faster_than_its_rate(pubdb):
    with Link(pubdb.server.port, RATE) as link, psycopg.connect(link.through(pubdb.conninfo)) as session:
        begun = time.monotonic()
        row = session.execute(_TEXT, (20_000,)).fetchone()
        assert row is not None
        # a lower bound: a busy machine cannot break it; the first 115 kB are free (one slice, and what is made up for)
        assert time.monotonic() - begun >= (len(row[0]) - 115_000) / RATE


def test_one_connection_does_not_wait_for_the_bytes_of_another(pubdb):
    with Link(pubdb.server.port, RATE) as link, closing(psycopg.connect(link.through(pubdb.conninfo))) as slow:
        with psycopg.connect(link.through(pubdb.conninfo)) as quick:
            # 60 seconds of the first one's bandwidth
            large = threading.Thread(target=_interrupted, args=(slow,), daemon=True)
            large.start()
            running = "SELECT query LIKE 'SELECT repeat%%' FROM pg_stat_activity WHERE pid = %s"
            pubdb.wait(running, slow.info.backend_pid)
            assert quick.execute(_TEXT, (10,)).fetchone() == (_expected(10),)
            assert large.is_alive()
        pubdb.execute("SELECT pg_terminate_backend(%s)", slow.info.backend_pid)
        large.join(60)
        assert not large.is_alive()


def _interrupted(session: psycopg.Connection) -> None:
    try:
        session.execute("SELECT repeat('x', 60000000)")
    except psycopg.OperationalError:
        return
    raise AssertionError("it was not interrupted")


def test_a_link_ends_with_its_connections(pubdb):
    link = Link(pubdb.server.port, RATE)
    session = psycopg.connect(link.through(pubdb.conninfo))
    pid = session.info.backend_pid
    link.close()
    pubdb.wait("SELECT count(*) FROM pg_stat_activity WHERE pid = %s", pid, value=0)
    session.close()
