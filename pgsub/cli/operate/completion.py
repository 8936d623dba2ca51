"""``pgsub completion``: prints completion scripts, which are made from the command tree and so always match it."""

from __future__ import annotations

from typing import Annotated, Literal

import typer
from typer.core import TyperGroup

from pgsub.cli.command_tree.command import command
from pgsub.cli.output.documents import emit
from pgsub.cli.pages import Page

PAGE = Page(
    summary="Print the completion script of a shell",
    description="""
The script is static; only the names of subscriptions are looked up, in the state store. Distributions install it from
the folder completions of the sources.
""",
    examples=(
        ("For this session of bash.", "source <(pgsub completion bash)"),
        ("Permanently, in fish.", "pgsub completion fish > ~/.config/fish/completions/pgsub.fish"),
    ),
)


@command("completion", PAGE)
def completion(
    context: typer.Context,
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(metavar="bash|zsh|fish", help="The shell.")],
) -> None:
    """Print the script."""
    from pgsub.cli.command_tree.shells import script
    from pgsub.cli.command_tree.tree import describe

    root = context.find_root().command
    assert isinstance(root, TyperGroup)
    emit(script(shell, describe(root)).rstrip("\n"))
