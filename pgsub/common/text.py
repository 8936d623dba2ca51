"""Texts that others chose (names, values, words of servers and of the ledger) in what pgsub writes or hands on.

Mirrors ``pg_clean_ascii`` (``common/string.c``), which keeps a name of a client from controlling a terminal or a log.
"""

from __future__ import annotations

import re

from pgsub.common.errors import one_line

#: Control characters but tab and line break; marks that turn the direction of text around; separators of lines.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Write out control characters: values of rows must not control a terminal, nor turn text around."""
    return CONTROLS.sub(lambda match: f"\\{'x' if match[0] < chr(256) else 'u'}{ord(match[0]):02x}", text)


def line(text: str) -> str:
    """Write out line breaks and control characters, so that the text is one line of output."""
    return printable(one_line(text))
