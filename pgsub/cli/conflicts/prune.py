"""``pgsub conflicts prune``: shows what would be removed and asks on a terminal. Elsewhere it requires ``--yes``."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from pgsub.cli.general_options import current
from pgsub.cli.output import console
from pgsub.cli.output.documents import emit_document
from pgsub.cli.output.progress import size
from pgsub.cli.output.prompts import agreed, confirm, require_terminal
from pgsub.common.errors import UsageError
from pgsub.common.plural import counted

if TYPE_CHECKING:
    from pgsub.target.ledger.skipped_changes import Usage


def prune(name: str, *, replayed: bool, older_than: float | None, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Show what would be removed, or remove it.

    :raises UsageError: nothing was chosen, or there is no terminal to ask on.
    """
    command = ["pgsub", "conflicts", "prune", name]
    if not replayed and older_than is None:
        raise UsageError(
            "pgsub conflicts prune needs --replayed, --older-than or both",
            hint=f"To see what was replayed and is still kept:\n{shlex.join([*command, '--replayed', '--dry-run'])}",
        )
    if not dry_run and not yes:
        words = [*command, *["--replayed"] * replayed]
        words += [] if older_than is None else ["--older-than", f"{older_than:g}s"]
        introduction = "To see what would be removed, and then:"
        require_terminal([name], "removing skipped changes", introduction, [*words, "--dry-run"], [*words, "--yes"])
    current.take_environment()
    from pgsub.commands.skip.prune import prune as remove

    ask = agreed if yes else _ask
    found = remove(current.state_dir, name, replayed=replayed, older_than=older_than, dry_run=dry_run, confirm=ask)
    if as_json:
        content = {"dry_run": dry_run, "waiting": found.waiting, "replayed": found.replayed, "bytes": found.bytes}
        emit_document("conflicts", {"subscription": name, "prune": content})
    else:
        console.notice(f"{_total(found)} {'would be removed' if dry_run else 'removed'}")


def _ask(found: Usage) -> None:
    confirm("Remove?", f"{_total(found)} will be removed from pgsub.skipped_change on the target for good.")


def _total(found: Usage) -> str:
    text = f"{counted(found.waiting + found.replayed, 'change')} ({size(found.bytes)})"
    return text + (f", {found.waiting} of which never replayed," if found.waiting else "")
