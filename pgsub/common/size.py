"""Sizes as PostgreSQL's settings write them: a number of bytes, or with a unit."""

from __future__ import annotations

import re

_UNITS = {None: 0, "kB": 10, "MB": 20, "GB": 30, "TB": 40}


def parse_size(text: str) -> int | None:
    """Read ``500kB`` or ``20MB``.

    :return: bytes; None where it is no size.
    """
    found = re.fullmatch(r"\s*(\d{1,18})\s*(kB|MB|GB|TB)?\s*", text, re.ASCII)
    return None if found is None else int(found[1]) << _UNITS[found[2]]
