"""``pgsub enable`` and ``pgsub disable``."""

from __future__ import annotations

from typing import Annotated

import typer

from pgsub.cli.command import command
from pgsub.cli.pages import Page
from pgsub.cli.reporting import ConsoleReporter
from pgsub.cli.settings import current

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the subscription.")]

ENABLE = Page(
    summary="Enable a subscription",
    description="""
A running pgsub run starts its workers within a second. Enabling an enabled subscription is a notice, no error.
""",
    examples=(
        ("Resume after the cause of an error is gone.", "pgsub enable sales"),
        ("And see whether it gets on.", "pgsub enable sales && pgsub wait sales --for caught-up --timeout 1m"),
    ),
)
DISABLE = Page(
    summary="Disable a subscription",
    description="""
A running pgsub run ends its workers within a second; the replication slot stays and keeps WAL on the publisher.
Disabling a disabled subscription is a notice, no error.
""",
    examples=(
        ("Stop applying.", "pgsub disable sales"),
        ("And wait until the workers have ended.", "pgsub disable sales && pgsub wait sales --for disabled"),
    ),
)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    command(app, "enable", ENABLE)(enable)
    command(app, "disable", DISABLE)(disable)


def enable(name: Name) -> None:
    """Enable."""
    from pgsub.commands.enable import enable as enable_subscription

    enable_subscription(current.state_dir, name, reporter=ConsoleReporter())


def disable(name: Name) -> None:
    """Disable."""
    from pgsub.commands.disable import disable as disable_subscription

    disable_subscription(current.state_dir, name, reporter=ConsoleReporter())
