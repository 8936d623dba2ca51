"""A publisher that sends what it likes in answer to a query, and the streams that it sends.

Each stream holds messages by which a target that took them for a client's would write into a table, at every offset
that a parser could be led to. ``python tests/hostile.py --minutes 10`` is the long form of the fuzz test.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shutil
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psycopg
import pytest
from embedded import Server
from fix_servers import Database

from pgsub.common.errors import PgsubError
from pgsub.tablesync.copy import copy_to_copy as copy_stream

CANARY = "CREATE TABLE canary (what text); CREATE TABLE t (id int, v text)"
_SQL = b"ROLLBACK; INSERT INTO public.canary SELECT pg_catalog.current_user();\0"
COPY = "COPY public.t TO STDOUT"
#: What a server says of a message that it cannot make sense of (CopyGetData, SocketBackend, pqcomm.c).
_MISREAD = "(FATAL|ERROR|LOG): .*(message (type|length|format|from client)|protocol synchronization)"


def frame(kind: bytes, body: bytes) -> bytes:
    """One message."""
    return kind + struct.pack(">I", len(body) + 4) + body


def header(kind: bytes, length: int) -> bytes:
    """One that announces what it likes."""
    return kind + struct.pack(">I", length)


QUERY = frame(b"Q", _SQL)
#: As a Bind and Execute of a simple statement would come, and the end of a copy before it.
EXTENDED = frame(b"P", b"\0" + _SQL[10:] + b"\0\0") + frame(b"B", bytes(8)) + frame(b"E", bytes(5)) + frame(b"S", b"")
SLED = frame(b"f", b"no\0") + EXTENDED + QUERY * 3
ROW = frame(b"d", b"1\tx\n")
BEGIN, DONE, COUNT, READY = (
    frame(b"H", b"\0\0\2\0\0\0\0"),
    frame(b"c", b""),
    frame(b"C", b"COPY 2\0"),
    frame(b"Z", b"T"),
)
ERROR = frame(b"E", b"SERROR\0C22012\0Mno\0\0")
NOTICE = frame(b"N", b"SNOTICE\0C00000\0Mno\0\0")
LEGAL = BEGIN + ROW + NOTICE + ROW + DONE + COUNT + READY
_END = DONE + COUNT + READY
_HIDDEN = frame(b"d", b"x" * 92 + SLED)

#: None of them is an answer to COPY that ends well.
MALFORMED: dict[str, bytes] = {
    **{
        f"a length of {length:#x} {where}": before + header(b"d", length) + rest + _HIDDEN + _END
        for length in (0, 1, 2, 3, 0x40000004, 0x7FFFFFFF, 0x80000003, 0xFFFFFFFF)
        for where, before in (("at the first row", BEGIN), ("after a row", BEGIN + ROW))
        for rest in (b"\0\0\0\4",)
    },
    **{
        f"a {chr(kind[0])} message of length {length}": BEGIN + ROW + header(kind, length) + _HIDDEN + _END
        for kind in (b"c", b"C", b"Z", b"E", b"N", b"S", b"A", b"H")
        for length in (0, 3, 0xFFFFFFFF)
    },
    "a query among the rows": BEGIN + ROW + SLED + _END,
    "a row after an error": BEGIN + ROW + ERROR + _HIDDEN + READY,
    "an error among the rows": BEGIN + ROW + ERROR + READY,
    "an error after CopyDone": BEGIN + ROW + DONE + ERROR + READY,
    "an error after CommandComplete": BEGIN + ROW + DONE + COUNT + ERROR + READY,
    "an error and no more": BEGIN + ROW + ERROR,
    "a second CopyOutResponse": BEGIN + ROW + BEGIN + ROW + _END,
    "CopyInResponse": frame(b"G", b"\0\0\2\0\0\0\0") + ROW + _END,
    "CopyBothResponse": frame(b"W", b"\0\0\2\0\0\0\0") + ROW + _END,
    "rows of a SELECT": frame(b"T", b"\0\0") + frame(b"D", b"\0\0") + frame(b"C", b"SELECT 1\0") + READY,
    "rows of a SELECT among those of the copy": BEGIN + ROW + frame(b"D", b"\0\0") + _END,
    "no ReadyForQuery": BEGIN + ROW + DONE + COUNT,
    "no CommandComplete": BEGIN + ROW + DONE + READY,
    "only ReadyForQuery": READY,
    "nothing": b"",
    "half a header": BEGIN + ROW + b"d\0\0",
    "half a row": BEGIN + ROW + header(b"d", len(SLED) + 100) + SLED,
    "half a row of 500 MB": BEGIN + header(b"d", 500_000_000) + SLED * 2000,
    "a row of 1 GB that is not there": BEGIN + header(b"d", 0x3FFFFFFF),
    "a notice of 1 GB that is not there": BEGIN + header(b"N", 0x3FFFFFFF) + SLED,
}
#: libpq lets these pass: none of them moves the boundary of a message.
STRICTER = {
    "a row after CommandComplete": BEGIN + ROW + DONE + COUNT + _HIDDEN + READY,
    "a row after CopyDone": BEGIN + ROW + DONE + _HIDDEN + COUNT + READY,
    "rows before the copy": ROW + _HIDDEN + LEGAL,
    "a query before the rows": SLED + LEGAL,
    "no CopyDone": BEGIN + ROW + COUNT + READY,
    "another command's end": BEGIN + ROW + DONE + frame(b"C", b"SELECT 1\0") + READY,
    "a CommandComplete that is no text": BEGIN + ROW + DONE + frame(b"C", b"COPY x\0") + READY,
    "two CommandComplete": BEGIN + ROW + DONE + COUNT + COUNT + READY,
    "no transaction any more": BEGIN + ROW + DONE + COUNT + frame(b"Z", b"I"),
    "a CopyOutResponse that is too short": frame(b"H", b"\0\0\2") + ROW + _END,
    "a CopyDone with content": BEGIN + ROW + frame(b"c", SLED) + COUNT + READY,
    "more after the end": LEGAL + SLED,
}


def fuzzed(random_: random.Random) -> bytes:
    """A legal answer with a few things wrong, or none."""
    messages = [BEGIN, *[_any_row(random_) for _ in range(random_.randrange(6))], DONE, COUNT, READY]
    for _ in range(random_.choice((0, 1, 1, 2, 3))):
        place = random_.randrange(len(messages))
        messages[place : place + 1] = _wrong(random_, messages[place], messages)
    stream = bytearray(b"".join(messages))
    if random_.random() < 0.2 and stream:
        stream[random_.randrange(len(stream))] = random_.randrange(256)
    if random_.random() < 0.2:
        del stream[random_.randrange(len(stream) + 1) :]
    return bytes(stream)


def _any_row(random_: random.Random) -> bytes:
    pad = random_.choice((0, 1, 5, 92, 300, 70_000, 1 << 18, 400_000))
    inside = random_.choice((b"1\tx\n", b"x" * pad + SLED, bytes(pad) + QUERY, b"\\.\n" + SLED, random_.randbytes(40)))
    return random_.choice((ROW, frame(b"d", inside), frame(b"d", inside), NOTICE, frame(b"S", b"a\0" + SLED + b"\0")))


def _wrong(random_: random.Random, message: bytes, all_of_them: Sequence[bytes]) -> Sequence[bytes]:
    kind, length, body = message[:1], struct.unpack_from(">xI", message)[0] if len(message) >= 5 else 4, message[5:]
    lengths = (
        0,
        1,
        2,
        3,
        4,
        length - 1,
        length + 1,
        length + len(QUERY),
        0x7FFFFFFF,
        0xFFFFFFFF,
        random_.getrandbits(32),
    )
    return random_.choice(
        (
            [header(kind, random_.choice(lengths) & 0xFFFFFFFF) + body],
            [bytes([random_.randrange(256)]) + message[1:]],
            [message[: random_.randrange(len(message) + 1)]],
            [message, random_.choice((SLED, QUERY, EXTENDED, ERROR, NOTICE, DONE, READY, BEGIN))],
            [message, random_.choice(all_of_them)],
            [],
            [random_.randbytes(random_.randrange(12)) + message],
        )
    )


class Publisher:
    """Lets everybody in, and answers queries by :attr:`answer`, after which it hangs up.

    :param folder: for a certificate: what it sends is encrypted then.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.answer = b""
        self.below_tls = b""  #: what somebody on the line adds to the answer
        self.ends_tls = False  #: by a close_notify; otherwise the connection is cut
        self.pieces: Callable[[], int] = lambda: 1 << 16
        self._tls = None if folder is None else _context(folder)
        self._listener = socket.create_server(("127.0.0.1", 0))
        mode = "require" if self._tls else "disable"
        self.conninfo = (
            f"host=127.0.0.1 port={self._listener.getsockname()[1]} dbname=d user=u password=p sslmode={mode}"
            " gssencmode=disable application_name=hostile connect_timeout=60"
        )
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def encrypts(self) -> bool:
        """Whether it has a certificate."""
        return self._tls is not None

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._serve, args=self._listener.accept()[:1], daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError, struct.error), client:
            if self._tls is not None:
                client.recv(8)
                client.sendall(b"S")
                client = self._tls.wrap_socket(client, server_side=True)
            self._speak(client)
            if self.below_tls:
                with socket.socket(fileno=os.dup(client.fileno())) as line:
                    line.sendall(self.below_tls)
            if self.ends_tls and isinstance(client, ssl.SSLSocket):
                with contextlib.suppress(OSError, ValueError):
                    client.unwrap()
            with contextlib.suppress(OSError):  # not before the other side has read: a reset would drop what was sent
                client.shutdown(socket.SHUT_WR)
            while client.recv(1 << 16):
                pass

    def _speak(self, client: socket.socket) -> None:
        _exactly(client, struct.unpack(">I", _exactly(client, 4))[0] - 4)
        settings = {b"server_version": b"18.0", b"client_encoding": b"UTF8", b"standard_conforming_strings": b"on"}
        told = b"".join(frame(b"S", name + b"\0" + value + b"\0") for name, value in settings.items())
        client.sendall(frame(b"R", bytes(4)) + told + frame(b"K", bytes(8)) + frame(b"Z", b"T"))
        kind, length = struct.unpack(">cI", _exactly(client, 5))
        _exactly(client, length - 4)
        if kind == b"Q":
            answer = memoryview(self.answer)
            while answer:
                sent = max(1, self.pieces())
                client.sendall(answer[:sent])
                answer = answer[sent:]


