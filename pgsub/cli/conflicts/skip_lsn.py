"""``pgsub skip-lsn``: shows what would be lost and asks on a terminal. Elsewhere it requires ``--yes``."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pgsub.cli.command_tree.command import command
from pgsub.cli.command_tree.option_values import AsJson, Name, Yes, flag, parse_lsn, value
from pgsub.cli.general_options import current
from pgsub.cli.output import console, render
from pgsub.cli.output.documents import emit, emit_document
from pgsub.cli.output.prompts import agreed, confirm, require_terminal
from pgsub.cli.pages import Page
from pgsub.common.errors import ApplyError, UsageError
from pgsub.common.plural import counted

if TYPE_CHECKING:
    from pgsub.common.conflict_rules import Rule
    from pgsub.target.ledger.skip import Skip

LISTED = 40  #: maximum number of listed rows

PAGE = Page(
    summary="Skip a transaction that apply cannot apply",
    description="""
Skips the transaction that finishes at LSN, as ALTER SUBSCRIPTION ... SKIP does: with --rows whole all of it, with
--rows conflicting only the rows that cannot be applied and the changes that depend on them. Skipped changes are kept
in table pgsub.skipped_change of the target, in the commit that passes the transaction.

LSN is the finish LSN in the CONTEXT of an error; the default is the transaction at which apply stopped last. An LSN
that is not the finish LSN of a pending transaction is rejected, and the error suggests the likely one. The next
transaction with changes clears the LSN, with a warning if it did not match. Of several LSNs each waits for its own
transaction; the transactions between them are applied. A new setting replaces the previous one; none clears it.

--conflict, --table and --limit together skip the next N rows of a table that run into this conflict, whatever their
transaction. The rest of each transaction is applied. After N rows, conflicts are handled as before; none in place of
an LSN takes it back. This works for conflicts that stop apply and for those that do not: the change of a missing row
is then kept, and the log has one message for each commit. All of these conflicts are recorded and counted; pgsub
conflicts replay applies the changes later. For permanent rules see pgsub alter --on-conflict.

--preview changes nothing and works in every state of the subscription. It reads the transaction from a temporary copy
of the replication slot, compares it with the target row by row, and prints the outcome that apply would have.
would_apply: the row would be applied. conflict: the target holds a different version of the row. dependent: the change
follows one that cannot be applied. error: no row of the target can hold it. missing: the target lacks the row.
identical: the target has the row already. left: the table is not subscribed, or is being copied. Where a rule resolves
the conflict, its outcome is shown: would_apply; kept, the target's row stays; skipped, the rule sets the change aside.
Skipping loses nothing that is kept or skipped. The verdict is safe if nothing would be lost, caution if the target
holds other versions of the lost rows, risky if changes that apply would make would be lost. The exit code is 0 if
nothing would be lost, else 6.

Asks on a terminal; elsewhere --yes is needed.
""",
    examples=(
        ("See what skipping the transaction that apply stopped at would lose.", "pgsub skip-lsn sales --preview"),
        ("Apply all of it except the conflicting rows.", "pgsub skip-lsn sales --rows conflicting --yes"),
        (
            "Skip the next thousand deletes of missing rows.",
            "pgsub skip-lsn sales --conflict delete_missing --table public.t --limit 1000 --yes",
        ),
    ),
)


@command("skip-lsn", PAGE, connects=True)
def skip_lsn(
    name: Name,
    lsns: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="LSN|none", help="Finish LSN of the transaction, or of several; default: of the recorded error."
        ),
    ] = None,
    preview: Annotated[bool, flag("preview", "Show what would be lost, and change nothing.")] = False,
    rows: Annotated[str, value("whole|conflicting", "Which rows of the transaction are skipped.")] = "whole",
    conflict: Annotated[str | None, value("TYPE", "Skip rows with this conflict, whatever the transaction.")] = None,
    table: Annotated[str | None, value("SCHEMA.TABLE", "With --conflict: rows of this table.")] = None,
    limit: Annotated[int | None, value("N", "With --conflict: the next N of them.", min=1)] = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Show what would be lost, or skip."""
    if (conflict, table, limit) != (None, None, None):
        if conflict is None or table is None or limit is None or lsns or preview or rows != "whole":
            raise UsageError("--conflict, --table, and --limit must be given together, and without other options")
        _skip_conflicts(name, conflict, table, limit, yes=yes, as_json=as_json)
        return
    wanted = _wanted(lsns or [])
    if rows not in ("whole", "conflicting"):
        raise UsageError(f'"{rows}" is not one of whole, conflicting')
    if preview and (wanted is None or len(wanted) > 1):
        raise UsageError("--preview needs exactly one transaction")
    if not preview and wanted is not None and not yes:
        _require_terminal(name, lsns or [], rows)
    from pgsub.commands.skip.skip_lsn import SkipOptions

    options = SkipOptions(name, current.state_dir, wanted, rows)
    if preview:
        _preview(options, as_json)
    else:
        _skip(options, yes, as_json)


def _wanted(words: list[str]) -> tuple[int, ...] | None:
    if [word.lower() for word in words] == ["none"]:
        return None
    lsns = tuple(parse_lsn(word) for word in words)
    if 0 in lsns:
        raise UsageError(f"invalid WAL location (LSN): {words[lsns.index(0)]}")
    return lsns


def _require_terminal(name: str, lsns: list[str], rows: str) -> None:
    words, mode = ["pgsub", "skip-lsn", name], [] if rows == "whole" else ["--rows", rows]
    previews = [[*words, *lsn, *mode, "--preview"] for lsn in ([[one] for one in lsns] or [[]])]
    introduction = "To see what would be lost, and then:"
    require_terminal([name], "skipping a transaction", introduction, *previews, [*words, *lsns, *mode, "--yes"])


