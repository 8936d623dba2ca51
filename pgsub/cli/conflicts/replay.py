"""``pgsub conflicts replay``: shows what would be applied and asks on a terminal. Elsewhere it requires ``--yes``."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import typer

from pgsub.cli.command_tree.option_values import parse_lsn
from pgsub.cli.conflicts.skip_lsn import LISTED, change_rows
from pgsub.cli.general_options import current
from pgsub.cli.output import console
from pgsub.cli.output.documents import emit, emit_document
from pgsub.cli.output.prompts import agreed, confirm, require_terminal
from pgsub.common.errors import ApplyError, UsageError
from pgsub.common.plural import counted

if TYPE_CHECKING:
    from pgsub.commands.skip.replay import Replay


def replay(
    name: str, *, number: int | None, lsn: str | None, table: str | None, dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Show what would be applied, or replay it.

    :raises UsageError: there is not exactly one choice, or no terminal to ask on.
    """
    if (number is None) == (lsn is None):
        raise UsageError(
            "pgsub conflicts replay needs either an ID or --lsn",
            hint=f"See what was skipped.\npgsub conflicts list {shlex.quote(name)}",
        )
    if table is not None and lsn is None:
        raise UsageError("--table needs --lsn")
    words = ["pgsub", "conflicts", "replay", name, *([] if number is None else [str(number)])]
    words += ([] if lsn is None else ["--lsn", lsn]) + ([] if table is None else ["--table", table])
    wanted = 0 if lsn is None else parse_lsn(lsn)
    if not dry_run and not yes:
        introduction = "To see what it would do, and then:"
        require_terminal([name], "replaying changes", introduction, [*words, "--dry-run"], [*words, "--yes"])
    current.take_environment()
    from pgsub.cli.output.reporting import ConsoleReporter
    from pgsub.commands.skip.replay import ReplayOptions, conflicts_replay, document

    options = ReplayOptions(name, current.state_dir, number, wanted, table, dry_run)
    done = document(conflicts_replay(options, reporter=ConsoleReporter(), confirm=agreed if yes else _ask))
    if as_json:
        emit_document("conflicts", {"subscription": done.pop("subscription"), "replay": done})
    elif dry_run:
        _print(done)
    else:
        console.notice(f"{_changes(done)} replayed")
    if dry_run and (done["refused"] or done["not_compared"]):
        raise typer.Exit(ApplyError.exit_code)


def _ask(found: Replay) -> None:
    from pgsub.commands.skip.replay import document

    shown = document(found)
    tables = [f"{one['operation']} {one['schemaname']}.{one['relname']}: {one['changes']}" for one in shown["tables"]]
    confirm("Replay?", *tables, f"{_changes(shown)} will be applied to the target, or none if there is a conflict.")


def _changes(done: dict[str, Any]) -> str:
    return f"{counted(done['changes'], 'change')} of transaction {done['xid']}, finished at {done['finish_lsn']},"


def _print(done: dict[str, Any]) -> None:
    emit(change_rows(done["rows"]))
    listed = min(len(done["rows"]), LISTED)
    if listed < done["changes"]:
        emit(f"\n{listed} of {counted(done['changes'], 'change')} listed; --json has more.")
    if done["replayed_before"]:
        emit(f"\n{counted(done['replayed_before'], 'other', ('was', 'were'))} replayed before.")
    verdict = "Nothing would be replayed" if done["refused"] else "All of it would be replayed"
    refused = f"{done['refused']} of {counted(done['changes'], 'change')} cannot be applied"
    emit(f"\n{verdict}: {refused if done['refused'] else 'no conflict'}.")
