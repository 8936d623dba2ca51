"""``pgsub reconcile``: asks on a terminal before rows are replaced, and requires ``--yes`` elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pgsub.cli.command_tree.command import command, parameters
from pgsub.cli.command_tree.option_values import AsJson, Name, Yes, collected, flag, value
from pgsub.cli.output.documents import emit_document
from pgsub.cli.output.prompts import agreed, confirm, require_terminal
from pgsub.cli.pages import Page
from pgsub.cli.subscription import options
from pgsub.common.plural import counted
from pgsub.common.subscription import KEEP

if TYPE_CHECKING:
    from pgsub.commands.reconcile.reconcile import Reconciliation

PAGE = Page(
    summary="Continue a subscription whose slot is lost",
    description="""
When a replication slot is lost, the changes that it kept are lost for the subscription, which stops with exit code 7.
This happens if the slot was invalidated (max_slot_wal_keep_size, idle_replication_slot_timeout, rows that a standby
needed), dropped, or created again, or if the publisher failed over to a standby without the slot or went back in time
(a standby that was behind, a restored backup). This command creates another slot, and has every table compared with the
publisher. Only rows that differ are sent and written, as by pgsub refresh --adopt. No table is emptied.

The publisher decides. Rows that it does not have are deleted on the target, even if somebody wrote them there, and also
those that a publisher that went back in time has lost. For each table, up to --keep-replaced rows that are deleted or
replaced are kept on the target, in pgsub.skipped_change, and pgsub conflicts list shows them. As by pgsub refresh,
tables that are new in the publications are added, and tables that are no longer published are removed. A copy of a
table that had not ended continues. Changes of a table are not applied until it has been compared; the other tables are
replicated meanwhile.

Whatever was waiting for the lost changes is given up, and the command lists it first. Transactions that are prepared on
the target are rolled back. Skips that were set are cleared. Held tables are released without their kept changes,
because the comparison brings the publisher's rows. two_phase is enabled again once every table is ready. The new slot
is a failover slot if the subscription has the option failover.

If slot, publisher and ledger match, nothing is done. If you know that changes are missing all the same, --force creates
another slot. A slot of the same name that another consumer uses, or that has another kind or database, is never
dropped; in that case give the new slot another name with --slot-name. An existing slot of that name is never dropped.

If pgsub run serves the subscription, it does the work, and this command shows the progress. The subscription may be
disabled. If the command is killed, run it again; apply does not continue before that. If it fails before it has
dropped or created a slot, as by --timeout, the subscription stays as it was. To create a slot, the publisher waits
until all transactions that write have ended, prepared ones included.
""",
    examples=(
        ("See what is wrong, and what would be done.", "pgsub reconcile sales --dry-run"),
        ("Continue from a new slot.", "pgsub reconcile sales"),
        ("Leave the comparison to pgsub run.", "pgsub reconcile sales --yes --no-wait"),
    ),
)


class Reconcile:
    """The command's own options."""

    name: Name
    slot_name: Annotated[str | None, value("NAME", "Name of the new slot.", show_default="that of the old one")] = None
    force: Annotated[bool, flag("force", "Make another slot although nothing seems wrong.")] = False
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
        "Change the rows of these tables to the publisher's, and delete all others?",
        f'Slot "{found.diagnosis.slot_name}" is made on the publisher, and {tables} on the target compared with it.',
    )