def _skip(options: Any, yes: bool, as_json: bool) -> None:
    from pgsub.cli.output.reporting import ConsoleReporter
    from pgsub.commands.skip.skip_lsn import skip_lsn as skip_transaction
    from pgsub.protocol.lsn import format_lsn

    skipped, previous = skip_transaction(options, reporter=ConsoleReporter(), confirm=agreed if yes else _ask)
    if as_json:
        content = {
            "preview": False,
            "subscription": options.name,
            "subskiplsn": format_lsn(skipped.lsn if skipped else 0),
            "lsns": [format_lsn(lsn) for lsn in skipped.lsns] if skipped else [],
            "rows_mode": skipped.rows if skipped else None,
            "previous": format_lsn(previous.lsn if previous else 0),
        }
        emit_document("skip-lsn", content)


def _ask(name: str, skip: Skip) -> None:
    from pgsub.protocol.lsn import format_lsn

    what = "nothing" if skip.rows == "whole" else "only what it can"
    which = "transactions" if skip.waits else "transaction"
    finished = " and at ".join(map(format_lsn, skip.lsns))
    confirm(
        "Skip it?",
        f"Subscription {name} will apply {what} of the {which} finished at {finished}; the rest goes to"
        " pgsub.skipped_change on the target.",
        "To see first what would be lost: "
        + shlex.join(["pgsub", "skip-lsn", name, format_lsn(skip.lsn), "--rows", skip.rows, "--preview"]),
    )


def _skip_conflicts(name: str, conflict: str, table: str, limit: int, *, yes: bool, as_json: bool) -> None:
    """Set a rule.

    :raises UsageError: there is no terminal to ask on.
    """
    if not yes:
        words = ["pgsub", "skip-lsn", name, "--conflict", conflict, "--table", table, "--limit", str(limit), "--yes"]
        require_terminal([name], "skipping changes", "Then:", words)
    from pgsub.cli.output.reporting import ConsoleReporter
    from pgsub.commands.skip.skip_conflicts import skip_conflicts
    from pgsub.common.conflict_rules import SKIP, Rule

    rule, ask = Rule(table, conflict, SKIP, limit), agreed if yes else _ask_conflicts
    rules = skip_conflicts(current.state_dir, name, rule, reporter=ConsoleReporter(), confirm=ask)
    if as_json:
        shown = [{"conflict": one.conflict, "table": one.table, "limit": one.limit} for one in rules]
        emit_document("skip-lsn", {"preview": False, "subscription": name, "rules": shown})


def _ask_conflicts(name: str, rule: Rule) -> None:
    changes = counted(rule.limit or 0, "change")
    confirm(
        "Skip them?",
        f"Of {rule.table} the next {changes} with {rule.conflict} will not be applied by subscription {name}, but kept"
        " in pgsub.skipped_change on the target.",
    )


def _preview(options: Any, as_json: bool) -> None:
    from pgsub.commands.skip.preview import document
    from pgsub.commands.skip.skip_lsn import show

    found = document(show(options))
    if as_json:
        emit_document("skip-lsn", {"preview": True, "subscription": options.name, **found})
    else:
        _print(found)
    if found["lost"] or found["verdict"] != "safe":
        raise typer.Exit(ApplyError.exit_code)


def _print(found: dict[str, Any]) -> None:
    from pgsub.apply.preview.finding import Outcome

    one = found["transaction"]
    emit(console.line(f"{one['kind']} of transaction {one['xid']}, finished at {one['finish_lsn']}, {one['at']}"))
    shown = [row for row in found["rows"] if row["outcome"] != "identical"] or found["rows"]
    emit("\n" + change_rows(shown))
    present = {name for table in found["tables"] for name in Outcome if table[name]}
    columns = ["table", *(name for name in Outcome if name in present)]
    totals = [{"table": f"{t['schemaname']}.{t['relname']}", **t} for t in found["tables"]]
    if totals:
        emit("\n" + render.rows(columns, totals))
    listed = min(len(shown), LISTED)
    if listed < found["changes"]:
        emit(f"\n{listed} of {counted(found['changes'], 'change')} listed; --json has more.")
    if found["unexplained"]:
        stopped = console.line(found["error"]["message"])
        emit(f"\nApply stopped here for a reason that no row shows: {stopped}")
    what = "the transaction" if found["rows_mode"] == "whole" else "its conflicting rows"
    changes = counted(found["changes"], "change")
    emit(f"\n{found['verdict']}: skipping {what} would lose {found['lost']} of {changes}.")


def change_rows(shown: list[dict[str, Any]]) -> str:
    """Return the first changes of a preview document as a table."""
    return render.rows(("change", "table", "outcome", "why", "remote", "local"), [_row(r) for r in shown[:LISTED]])


def _row(row: dict[str, Any]) -> dict[str, Any]:
    local = row["existing"][0]["row"] if row["existing"] else row["local"]
    why = [row["rule"] or row["conflict"], *(other["index"] for other in row["existing"]), row["reason"]]
    return {
        "change": f"{row['number']} {row['operation']}",
        "table": f"{row['schemaname']}.{row['relname']}",
        "outcome": row["outcome"],
        "why": " ".join(filter(None, why)) or None,
        "remote": _values(row["remote"] or row["key"]),
        "local": _values(local),
    }


def _values(row: dict[str, str | None] | None) -> str | None:
    return None if row is None else ", ".join(f"{name}={_short(value)}" for name, value in row.items())


def _short(value: str | None) -> str:
    text = "NULL" if value is None else value
    return text if len(text) <= 32 else text[:29] + "..."
