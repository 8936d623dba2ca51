"""``pgsub reconcile``: asks on a terminal before rows are replaced, wants ``--yes`` elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from pgsub.cli.command_tree.command import command, parameters
from pgsub.cli.command_tree.option_values import AsJson, Name, Yes, collected
from pgsub.cli.output.documents import emit_document
from pgsub.cli.output.prompts import agreed, confirm, require_terminal
from pgsub.cli.pages import Page
from pgsub.cli.subscription import options
from pgsub.common.plural import counted
from pgsub.common.subscription import KEEP

if TYPE_CHECKING:
    from pgsub.commands.reconcile.reconcile import Reconciliation

PAGE = Page(
    summary="Go on with a subscription whose slot is lost",
    description="""
A replication slot that is lost has taken changes with it: it was invalidated (max_slot_wal_keep_size,
idle_replication_slot_timeout, rows that a standby needed), dropped, or made again; the publisher failed over to a
standby that does not have it, or went back in time (a standby that lagged, a restored backup). The subscription then
stops with exit code 7. This command makes another slot, and has every table compared with the publisher's snapshot of
its own slot: only rows that differ are sent and written, as by pgsub refresh --adopt. No table is emptied.

The publisher is the truth. Rows that it does not have are deleted on the target, also those that somebody wrote
there, and, where the publisher went back in time, those that it has lost. Of each table --keep-replaced such rows are
kept on the target, in pgsub.skipped_change, as are those that are replaced, and pgsub conflicts list shows them.
Tables that are published and new are added, and tables that are no longer published are removed, as by pgsub refresh.
A table whose copy had not ended goes on with it. Apply keeps off a table until it is compared; the others are
replicated meanwhile.

What waited for the lost changes is given up, and each is named before: transactions that are prepared on the target
are rolled back, transactions that were to be skipped do not come, and held tables are released without their kept
changes, for the comparison brings what the publisher has. two_phase is enabled again once every table is ready, and
the new slot is a failover slot if the subscription says so.

Nothing is done where slot, publisher and ledger fit together; --force makes another slot all the same, where it is
known from elsewhere that changes are missing. A slot of that name that another consumer uses, or of another kind or
database, is never dropped: give the new one another name with --slot-name.

Where pgsub run serves the subscription, it does the work and this command shows the progress; the subscription may be
disabled, too. If the command is killed, apply does not go on until it is repeated. Creating a slot waits until all
transactions of the publisher that write have ended, prepared ones included.
""",
    examples=(
        ("See what is wrong, and what would be done.", "pgsub reconcile sales --dry-run"),
        ("Go on from a new slot.", "pgsub reconcile sales"),
        ("Leave the comparison to pgsub run.", "pgsub reconcile sales --yes --no-wait"),
    ),
)


class Reconcile:
    """Options of its own."""

    name: Name
    slot_name: Annotated[
        str | None, typer.Option(metavar="NAME", show_default="that of the old one", help="Name of the new slot.")
    ] = None
    force: Annotated[bool, typer.Option("--force", help="Make another slot although nothing seems wrong.")] = False
    keep_replaced: options.KeepReplaced = KEEP
    yes: Yes = False
    dry_run: options.DryRun = False
    as_json: AsJson = False


@command("reconcile", PAGE, parameters(Reconcile), parameters(options.Service), connects=True)
def reconcile(**given: Any) -> None:
    """Ask, then reconcile."""
    from pgsub.cli.output.reporting import ConsoleReporter
    from pgsub.commands.reconcile.reconcile import ReconcileOptions
    from pgsub.commands.reconcile.reconcile import reconcile as reconcile_subscription

    wanted, yes = collected(ReconcileOptions, given), given["yes"]
    if not yes and not wanted.dry_run:
        words = ["pgsub", "reconcile", wanted.name]
        introduction = "To see what would be done, and then:"
        require_terminal([wanted.name], "replacing rows", introduction, [*words, "--dry-run"], [*words, "--yes"])
    with ConsoleReporter() as reporter:
        done = reconcile_subscription(wanted, reporter=reporter, confirm=agreed if yes else _ask)
    if given["as_json"]:
        emit_document("reconcile", done.document())


def _ask(found: Reconciliation) -> None:
    tables = counted(len(found.plan.again), "table")
    confirm(
        "Make the rows of these tables the publisher's, and delete all others?",
        f'Slot "{found.diagnosis.slot_name}" is made on the publisher, and {tables} on the target compared with it.',
    )
