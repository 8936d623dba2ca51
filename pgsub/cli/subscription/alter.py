"""``pgsub alter``."""

from __future__ import annotations

from typing import Any

from pgsub.cli.command_tree.command import command, parameters
from pgsub.cli.command_tree.option_values import collected
from pgsub.cli.pages import Page
from pgsub.cli.subscription import options

PAGE = Page(
    summary="Change a subscription",
    description="""
Changes only the given options. A running pgsub run restarts the workers within a second.

After a change of publications the tables are refreshed as by pgsub refresh, unless --no-refresh is given; that needs an
enabled subscription. Before a publication is removed, apply must have passed the publisher's position, because the
publisher sends the changes up to there only by the present publications. alter lets apply get there, within --timeout
or 30 seconds, or ends with an error. A new --connection must lead to the same publisher, or to the standby that took
its place, and a new --target to the same database; the command returns once the workers of the old definition have
ended. The replication slot is not renamed with the subscription.

pg_upgrade of the publisher keeps logical slots from PostgreSQL 17 on, but makes it another system at another position:
--publisher-upgraded records both. Disable the subscription before the old publisher is stopped for good. A slot that
was not kept by pg_upgrade lacks changes, so never give the option for one.

With --two-phase the slot changes when the subscription is enabled again and every table is synchronized. To turn it
off nothing may be prepared, and the publisher must be PostgreSQL 18 or newer.

--hold stops one table while the others continue: its changes are kept on the target in their order, and --release
applies them before any newer change of the table. So a table with a conflict need not stop the others. Meanwhile a
transaction that changes both held and other tables is not applied as a whole, and schema pgsub of the target grows;
pgsub status shows how much. If a kept change causes a conflict when it is released, apply stops and names the original
transaction, until the row is corrected, the transaction is skipped, or the table is held again. Running workers follow
both options from their next transaction on.

--on-conflict adds a rule for conflicts or replaces the one of its type and table; TYPE=default removes it. See
pgsub-conflicts(7). A conflict that stops apply is retried by the new rules at once.

With --sequences a running pgsub run begins to keep sequences close to the publisher's values, see pgsub-create(1). With
--no-sequences it stops doing so, and the values stay.

A password in a connection string is moved to a file that only you can read. PGSUB_CONNECTION and PGSUB_TARGET are not
used here.
""",
    examples=(
        ("Subscribe to another publication and copy its tables.", "pgsub alter sales --add-publication returns"),
        ("Let the other tables continue while one is repaired.", "pgsub alter sales --hold public.orders"),
        (
            "Continue after pg_upgrade of the publisher.",
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
    """Collect the given options and alter the subscription."""
    from pgsub.cli.output.reporting import ConsoleReporter
    from pgsub.commands.alter.alter import alter as alter_subscription
    from pgsub.commands.alter.options import AlterOptions

    settings = (*options.SETTINGS, "password_required")
    given["settings"] = {name: given[name] for name in settings if given[name] is not None}
    with ConsoleReporter() as reporter:
        alter_subscription(collected(AlterOptions, given), reporter=reporter)
