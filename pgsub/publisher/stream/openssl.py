"""The OpenSSL that psycopg's libpq is linked with, called through ctypes.

Functions are looked up in psycopg's own module, and so among the libraries that it was loaded with: whatever other
OpenSSL is in this process, as that of Python's ``ssl``, is not found. Where anything is missing or not certain, as with
psycopg's implementation in Python or another TLS library, there is none, and libpq does everything.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

from psycopg import pq

#: SSL_get_error
WANT_READ, WANT_WRITE, ZERO_RETURN = 2, 3, 6
#: BIO_FLAGS_SHOULD_RETRY; SSL_RECEIVED_SHUTDOWN
SHOULD_RETRY, RECEIVED_SHUTDOWN = 8, 2
_SET_SSL, _CLOSE = 109, 1  # BIO_C_SET_SSL, BIO_CLOSE
#: They may take their time, so that other threads run meanwhile.
_LONG_ONES = ("BIO_read", "SSL_write")

_POINTER, _INT, _LONG, _ULONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_long, ctypes.c_ulong
#: Result and parameters. All of them are public since OpenSSL 1.1.1.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "PQsslStruct": (_POINTER, _POINTER, ctypes.c_char_p),
    "SSL_write": (_INT, _POINTER, _POINTER, _INT),
    "SSL_peek": (_INT, _POINTER, _POINTER, _INT),
    "SSL_get_error": (_INT, _POINTER, _INT),
    "SSL_set_read_ahead": (None, _POINTER, _INT),
    "SSL_has_pending": (_INT, _POINTER),
    "SSL_up_ref": (_INT, _POINTER),
    "SSL_get_shutdown": (_INT, _POINTER),
    "SSL_set_shutdown": (None, _POINTER, _INT),
    "SSL_set_quiet_shutdown": (None, _POINTER, _INT),
    "BIO_f_ssl": (_POINTER,),
    "BIO_f_buffer": (_POINTER,),
    "BIO_new": (_POINTER, _POINTER),
    "BIO_push": (_POINTER, _POINTER, _POINTER),
    "BIO_ctrl": (_LONG, _POINTER, _INT, _LONG, _POINTER),
    "BIO_read": (_INT, _POINTER, _POINTER, _INT),
    "BIO_test_flags": (_INT, _POINTER, _INT),
    "BIO_free_all": (None, _POINTER),
    "ERR_clear_error": (None,),
    "ERR_get_error": (_ULONG,),
    "ERR_reason_error_string": (ctypes.c_char_p, _ULONG),
}


class Library:
    """Functions of the library, by name.

    :param module: that libpq was loaded with.
    :raises AttributeError: a function is missing.
    :raises OSError: the module cannot be opened.
    """

    def __init__(self, module: str) -> None:
        quick, long, everywhere = ctypes.PyDLL(module), ctypes.CDLL(module), ctypes.CDLL(None)
        for name, (result, *parameters) in _FUNCTIONS.items():
            function = getattr(long if name in _LONG_ONES else quick, name)
            # what the program itself brings goes before in libpq, too, and need not be what was found here
            # guard: a TLS session is used only with the OpenSSL that created it
            if hasattr(everywhere, name) and _address(getattr(everywhere, name)) != _address(function):
                raise AttributeError(name)
            function.restype, function.argtypes = result, parameters
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def session(self, pgconn: pq.abc.PGconn) -> int | None:
        """Return the TLS session of a connection (SSL *); None where it is not OpenSSL's."""
        found: int | None = self.PQsslStruct(pointer(pgconn), b"OpenSSL")
        return found

    def bio_over(self, session: int) -> int:
        """Make a BIO that reads a session and keeps a reference to it until it is freed."""
        bio: int = self.BIO_new(self.BIO_f_ssl())
        self.SSL_up_ref(session)
        self.BIO_ctrl(bio, _SET_SSL, _CLOSE, session)
        return bio

    def reason(self) -> str:
        """Say in OpenSSL's words why the last call failed; empty where it does not know."""
        code = self.ERR_get_error()
        said = self.ERR_reason_error_string(code) if code else None
        return said.decode(errors="replace") if said else ""


def pointer(pgconn: pq.abc.PGconn) -> int | None:
    """Return libpq's own PGconn *, None once it has been closed."""
    return getattr(pgconn, "pgconn_ptr", None)


def _address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value


@functools.cache
def loaded() -> Library | None:
    """Return psycopg's OpenSSL, None where it cannot be used."""
    module = sys.modules.get(f"psycopg_{pq.__impl__}.pq")
    try:
        return Library(str(module.__file__)) if module is not None else None
    except (AttributeError, OSError):
        return None
