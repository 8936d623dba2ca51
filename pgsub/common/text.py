"""Escapes texts that others chose (names, values, server messages, ledger contents) in what pgsub writes or passes on.

Mirrors ``pg_clean_ascii`` (``common/string.c``), which keeps a name of a client from controlling a terminal or a log.
"""

from __future__ import annotations

import re

from pgsub.common.errors import one_line

#: Control characters except tab and line break, marks that change the direction of text, and line separators.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Escape control characters, so that row values cannot control a terminal or reverse text."""
    return CONTROLS.sub(lambda match: f"\\{'x' if match[0] < chr(256) else 'u'}{ord(match[0]):02x}", text)


def line(text: str) -> str:
    """Escape line breaks and control characters, so that the text is one line of output."""
    return printable(one_line(text))
