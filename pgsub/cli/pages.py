"""The texts of a command, kept once: ``--help``, the manual page and the README are made from them.

Mirrors ``doc/src/sgml/ref``: a purpose in one line, a description, examples.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Page:
    """The texts of one command."""

    summary: str  #: one line, no full stop
    description: str  #: paragraphs, separated by empty lines
    examples: tuple[tuple[str, str], ...]  #: what it does, the command to paste

    def paragraphs(self) -> list[str]:
        """Return the description, one string a paragraph, without line breaks."""
        return [" ".join(part.split()) for part in self.description.strip().split("\n\n")]


#: by command
PAGES: dict[str, Page] = {}
