"""Makes lines to paste into a shell or psql: one line each, whatever the names in them contain.

Others choose names (a publisher's columns, GIDs of prepared transactions), and every line of a hint after its first is
taken for pgsub's own. If a line break in a name is escaped, the statement names nothing and fails.
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from pgsub.common.errors import one_line

if TYPE_CHECKING:  # modules that compose no SQL, such as status, need not wait for psycopg
    from psycopg import sql

#: Literals end at the same place under either standard_conforming_strings. Outside quotes servers write ASCII. A colon
#: is a cast or part of a slice, because psql replaces anything that looks like a variable.
_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n\f\v]+)
      | (?P<open>[(\[]) | (?P<close>[)\]]) | (?P<comma>,)
      | '(?:[^'\\\n]|''|\\[^'\n])*' | "(?:[^"\n]|"")*"
      | :: | :(?=[0-9\])]) | -(?!-) | /(?!\*)
      | [A-Za-z0-9_.]+ | [+*<>=~!@\#%^&|`?]
    """,
    re.VERBOSE,
)
_PAIRS = {")": "(", "]": "["}


def statement(text: sql.Composable) -> str:
    """Return SQL on one line without a semicolon. Values are quoted as by :func:`literal`."""
    from psycopg import sql

    if isinstance(text, sql.Composed):
        return "".join(map(statement, text))
    return literal(text._obj) if isinstance(text, sql.Literal) else one_line(text.as_string(None))


def name(*parts: str) -> str:
    """Quote a name as SQL, qualified by the parts before the last one."""
    from psycopg import sql

    return statement(sql.Identifier(*parts))


def dumping(options: str) -> str:
    """Return sentences and a line to paste that bring objects of the publisher to the target through a file.

    :param options: options for pg_dump, quoted.
    """
    return (
        "The publisher decides what this writes, and it would run with your rights: read dump.sql, then run it with"
        f" psql --file=dump.sql TARGET\npg_dump {options} --file=dump.sql PUBLISHER"
    )


def literal(value: object) -> str:
    """Quote a value as SQL on one line, with line breaks as escapes.

    Without a connection, libpq (PQescapeString) assumes the encoding that any server reported last. In GBK a quote can
    be part of the character before it.

    :param value: a text, or another value such as a number, which is not quoted.
    """
    if not isinstance(value, str):
        return str(value)
    quoted = value.replace("'", "''")
    if "\\" not in quoted and "\n" not in quoted:
        return f"'{quoted}'"
    escaped = quoted.replace("\\", "\\\\").replace("\n", "\\n")
    return f"E'{escaped}'"


def fragment(text: str, *, listed: bool = False) -> str | None:
    """Return SQL from a server on one line; None if it could be more than part of a statement.

    A publisher chooses what it sends. Output of its deparsing functions (ruleutils.c) is checked word by word. Outside
    quotes it may have no semicolon, comment or psql command, and its parentheses must match. So the surrounding
    statement ends where it was meant to end. Functions that the expression calls are not checked.

    :param listed: a comma outside parentheses starts nothing new, such as a further action of ALTER TABLE.
    """
    parts: list[str] = []
    opened: list[str] = []
    position = 0
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None:
            return None
        position, kind = found.end(), found.lastgroup
        if kind == "open":
            opened.append(found[0])
        elif (kind == "close" and (not opened or opened.pop() != _PAIRS[found[0]])) or (
            kind == "comma" and not opened and not listed
        ):
            return None
        parts.append(" " if kind == "space" else found[0])
    line = "".join(parts).strip()
    return line if line and line.isprintable() and not opened else None


def word(text: str) -> str:
    """Quote a name as one word of a shell command."""
    return shlex.quote(one_line(text))


def named(hint: str | None, name: str) -> str | None:
    """Put a subscription's name into the command of a hint that was made without it."""
    return hint and re.sub(r"(?<=\npgsub )(alter|reconcile) NAME", lambda found: f"{found[1]} {word(name)}", hint)
