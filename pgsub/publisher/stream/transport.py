"""Bytes of a connection below libpq's framing: its socket, or the TLS session that libpq has established over it.

libpq always connects, checks certificates and authenticates. Afterwards bulk data is read and written here in pieces of
any size, because libpq makes an object of every message. On an encrypted connection this uses the connection's TLS
session: libpq provides it (PQsslStruct), and it is used with the library that libpq is linked with. So sslmode,
certificates, revocation lists, protocol versions and channel binding have the same meaning as with libpq; none of that
is repeated here.
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
#: A BIO_f_buffer uses a buffer of its own for reads of at most this size (DEFAULT_BUFFER_SIZE, bf_buff.c).
_BUFFERED = 4096
_RECORD = 1 << 14  #: maximum size of a TLS record
_CLOSED = "SSL connection has been closed unexpectedly"  # libpq's message in pgtls_read


class Transport(Protocol):
    """The bytes of one connection, in both directions, without waiting.

    A closed or broken connection is distinguished from one where nothing has arrived yet. Neither means that the peer
    has sent everything: only its messages tell that.
    """

    def fileno(self) -> int:
        """Return the socket, for poll.

        :raises psycopg.OperationalError: the connection was closed on this side.
        """

    def read(self, into: memoryview) -> int:
        """Read what has arrived.

        :return: number of bytes; 0: the peer has closed the connection.
        :raises BlockingIOError: there is nothing. The socket becomes readable when there is.
        :raises OSError: the connection broke.
        """

    def write(self, data: memoryview) -> int:
        """Write as much as there is space for.

        :return: number of bytes. After BlockingIOError the same bytes must be written again.
        :raises BlockingIOError: there is no space.
        :raises OSError: the connection broke.
        """

    def peek(self) -> bytes:
        """Look at the next byte without taking it; return an empty value if the peer has closed the connection.

        libpq takes the byte later. It may have to (PQconsumeInput) before the socket becomes readable again.

        :raises BlockingIOError: there is none.
        :raises OSError: the connection broke.
        """

    def waiting(self) -> bool:
        """Return whether there may be bytes to read although the socket is not readable."""

    def end(self) -> bool:
        """Give the connection back to libpq.

        :return: whether bytes are lost for libpq.
        """


def reachable(connection: psycopg.Connection) -> bool:
    """Return whether :func:`over` can carry the bytes of a connection to either server; otherwise only libpq can."""
    if connection.pgconn.ssl_in_use:
        return (library := openssl.loaded()) is not None and library.session(connection.pgconn) is not None
    return plain(connection)


def over(pgconn: pq.abc.PGconn) -> Transport:
    """Return the transport of a connection that is :func:`reachable`."""
    if not pgconn.ssl_in_use:
        return PlainTransport(pgconn)
    library = openssl.loaded()
    session = library.session(pgconn) if library is not None else None
    if library is None or session is None:
        raise InternalError("only libpq can read this connection")
    return TlsTransport(pgconn, library, session)


def plain(connection: psycopg.Connection) -> bool:
    """Return whether the bytes on a connection's socket are not encrypted."""
    return not connection.pgconn.ssl_in_use and connection.execute(_ENCRYPTED).fetchone() != (True,)


class PlainTransport:
    """A :class:`Transport` over an unencrypted socket."""

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
    """A :class:`Transport` over the TLS session of a connection.

    A walsender makes a TLS record of every message. Two settings make that cheap, and neither changes what is read or
    how it is checked. The session reads ahead: one read of the socket fetches many records, instead of two for each. A
    BIO_f_buffer above it decrypts all available records in one call, during which other threads run.

    NOTES
    The session belongs to libpq, and only one thread at a time uses it, as with libpq itself. Reading ahead is disabled
    before libpq reads again, because libpq would wait for the socket for bytes that the session has taken already. The
    session is kept by a reference of its own, so that it stays valid if the connection is closed meanwhile.
    """

    def __init__(self, pgconn: pq.abc.PGconn, library: Library, session: int) -> None:
        self._pgconn, self._library, self._session = pgconn, library, session
        self._one = library.bio_over(session)  #: reads one record
        self._many = library.BIO_push(library.BIO_new(library.BIO_f_buffer()), self._one)
        self._broken: OSError | None = None
        self._ahead = False
        self._drained = False  #: the last read took all that had arrived
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
        # only what has arrived: a reader as fast as the peer would otherwise read the records one by one
        here = int.from_bytes(fcntl.ioctl(self._pgconn.socket, termios.FIONREAD, bytes(4)), sys.byteorder)
        room = min(len(into), max(here, _RECORD))
        source = self._many if room > _BUFFERED else self._one
        self._library.ERR_clear_error()
        count: int = self._library.BIO_read(source, np.frombuffer(into, np.uint8).ctypes.data, room)
        self._drained = count < room and self._library.BIO_test_flags(self._one, openssl.SHOULD_RETRY) != 0
        if count > 0:
            if source == self._many and count < room and not self._drained and not self._closed():
                self._failed()  # the next call raises the error: what arrived before is valid
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
        """Raise a known error. The session is not used after it has failed or the connection was closed."""
        self._pgconn.socket  # noqa: B018 - raises where the connection was closed
        if self._broken is not None:
            raise self._broken

    def _refused(self, count: int) -> None:
        """Raise the error of a call that returned no bytes; return if the peer closed the session."""
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
    """Free the BIOs and their reference to the session. The session is unchanged, and sends nothing to the peer.

    Freeing a BIO_f_ssl shuts its session down (ssl_free, bio_ssl.c). A quiet session only records that.
    """
    state = library.SSL_get_shutdown(session)
    library.SSL_set_quiet_shutdown(session, 1)
    library.BIO_free_all(bio)
    if openssl.pointer(pgconn) is not None:
        library.SSL_set_quiet_shutdown(session, 0)
        library.SSL_set_shutdown(session, state)
