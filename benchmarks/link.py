"""A slow link: a TCP proxy that gives every connection the same bandwidth in each direction, in a process of its own.

``python -m benchmarks.link PORT RATE`` stands before a server on the loopback, prints the port that it listens on, and
ends when its standard input does. It adds no delay of its own: an idle connection passes what comes at once.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from types import TracebackType

from psycopg.conninfo import make_conninfo

#: Bytes passed on at once: 6.5 ms of a link of 10 MB/s.
_SLICE = 1 << 16
#: Seconds that a late wake-up may be made up for, or a busy machine would make the link slower than it is said to be.
_DEPTH = 0.05


class Bucket:
    """A token bucket, in terms of the moment from which the link is free again.

    :param rate: bytes a second.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free = 0.0

    def take(self, size: int) -> None:
        """Wait until earlier bytes are through, and count these."""
        clock = time.monotonic()
        if self._free > clock:
            time.sleep(self._free - clock)
            clock = time.monotonic()
        self._free = max(self._free, clock - _DEPTH) + size / self._rate


class Proxy:
    """Two threads for each connection; they mostly sleep.

    :param address: of the server.
    :param rate: bytes a second for each direction of each connection.
    """

    def __init__(self, address: tuple[str, int], rate: float) -> None:
        self._address = address
        self._rate = rate
        self._counting = threading.Lock()
        self.sent = 0  #: bytes of the server that were passed on
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="link", daemon=True).start()

    def close(self) -> None:
        """Accept no more; connections end by themselves."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError), socket.create_connection(self._address) as server:
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            requests = threading.Thread(target=self._carry, args=(client, server), daemon=True)
            requests.start()
            self._carry(server, client, count=True)
            requests.join()

    def _carry(self, source: socket.socket, sink: socket.socket, *, count: bool = False) -> None:
        """One direction, to its end; a broken one breaks the other."""
        bucket, block = Bucket(self._rate), memoryview(bytearray(_SLICE))
        try:
            while size := source.recv_into(block):
                bucket.take(size)
                sink.sendall(block[:size])
                if count:
                    with self._counting:
                        self.sent += size
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            for one in (source, sink):
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)


class Link:
    """The proxy as a child process.

    :param port: of the server.
    :param rate: bytes a second for each direction of each connection.
    """

    def __init__(self, port: int, rate: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.link", str(port), str(rate)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the parent, whose end is the link's
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def through(self, conninfo: str) -> str:
        """The conninfo of the server by way of the link."""
        return make_conninfo(conninfo, host="127.0.0.1", port=self.port)

    def close(self) -> None:
        """End it, and every connection with it."""
        self._process.communicate()

    def __enter__(self) -> Link:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def main() -> None:
    """The child process."""
    port, rate = map(int, sys.argv[1:])
    print(Proxy(("127.0.0.1", port), rate).port, flush=True)
    sys.stdin.buffer.read()


if __name__ == "__main__":
    main()
