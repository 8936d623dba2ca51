"""``pgsub refresh``: asks on a terminal before a table is emptied, and requires ``--yes`` elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from pgsub.cli.command_tree.command import command, parameters
from pgsub.cli.command_tree.option_values import Name, Yes, collected, flag, repeatable
from pgsub.cli.output.progress import size
from pgsub.cli.output.prompts import agreed, confirm, require_terminal
from pgsub.cli.pages import Page
from pgsub.cli.subscription import options, plan
from pgsub.common.errors import UsageError
from pgsub.common.subscription import KEEP

if TYPE_CHECKING:
    from pgsub.commands.refresh.diff import Plan

PAGE = Page(
    summary="Refresh the tables of a subscription from its publications",
    description="""
Adds and copies tables that are published and not subscribed yet. Removes tables that are no longer published, with
their slots; their rows stay on the target. Tables that are subscribed already are not copied again, and keep
replicating meanwhile. New tables must exist on the target. A standby that has not replayed what the target has is
refused, because its publications may be older.

With --resync a table is copied again: it is truncated on the target in the commit that marks it, then copied. This is
rejected where a foreign key of another table references it, where a trigger on TRUNCATE would fire, and where another
subscription writes to the table. Tables that reference each other may be named together. The command asks on a
terminal; elsewhere --yes is needed.

With --adopt no table is truncated. The rows of the tables of --resync, and of new tables that already have rows, are
compared with the publisher's, and only rows that differ are sent and written. Rows that the publisher does not have are
deleted. pgsub-create(1) says what is compared, and which replaced rows are kept. Foreign keys and triggers on TRUNCATE
are no obstacle. As while a table is copied, its changes are not applied meanwhile.

With --sequences only the values of sequences are refreshed, and only once. Publishers of any version support this for
sequences that subscribed tables own or use in defaults, and publishers of PostgreSQL 19 also for published sequences.
To let sequences follow the publisher, give the subscription the option --sequences. A sequence of the target that is
ahead is not changed, unless --allow-backward is given; the target then gives out values again that it has given out
before. If a sequence is missing on the target, has another definition, or lacks a privilege, the command reports an
error with the statement to run; the other sequences are set.

New tables are checked as by pgsub create. --dry-run changes nothing and prints the plan, with --json as one document.
If pgsub run serves the subscription, it does the work, and this command shows the progress.
""",
    examples=(
        ("Add and copy the tables that were added to the publications.", "pgsub refresh sales"),
        ("Copy one table again.", "pgsub refresh sales --resync public.orders --yes"),
        (
            "Compare one table, and copy only rows that differ.",
            "pgsub refresh sales --resync public.orders --adopt --yes",
        ),
        ("Set sequences to the publisher's values.", "pgsub refresh sales --sequences"),
    ),
)


class Refresh:
    """The command's own options."""

    name: Name
    copy_data: Annotated[bool, typer.Option(help="Copy pre-existing data of new tables.")] = True
    resync: Annotated[list[str], repeatable("SCHEMA.TABLE", "Empty this table and copy it again")] = []
    adopt: options.Adopt = False
    keep_replaced: options.KeepReplaced = KEEP
    sequences: Annotated[bool, flag("sequences", "Set sequences to the publisher's values, and do nothing else.")] = (
        False
    )
    allow_backward: Annotated[
        bool, flag("allow-backward", "With --sequences: also set those that are ahead of the publisher.")
    ] = False
    yes: Yes = False
    dry_run: options.DryRun = False
    as_json: options.AsJson = False


@command("refresh", PAGE, parameters(Refresh), parameters(options.Service), connects=True)
def refresh(**given: Any) -> None:
    """Ask, then refresh."""
    from pgsub.cli.output.reporting import ConsoleReporter
    from pgsub.commands.refresh.refresh import RefreshOptions
    from pgsub.commands.refresh.refresh import refresh as refresh_subscription

    if given["sequences"] or given["allow_backward"]:
        _refresh_sequences(given)
        return
    wanted, yes = collected(RefreshOptions, given), given["yes"]
    if given["as_json"] and not wanted.dry_run:
        raise UsageError("--json needs --dry-run", hint="pgsub status --json shows what was done.")
    if wanted.resync and not yes and not wanted.dry_run:
        tables = (word for table in wanted.resync for word in ("--resync", table))
        adopt = ["--adopt"] if wanted.adopt else []
        words = ["pgsub", "refresh", wanted.name, *tables, *adopt, "--yes"]
        action = "replacing rows" if wanted.adopt else "emptying a table"
        require_terminal([wanted.name], action, "If you are sure:", words)
    elif wanted.adopt and not yes and not wanted.dry_run:
        introduction = "See with --dry-run which tables are compared, then add --yes."
        require_terminal([wanted.name], "deleting rows (--adopt)", introduction)
        confirm("Change the rows of new tables that have any to the publisher's, and delete all others?")
    with ConsoleReporter() as reporter:
        done = refresh_subscription(wanted, reporter=reporter, confirm=agreed if yes else _ask)
    if wanted.dry_run:
        plan.show("refresh", wanted.name, done.found, done.document() if given["as_json"] else None)


def _refresh_sequences(given: dict[str, Any]) -> None:
    """Refresh the sequences.

    :raises UsageError: an option that concerns tables was given.
    """
    from pgsub.cli.output.reporting import ConsoleReporter
    from pgsub.commands.refresh.sequences import SequenceOptions, refresh_sequences

    if not given["sequences"]:
        raise UsageError("--allow-backward needs --sequences")
    if given["resync"] or given["adopt"] or given["as_json"] or not given["copy_data"]:
        raise UsageError(
            "--sequences cannot be used with --resync, --adopt, --no-copy-data or --json",
            hint="Refresh tables separately.",
        )
    with ConsoleReporter() as reporter:
        refresh_sequences(collected(SequenceOptions, given), reporter=reporter)


def _ask(plan: Plan) -> None:
    if plan.adopt:
        tables = (f'Table "{one.schemaname}.{one.relname}" on the target is compared.' for one in plan.again)
        confirm("Change its rows to the publisher's, and delete all others?", *tables)
        return
    rows = [
        (one, f"{size(one.bytes)} of rows, and was never analyzed" if one.rows is None else f"about {one.rows} rows")
        for one in plan.emptied
    ]
    sentences = [f'Table "{one.schema}.{one.name}" on the target has {number}.' for one, number in rows]
    confirm("Empty and copy again?", *sentences)
