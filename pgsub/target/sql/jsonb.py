"""JSON for the ledger, whatever the encoding of the target: jsonb refuses a character that the database cannot have.

It does so where the character is escaped, too, and with SQL_ASCII it refuses every escape. No database has U+0000.
"""

from __future__ import annotations

import codecs
import json
import re
from functools import partial
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

_ESCAPED = re.compile(r"\\(?:\\|u0000)")  #: a backslash, whose text may go on as an escape does, or U+0000
#: Those whose databases have every character: SQL_ASCII takes UTF-8 as bytes, and gives it back.
_ALL = ("UTF8", "SQL_ASCII")


def jsonb(connection: psycopg.Connection, body: Any) -> Jsonb:
    """Make a parameter for a jsonb; what the database cannot have is in it as Python shows it (``\u65e5``)."""
    return Jsonb(body, dumps=partial(text, encoding=encoding(connection)))


def encoding(connection: psycopg.Connection) -> str:
    """Return the encoding of the target's database."""
    return connection.info.parameter_status("server_encoding") or "UTF8"


def text(body: Any, encoding: str) -> str:
    """Write JSON that a database of this encoding takes."""
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
    """Return Python's name of an encoding; ASCII, which is part of each, for an unknown one."""
    name = re.sub(r"^WIN(?=\d)", "cp", re.sub(r"^KOI8(?=.)", "KOI8-", encoding))
    try:
        return codecs.lookup(name).name
    except LookupError:
        return "ascii"
