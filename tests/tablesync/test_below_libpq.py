"""Bytes of a COPY go from the publisher's connection to the target's, all of them, or the copy fails."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any, cast

import psycopg
import pytest
from fix_servers import Database
from hypothesis import given, settings
from hypothesis import strategies as st

from pgsub.publisher import connect as publisher
from pgsub.publisher.stream.transport import PlainTransport, reachable
from pgsub.tablesync.copy import copy_to_copy as copy_stream
from pgsub.tablesync.copy.below_libpq import Passthrough
from pgsub.target.session import connect as target

_SIDES = "pubdb", "subdb"
DDL = "CREATE TABLE t (id int, v text)"


@pytest.fixture(params=["raw", "encrypted", "libpq", "libpq over tls"])
def way(request: pytest.FixtureRequest) -> str:
    """How both connections are used."""
    return str(request.param)


@pytest.fixture
def pubdb(request: pytest.FixtureRequest, way: str) -> Database:
    """The shared publisher's, or one that encrypts."""
    return _database(request, way, 0)


@pytest.fixture
def subdb(request: pytest.FixtureRequest, way: str) -> Database:
    """The shared target's, or one that encrypts."""
    return _database(request, way, 1)


def _database(request: pytest.FixtureRequest, way: str, side: int) -> Database:
    encrypts = way in ("encrypted", "libpq over tls")
    found = request.getfixturevalue("tls_databases")[side] if encrypts else request.getfixturevalue(_SIDES[side])
    assert isinstance(found, Database)
    return found


@pytest.fixture
def ends(pubdb: Database, subdb: Database, way: str) -> Iterator[Any]:
    """Run a copy; rows and bytes, or the error."""
    sessions = []

    def run(copy_out: str, copy_in: str = "COPY public.t FROM STDIN") -> tuple[int, int]:
        source = publisher.connect(pubdb.conninfo, application_name="pump")
        session = target.connect(subdb.conninfo, "pgsub 1 copy:1 1")
        sessions.extend([source, session])
        for connection in (source, session):
            connection.execute("BEGIN")
        for connection in (source, session):
            assert connection.pgconn.ssl_in_use is (way in ("encrypted", "libpq over tls")) and reachable(connection)
        result = copy_stream.move(source, session, copy_out, copy_in, lambda size: None, direct="libpq" not in way)
        for connection in (source, session):
            assert connection.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
            connection.execute("COMMIT")
        return result

    pubdb.execute(DDL)
    subdb.execute(DDL)
    yield run
    for connection in sessions:
        connection.close()


@pytest.mark.parametrize(
    "rows",
    [
        "SELECT 1, 'x' WHERE false",
        "SELECT 1, 'x'",
        "SELECT g, repeat('row', g % 7) FROM generate_series(1, 20000) g",
        "SELECT g, repeat(md5(g::text), 30000) FROM generate_series(1, 5) g",
        r"SELECT g, E'\\ tab\t line\n cr\r null \\N d\x01' || chr(233) FROM generate_series(1, 300) g",
        "SELECT NULL::int, NULL::text FROM generate_series(1, 10)",
    ],
    ids=["none", "one", "small", "larger than the buffer", "escapes", "nulls"],
)
def test_all_rows_arrive_as_they_are(ends: Any, pubdb: Database, subdb: Database, rows: str) -> None:
    pubdb.execute(f"INSERT INTO t {rows}")
    count, size = ends("COPY public.t TO STDOUT")
    query = "SELECT id, v FROM t ORDER BY 1, 2"
    assert subdb.rows(query) == pubdb.rows(query)
    assert count == pubdb.value("SELECT count(*) FROM t")
    assert size == sum(len(line) for line in _copied(pubdb))


def _copied(pubdb: Database) -> list[bytes]:
    with pubdb.connection.cursor() as cursor, cursor.copy("COPY public.t TO STDOUT") as copy:
        return [bytes(block) for block in copy]


def test_binary_rows_arrive_too(ends: Any, pubdb: Database, subdb: Database) -> None:
    pubdb.execute("INSERT INTO t SELECT g, repeat('x', g * 100) FROM generate_series(1, 500) g")
    ends("COPY public.t TO STDOUT (FORMAT binary)", "COPY public.t FROM STDIN (FORMAT binary)")
    query = "SELECT id, md5(v) FROM t ORDER BY 1"
    assert subdb.rows(query) == pubdb.rows(query)


def test_notices_of_the_publisher_are_not_rows(ends: Any, pubdb: Database, subdb: Database) -> None:
    pubdb.execute(
        "CREATE FUNCTION loud(n int) RETURNS int LANGUAGE plpgsql AS"
        " $$ BEGIN IF n % 100 = 0 THEN RAISE WARNING 'row %', n; END IF; RETURN n; END $$"
    )
    assert ends("COPY (SELECT public.loud(g), 'x' FROM generate_series(1, 1000) g) TO STDOUT")[0] == 1000
    assert subdb.value("SELECT count(DISTINCT id) FROM t") == 1000


