"""Lines that are meant to be pasted, into a shell or into psql: one line each, whatever the names in them hold.

Names are chosen by others (a publisher's columns, identifiers of prepared transactions), and every line of a hint
below its first is taken for one of ours. With a line break written out a statement names nothing, and fails.
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from pgsub.common.errors import one_line

if TYPE_CHECKING:  # who composes no SQL, such as status, does not wait for psycopg
    from psycopg import sql

#: Literals end at the same place whatever standard_conforming_strings is. Outside of quotes servers write ASCII. A
#: colon is a cast or part of a slice: psql replaces what looks like a variable.
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
    """Return SQL on one line, without a semicolon. Values are quoted as by :func:`literal`."""
    from psycopg import sql

    if isinstance(text, sql.Composed):
        return "".join(map(statement, text))
    return literal(text._obj) if isinstance(text, sql.Literal) else one_line(text.as_string(None))


def name(*parts: str) -> str:
    """Quote a name as SQL, qualified by the parts before the last one."""
    from psycopg import sql

    return statement(sql.Identifier(*parts))


def dumping(options: str) -> str:
    """Return sentences and a line to paste by which something of the publisher comes to the target, through a file.

    :param options: of pg_dump, quoted.
    """
    return (
        "The publisher decides what this writes, and it would run with your rights: read dump.sql, then run it with"
        f" psql --file=dump.sql TARGET\npg_dump {options} --file=dump.sql PUBLISHER"
    )


def literal(value: object) -> str:
    """Quote a value as SQL on one line; line breaks are written as escapes.

    Without a connection libpq (PQescapeString) takes the encoding that any server reported last for that of the text:
    in GBK a quote can be a part of the character before it.

    :param value: a text, or what stands for itself, such as a number.
    """
    if not isinstance(value, str):
        return str(value)
    quoted = value.replace("'", "''")
    if "\\" not in quoted and "\n" not in quoted:
        return f"'{quoted}'"
    escaped = quoted.replace("\\", "\\\\").replace("\n", "\\n")
    return f"E'{escaped}'"


def fragment(text: str, *, listed: bool = False) -> str | None:
    """Return SQL of a server on one line; None if it could be more than a part of a statement.

    A publisher chooses what it sends. What its functions deparse (ruleutils.c) is looked at word by word: without a
    semicolon, a comment or a command of psql outside of quotes, and with its parentheses in pairs, the statement around
    it ends where it was meant to end. What such an expression calls is not looked at.

    :param listed: a comma outside of parentheses begins nothing new, such as a further action of ALTER TABLE.
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
    """Quote a name as one word of a shell."""
    return shlex.quote(one_line(text))


def named(hint: str | None, name: str) -> str | None:
    """Put the name of a subscription into the command of a hint that was made where no name is known."""
    return hint and re.sub(r"(?<=\npgsub )(alter|reconcile) NAME", lambda found: f"{found[1]} {word(name)}", hint)
