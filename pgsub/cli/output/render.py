"""Results as text: psql's aligned tables on a terminal, complete tab-separated rows elsewhere.

Mirrors ``src/fe_utils/print.c``: ``print_aligned_text``, ``print_aligned_vertical``, ``print_unaligned_text``.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from pgsub.cli.output.console import pasted, printable
from pgsub.common.errors import UsageError
from pgsub.common.plural import counted
from pgsub.protocol.lsn import parse_lsn

#: Names of columns, and rows by column name.
Content = tuple[Sequence[str], Sequence[Mapping[str, Any]]]


def choice(
    columns: Sequence[str], content: Sequence[Mapping[str, Any]], wanted: Sequence[str] | None, order: str | None
) -> Content:
    """Choose columns of a table, and sort its rows.

    :param wanted: names of columns, None for all.
    :param order: the column to sort by, with a leading - for descending order. Missing values are last.
    :raises UsageError: there is no such column.
    """
    descending, by = (order or "").startswith("-"), (order or "").lstrip("-")
    for name in (*(wanted or ()), *([by] if order else ())):
        if name not in columns:
            raise UsageError(f'column "{name}" does not exist', hint=f"Columns are {', '.join(columns)}.")
    if order:
        missing = [row for row in content if row.get(by) is None]
        known = sorted((row for row in content if row.get(by) is not None), key=lambda row: _rank(row[by]))
        content = [*(reversed(known) if descending else known), *missing]
    shown = columns if wanted is None else wanted
    return shown, [{name: row.get(name) for name in shown} for row in content]


def _rank(value: Any) -> tuple[int, Any]:
    """Return the sort key of a value: numbers and LSNs as numbers, other values as text."""
    if isinstance(value, (int, float)):
        return 0, value
    if re.fullmatch(r"[0-9A-F]{1,8}/[0-9A-F]{1,8}", str(value)):
        return 0, parse_lsn(value)
    return 1, str(value)


def rows(columns: Sequence[str], content: Sequence[Mapping[str, Any]], *, expanded: bool = False) -> str:
    """Format rows as a table, or expanded with one line per column."""
    texts = [[cell(row.get(column)) for column in columns] for row in content]
    for line in texts:
        line[:] = [pasted(text) if column == "next" else text for column, text in zip(columns, line, strict=True)]
    if expanded:
        return _vertical(columns, texts)
    if terminal():
        return _aligned(columns, texts)
    return "\n".join("\t".join(line) for line in [list(columns), *texts])


def terminal() -> bool:
    """Return whether the output goes to a terminal."""
    return sys.stdout is not None and sys.stdout.isatty()


def screen() -> int:
    """Return the number of columns of the terminal."""
    return shutil.get_terminal_size().columns


def broadest(text: str) -> int:
    """Return the width of the longest line."""
    return max(map(text_width, text.split("\n")))


def cell(value: Any) -> str:
    """Format a value like psql: nothing for NULL, t and f, and no line breaks or tabs."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "t" if value else "f"
    if isinstance(value, (list, dict)):
        value = json.dumps(value, ensure_ascii=False)
    return printable(str(value)).replace("\t", "\\t").replace("\n", "\\n")


def _aligned(columns: Sequence[str], texts: Sequence[Sequence[str]]) -> str:
    widths = [max(map(text_width, column)) for column in zip(columns, *texts, strict=True)]
    head = " | ".join(name.center(width) for name, width in zip(columns, widths, strict=True))
    lines = [" " + head.rstrip(), "-" + "-+-".join("-" * width for width in widths) + "-"]
    for line in texts:
        padded = [text + " " * (width - text_width(text)) for text, width in zip(line, widths, strict=True)]
        lines.append(" " + " | ".join(padded).rstrip())
    count = len(texts)
    return "\n".join([*lines, f"({counted(count, 'row')})"])


def _vertical(columns: Sequence[str], texts: Sequence[Sequence[str]]) -> str:
    width = max(map(len, columns))
    blocks = []
    for number, line in enumerate(texts, 1):
        blocks.append(f"-[ RECORD {number} ]" + "-" * width)
        blocks += [f"{name:<{width}} | {text}".rstrip() for name, text in zip(columns, line, strict=True)]
    return "\n".join(blocks) or "(0 rows)"


def text_width(text: str) -> int:
    """Return the number of terminal columns of a text."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)
