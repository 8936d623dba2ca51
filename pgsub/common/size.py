"""Sizes as in PostgreSQL's settings: a number of bytes, or with a unit."""

from __future__ import annotations

import re

_UNITS = {None: 0, "kB": 10, "MB": 20, "GB": 30, "TB": 40}


def parse_size(text: str) -> int | None:
    """Parse a size such as ``500kB`` or ``20MB`` to bytes; return None if it is invalid."""
    found = re.fullmatch(r"\s*(\d{1,18})\s*(kB|MB|GB|TB)?\s*", text, re.ASCII)
    return None if found is None else int(found[1]) << _UNITS[found[2]]