def _exactly(client: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = client.recv(size - len(data))
        if not piece:
            raise ConnectionError("the client hung up")
        data += piece
    return data


def _context(folder: Path) -> ssl.SSLContext:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    key, certificate = folder / "server.key", folder / "server.crt"
    command = "openssl req -new -x509 -nodes -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -subj /CN=localhost"
    subprocess.run([*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


class Judge:
    """A target that says what it was told: every statement, and every message that it could not make sense of.

    :param database: with :data:`CANARY` in it.
    """

    def __init__(self, database: Database) -> None:
        self.database = database

    @contextlib.contextmanager
    def session(self) -> Iterator[psycopg.Connection]:
        """One that logs what it is sent, in a transaction."""
        with contextlib.closing(self.database.connect(application_name="judged")) as session:
            session.execute("SET log_statement = 'all'")
            session.execute("BEGIN")
            yield session

    def copy(self, publisher: Publisher, *, direct: bool) -> BaseException | None:
        """Copy what the publisher sends, as a task does; its error.

        :raises AssertionError: the target took something for a message that was none of pgsub's.
        """
        log = self.database.server.log
        offset, error = log.stat().st_size, None
        with self.session() as session:
            pid = session.info.backend_pid
            try:
                with contextlib.closing(psycopg.connect(publisher.conninfo, autocommit=True)) as source:
                    assert source.pgconn.ssl_in_use is publisher.encrypts
                    copy_stream.move(
                        source, session, COPY, "COPY public.t FROM STDIN", lambda size: None, direct=direct
                    )
                session.execute("COMMIT")
            except (PgsubError, psycopg.Error, copy_stream.SourceError) as caught:
                error = caught
        # the backend has read all that it was sent when it is gone
        self.database.wait("SELECT count(*) FROM pg_stat_activity WHERE pid = %s", pid, value=0)
        self.look(log.read_bytes()[offset:].decode(errors="replace"), pid)
        return error

    def look(self, log: str, pid: int) -> None:
        """What a backend logged of what it was sent; fails where that is not all pgsub's."""
        lines = [line for line in log.splitlines() if f"[{pid}]" in line]
        statements = [line.partition("statement: ")[2] for line in lines if "statement: " in line]
        known = {"BEGIN", "COPY public.t FROM STDIN", "COMMIT"}
        assert not set(statements) - known, statements
        if any("Connection reset by peer" in line for line in lines):
            # closed with the target's error unread: what it had not read yet is lost, in the middle of a message
            lines = [line for line in lines if not line.endswith("incomplete message from client")]
        misread = [line for line in lines if re.search(_MISREAD, line)]
        # the connection was closed in the middle of the copy, by a Terminate between two messages
        assert not misread or "unexpected message type 0x58 during COPY" in misread[0], misread
        assert self.database.value("SELECT count(*) FROM canary") == 0


def trial(judge: Judge, plain: Publisher, encrypted: Publisher, seed: int) -> tuple[int, bool]:
    """One fuzzed stream, one of three ways; its bytes, and whether the copy took it."""
    random_ = random.Random(seed)
    publisher, direct = random_.choice(((plain, True), (encrypted, True), (encrypted, False)))
    publisher.answer = fuzzed(random_)
    largest = random_.choice((1 << 16, 1 << 16, 5000))
    publisher.pieces = lambda: random_.randrange(1, largest)
    try:
        return len(publisher.answer), judge.copy(publisher, direct=direct) is None
    except AssertionError as wrong:
        raise AssertionError(f"seed {seed}: {wrong}") from wrong


def main() -> int:
    """Fuzz for minutes."""
    parser = argparse.ArgumentParser(prog="hostile", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "big"), help="of an earlier run")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder, Server(fast=True) as server:
        judge = Judge(Database(server, "judge"))
        judge.database.execute(CANARY)
        ends = Publisher(), Publisher(Path(folder))
        until, seed, size, taken = time.monotonic() + 60 * options.minutes, options.seed, 0, 0
        while time.monotonic() < until:
            sent, well = trial(judge, *ends, seed)
            seed, size, taken = seed + 1, size + sent, taken + well
        judge.database.close()
    print(f"{seed - options.seed} streams, {size} bytes, {taken} of them copied; nothing foreign ran on the target")
    return 0


if __name__ == "__main__":
    sys.exit(main())
