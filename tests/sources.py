"""Sources of pgsub and of its tests, for tests that read code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "pgsub"


@cache
def modules() -> dict[str, str]:
    """Return the text of each module, by its path in the package."""
    return {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def trees(words: str = "") -> Iterator[tuple[str, ast.Module]]:
    """Parse one module after another.

    Trees are not kept: the collector would walk through millions of nodes in all tests that follow.

    :param words: regular expression; modules without a match are not parsed, which takes longest.
    """
    for name, text in modules().items():
        if re.search(words, text):
            yield name, ast.parse(text)


@cache
def tests() -> dict[str, list[str]]:
    """Return the files that define a test, by its name."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE):
            found.setdefault(name, []).append(str(path.relative_to(ROOT)))
    return found
