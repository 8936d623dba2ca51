"""The texts of a command, from which ``--help``, the manual page and the README are made.

Mirrors ``doc/src/sgml/ref``: a purpose in one line, a description, examples.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Page:
    """The texts of one command."""

    summary: str  #: one line without a full stop
    description: str  #: paragraphs, separated by empty lines
    examples: tuple[tuple[str, str], ...]  #: purpose, and the command to paste

    def paragraphs(self) -> list[str]:
        """Return the paragraphs of the description, without line breaks."""
        return [" ".join(part.split()) for part in self.description.strip().split("\n\n")]


#: Pages by command.
PAGES: dict[str, Page] = {}
