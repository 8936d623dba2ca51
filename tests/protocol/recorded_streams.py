"""What real walsenders send: CopyData of every message type, recorded in the test session itself."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import psycopg
from embedded import Server

from pgsub.common.errors import PublisherUnavailable
from pgsub.protocol.walsender_messages import XLogData, parse
from pgsub.publisher.connect import connect
from pgsub.publisher.stream.walsender import WalSender, start_options

Flush = Callable[[], object]
#: Every message type of pgoutput.
EVERY_KIND = frozenset("BCOIUDTRYMbPKrpSEcA")

_TABLES = """
CREATE TYPE mood AS ENUM ('sad', 'ok');
CREATE TABLE t (id int PRIMARY KEY, v text, m mood);
CREATE TABLE f (a int, b text, big text); ALTER TABLE f REPLICA IDENTITY FULL;
ALTER TABLE f ALTER big SET STORAGE EXTERNAL;
CREATE TABLE "wei rd" ("Kör per" numeric PRIMARY KEY, "x""y" bytea, z int[]);
CREATE PUBLICATION p FOR ALL TABLES;
"""
_BIG = "(SELECT string_agg(md5(g::text), '') FROM generate_series(1, 80) g)"
_CHANGES = (
    "INSERT INTO t VALUES (1, 'one', 'ok'), (2, NULL, 'sad'), (3, '', NULL)",
    "UPDATE t SET v = 'ünï\\\\' WHERE id = 1; UPDATE t SET id = 20 WHERE id = 2; DELETE FROM t WHERE id = 3",
    f"INSERT INTO f VALUES (1, 'x', {_BIG}), (NULL, NULL, 'short'); UPDATE f SET b = 'y'; DELETE FROM f WHERE a = 1",
    "INSERT INTO \"wei rd\" VALUES ('NaN', '\\x00ff', '{1,NULL}'); UPDATE \"wei rd\" SET z = '{}'",
    "BEGIN; SELECT pg_logical_emit_message(true, 'prefix', 'inside'); INSERT INTO t VALUES (5); COMMIT",
    "SELECT pg_logical_emit_message(false, 'prefix', 'outside')",
    "ALTER TABLE t ADD more int DEFAULT 7; INSERT INTO t VALUES (6)",
    'TRUNCATE t, f CASCADE; TRUNCATE "wei rd" RESTART IDENTITY',
)
_FLUSH = "SELECT pg_logical_emit_message(false, 'flush', '', true)"


class Stream(NamedTuple):
    """What one walsender sent, and how it was asked to."""

    parallel: bool
    copydata: tuple[bytes, ...]

    def payloads(self) -> list[bytes]:
        """The pgoutput messages."""
        opened = map(parse, self.copydata)
        return [one.payload for one in opened if isinstance(one, XLogData)]

    def kinds(self) -> set[str]:
        """Their types."""
        return {chr(payload[0]) for payload in self.payloads()}


class Recorder:
    """Streams a slot and keeps everything.

    :param conninfo: of the publisher or of a proxy before it.
    :param flush: makes the publisher flush its WAL.
    """

    def __init__(self, conninfo: str, slot: str, *, binary: bool, streaming: str, flush: Flush = lambda: None) -> None:
        self._flush = flush
        self._connection = connect(conninfo, application_name=slot, replication=True)
        self._sender = WalSender(self._connection)
        self._parallel = streaming == "parallel"
        self._copydata: list[bytes] = []
        version = self._connection.info.server_version
        options = start_options(
            version, ["p"], binary=binary, streaming=streaming, origin="any", two_phase=True, messages=True
        )
        self._sender.start(slot, 0, options)

    def until(self, done: Callable[[Sequence[bytes]], bool], seconds: float = 30) -> None:
        """Receive until what was received satisfies a condition."""
        deadline = time.monotonic() + seconds
        while not done(self._copydata):
            assert time.monotonic() < deadline, self.stream().kinds()
            self._copydata += self._sender.receive()
            self._sender.wait(0.1)

    def count(self, kind: str, number: int) -> None:
        """Receive until so many messages of a type have come.

        What an open transaction writes is sent once it is flushed, which may take the publisher fifteen seconds.
        """
        self._flush()
        self.until(lambda got: sum(p.startswith(kind.encode()) for p in Stream(False, tuple(got)).payloads()) >= number)

    def stream(self) -> Stream:
        """Everything so far."""
        return Stream(self._parallel, tuple(self._copydata))

    def close(self) -> None:
        """End it without telling the publisher that anything was kept."""
        self._connection.close()


def set_up(server: Server) -> None:
    """Tables, a publication and a slot ``history`` before all changes of :func:`history`."""
    with contextlib.closing(server.connect()) as session:
        session.execute(_TABLES.encode())
        for slot in ("history", "live", "parallel"):
            session.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput', false, true)", (slot,))


def history(server: Server) -> None:
    """Changes of every kind that a finished transaction can have."""
    with contextlib.closing(server.connect()) as session:
        for statement in _CHANGES:
            session.execute(statement.encode())
        for gid, end in (("g'1", "COMMIT"), ("g 2", "ROLLBACK")):
            literal = "'" + gid.replace("'", "''") + "'"
            session.execute(f"BEGIN; INSERT INTO t VALUES ({len(end)}); PREPARE TRANSACTION {literal}".encode())
            session.execute(f"{end} PREPARED {literal}".encode())
        session.execute("SELECT pg_replication_origin_create('up stream')")
        session.execute("SELECT pg_replication_origin_session_setup('up stream')")
        session.execute("INSERT INTO t VALUES (100)")
        session.execute("SELECT pg_replication_origin_session_reset()")
        session.execute("INSERT INTO t VALUES (101, 'the last')")


def replay(conninfo: str, *, binary: bool) -> Stream:
    """All of :func:`history` from its slot, which stays where it is."""
    recorder = _of_history(conninfo, binary)
    with contextlib.closing(recorder):
        recorder.until(lambda got: _history(got) is not None)
        whole = _history(recorder.stream().copydata)
        assert whole is not None
        return Stream(False, whole)


def _of_history(conninfo: str, binary: bool) -> Recorder:
    """A recorder of the slot, once the walsender of an earlier one has left it."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return Recorder(conninfo, "history", binary=binary, streaming="off")
        except PublisherUnavailable as error:
            if "is active for PID" not in str(error) or time.monotonic() >= deadline:
                raise
            time.sleep(0.05)


