"""``pgsub enable``, ``pgsub disable`` and ``pgsub disable-on-error``."""

from __future__ import annotations

from typing import Annotated

import typer

from pgsub.cli.command_tree.command import command
from pgsub.cli.command_tree.option_values import Name
from pgsub.cli.general_options import current
from pgsub.cli.output.reporting import ConsoleReporter
from pgsub.cli.pages import Page
from pgsub.common.errors import UsageError

ENABLE = Page(
    summary="Enable a subscription",
    description="""
A running pgsub run starts its workers within a second. Enabling an enabled subscription is a notice, not an error.
A subscription that a switchover has ended, or whose way back it has not opened yet, is not enabled.
""",
    examples=(
        ("Resume after the cause of an error is gone.", "pgsub enable sales"),
        ("And check that it catches up.", "pgsub enable sales && pgsub wait sales --for caught-up --timeout 1m"),
    ),
)
DISABLE = Page(
    summary="Disable a subscription",
    description="""
A running pgsub run ends its workers within a second; the replication slot stays and keeps WAL on the publisher.
Disabling a disabled subscription is a notice, not an error.
""",
    examples=(
        ("Stop applying.", "pgsub disable sales"),
        ("And wait until the workers have ended.", "pgsub disable sales && pgsub wait sales --for disabled"),
    ),
)
DISABLE_ON_ERROR = Page(
    summary="Set whether an error disables a subscription",
    description="""
With on, an error of apply or of a table's synchronization disables the subscription once it is recorded: conflicts,
data and schema faults, and missing privileges. A row, statement or table beyond a limit of the server (SQLSTATE class
54) is such a fault. Lost connections, deadlocks, a full disk, a server that shuts down, and one that has no transaction
IDs left until a vacuum, never disable it; they are retried. With off, every error is retried after
wal_retrieve_retry_interval.

Running workers go on; the setting holds for their next error.
""",
    examples=(
        ("Stop for good at the first conflict.", "pgsub disable-on-error sales on"),
        ("Try again and again.", "pgsub disable-on-error sales off"),
    ),
)


@command("enable", ENABLE)
def enable(name: Name) -> None:
    """Enable."""
    from pgsub.commands.subscription.enable_disable import enable as enable_subscription

    enable_subscription(current.state_dir, name, reporter=ConsoleReporter())


@command("disable", DISABLE)
def disable(name: Name) -> None:
    """Disable."""
    from pgsub.commands.subscription.enable_disable import disable as disable_subscription

    disable_subscription(current.state_dir, name, reporter=ConsoleReporter())


@command("disable-on-error", DISABLE_ON_ERROR)
def disable_on_error(
    name: Name, setting: Annotated[str, typer.Argument(metavar="on|off", help="Whether an error disables it.")]
) -> None:
    """Set disable_on_error."""
    if setting not in ("on", "off"):
        raise UsageError(f'"{setting}" is not a value of disable_on_error: expected on or off')
    from pgsub.commands.subscription.enable_disable import disable_on_error as set_option

    set_option(current.state_dir, name, on=setting == "on", reporter=ConsoleReporter())