@pytest.mark.parametrize("after", [0, 1, 30_000])
def test_an_error_of_the_publisher_fails_the_copy(ends: Any, subdb: Database, after: int) -> None:
    query = f"COPY (SELECT 1 / ({after + 1} - g), repeat('x', 50) FROM generate_series(1, 60000) g) TO STDOUT"
    with pytest.raises(copy_stream.SourceError) as caught:
        ends(query)
    assert caught.value.error.sqlstate == "22012" and "division by zero" in str(caught.value.error)
    assert subdb.value("SELECT count(*) FROM t") == 0


@pytest.mark.parametrize("end", ["pg_cancel_backend", "pg_terminate_backend"])
def test_a_copy_that_is_broken_off_is_no_shorter_table(ends: Any, pubdb: Database, subdb: Database, end: str) -> None:
    def break_off() -> None:
        with closing(pubdb.connect()) as session:
            query = (
                f"SELECT {end}(pid) FROM pg_stat_activity WHERE application_name = 'pump' AND query ~ '^COPY'"
                " AND clock_timestamp() > query_start + interval '0.2 s'"
            )
            while not session.execute(query.encode()).fetchall():
                pass

    thread = threading.Thread(target=break_off)
    thread.start()
    with pytest.raises(copy_stream.SourceError) as caught:
        ends("COPY (SELECT g, repeat('x', 50) FROM generate_series(1, 100000000) g) TO STDOUT")
    thread.join()
    assert caught.value.error.sqlstate in ("57014", "57P01", None)
    assert subdb.value("SELECT count(*) FROM t") == 0


def test_an_error_of_the_target_fails_the_copy(ends: Any, subdb: Database) -> None:
    with pytest.raises(psycopg.errors.InvalidTextRepresentation) as caught:
        ends("COPY (SELECT 'no number', 'x' FROM generate_series(1, 50000)) TO STDOUT")
    assert "line 1" in (caught.value.diag.context or "")


@pytest.mark.parametrize("way", ["raw", "encrypted"], indirect=True)
def test_an_early_error_of_the_target_ends_the_copy_early(ends: Any, pubdb: Database) -> None:
    pubdb.execute(
        "CREATE SEQUENCE read; CREATE FUNCTION next() RETURNS bigint LANGUAGE sql AS $$SELECT nextval('public.read')$$"
    )
    with pytest.raises(psycopg.errors.InvalidTextRepresentation):
        ends("COPY (SELECT 'no number', public.next() || repeat('x', 1000) FROM generate_series(1, 2000000)) TO STDOUT")
    assert pubdb.value("SELECT last_value FROM read") < 1_000_000


def _frame(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack(">I", len(body) + 4) + body


_noise = st.sampled_from(
    [("N", b"SNOTICE\0C00000\0Mhello\0\0"), ("S", b"TimeZone\0UTC\0"), ("A", bytes(4) + b"c\0p\0")]
)


@settings(max_examples=200, deadline=None)
@given(
    messages=st.lists(st.one_of(st.binary(max_size=40).map(lambda body: ("d", body)), _noise), max_size=30),
    large=st.integers(0, 3),
    cuts=st.lists(st.integers(1, 60), min_size=1, max_size=40),
)
def test_messages_are_told_apart_however_the_bytes_arrive(
    messages: list[tuple[str, bytes]], large: int, cuts: list[int]
) -> None:
    messages = [*messages, *[("d", b"l" * 300_000)] * large]
    rows = [body for kind, body in messages if kind == "d"]
    stream = _frame(b"H", b"\0\0\2\0\0\0\0")
    stream += b"".join(_frame(kind.encode(), body) for kind, body in messages)
    stream += _frame(b"c", b"") + _frame(b"C", b"COPY %d\0" % len(rows)) + _frame(b"Z", b"T")
    handed, size = _through(stream, cuts)
    assert b"".join(_contents(handed)) == b"".join(rows)
    assert size == sum(map(len, rows))


def _contents(handed: bytes) -> Iterator[bytes]:
    """Of CopyData messages, and nothing else."""
    while handed:
        assert handed[:1] == b"d"
        end = 1 + struct.unpack_from(">xI", handed)[0]
        yield handed[5:end]
        handed = handed[end:]


def _through(stream: bytes, cuts: list[int]) -> tuple[bytes, int]:
    """What is handed on when the stream arrives in these pieces, the last cut for all that is left."""
    (publisher_end, source), (session, target_end) = socket.socketpair(), socket.socketpair()
    handed = bytearray()

    def feed() -> None:
        publisher_end.recv(1000)
        position = 0
        for cut in cuts:
            publisher_end.sendall(stream[position : position + cut])
            position += cut
        publisher_end.sendall(stream[position:])

    def read() -> None:
        while block := target_end.recv(1 << 16):
            handed.extend(block)

    threads = [threading.Thread(target=feed), threading.Thread(target=read)]
    with publisher_end, source, target_end:
        with session:
            for end in (source, session):
                end.setblocking(False)
            for thread in threads:
                thread.start()
            ends = (PlainTransport(cast(Any, SimpleNamespace(socket=end.fileno()))) for end in (source, session))
            size = Passthrough(*ends, cast(Any, None), lambda size: None).run("COPY public.t TO STDOUT")
        for thread in threads:
            thread.join()
    return bytes(handed), size
