"""``pgsub wait``."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import typer

from pgsub.cli.command_tree.command import command
from pgsub.cli.command_tree.option_values import Name, Timeout, flag, parse_lsn
from pgsub.cli.general_options import current
from pgsub.cli.pages import Page


class Awaited(NamedTuple):
    """The value of ``--for``."""

    condition: str
    lsn: int | None


_METAVAR = "synced|caught-up|lsn=X/X|disabled|error"


def parse_condition(text: str | Awaited) -> Awaited:
    """Read ``synced``, ``caught-up``, ``lsn=X/X``, ``disabled`` or ``error``."""
    if isinstance(text, Awaited):
        return text
    word, _, position = text.partition("=")
    if word == "lsn":
        return Awaited("lsn", parse_lsn(position))
    if text not in _METAVAR.split("|"):
        raise typer.BadParameter(f'"{text}" is not a condition: expected one of {_METAVAR}')
    return Awaited(text, None)


PAGE = Page(
    summary="Wait until a subscription has reached a state",
    description="""
synced: every table that the subscription has now is ready. caught-up: synced, and apply has reached the publisher's
present position. lsn=X/X: apply has reached this position. disabled: the subscription is disabled and its workers have
ended. error: an error has been recorded.

A position counts as reached even if changes of a held table are kept, and even if changes were skipped. pgsub verify
says whether the rows are equal.

If the subscription fails meanwhile, the command ends at once with the exit code of the error, 6 for a conflict. If an
error was there before the command began, it waits for two further attempts, however long these take. After the timeout
the command ends with 8 and says what is missing.

If the subscription is disabled, the command ends at once with 3. If no pgsub run serves it, the command ends with 3
after 5 seconds, in which one may start. Neither applies to --for disabled. With --even-if-stopped the command waits
instead.

A target that was restored from a backup may be behind the state store. So the command also asks the target's ledger
before it reports synced, caught-up or lsn. If the target cannot be reached, the state store alone decides.

A subscription with a held table (alter --hold) is not caught up: the command ends with 3, or with --even-if-stopped
waits until the table is released. A subscription with the option --sequences is not caught up while an error keeps a
sequence from following the publisher. If a publication is missing on the publisher, which then leaves out changes, the
command ends with 3. Values that the publisher gives out after the last look are not waited for.
""",
    examples=(
        ("Wait for the copy before the application is switched.", "pgsub wait sales --for synced --timeout 2h"),
        ("Wait until a known position is applied.", "pgsub wait sales --for lsn=16/B374D848 --timeout 30s"),
    ),
)


@command("wait", PAGE)
def wait(
    name: Name,
    awaited: Annotated[
        Awaited, typer.Option("--for", metavar=_METAVAR, parser=parse_condition, help="What to wait for.")
    ],
    timeout: Timeout = None,
    even_if_stopped: Annotated[
        bool, flag("even-if-stopped", "Wait even if it is disabled, not served, or a table is held.")
    ] = False,
) -> None:
    """Wait."""
    if awaited.condition == "caught-up":
        current.take_environment()
    from pgsub.commands.status.wait import WaitOptions
    from pgsub.commands.status.wait import wait as wait_for

    wait_for(WaitOptions(name, current.state_dir, *awaited, timeout, even_if_stopped=even_if_stopped, everything=True))
