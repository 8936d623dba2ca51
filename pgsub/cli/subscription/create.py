"""``pgsub create``."""

from __future__ import annotations

import os
from typing import Any

from pgsub.cli.command_tree.command import command, parameters
from pgsub.cli.command_tree.values import collected
from pgsub.cli.pages import Page
from pgsub.cli.subscription import options, plan
from pgsub.common.errors import UsageError

PAGE = Page(
    summary="Create a subscription and synchronize its tables",
    description="""
Registers the subscription, creates its replication slot on the publisher, copies the tables of its publications and
applies changes until the target has reached the publisher's position of that moment. The tables must exist on the
target.

With --no-wait the subscription is only registered and a running pgsub run does the work; with --follow the command
stays. Where pgsub run serves the state folder already, it does the work and this command watches.

Both servers are looked at first. With --dry-run nothing is changed: how each table would be copied is printed (with
--json as one document), and whatever does not fit is a warning: types, constraints, replica identities, privileges
with the GRANT to paste, room for slots and sessions, old transactions that slots will wait for. With --strict a
warning is an error.

With --two-phase the command ends when two_phase is enabled: once every table is synchronized, or from the start with
--no-copy-data. From then on no table can be copied: what would is refused. The target needs room for as many prepared
transactions as the publisher (max_prepared_transactions).

Changes and copies are made as the owner of each table where the user of --target may SET ROLE to it, and TRUNCATE as
that user; with --run-as-owner everything is made as that user. A member of the owner that may not SET ROLE is refused;
a user that is no member goes on as itself with its own privileges on the table, and is warned: the owner's code
(triggers, rules, expressions) then runs with the rights of the user.

With --on-conflict conflicts of a type are resolved by a rule, for all tables or for one; without, everything is as in
the server. pgsub-conflicts(7) has the types, the resolutions and what each of them does.

A password in a connection string is moved to a file that only you can read.

With --messages the publisher sends what pg_logical_emit_message() writes too, and pgsub run logs it: the message of a
transaction once that is committed here, any other as it comes, perhaps again after a restart. A large transaction that
is streamed can bring a message that was written after a savepoint and before any change of a row, though that savepoint
is rolled back.

With --password-required in so many words the publisher must ask for a password, at every connection, and --connection
must hold it; that binds every user of the target but superusers, who alone may give --no-password-required. Without
either nothing is enforced: the server keeps roles of the database from the credentials of its operating-system user,
and here those are your own.
""",
    examples=(
        (
            "Subscribe and wait until all rows are there.",
            'pgsub create sales --connection "host=db1 dbname=shop user=repl" --target "host=db2 dbname=shop"'
            " --publication sales",
        ),
        (
            "Register only; a pgsub run that serves the folder does the rest.",
            "pgsub create sales --connection service=shop --target service=copy --publication sales --no-wait",
        ),
    ),
)


@command(
    "create",
    PAGE,
    *map(parameters, (options.Create, options.Parameters, options.OtherParameters, options.Conflicts)),
    *map(parameters, (options.Unsupported, options.Checks, options.Service)),
    connects=True,
)
def create(**given: Any) -> None:
    """Collect the options and create the subscription."""
    for variable in ("PGSUB_CONNECTION", "PGSUB_TARGET"):
        os.environ.pop(variable, None)  # what only this command was given is not for its children
    from pgsub.cli.output.reporting import ConsoleReporter
    from pgsub.commands.subscription.create import CreateOptions
    from pgsub.commands.subscription.create import create as create_subscription

    given["publications"] = given.pop("publication")
    given["settings"] = {name: given[name] for name in options.SETTINGS}
    wanted = collected(CreateOptions, given)
    if given["as_json"] and not wanted.dry_run:
        raise UsageError("--json needs --dry-run", hint="pgsub status --json shows what was created.")
    # who follows sees the log as pgsub run shows it
    with ConsoleReporter(log_from=0 if wanted.follow else 1) as reporter:
        result = create_subscription(wanted, reporter=reporter)
    if result is not None:
        plan.show("create", wanted.name, result, result.document() if given["as_json"] else None)
