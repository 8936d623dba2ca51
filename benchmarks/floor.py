"""The floor for every subscriber: what the walsender alone needs to decode and send a backlog.

Whatever arrives is thrown away unread, which takes a client next to nothing: one process decodes, and nobody is faster.
"""

from __future__ import annotations

import select
import socket
import time
from contextlib import closing

import psycopg

from benchmarks.arena import PUBLICATION, BenchmarkFailed, Database
from pgsub.publisher import connect
from pgsub.publisher.stream.walsender import WalSender, start_options

_SLOT = "floor"
_POLL = 0.005  #: seconds between two looks at how far the walsender is
_BUFFER = 1 << 20
#: Seconds between two reads: a walsender whose every small write is read at once takes twice its time.
_GULP = 0.02


class Floor:
    """A slot of its own that sees what the subscribers' slots see.

    :param source: the publisher's database, before the backlog is written.
    :param binary: as the subscriptions have it; streaming likewise.
    """

    def __init__(self, source: Database, *, binary: bool, streaming: str) -> None:
        self._source = source
        version = source.connection.info.server_version
        self._options = start_options(version, [PUBLICATION], binary=binary, streaming=streaming, origin="any")
        source.value(f"SELECT pg_create_logical_replication_slot('{_SLOT}', 'pgoutput')")

    def drain(self, position: object, limit: float) -> float:
        """Let the walsender send everything up to a position, then drop the slot.

        :param position: LSN as text that less than one transaction follows: the walsender is done when it is past it.
        :param limit: seconds.
        :return: seconds.
        """
        replication = connect.connect(self._source.conninfo, application_name=_SLOT, replication=True)
        with closing(replication):
            replication.execute("SET wal_sender_timeout = 0")  # nobody answers its keepalives
            walsender = WalSender(replication)
            begun = time.monotonic()
            walsender.start(_SLOT, 0, self._options)
            with socket.socket(fileno=socket.dup(walsender.fileno)) as stream:
                stream.setblocking(False)
                self._drain(stream, position, begun + limit)
            taken = time.monotonic() - begun
        self._drop(begun + limit)
        return taken

    def _drain(self, stream: socket.socket, position: object, deadline: float) -> None:
        buffer, look = bytearray(_BUFFER), 0.0
        while time.monotonic() < look or not self._past(position):
            if time.monotonic() > deadline:
                raise BenchmarkFailed("the walsender did not send the backlog in time")
            if time.monotonic() >= look:
                look = time.monotonic() + _POLL
            if select.select([stream], [], [], _POLL)[0]:
                self._gulp(stream, buffer)
                time.sleep(_GULP)

    def _gulp(self, stream: socket.socket, buffer: bytearray) -> None:
        try:
            while stream.recv_into(buffer):
                pass
        except BlockingIOError:
            return
        raise BenchmarkFailed("the walsender ended the stream")

    def _past(self, position: object) -> bool:
        query = f"SELECT sent_lsn > '{position}' FROM pg_stat_replication WHERE application_name = '{_SLOT}'"
        return self._source.value(query) is True

    def _drop(self, deadline: float) -> None:
        while True:
            try:
                self._source.execute(f"SELECT pg_drop_replication_slot('{_SLOT}')")
                return
            except psycopg.errors.ObjectInUse:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_POLL)
