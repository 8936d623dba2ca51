"""Questions on a terminal. Elsewhere a command that would ask needs ``--yes``. Mirrors ``yesno_prompt`` of scripts."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

import typer

from pgsub.cli.general_options import current
from pgsub.cli.output import console
from pgsub.common.errors import PgsubError, UsageError


def require_terminal(names: Sequence[str], action: str, introduction: str, *commands: Sequence[str]) -> None:
    """Check that the subscription exists and that there is a terminal to ask on.

    :param names: names of which one must exist, empty if the command creates one.
    :param action: the action that needs ``--yes``.
    :param introduction: text before the commands in the hint.
    :param commands: words of commands to paste.
    :raises SubscriptionNotFound: none of the named subscriptions exists.
    :raises UsageError: there is no terminal.
    """
    if names:
        from pgsub.catalog.store import StateStore

        with StateStore.open(current.state_dir, create=False) as store:
            if not any(map(store.find, names)):
                store.subscription(names[0])
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
    """Ask nothing, because ``--yes`` was given."""
