"""The OpenSSL library that psycopg's libpq is linked with, called through ctypes.

Functions are looked up in psycopg's own module, that is, in the libraries that it was loaded with. So another OpenSSL
in this process, such as that of Python's ``ssl``, is not found. If anything is missing or uncertain, as with psycopg's
implementation in Python or another TLS library, there is no library, and libpq does everything.
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
#: Functions that may take long: they release the interpreter lock, so that other threads run meanwhile.
_LONG_ONES = ("BIO_read", "SSL_write")

_POINTER, _INT, _LONG, _ULONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_long, ctypes.c_ulong
#: Result and parameter types. All functions are public since OpenSSL 1.1.1.
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
    """The functions of the library, by name.

    :param module: the module with which libpq was loaded.
    :raises AttributeError: a function is missing.
    :raises OSError: the module cannot be opened.
    """

    def __init__(self, module: str) -> None:
        quick, long, everywhere = ctypes.PyDLL(module), ctypes.CDLL(module), ctypes.CDLL(None)
        for name, (result, *parameters) in _FUNCTIONS.items():
            function = getattr(long if name in _LONG_ONES else quick, name)
            # libpq uses the program's own functions in preference, and these need not be the ones that were found here
            # guard: a TLS session is used only with the OpenSSL that created it
            if hasattr(everywhere, name) and _address(getattr(everywhere, name)) != _address(function):
                raise AttributeError(name)
            function.restype, function.argtypes = result, parameters
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def session(self, pgconn: pq.abc.PGconn) -> int | None:
        """Return the TLS session of a connection (SSL *); None if it is not OpenSSL's."""
        found: int | None = self.PQsslStruct(pointer(pgconn), b"OpenSSL")
        return found

    def bio_over(self, session: int) -> int:
        """Make a BIO that reads a session and holds a reference to it until it is freed."""
        bio: int = self.BIO_new(self.BIO_f_ssl())
        self.SSL_up_ref(session)
        self.BIO_ctrl(bio, _SET_SSL, _CLOSE, session)
        return bio

    def reason(self) -> str:
        """Return OpenSSL's reason for the failure of the last call; empty if unknown."""
        code = self.ERR_get_error()
        said = self.ERR_reason_error_string(code) if code else None
        return said.decode(errors="replace") if said else ""


def pointer(pgconn: pq.abc.PGconn) -> int | None:
    """Return libpq's own PGconn *; None after it was closed."""
    return getattr(pgconn, "pgconn_ptr", None)


def _address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value


@functools.cache
def loaded() -> Library | None:
    """Return psycopg's OpenSSL; None if it cannot be used."""
    module = sys.modules.get(f"psycopg_{pq.__impl__}.pq")
    try:
        return Library(str(module.__file__)) if module is not None else None
    except (AttributeError, OSError):
        return None
