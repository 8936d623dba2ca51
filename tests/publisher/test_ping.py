"""What a server says to an attempt to connect that only asks whether it answers."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
import sources

from pgsub.commands.switchover.transfer import server_gone
from pgsub.common.connections import conninfo as ci
from pgsub.publisher.connect import refuses

#: AuthenticationOk, and a NOTICE that clears the screen: libpq takes one only from there on.
_GREETING = b"R\0\0\0\x08\0\0\0\0" + b"N\0\0\0\x1aSNOTICE\0C00000\0M\x1b[2J\0\0" + b"Z\0\0\0\x05I"


@contextlib.contextmanager
def _noisy() -> Iterator[str]:
    """A server that lets everybody in and says what it likes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    with client:
                        client.recv(8192)
                        client.sendall(_GREETING)
                        client.recv(8192)  # until it has read that

        threading.Thread(target=serve, daemon=True).start()
        port = listener.getsockname()[1]
        yield f"host=127.0.0.1 port={port} user=u dbname=d sslmode=disable gssencmode=disable"


@pytest.mark.long
def test_what_a_server_says_meanwhile_does_not_reach_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with _noisy() as conninfo:
        assert not refuses(conninfo)
        assert server_gone._answers(ci.parse(conninfo, "publisher"))
    assert capfd.readouterr() == ("", "")


def test_nothing_else_asks_in_a_way_that_libpq_answers_on_stderr() -> None:
    """PGconn.connect waits for a session before it can be told who takes its notices."""
    found = {name for name, _ in sources.trees(r"PGconn\.(ping|connect)\(")}
    assert found == {"common/connections/ping.py"}
