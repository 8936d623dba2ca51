"""Manual pages that do not belong to a command, made from texts in ``docs/``. Only ``pgsub.cli.docs`` uses this.

A text begins with ``name section: summary``. ``# NAME`` begins a section, ``: text`` below a line describes it, and
indented lines are kept unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from pgsub.cli.configuration import SETTINGS
from pgsub.cli.manual.man_pages import escaped, head

TOPICS = ("conflicts", "states", "pgsub.toml")
_FOLDER = Path(__file__).parents[3] / "docs"
_HEAD = re.compile(r"(\S+) (\d): (.*)")
_PAGE = re.compile(r"(pgsub[\w.-]*)\((\d)\)")


def topics() -> dict[str, str]:
    """Make the pages, text by file name."""
    texts = ((_FOLDER / f"{name}.txt").read_text(encoding="utf-8") for name in TOPICS)
    return dict(_page(text.replace("@SETTINGS@", _settings())) for text in texts)


def _settings() -> str:
    """Return the blocks of all settings."""
    return "\n\n".join(
        f"{one.name}\n: {one.help} Stands in for {one.variable}."
        + (f" The default is {one.default}." if one.default else "")
        for one in SETTINGS
    )


def _page(text: str) -> tuple[str, str]:
    first, _, rest = text.partition("\n")
    found = _HEAD.fullmatch(first)
    assert found is not None, first
    name, section, summary = found.groups()
    lines = head(name, section, summary, f"docs/{name.removeprefix('pgsub-')}.txt")
    for block in rest.strip("\n").split("\n\n"):
        lines += _block(block)
    page = "\n".join([*lines, ""])
    # Successive unchanged blocks are joined, with an empty line between them.
    return f"{name}.{section}", page.replace(".RE\n.fi\n.PP\n.nf\n.RS 4\n", "\\&\n")


def _block(block: str) -> Iterator[str]:
    first, _, rest = block.partition("\n")
    if block.startswith("# "):
        yield f".SH {escaped(block[2:])}"
    elif block.startswith("    "):
        yield from (".PP", ".nf", ".RS 4")
        # A line that begins with a control character would be a request.
        yield from (rf"\&{escaped(line[4:])}" for line in block.split("\n"))
        yield from (".RE", ".fi")
    elif rest.startswith(": "):
        yield from (".TP", rf"\fB{escaped(first)}\fR", escaped(rest[2:]))
    else:
        yield from (".PP", _PAGE.sub(r"\\fB\1\\fR(\2)", escaped(block).replace(r"\-", "-")).replace("-", r"\-"))
