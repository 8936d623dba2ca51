"""JSON for the ledger, for any encoding of the target: jsonb rejects characters that the database cannot store.

It rejects them as escapes too; with SQL_ASCII it rejects every escape. No database can store U+0000.
"""

from __future__ import annotations

import codecs
import json
import re
from functools import partial
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

_ESCAPED = re.compile(r"\\(?:\\|u0000)")  #: an escaped backslash (the text after it is no escape), or U+0000
#: Encodings that can store every character. SQL_ASCII stores the bytes of UTF-8 and returns them.
_ALL = ("UTF8", "SQL_ASCII")


def jsonb(connection: psycopg.Connection, body: Any) -> Jsonb:
    """Make a jsonb parameter. Characters that the database cannot store become Python escapes (``\\u65e5``)."""
    return Jsonb(body, dumps=partial(text, encoding=encoding(connection)))


def encoding(connection: psycopg.Connection) -> str:
    """Return the encoding of the target's database."""
    return connection.info.parameter_status("server_encoding") or "UTF8"


def text(body: Any, encoding: str) -> str:
    """Write JSON that a database with this encoding accepts."""
    found = json.dumps(body, ensure_ascii=False)
    if "\\u0000" in found:
        found = _ESCAPED.sub(lambda pair: pair[0].replace("u0000", r"\x00"), found)
    if found.isascii() or encoding in _ALL:
        return found
    return re.sub(r"[^\x00-\x7f]", partial(_shown, codec=_codec(encoding)), found)


def _shown(found: re.Match[str], codec: str) -> str:
    try:
        found[0].encode(codec)
    except UnicodeEncodeError:
        return "\\" + found[0].encode("ascii", "backslashreplace").decode()
    return found[0]


def _codec(encoding: str) -> str:
    """Return Python's name for an encoding. For an unknown one, return ASCII, which every encoding includes."""
    name = re.sub(r"^WIN(?=\d)", "cp", re.sub(r"^KOI8(?=.)", "KOI8-", encoding))
    try:
        return codecs.lookup(name).name
    except LookupError:
        return "ascii"
