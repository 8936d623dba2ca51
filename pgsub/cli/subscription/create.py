"""``pgsub create``."""

from __future__ import annotations

from typing import Any

from pgsub.cli.command_tree.command import Command, command, parameters
from pgsub.cli.command_tree.option_values import collected, take_conninfos
from pgsub.cli.output.prompts import confirm, require_terminal
from pgsub.cli.pages import Page
from pgsub.cli.subscription import options, plan
from pgsub.common.errors import UsageError

PAGE = Page(
    summary="Create a subscription and synchronize its tables",
    description="""
Registers the subscription, creates its replication slot on the publisher, copies the tables of its publications and
applies changes until the target has reached the publisher's position of that moment. The tables must exist on the
target.

With --no-wait the subscription is only registered, and a running pgsub run does the work. With --follow the command
keeps running. If pgsub run already serves the state folder, it does the work, and this command shows the progress.

With --adopt, tables that already have rows are compared with the publisher instead of copied. Such rows may come from a
restored dump, a former subscription or an interrupted copy. Only rows that differ are sent: missing rows are inserted,
different ones are updated, and rows that the publisher does not have are deleted. Nothing is truncated. For each table,
up to --keep-replaced rows that are replaced or deleted are kept on the target, in pgsub.skipped_change, and pgsub
conflicts list shows them. Empty tables are copied. Conflict rules do not apply. If update or delete is not published,
rows that such changes have left stay. If the work is killed, the next attempt compares again.

A table without a key is compared as a multiset, and its columns must have types with an equality operator. Two kinds of
tables are rejected: those that another subscription writes to, and those that have no rows on the publisher. The
command asks on a terminal; elsewhere --yes is needed. The user of --target needs SELECT on the tables.

Both servers are checked first: types, constraints, replica identities, privileges with the GRANT to run, room for slots
and sessions, and old transactions that slots must wait for. A problem that does not prevent the subscription is a
warning; with --strict it is an error. --dry-run changes nothing and prints how each table would be copied, with --json
as one document.

With --two-phase the command ends when two_phase is enabled: once every table is synchronized, or at once with --no-
copy-data. From then on tables cannot be copied; commands that would copy one are rejected. The target needs room for as
many prepared transactions as the publisher (max_prepared_transactions).

If the user of --target may SET ROLE to the owner of a table, its rows are copied and changed as the owner, except that
TRUNCATE is done as the user. With --run-as-owner everything is done as the user. A user that is a member of the owner
but may not SET ROLE is rejected. A user that is not a member uses its own privileges on the table, with a warning,
because the owner's triggers, rules and expressions then run with the user's rights.

With --sequences the target's sequences are set to the publisher's values, and pgsub run keeps them close. This includes
sequences that subscribed tables own or use in defaults, and, from publishers of PostgreSQL 19, published sequences. The
publisher is asked every 2 seconds while values change, and less often while they do not, down to every 30 seconds
(sequence_seconds in config.toml). No value goes backward; to allow that, use pgsub refresh --sequences
--allow-backward. If a sequence is missing on the target, has another definition, or lacks a privilege, create prints a
warning with the statement to run. Later this is an error that does not stop apply; with --disable-on-error it disables
the subscription, as in the server. pgsub status shows each sequence.

--on-conflict resolves conflicts of a type by a rule, for all tables or for one. pgsub-conflicts(7) describes the types
and resolutions; without a rule everything is as in the server.

A password in a connection string is moved to a file that only you can read. target_session_attrs=read-write means
primary, because pgsub also writes where clients are kept from writing by default_transaction_read_only.

With --messages pgsub run logs the messages that pg_logical_emit_message() writes on the publisher. A transactional
message is logged once its transaction is committed on the target, any other as it arrives, possibly again after a
restart. A message in a large, streamed transaction may be logged although its savepoint was rolled back, if no row was
changed between the savepoint and the message.

With --password-required the publisher must ask for a password at every connection, and --connection must contain it.
This binds every user of the target except superusers, and only superusers may give --no-password-required. Without
either option nothing is enforced: the server protects the credentials of its operating-system user, but pgsub runs with
your own.
""",
    examples=(
        (
            "Subscribe and wait until all rows are there.",
            'pgsub create sales --connection "host=db1 dbname=shop user=repl" --target "host=db2 dbname=shop"'
            " --publication sales",
        ),
        (
            "Take over a target that was restored from a dump.",
            "pgsub create sales --connection service=shop --target service=copy --publication sales --adopt --yes",
        ),
        (
            "Register only; a pgsub run that serves the folder does the rest.",
            "pgsub create sales --connection service=shop --target service=copy --publication sales --no-wait",
        ),
    ),
)


class CreateCommand(Command):
    """A command that also requires connection strings, which the environment may contain."""

    def needs(self, param: Any) -> bool:
        """Return whether the subscription cannot be created without a parameter."""
        from pgsub.common.connections.conninfo import in_environment

        return super().needs(param) or param.name == "connection" or (param.name == "target" and not in_environment())


@command(
    "create",
    PAGE,
    *map(parameters, (options.Create, options.Parameters, options.OtherParameters, options.Conflicts)),
    *map(parameters, (options.Unsupported, options.Checks, options.Service)),
    connects=True,
    cls=CreateCommand,
)
def create(**given: Any) -> None:
    """Collect the options and create the subscription."""
    take_conninfos()
    from pgsub.cli.output.reporting import ConsoleReporter
    from pgsub.commands.subscription.create import create as create_subscription
    from pgsub.commands.subscription.definition import CreateOptions

    given["publications"] = given.pop("publication")
    given["settings"] = {name: given[name] for name in options.SETTINGS}
    wanted = collected(CreateOptions, given)
    if given["as_json"] and not wanted.dry_run:
        raise UsageError("--json needs --dry-run", hint="pgsub status --json shows what was created.")
    # With --follow, the log is shown like by pgsub run.
    if wanted.adopt and not given["yes"] and not wanted.dry_run:
        require_terminal([], "deleting rows (--adopt)", "See with --dry-run which tables are compared, then add --yes.")
        confirm("Change the rows of tables that have any to the publisher's, and delete all others?")
    with ConsoleReporter(log_from=0 if wanted.follow else 1) as reporter:
        result = create_subscription(wanted, reporter=reporter)
    if result is not None:
        plan.show("create", wanted.name, result, result.document() if given["as_json"] else None)
