"""``pgsub alter``."""

from __future__ import annotations

from typing import Any

from pgsub.cli.command_tree.command import command, parameters
from pgsub.cli.command_tree.values import collected
from pgsub.cli.pages import Page
from pgsub.cli.subscription import options

PAGE = Page(
    summary="Change a subscription",
    description="""
Changes what is given and leaves the rest. A running pgsub run starts the workers again within a second.

With another list of publications the tables follow as with pgsub refresh, unless --no-refresh is given; that needs an
enabled subscription. A new --connection must lead to the same publisher, or to the standby that took its place, and a
new --target to the same database; the command returns once a running pgsub run has ended the workers of the old one.
The replication slot is not renamed with the subscription.

After pg_upgrade of the publisher, which takes logical slots along from PostgreSQL 17 on, the publisher is another
system at another position: --publisher-upgraded records both. Disable the subscription before the old publisher is
stopped for good, and say so only of a slot that pg_upgrade took along: changes that another slot does not have would
be missing.

With --two-phase the slot changes when the subscription is enabled again and every table is synchronized. To take it
back nothing may be prepared, and the publisher must be PostgreSQL 18 or newer.

With --hold a table stands still while the others go on: its changes are kept on the target, in the order in which they
came, and applied when it is released with --release, before any newer change of it. So a table that stops apply need
not stop the rest. Transactions that change it and other tables are not applied as a whole meanwhile, and what is kept
grows in schema pgsub of the target: pgsub status shows how much. A conflict of a kept change is one as ever: it stops
apply, names the transaction that the change came with, and ends when the row is mended, the transaction is skipped, or
the table is held again. A running worker heeds both from its next transaction on.

--on-conflict adds a rule for conflicts or replaces the one of its type and table, TYPE=default takes it back; see
pgsub-conflicts(7). What stops apply at present is tried again by the new rules at once.

A password in a connection string is moved to a file that only you can read. PGSUB_CONNECTION and PGSUB_TARGET are not
looked at here.
""",
    examples=(
        ("Subscribe to another publication and copy its tables.", "pgsub alter sales --add-publication returns"),
        ("Let the rest go on while a table is mended.", "pgsub alter sales --hold public.orders"),
        (
            "Go on after pg_upgrade of the publisher.",
            'pgsub alter sales --connection "host=db4 dbname=shop user=repl" --publisher-upgraded',
        ),
        ("Follow the publisher to another host.", 'pgsub alter sales --connection "host=db3 dbname=shop user=repl"'),
    ),
)


@command(
    "alter",
    PAGE,
    parameters(options.Alter),
    *(parameters(group, optional=True) for group in (options.Parameters, options.OtherParameters)),
    *map(parameters, (options.Conflicts, options.Unsupported, options.Service)),
    connects=True,
)
def alter(**given: Any) -> None:
    """Collect what was given and alter the subscription."""
    from pgsub.cli.output.reporting import ConsoleReporter
    from pgsub.commands.alter.alter import AlterOptions
    from pgsub.commands.alter.alter import alter as alter_subscription

    settings = (*options.SETTINGS, "password_required")
    given["settings"] = {name: given[name] for name in settings if given[name] is not None}
    with ConsoleReporter() as reporter:
        alter_subscription(collected(AlterOptions, given), reporter=reporter)
