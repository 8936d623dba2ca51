"""``pgsub drop``: asks on a terminal, and requires ``--yes`` elsewhere."""

from __future__ import annotations

from typing import Annotated

import typer

from pgsub.cli.command_tree.command import command
from pgsub.cli.command_tree.option_values import Name, Yes, flag
from pgsub.cli.general_options import current
from pgsub.cli.output import console
from pgsub.cli.output.prompts import require_terminal
from pgsub.cli.pages import Page
from pgsub.common.errors import PgsubError
from pgsub.common.plural import counted

PAGE = Page(
    summary="Drop a subscription and its replication slot",
    description="""
Ends its workers, drops the slots on the publisher, and removes its progress from the target and its definition from the
state store. The replicated tables and their rows stay. So do schema pgsub of the target, with changes that were
skipped, and the state folder, with state.db and logs; a notice has the statement that removes the schema, once no
subscription needs it.

Asks for the name on a terminal; elsewhere --yes is needed. With --keep-slot the publisher is not contacted, and the
slot retains WAL until something else uses or drops it. --keep-target changes nothing on the target; use it only if the
target is gone for good, because otherwise schema pgsub keeps the subscription's rows, and prepared transactions keep
their locks. If the target answers, and another state store was rebuilt from its ledger, the slots belong to that one,
and the command ends with 3.
""",
    examples=(
        ("Drop, from a script.", "pgsub drop sales --yes"),
        ("Drop although the publisher is gone for good.", "pgsub drop sales --keep-slot --yes"),
        ("Drop although the target is gone for good.", "pgsub drop sales --keep-target --yes"),
    ),
)


@command("drop", PAGE, connects=True)
def drop(
    name: Name,
    if_exists: Annotated[bool, flag("if-exists", "Only a notice if it does not exist.")] = False,
    keep_slot: Annotated[bool, flag("keep-slot", "Leave the slots on the publisher alone.")] = False,
    keep_target: Annotated[bool, flag("keep-target", "Change nothing on the target, which is gone for good.")] = False,
    yes: Yes = False,
) -> None:
    """Ask, then drop."""
    if not yes:
        _confirm(name, if_exists, keep_slot, keep_target)
    from pgsub.cli.output.reporting import ConsoleReporter
    from pgsub.commands.subscription.drop import drop as drop_subscription

    drop_subscription(
        current.state_dir,
        name,
        if_exists=if_exists,
        keep_slot=keep_slot,
        keep_target=keep_target,
        reporter=ConsoleReporter(),
    )


def _confirm(name: str, if_exists: bool, keep_slot: bool, keep_target: bool) -> None:
    given = {"--if-exists": if_exists, "--keep-slot": keep_slot, "--keep-target": keep_target}
    words = ["pgsub", "drop", name, *(option for option, on in given.items() if on), "--yes"]
    from pgsub.catalog.store import StateStore

    with StateStore.open(current.state_dir, create=False) as store:
        found = store.find(name)
        kept = sum(row.kept_changes for row in store.held(found.subid)) if found is not None else 0
    if found is None:
        return  # the command says so
    require_terminal([name], f'dropping subscription "{name}"', "If you are sure:", words)
    fate = "is kept" if keep_slot or found.slot_name is None else f'"{found.slot_name}" is dropped'
    console.say(f"This drops subscription {console.line(name)}; its replication slot on the publisher {fate}.")
    if kept:
        console.say(f"{counted(kept, 'kept change', ('was', 'were'))} never applied to held tables and would be lost.")
    if typer.prompt("Type the name of the subscription to continue", err=True) != name:
        raise PgsubError("canceled", detail="Nothing was dropped.")
