"""Lines that are meant to be pasted, into a shell or into psql: one line each, whatever the names in them hold.

Names are chosen by others (a publisher's columns, identifiers of prepared transactions), and every line of a hint
below its first is taken for one of ours. With a line break written out a statement names nothing, and fails.
"""

from __future__ import annotations

import shlex

from psycopg import sql

from pgsub.common.errors import one_line


def statement(text: sql.Composable) -> str:
    """SQL on one line, without a semicolon."""
    return one_line(text.as_string(None))


def name(*parts: str) -> str:
    """A name as SQL, qualified by the parts before the last one."""
    return statement(sql.Identifier(*parts))


def value(text: str) -> sql.Composable:
    """A value as SQL; a line break in it is one that SQL writes out."""
    if "\n" not in text:
        return sql.Literal(text)
    escaped = text.replace("\\", "\\\\").replace("'", "''").replace("\n", "\\n")
    return sql.SQL(f"E'{escaped}'")


def literal(value: object) -> str:
    """A value as SQL."""
    return statement(sql.Literal(value))


def word(text: str) -> str:
    """A name as one word of a shell."""
    return shlex.quote(one_line(text))
