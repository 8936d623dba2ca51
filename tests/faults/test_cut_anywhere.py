"""The connection to either server is cut at every single message, one after another: after each, a retry mends it.

SQLite's way of testing IO errors: fail at the n-th call, then at the n+1-th, until nothing fails any more.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from fix_engine import Subscriber
from fix_proxy import Harm, Link, Proxy
from fix_servers import Database
from thorough import thorough

from pgsub.common.errors import Directive, PgsubError
from pgsub.protocol.lsn import parse_lsn
from pgsub.tablesync.copy import plan

pytestmark = pytest.mark.long

#: More messages than a start, a batch and an end have.
MANY = 200


class NthRequest:
    """Harm to the n-th piece of bytes of clients whose name matches."""

    def __init__(self, wanted: Callable[[str], bool], kind: Harm) -> None:
        self._wanted = wanted
        self._kind = kind
        self.left = -1

    def __call__(self, link: Link, data: bytes) -> Harm:
        if self.left < 0 or not link.application_name or not self._wanted(link.application_name):
            return "none"
        self.left -= 1
        return self._kind if self.left < 0 else "none"


@pytest.fixture
def log(pubdb: Database, subdb: Database) -> None:
    """An append-only table without a key, and a counter."""
    for database in (pubdb, subdb):
        database.execute("CREATE TABLE log (n bigint, pad text); CREATE TABLE counter (id int PRIMARY KEY, n int)")
    pubdb.execute("CREATE PUBLICATION p FOR TABLE log, counter")


def write(pubdb: Database, number: int) -> None:
    """Three transactions."""
    pubdb.execute("INSERT INTO log SELECT %s, 'x' FROM generate_series(1, 60)", number)
    pubdb.execute("UPDATE counter SET n = n + 1")
    pubdb.execute("INSERT INTO log VALUES (%s, 'y')", number)


def content(database: Database) -> list[tuple[object, ...]]:
    """Rows of the log counted, and the counter."""
    return database.rows("SELECT n, count(*) FROM log GROUP BY n ORDER BY n") + database.rows("SELECT * FROM counter")


def expect_transient(call: Callable[[], object]) -> bool:
    """Whether it failed, and then with what a retry mends."""
    try:
        call()
    except PgsubError as error:
        if error.directive is not Directive.RETRY:
            raise
        return True
    return False


def through(sub: Subscriber, side: str, proxy: Callable[[str], Proxy]) -> Proxy:
    """Put a proxy between the subscriber's tasks and one server; the test's own sessions go past it."""
    conninfo = sub.sub.target if side == "target" else sub.sub.connection
    between = proxy(conninfo)
    field = "target" if side == "target" else "connection"
    sub.sub = replace(sub.sub, **{field: between.conninfo})
    return between


@pytest.mark.usefixtures("log")
@pytest.mark.parametrize("kind", ["swallow", "lose reply"])
@pytest.mark.parametrize("side", ["target", "publisher"])
def test_apply_survives_a_cut_at_any_message(
    pubdb: Database,
    subdb: Database,
    subscriber: Callable[[], Subscriber],
    proxy: Callable[[str], Proxy],
    side: str,
    kind: Harm,
) -> None:
    sub = subscriber()
    between = through(sub, side, proxy)
    pubdb.execute("INSERT INTO counter VALUES (1, 0)")
    subdb.execute("INSERT INTO counter VALUES (1, 0)")
    sub.register("log", "counter")
    between.harm = cut = NthRequest(lambda name: True, kind)
    for n in itertools.count():
        assert n < MANY
        write(pubdb, n)
        position = parse_lsn(pubdb.value("SELECT pg_current_wal_flush_lsn()"))
        claim = sub.take_over()
        cut.left = n
        failed = expect_transient(
            lambda claim=claim, end=position: sub.submit("apply", _apply, [sub.spec(claim, until_lsn=end)]).result()
        )
        harmed, cut.left = cut.left < 0, -1
        assert failed <= harmed
        if not harmed:
            break
        if n % 10 == 9:
            sub.catch_up()
            assert content(subdb) == content(pubdb)
    sub.catch_up()
    assert content(subdb) == content(pubdb)
    assert n > (15 if side == "target" else 5)


@pytest.mark.usefixtures("log")
@pytest.mark.parametrize("streaming", ["parallel", *thorough(["off", "on"])])
def test_apply_survives_a_cut_inside_any_message_of_the_publisher(
    pubdb: Database,
    subdb: Database,
    subscriber: Callable[..., Subscriber],
    proxy: Callable[[str], Proxy],
    streaming: str,
) -> None:
    pubdb.execute(f"ALTER DATABASE {pubdb.name} SET debug_logical_replication_streaming = immediate")
    sub = subscriber(streaming=streaming)
    between = through(sub, "publisher", proxy)
    for database in (pubdb, subdb):
        database.execute("INSERT INTO counter VALUES (1, 0)")
    sub.register("log", "counter")
    chance, cut, whole = random.Random(streaming), 0, 0
    for n in range(25):
        write(pubdb, n)
        position = parse_lsn(pubdb.value("SELECT pg_current_wal_flush_lsn()"))
        claim = sub.take_over()
        # the connection itself takes some of it, and a look into the WAL for the last transaction
        between.allowance = int(2500 * 2 ** (6 * chance.random()))
        failed = expect_transient(
            lambda claim=claim, end=position: sub.submit("apply", _apply, [sub.spec(claim, until_lsn=end)]).result()
        )
        between.allowance = None
        cut, whole = cut + failed, whole + (not failed)
        if n % 5 == 4:
            sub.catch_up()
            assert content(subdb) == content(pubdb)
    assert cut > 3 and whole > 1
    sub.catch_up()
    assert content(subdb) == content(pubdb)


def _apply(spec: object) -> object:
    from pgsub.apply.worker import worker

    return worker.run(spec)  # type: ignore[arg-type]


@pytest.mark.usefixtures("log")
@pytest.mark.parametrize(
    ("mode", "side", "kind"),
    [
        ("atomic", "target", "lose reply"),
        ("chunked", "publisher", "swallow"),
        *thorough(
            [
                ("atomic", "publisher", "swallow"),
                ("chunked", "target", "lose reply"),
                ("atomic", "target", "swallow"),
                ("atomic", "publisher", "lose reply"),
                ("chunked", "target", "swallow"),
                ("chunked", "publisher", "lose reply"),
            ]
        ),
    ],
)
def test_a_synchronization_survives_a_cut_at_any_message(
    pubdb: Database,
    subdb: Database,
    subscriber: Callable[[], Subscriber],
    proxy: Callable[[str], Proxy],
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    side: str,
    kind: Harm,
) -> None:
    size = 1 << 30 if mode == "atomic" else 8192
    monkeypatch.setattr(plan, "CHUNK_BYTES", size)
    monkeypatch.setattr(plan, "CHUNKS_PER_TASK", 1)  # some chunks are enough
    monkeypatch.setattr(plan, "CHUNKED_FROM_BYTES", size)
    pubdb.execute("INSERT INTO log SELECT -g, repeat('z', 100) FROM generate_series(1, 100) g")
    sub = subscriber()
    between = through(sub, side, proxy)
    sub.register("log", state="i")
    between.harm = cut = NthRequest(lambda name: True, kind)
    for n in itertools.count():
        assert n < MANY
        pubdb.execute("INSERT INTO log VALUES (%s, 'y')", n)
        if sub.state("log") in "sr":  # once more from the beginning
            _start_again(sub)
        cut.left = n
        expect_transient(lambda: sub.sync("log"))
        harmed, cut.left = cut.left < 0, -1
        if not harmed:
            break
        if n % 2:
            sub.sync("log")
            sub.catch_up()
            assert content(subdb) == content(pubdb)
    sub.catch_up()
    assert content(subdb) == content(pubdb)
    names = pubdb.rows("SELECT slot_name FROM pg_replication_slots WHERE database = current_database()")
    assert names == [(sub.sub.slot_name,)]


def _start_again(sub: Subscriber) -> None:
    sub.sync("log")  # its slot may be there still
    sub.subdb.execute("TRUNCATE log")
    sub.subdb.execute("UPDATE pgsub.subscription_rel SET srsubstate = 'i', srsublsn = NULL")
    sub.subdb.execute("UPDATE pgsub.progress SET states_version = states_version + 1 WHERE worker = 0")