def _history(got: Sequence[bytes]) -> tuple[bytes, ...] | None:
    """All up to the end of the last transaction of :func:`history`: more may have come at once."""
    last = False
    for number, copydata in enumerate(got):
        last = last or b"the last" in copydata
        if last and copydata.startswith(b"w") and Stream(False, (copydata,)).kinds() == {"C"}:
            return tuple(got[: number + 1])
    return None


def live(server: Server, *, parallel: bool) -> Stream:
    """Transactions in progress, which are streamed as they are made: committed, rolled back, prepared."""
    with contextlib.closing(server.connect()) as session:
        session.execute("ALTER SYSTEM SET debug_logical_replication_streaming = immediate")
        session.execute("SELECT pg_reload_conf()")
    name, streaming = ("parallel", "parallel") if parallel else ("live", "on")
    with _sessions(server) as (one, two, three):
        recorder = Recorder(
            server.conninfo(), name, binary=parallel, streaming=streaming, flush=lambda: three.execute(_FLUSH)
        )
        with contextlib.closing(recorder):
            return _in_progress(recorder, one, two)


def _in_progress(recorder: Recorder, one: psycopg.Connection, two: psycopg.Connection) -> Stream:
    for session in (one, two):
        session.execute("BEGIN; INSERT INTO t VALUES (pg_backend_pid(), 'x', 'ok')")
    one.execute("SELECT pg_logical_emit_message(true, 'p', 'in a stream'); SAVEPOINT a; DELETE FROM t")
    recorder.count("D", 1)
    one.execute("ROLLBACK TO a; ALTER TABLE f ADD added int; INSERT INTO f VALUES (1, 'b', 'c', 2)")
    two.execute("SAVEPOINT b; UPDATE t SET v = 'y' WHERE id = pg_backend_pid(); RELEASE b")
    recorder.count("A", 1)
    recorder.count("U", 1)
    two.execute("ROLLBACK")
    one.execute("ALTER TABLE f DROP added; COMMIT")
    recorder.count("A", 2)
    recorder.count("c", 1)
    two.execute("BEGIN; INSERT INTO t VALUES (200, 'prepared'); TRUNCATE f; PREPARE TRANSACTION 'streamed'")
    recorder.count("p", 1)
    two.execute("COMMIT PREPARED 'streamed'")
    recorder.count("K", 1)
    one.execute("DELETE FROM t WHERE id = 200")
    recorder.count("c", 2)
    return recorder.stream()


@contextlib.contextmanager
def _sessions(server: Server) -> Iterator[list[psycopg.Connection]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(server.connect())) for _ in range(3)]
