"""The manual pages and the lines of their examples."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

PAGES = sorted((Path(__file__).parents[1] / "man").glob("*.[157]"))
_TYPED = re.compile(r"(?:^|[;&(|] ?)(?:\$ )?(pgsub .*?)(?= \|| &&| >|\)|$)", re.MULTILINE)
_ESCAPES = ((r"\-", "-"), (r"\(dq", '"'), (r"\(aq", "'"), (r"\(ti", "~"), (r"\&", ""))


def typed(text: str) -> Iterator[list[str]]:
    """Yield the words of each command of pgsub in lines of a shell, without the program's name."""
    for found in _TYPED.findall(text.replace("\\\n", " ")):
        yield shlex.split(found, comments=True)[1:]


def example_lines(page: Path) -> list[str]:
    """Return the lines under EXAMPLES that are typed, as a reader sees them."""
    text = page.read_text().partition(".SH EXAMPLES\n")[2].partition(".SH ")[0]
    for escape, plain in _ESCAPES:
        text = text.replace(escape, plain)
    blocks = re.findall(r"^\.RS 4\n(.*?)^\.RE$", text, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line]


def examples(page: Path) -> Iterator[list[str]]:
    """Yield the words of each command of pgsub under EXAMPLES."""
    for line in example_lines(page):
        yield from typed(line)


def between(words: list[str], connection: str, target: str) -> list[str]:
    """Return the words of an example with the connection strings of two servers."""
    place = {"--connection": connection, "--target": target}
    return [place.get(before, word) for before, word in zip(["", *words], words, strict=False)]
