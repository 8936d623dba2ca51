"""Command lines as the program's own parser reads them, without running them."""

from __future__ import annotations

from functools import cache
from typing import Any

from pgsub.cli.app import program

_program = cache(program)  # putting the tree of commands together takes longer than reading a line


def understood(*words: str) -> None:
    """Have the program's own parser read a command line, without running it.

    :raises TyperException: it would be refused.
    """
    context: Any = _program().make_context("pgsub", list(words))
    while hasattr(context.command, "resolve_command"):
        name, command, rest = context.command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, rest, parent=context)
