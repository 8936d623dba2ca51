"""Questions on a terminal; elsewhere a command that would ask needs ``--yes``. Mirrors ``yesno_prompt`` of scripts."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

import typer

from pgsub.cli.output import console
from pgsub.common.errors import PgsubError, UsageError


def require_terminal(action: str, introduction: str, *commands: Sequence[str]) -> None:
    """Check that a question can be asked.

    :param action: what needs ``--yes``.
    :param introduction: of the commands, in the hint.
    :param commands: words of commands to paste.
    :raises UsageError: there is no terminal.
    """
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError(
            f"{action} needs --yes",
            detail="There is no terminal to ask on.",
            hint="\n".join([introduction, *map(shlex.join, commands)]),
        )


def confirm(question: str, *sentences: str) -> None:
    """Ask a question after some sentences.

    :raises PgsubError: the answer is no.
    """
    for sentence in sentences:
        console.say(console.line(sentence))
    if not typer.confirm(question, default=False, err=True):
        raise PgsubError("canceled", detail="Nothing was changed.")


def agreed(*_: object) -> None:
    """Ask nothing: ``--yes`` was given."""
