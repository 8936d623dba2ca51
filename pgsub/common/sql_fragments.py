"""SQL that a server wrote, as a part of a statement that is to be pasted: it must be no more than that part.

A publisher chooses what it sends. What its functions deparse (ruleutils.c) is looked at word by word: without a
semicolon, a comment or a command of psql outside of quotes, and with its parentheses in pairs, the statement around it
ends where it was meant to end. What such an expression calls is not looked at.
"""

from __future__ import annotations

import re

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


def fragment(text: str, *, listed: bool = False) -> str | None:
    """Return SQL of a server on one line; None if it could be more than a part of a statement.

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
