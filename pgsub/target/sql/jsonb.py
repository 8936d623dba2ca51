"""JSON for the ledger, for any encoding of the target: jsonb rejects characters that the database cannot store.

It rejects them as escapes too; with SQL_ASCII it rejects every escape. No database can store U+0000.
"""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from pgsub.common.text import codec

_ESCAPED = re.compile(r"\\(?:\\|u0000)")  #: an escaped backslash (the text after it is no escape), or U+0000


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
    name = codec(encoding)
    if found.isascii() or name == "utf-8":
        return found
    return re.sub(r"[^\x00-\x7f]", partial(_shown, name=name), found)


def _shown(found: re.Match[str], name: str) -> str:
    try:
        found[0].encode(name)
    except UnicodeEncodeError:
        return "\\" + found[0].encode("ascii", "backslashreplace").decode()
    return found[0]
