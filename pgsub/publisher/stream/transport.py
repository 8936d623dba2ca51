"""Bytes of a connection below libpq's framing: its socket, or the TLS session that libpq has set up over it.

libpq connects, checks certificates and authenticates, always. Afterwards bulk data is read and written here in pieces
of any size, because libpq makes an object of every message. Where it is encrypted, the TLS session of the connection
does that: libpq hands it out (PQsslStruct), and it is used with the library that libpq is linked with. So sslmode,
certificates, revocation lists, protocol versions and channel binding mean what they mean to libpq; nothing of them is
done again here.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sys
import termios
import weakref
from typing import Protocol

import numpy as np
import psycopg
from psycopg import pq

from pgsub.common.errors import InternalError
from pgsub.publisher.stream import openssl
from pgsub.publisher.stream.openssl import Library

_ENCRYPTED = "SELECT encrypted FROM pg_catalog.pg_stat_gssapi WHERE pid = pg_catalog.pg_backend_pid()"
#: A BIO_f_buffer reads so much into a buffer of its own where less is asked for (DEFAULT_BUFFER_SIZE, bf_buff.c).
_BUFFERED = 4096
_RECORD = 1 << 14  #: the largest
_CLOSED = "SSL connection has been closed unexpectedly"  # libpq's words, pgtls_read


class Transport(Protocol):
    """The bytes of one connection, in both directions, never waited for.

    What the peer ends, closes or breaks is told apart from what has not come yet; none of them is the end of what it
    had to say, which only its messages can tell.
    """

    def fileno(self) -> int:
        """Return the socket, to be polled.

        :raises psycopg.OperationalError: the connection was closed here.
        """

    def read(self, into: memoryview) -> int:
        """Read what is there.

        :return: bytes, 0 where the peer has closed the connection.
        :raises BlockingIOError: there is nothing, and the socket becomes readable when there is.
        :raises OSError: the connection broke.
        """

    def write(self, data: memoryview) -> int:
        """Write what there is room for.

        :return: bytes. After BlockingIOError the same bytes are to be written again.
        :raises BlockingIOError: there is no room.
        :raises OSError: the connection broke.
        """

    def peek(self) -> bytes:
        """Look at the next byte without taking it; empty where the peer has closed the connection.

        libpq takes it later, and may have to do so (PQconsumeInput) before the socket tells of more.

        :raises BlockingIOError: there is none.
        :raises OSError: the connection broke.
        """

    def waiting(self) -> bool:
        """Return whether there may be bytes to read although the socket is silent."""

    def end(self) -> bool:
        """Leave the connection to libpq.

        :return: whether bytes are lost to it.
        """


def reachable(connection: psycopg.Connection) -> bool:
    """Return whether :func:`over` can carry the bytes of a connection, of whatever server; otherwise only libpq can."""
    if connection.pgconn.ssl_in_use:
        return (library := openssl.loaded()) is not None and library.session(connection.pgconn) is not None
    return plain(connection)


def over(pgconn: pq.abc.PGconn) -> Transport:
    """Return what carries the bytes of a connection that is :func:`reachable`."""
    if not pgconn.ssl_in_use:
        return PlainTransport(pgconn)
    library = openssl.loaded()
    session = library.session(pgconn) if library is not None else None
    if library is None or session is None:
        raise InternalError("only libpq can read this connection")
    return TlsTransport(pgconn, library, session)


def plain(connection: psycopg.Connection) -> bool:
    """Return whether nothing encrypts what goes over the socket of a connection."""
    return not connection.pgconn.ssl_in_use and connection.execute(_ENCRYPTED).fetchone() != (True,)


class PlainTransport:
    """A :class:`Transport` over the socket, where nothing encrypts it."""

    def __init__(self, pgconn: pq.abc.PGconn) -> None:
        self._pgconn = pgconn

    def fileno(self) -> int:
        """See the protocol."""
        return self._pgconn.socket

    def read(self, into: memoryview) -> int:
        """See the protocol."""
        return os.readv(self._pgconn.socket, [into])

    def write(self, data: memoryview) -> int:
        """See the protocol."""
        return os.write(self._pgconn.socket, data)

    def peek(self) -> bytes:
        """See the protocol."""
        with socket.socket(fileno=os.dup(self._pgconn.socket)) as same:
            return same.recv(1, socket.MSG_PEEK)

    def waiting(self) -> bool:
        """See the protocol."""
        return False

    def end(self) -> bool:
        """See the protocol."""
        return False


class TlsTransport:
    """A :class:`Transport` by the TLS session of a connection.

    A walsender makes a TLS record of every message. Two settings make that cheap, and neither changes what is read or
    how it is checked: the session reads ahead, one read of the socket for many records instead of two for each; and a
    BIO_f_buffer above it decrypts as many records as there are in one call, during which other threads run.

    NOTES
    The session belongs to libpq, and only one thread uses it at a time, as it must be with libpq itself. Reading ahead
    is switched off before libpq reads again: libpq waits for the socket where the session has taken bytes from it. The
    session is kept by a reference of its own, so that a connection closed meanwhile leaves none that points nowhere.
    """

    def __init__(self, pgconn: pq.abc.PGconn, library: Library, session: int) -> None:
        self._pgconn, self._library, self._session = pgconn, library, session
        self._one = library.bio_over(session)  #: reads one record
        self._many = library.BIO_push(library.BIO_new(library.BIO_f_buffer()), self._one)
        self._broken: OSError | None = None
        self._ahead = False
        self._drained = False  #: the last read took all that there was
        self._release = weakref.finalize(self, _release, library, pgconn, session, self._many)
        self._release.atexit = False

    def fileno(self) -> int:
        """See the protocol."""
        return self._pgconn.socket

    def read(self, into: memoryview) -> int:
        """See the protocol."""
        self._check()
        if not self._ahead:
            self._library.SSL_set_read_ahead(self._session, 1)
            self._ahead = True
        # no more than is here now: whoever decrypts as fast as the peer sends would read its records one by one
        here = int.from_bytes(fcntl.ioctl(self._pgconn.socket, termios.FIONREAD, bytes(4)), sys.byteorder)
        room = min(len(into), max(here, _RECORD))
        source = self._many if room > _BUFFERED else self._one
        self._library.ERR_clear_error()
        count: int = self._library.BIO_read(source, np.frombuffer(into, np.uint8).ctypes.data, room)
        self._drained = count < room and self._library.BIO_test_flags(self._one, openssl.SHOULD_RETRY) != 0
        if count > 0:
            if source == self._many and count < room and not self._drained and not self._closed():
                self._failed()  # told by the next call: what came before is good
            return count
        if self._drained:
            raise BlockingIOError
        if not self._closed():
            raise self._failed()
        return 0

    def write(self, data: memoryview) -> int:
        """See the protocol."""
        self._check()
        self._library.ERR_clear_error()
        count: int = self._library.SSL_write(self._session, np.frombuffer(data, np.uint8).ctypes.data, len(data))
        if count <= 0:
            self._refused(count)
            raise BrokenPipeError(errno.EPIPE, _CLOSED)
        return count

    def peek(self) -> bytes:
        """See the protocol."""
        self._check()
        byte = np.zeros(1, np.uint8)
        self._library.ERR_clear_error()
        count: int = self._library.SSL_peek(self._session, byte.ctypes.data, 1)
        if count <= 0:
            self._refused(count)
            return b""
        return byte.tobytes()

    def waiting(self) -> bool:
        """See the protocol."""
        return not self._drained

    def end(self) -> bool:
        """See the protocol."""
        hidden = self._ahead and self._library.SSL_has_pending(self._session) != 0
        if self._ahead:
            self._library.SSL_set_read_ahead(self._session, 0)
            self._ahead = False
        self._broken = OSError(errno.EBADF, "the connection is in libpq's hands again")
        self._release()
        return hidden

    def _check(self) -> None:
        """Raise what is known: the session is not touched once it has failed, or its connection was closed."""
        self._pgconn.socket  # noqa: B018 - raises where the connection was closed
        if self._broken is not None:
            raise self._broken

    def _refused(self, count: int) -> None:
        """Raise what a result that is no number of bytes means; return where the peer closed the session."""
        code = self._library.SSL_get_error(self._session, count)
        if code in (openssl.WANT_READ, openssl.WANT_WRITE):
            raise BlockingIOError
        if code != openssl.ZERO_RETURN:
            raise self._failed()

    def _closed(self) -> bool:
        return bool(self._library.SSL_get_shutdown(self._session) & openssl.RECEIVED_SHUTDOWN)

    def _failed(self) -> OSError:
        reason = self._library.reason()
        self._broken = OSError(errno.EPROTO, f"SSL error: {reason}" if reason else _CLOSED)
        return self._broken


def _release(library: Library, pgconn: pq.abc.PGconn, session: int, bio: int) -> None:
    """Free what reads the session, and its reference; the session stays as it is, and says nothing to the peer.

    To free a BIO_f_ssl shuts its session down (ssl_free, bio_ssl.c), which quiet sessions only note.
    """
    state = library.SSL_get_shutdown(session)
    library.SSL_set_quiet_shutdown(session, 1)
    library.BIO_free_all(bio)
    if openssl.pointer(pgconn) is not None:
        library.SSL_set_quiet_shutdown(session, 0)
        library.SSL_set_shutdown(session, state)
