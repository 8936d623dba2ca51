"""A TCP proxy that does harm at a chosen byte: lost replies, swallowed requests, cuts, stalls.

psycopg's own tests have one for the same reason: no server can be asked to lose a reply.
"""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Literal

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

#: What to do with bytes from the client: pass them on; pass them on and lose the answer; lose them. Whatever is lost,
#: both connections are reset then.
Harm = Literal["none", "lose reply", "swallow"]


class Link:
    """One client's connection through the proxy.

    :ivar application_name: from the startup packet.
    :ivar notes: for whoever decides about harm.
    """

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self._sockets = (client, server)
        self.client_port: int = client.getpeername()[1]
        self._start = b""
        self.application_name = ""
        self.notes: set[str] = set()
        self.losing = False  #: the next bytes from the server end the link

    def greet(self, data: bytes) -> None:
        """Look for the application's name in what the client sends first."""
        if not self.application_name and len(self._start) < 8192:
            self._start += data
            found = re.search(rb"application_name\0([^\0]*)\0", self._start)
            self.application_name = found[1].decode() if found else ""

    def reset(self) -> None:
        """End both connections without a word."""
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


def unharmed(link: Link, data: bytes) -> Harm:
    """Let all bytes through."""
    return "none"


class Proxy:
    """Stands before a server until :meth:`close`.

    :param conninfo: of the server.
    :param place: where to listen.
    """

    def __init__(self, conninfo: str, place: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        given = conninfo_to_dict(conninfo)
        self._address = (str(given["host"]), int(str(given["port"])))
        self._listener = socket.create_server(place)
        port = self._listener.getsockname()[1]
        self.conninfo = make_conninfo(conninfo, host=place[0], port=port)  #: of the proxy
        self._links: list[Link] = []
        self._open = threading.Event()
        self._open.set()
        self.harm: Callable[[Link, bytes], Harm] = unharmed  #: asked for all bytes of clients
        self.held: Callable[[Link], bool] = lambda link: False  #: clients that alone are stalled, in both directions
        self.replies: list[bytes] = []  #: those that were lost
        self.swallowed: list[bytes] = []
        #: how many bytes of a server's answer go on at a time, and the seconds between
        self.slice: Callable[[], int] = lambda: 65536
        self.pause = 0.0
        #: how many bytes of servers' answers still go on before everything is reset; None for all
        self.allowance: int | None = None
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(self._address)
                except OSError:
                    client.close()
                    continue
                link = Link(client, server)
                self._links.append(link)
                for body in (self._requests, self._answers):
                    threading.Thread(target=self._guarded, args=(body, link, client, server), daemon=True).start()

    def _guarded(
        self,
        body: Callable[[Link, socket.socket, socket.socket], None],
        link: Link,
        client: socket.socket,
        server: socket.socket,
    ) -> None:
        with contextlib.suppress(OSError):
            body(link, client, server)
        link.reset()

    def _requests(self, link: Link, client: socket.socket, server: socket.socket) -> None:
        while data := client.recv(65536):
            self._wait(link)
            link.greet(data)
            match self.harm(link, data):
                case "swallow":
                    self.swallowed.append(data)
                    return
                case "lose reply":
                    link.losing = True
            server.sendall(data)

    def _answers(self, link: Link, client: socket.socket, server: socket.socket) -> None:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := server.recv(65536):
            self._wait(link)
            if link.losing:
                self.replies.append(data)
                return
            if self._exhausted(data):
                client.sendall(data[: self.allowance])
                self.allowance = None
                self.cut()
                return
            while data:
                size = self.slice()
                client.sendall(data[:size])
                data = data[size:]
                time.sleep(self.pause if data else 0)

    def _wait(self, link: Link) -> None:
        self._open.wait()
        while self.held(link):
            time.sleep(0.02)

    def _exhausted(self, data: bytes) -> bool:
        if self.allowance is None or len(data) <= self.allowance:
            self.allowance = None if self.allowance is None else self.allowance - len(data)
            return False
        return True

    def cut(self) -> None:
        """Reset every connection; new ones are accepted."""
        links, self._links = self._links, []
        for link in links:
            link.reset()

    def stall(self) -> None:
        """Move no byte until :meth:`resume`: a peer that vanished without a FIN."""
        self._open.clear()

    def resume(self) -> None:
        """Move bytes again."""
        self._open.set()

    def close(self) -> None:
        """End everything."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # or it accepts one more
        self._listener.close()
        self._open.set()
        self.held = lambda link: False
        self.cut()


@pytest.fixture
def proxy() -> Iterator[Callable[[str], Proxy]]:
    """Makes proxies before the servers of conninfos."""
    made: list[Proxy] = []

    def make(conninfo: str) -> Proxy:
        made.append(Proxy(conninfo))
        return made[-1]

    yield make
    for one in made:
        one.close()
