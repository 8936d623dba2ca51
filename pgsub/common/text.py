"""Escapes texts that others chose (names, values, server messages, ledger contents) in what pgsub writes or passes on.

Mirrors ``pg_clean_ascii`` (``common/string.c``), which keeps a name of a client from controlling a terminal or a log.
"""

from __future__ import annotations

import codecs
import re
from functools import lru_cache

from pgsub.common.errors import one_line

#: Control characters except tab and line break, marks that change the direction of text, and line separators.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Escape control characters, so that row values cannot control a terminal or reverse text."""
    return CONTROLS.sub(lambda match: f"\\{'x' if match[0] < chr(256) else 'u'}{ord(match[0]):02x}", text)


def line(text: str) -> str:
    """Escape line breaks and control characters, so that the text is one line of output."""
    return printable(one_line(text))


@lru_cache
def codec(encoding: str) -> str:
    """Return Python's name for the encoding of a database.

    A database with SQL_ASCII is read as UTF-8, which pgsub sends to it. For an encoding that Python lacks, the result
    is ASCII, which every encoding includes.
    """
    if encoding == "SQL_ASCII":
        return "utf-8"
    name = re.sub(r"^WIN(?=\d)", "cp", re.sub(r"^KOI8(?=.)", "KOI8-", encoding))
    try:
        b"\x80".decode(name, "backslashreplace")  # a server may name anything, and not every codec reads a text
        return codecs.lookup(name).name
    except (LookupError, ValueError):
        return "ascii"


def legible(data: bytes, encoding: str) -> str:
    """Read a text in the encoding of its database. What is no character for Python becomes an escape (``\\x81``)."""
    return data.decode(codec(encoding), "pgsub.legible")


_EUC = ("euc_jp", "euc_jis_2004", "euc_kr", "gb2312", "johab")


def _escaped(error: UnicodeError) -> tuple[str | bytes, int]:
    """Escape all bytes of a character (``pg_euc_mblen``), so that the rest is read as the server reads it."""
    assert isinstance(error, UnicodeDecodeError)
    data, at = error.object, error.start
    width = 1 if error.encoding not in _EUC else 3 if data[at] == 0x8F else 2
    char = data[at : at + width]
    return "".join(f"\\x{byte:02x}" for byte in char), at + len(char)


codecs.register_error("pgsub.legible", _escaped)
