"""The HTTP server of ``run --metrics-listen``. It is limited, because the launcher needs threads and descriptors."""

from __future__ import annotations

import io
import ipaddress
import socketserver
import sys
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socket import AI_PASSIVE, SOCK_STREAM, getaddrinfo, socket
from threading import BoundedSemaphore, Thread
from typing import Any

from prometheus_client.exposition import choose_encoder

from pgsub.cli.output import console
from pgsub.commands.status.metrics import registry

CONNECTIONS = 4  #: maximum number served at once; others wait in the backlog
_HEAD = 8192  #: maximum number of bytes read of a request
_QUIET = 60.0  #: minimum seconds between two warnings


class MetricsServer(socketserver.ThreadingTCPServer):
    """A server of ``/metrics`` that serves at most :data:`CONNECTIONS` at once, each for a limited time."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 2 * CONNECTIONS
    pause = 1.0  #: seconds to wait after a failure to accept a connection
    seconds = 5.0  #: limit for a request to arrive, and for its answer to be read

    def __init__(self, host: str, port: int, folder: Path) -> None:
        """Listen on an address, and serve it in a thread until the process ends.

        :raises OSError: the address cannot be used.
        """
        family, _, _, _, address = getaddrinfo(host, port, type=SOCK_STREAM, flags=AI_PASSIVE)[0]
        self.address_family = family
        self.names = {host.lower(), str(address[0])}
        self.private = _loopback(str(address[0]))
        self.folder = folder
        self._slots = BoundedSemaphore(CONNECTIONS)
        self._warned = -_QUIET
        super().__init__((str(address[0]), port), _Handler)
        Thread(target=self.serve_forever, daemon=True, name="pgsub metrics").start()

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection. Without free descriptors, the connection keeps waiting."""
        try:
            return super().get_request()
        except OSError:
            # guard: failed attempts to accept a connection are spaced out
            time.sleep(self.pause)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread when fewer than :data:`CONNECTIONS` are served."""
        self._slots.acquire()
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Warn of a failure of pgsub, at most once a minute. A lost or slow client is no failure."""
        failure, now = sys.exception(), time.monotonic()
        if not isinstance(failure, OSError) and now - self._warned >= _QUIET:
            self._warned = now
            console.warning("could not serve metrics", detail=str(failure))


class _Handler(BaseHTTPRequestHandler):
    """One GET or HEAD request."""

    server: MetricsServer
    connection: socket
    server_version, sys_version = "pgsub", ""

    def setup(self) -> None:
        """Read the whole head of the request within the time limit."""
        super().setup()
        head, deadline = b"", time.monotonic() + self.server.seconds
        while b"\r\n\r\n" not in head and b"\n\n" not in head:
            left = deadline - time.monotonic()
            if left <= 0 or len(head) >= _HEAD:
                raise TimeoutError
            self.connection.settimeout(left)
            more = self.connection.recv(_HEAD - len(head))
            if not more:
                raise ConnectionAbortedError
            head += more
        self.rfile = io.BufferedReader(io.BytesIO(head))
        self.connection.settimeout(self.server.seconds)

    def do_GET(self) -> None:
        """Send the metrics."""
        self._answer(self.wfile.write)

    def do_HEAD(self) -> None:
        """Send only the headers."""
        self._answer(len)

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def _answer(self, write: Callable[[bytes], object]) -> None:
        if not self._addressed():
            return self.send_error(421)
        if self.path.partition("?")[0] != "/metrics":
            return self.send_error(404)
        try:
            encode, kind = choose_encoder(self.headers.get("Accept", ""))
        except (TypeError, ValueError):  # a version that is not a number
            return self.send_error(400)
        try:
            text = encode(registry(self.server.folder))
        except Exception:
            self.send_error(500)
            raise
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        write(text)
        return None

    def _addressed(self) -> bool:
        # A website in a browser on this machine can resolve its own name to the loopback address.
        given = self.headers.get("Host")
        if given is None or not self.server.private:
            return True
        bracketed = given.startswith("[")
        host = (given[1:].partition("]")[0] if bracketed else given.partition(":")[0]).strip().lower()
        return host == "localhost" or host in self.server.names or _loopback(host)


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
