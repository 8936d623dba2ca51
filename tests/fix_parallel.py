"""Transactions applied while they arrive: a publisher that streams every change at once, and who replayed what."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from fix_engine import Task
from fix_pair import MakePair, Pair

if TYPE_CHECKING:
    from fix_servers import Database

TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text)"
#: Every change of an unfinished transaction is sent at once (the server's own tests use it).
AT_ONCE = "debug_logical_replication_streaming = immediate"
#: Transactions that are open on the target with changes of tables in them; those of the ledger alone do not count.
OPEN = (
    "SELECT count(*) FROM pg_stat_activity a"
    " WHERE application_name LIKE 'pgsub %% apply %%' AND datname = current_database() AND EXISTS ("
    " SELECT FROM pg_locks l JOIN pg_class c ON c.oid = l.relation WHERE l.pid = a.pid AND l.granted"
    " AND l.mode LIKE '%%Exclusive%%' AND c.relnamespace = 'public'::regnamespace)"
)

Parallel = Callable[..., Pair]
Replays = Callable[[], list[str]]


@pytest.fixture
def replays(caplog: pytest.LogCaptureFixture) -> Iterator[Replays]:
    """Why transactions were replayed from their files so far."""
    with caplog.at_level(logging.DEBUG, logger="pgsub.apply"):
        yield lambda: [r.getMessage() for r in caplog.records if "replayed" in r.getMessage()]


@pytest.fixture
def parallel(pair: MakePair, pubdb: Database) -> Iterator[Parallel]:
    """A pair whose publisher streams everything at once to a subscription with ``streaming = parallel``.

    It has no autovacuum. Changes of catalogs are streamed, too, though none is sent (DecodeUpdate): an ANALYZE would
    take one of the parallel workers, and a transaction that a test waits for might find none.
    """
    server = pubdb.server
    server.query("ALTER SYSTEM SET autovacuum = off")
    server.reload()
    pubdb.wait("SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'autovacuum worker'", value=0)

    def make(ddl: str = TABLE, **options: Any) -> Pair:
        p = pair(ddl, streaming="parallel", **options)
        p.pubdb.execute(f"ALTER DATABASE {p.pubdb.name} SET {AT_ONCE}")
        return p

    yield make
    if server.running:
        server.query("ALTER SYSTEM RESET autovacuum")
        server.reload()


@contextmanager
def publishing(p: Pair, *statements: str) -> Iterator[psycopg.Connection]:
    """A session with an open transaction on the publisher."""
    with closing(p.pubdb.connect()) as session:
        session.execute("BEGIN")
        for statement in statements:
            session.execute(statement.encode())
        yield session


def wait_open(p: Pair, task: Task, count: int = 1) -> None:
    """Wait until so many transactions are open on the target with changes in them."""
    p.pubdb.execute("SELECT pg_logical_emit_message(true, '', '')")  # half a page of WAL waits for a commit
    p.until(OPEN, value=count, task=task)
