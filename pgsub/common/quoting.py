"""Lines that are meant to be pasted, into a shell or into psql: one line each, whatever the names in them hold.

Names are chosen by others (a publisher's columns, identifiers of prepared transactions), and every line of a hint
below its first is taken for one of ours. With a line break written out a statement names nothing, and fails.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from pgsub.common.errors import one_line

if TYPE_CHECKING:  # who composes no SQL, such as status, does not wait for psycopg
    from psycopg import sql


def statement(text: sql.Composable) -> str:
    """Return SQL on one line, without a semicolon."""
    return one_line(text.as_string(None))


def name(*parts: str) -> str:
    """Quote a name as SQL, qualified by the parts before the last one."""
    from psycopg import sql

    return statement(sql.Identifier(*parts))


def value(text: str) -> sql.Composable:
    """Quote a value as SQL; line breaks are written as escapes."""
    from psycopg import sql

    if "\n" not in text:
        return sql.Literal(text)
    escaped = text.replace("\\", "\\\\").replace("'", "''").replace("\n", "\\n")
    return sql.SQL(f"E'{escaped}'")


def literal(value: object) -> str:
    """Quote a value as SQL."""
    from psycopg import sql

    return statement(sql.Literal(value))


def word(text: str) -> str:
    """Quote a name as one word of a shell."""
    return shlex.quote(one_line(text))


def named(hint: str | None, name: str) -> str | None:
    """Put the name of a subscription into the command of a hint that was made where no name is known."""
    return hint and hint.replace("\npgsub reconcile NAME", f"\npgsub reconcile {word(name)}")
