"""``pgsub origin-advance``: shows what would be lost and asks on a terminal. Elsewhere it requires ``--yes``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from pgsub.cli.command_tree.command import command
from pgsub.cli.command_tree.option_values import AsJson, Name, Yes, flag, parse_lsn
from pgsub.cli.general_options import current
from pgsub.cli.output import console, render
from pgsub.cli.output.documents import emit, emit_document
from pgsub.cli.output.progress import size
from pgsub.cli.output.prompts import agreed, confirm, require_terminal
from pgsub.cli.pages import Page
from pgsub.common.errors import ApplyError
from pgsub.common.plural import counted

if TYPE_CHECKING:
    from pgsub.commands.skip.origin_advance import SkippedRange

PAGE = Page(
    summary="Advance the replication origin past transactions that must not be applied",
    description="""
Moves the position of a disabled subscription to LSN, as pg_replication_origin_advance does in the server's
documentation. No transaction that finishes before LSN is applied any more, and none of them is kept. To skip a single
transaction, or only its conflicting rows, see pgsub-skip-lsn(1), which keeps what it skips.

A transaction is skipped if its finish LSN lies before LSN: to skip it, give its finish LSN plus one, or its end LSN. If
LSN lies inside a transaction, a notice says so; that transaction is still applied as a whole. An LSN that lies
backwards, beyond the publisher's WAL, or past a transaction that is prepared on the target is rejected.

--preview changes nothing and works while the subscription is enabled. It counts the transactions, the changes by table
and the bytes that would not be applied. A table that still synchronizes gets its part from its sync worker. The exit
code is 0 if nothing would be lost, else 6.

Asks on a terminal; elsewhere --yes is needed. The journal has the old position (pgsub status --view pgsub_journal).
""",
    examples=(
        ("See what would not be applied.", "pgsub origin-advance sales 0/14C0379 --preview"),
        ("Advance past it.", "pgsub disable sales && pgsub origin-advance sales 0/14C0379 --yes && pgsub enable sales"),
    ),
)


@command("origin-advance", PAGE, connects=True)
def origin_advance(
    name: Name,
    lsn: Annotated[str, typer.Argument(metavar="LSN", help="The new position: a finish LSN plus one, or an end LSN.")],
    preview: Annotated[bool, flag("preview", "Show what would be lost, and change nothing.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Show what would be lost, or advance."""
    to = parse_lsn(lsn)
    if not preview and not yes:
        words = ["pgsub", "origin-advance", name, lsn]
        introduction = "To see what would be lost, and then:"
        commands = [*words, "--preview"], [*words, "--yes"]
        require_terminal([name], "advancing a replication origin", introduction, *commands)
    from pgsub.cli.output.reporting import ConsoleReporter
    from pgsub.commands.skip.origin_advance import document
    from pgsub.commands.skip.origin_advance import origin_advance as advance

    ask, reporter = agreed if yes else _ask, ConsoleReporter()
    found = document(advance(current.state_dir, name, to, preview=preview, reporter=reporter, confirm=ask))
    if as_json:
        emit_document("origin-advance", {"preview": preview, **found})
    elif preview:
        _print(found)
    if preview and found["changes"]:
        raise typer.Exit(ApplyError.exit_code)


def _ask(found: SkippedRange) -> None:
    from pgsub.commands.skip.origin_advance import document

    confirm("Advance past it?", *_sentences(document(found)))


def _print(found: dict[str, Any]) -> None:
    if found["tables"]:
        columns = ["table", "insert", "update", "delete", "truncate"]
        rows = [{"table": f"{t['schemaname']}.{t['relname']}", **t} for t in found["tables"]]
        emit(render.rows(columns, rows) + "\n")
    for line in _sentences(found):
        emit(console.line(line))


def _sentences(found: dict[str, Any]) -> list[str]:
    between = f"Between {found['from']} and {found['to']}"
    if not found["transactions"]:
        said = [f"{between} no transaction ends ({size(found['wal_bytes'])} of WAL): nothing is left out."]
    else:
        verb, fate = ("lies", "it will not") if found["transactions"] == 1 else ("lie", "none of them will")
        said = [
            f"{between} {verb} {counted(found['transactions'], 'transaction')} with"
            f" {counted(found['changes'], 'change')} ({size(found['bytes'])} of"
            f" {size(found['wal_bytes'])} of WAL); {fate} be applied."
        ]
    if found["last"] is not None:
        said.append(
            f"The last of them is transaction {found['last']['xid']}, finished at {found['last']['finish_lsn']}."
        )
    if found["synchronizing"]:
        tables = ", ".join(found["synchronizing"])
        said.append(f"These tables still synchronize and get their part of it from their sync workers: {tables}.")
    return said
