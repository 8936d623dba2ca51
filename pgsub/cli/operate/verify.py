"""``pgsub verify``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from pgsub.cli.command_tree.command import command
from pgsub.cli.command_tree.option_values import AsJson, Name, Timeout, flag, value
from pgsub.cli.general_options import current
from pgsub.cli.output import console, render
from pgsub.cli.output.documents import emit, emit_document
from pgsub.cli.output.prompts import agreed, confirm, require_terminal
from pgsub.cli.pages import Page
from pgsub.common.errors import ApplyError, StateForbids, UsageError
from pgsub.common.plural import counted
from pgsub.common.size import parse_size

if TYPE_CHECKING:
    from pgsub.commands.verify.result import Verification

_SHOWN = 10  #: maximum number of differing rows to print for each table

PAGE = Page(
    summary="Compare the tables of a subscription with the publisher's",
    description="""
Compares every row while replication runs. Both servers are compared at one point: a snapshot of the publisher at an
LSN, and a snapshot of the target where apply has applied everything that this LSN covers, and nothing more. Apply
pauses for some milliseconds to take it, whatever the size of the tables. If no pgsub run serves the subscription, the
command itself applies changes up to that point.

Both servers read each table once and send sums of hashes; only rows of parts that differ cross the network. The
publisher keeps the snapshot until the command ends, as for pg_dump. Column lists, row filters, and different types or
encodings on the target are taken into account. Columns that only the target has, and generated columns, are not
compared.

Values are compared by their text, and otherwise by the operator = of the target's type. So values are equal if = finds
them equal, although they are written differently: the numeric values 1.0 and 1.00, also in jsonb; the floats 0 and -0;
the intervals 1 mon and 30 days; and upper and lower case with citext, or with a collation that ignores case.

Rows are missing on the target, extra there, or different. Counts are exact; at most 1000 rows of a table are listed,
and ten are printed. A row is explained if pgsub has recorded why it differs: its change was skipped, is kept and was
not replayed, it was changed in a held table, or a conflict rule kept what the target has. If update or delete is not
published, rows that only the target has, or has in another version, are explained, too. If another subscription writes
to the table as well, rows that only the target has are explained (other_subscription). Explained rows are counted
separately. A table that is equal except for them is shown as explained, and as equal in the JSON document.

A record explains a row only while the publisher's row is what the recorded change made of it. Once a later change of
the row was applied, or its table was copied again or adopted, a difference is no longer explained.

If a conflict left out a change without a rule, as update_missing does, the change is not kept, and its row is not on
the target. Such a row differs, with a note (left_out in the JSON document), and --repair inserts it.

Tables that still synchronize are listed, but not compared. The same is true of tables that are truncated, rewritten or
renamed meanwhile.

The exit code is 0 if all compared tables are equal except for explained rows. It is 6 if, and only if, rows differ. If
an error prevented the comparison of a table, and no other table differs, the exit code is that of the error, for
example 3 if a conflict stops apply, or if a table does not fit any more. If no table was compared, or a table that
--table names was not, the exit code is 3 as well, and "equal" in the JSON document is null. Without --table the exit
code can be 0 while tables still synchronize; the last line says how many were not compared.

--sample compares this share of the keys, different ones each time. The tables are still read completely. If keys with
different texts may be equal, as with citext or a collation that ignores case, all keys are compared. --jobs limits how
many parts of a table are read at the same time, on both servers together. --rate limits how much is read in a second on
each server, for example 20MB. If some thousand rows of a table differ, the table is read up to twice more without that
limit.

If the last verify was killed or failed, --resume omits what it had found equal, at the position that is shown: whole
tables, and ranges of the key of a large table, which is read range by range. The rest is compared at a new position.
A table is read in this way if it has more than 2 GB (or less with --rate: sixteen times the rate), the first column of
its key is an integer, a date, a timestamp or a uuid of the same type on both servers, and its rows lie in the order of
this column on both, according to their statistics. Any other table that was not finished is compared from the
beginning. So is a table, with a warning, if its columns, types, key, row filter or publications have changed, if it
was copied again, or if --sample is another one. What is known is in pgsub_verified of state.db. A verify that ends
removes it, and so do a verify of the same tables without --resume and pgsub drop.

--repair changes rows that differ without a recorded reason to the publisher's state, and then compares again; the exit
code is that of the last comparison. It takes up to 500 rows at a time. While apply pauses at one point, it reads them
again on both servers, and writes them to the target in one transaction, as apply does. So no newer row is overwritten,
and a step that fails or is killed has changed nothing. Explained rows are not changed. The rows that are replaced or
deleted are recorded (pgsub conflicts list) and kept on the target, in pgsub.skipped_change. Some tables are not
repaired: tables without a key, tables whose key may have several texts for one value, and held tables. Copy them again
instead. If a row cannot be written, for example because another row has its value of a unique column, none of the rows
of this step is, and the error names the row.

If another subscription writes to a table as well, --repair only inserts its missing rows. If the subscription has
origin = none and the target publishes the table, as where both servers are written to, a row may differ because the
publisher has not received it yet. A repair would then leave the servers different. So it is refused unless --from
publisher is given; write nothing on the target then until the publisher has received everything.

--dry-run changes nothing. The command asks on a terminal; elsewhere --yes is needed.
""",
    examples=(
        ("Check that the target has the publisher's rows.", "pgsub verify sales"),
        ("Show both versions of what differs in one table.", "pgsub verify sales --table public.orders --rows --json"),
        (
            "See what a repair would change, then repair.",
            "pgsub verify sales --repair --dry-run\npgsub verify sales --repair",
        ),
        ("Compare one key in a hundred.", "pgsub verify sales --sample 1%"),
        (
            "Continue an interrupted comparison, and limit the load on the disks.",
            "pgsub verify sales --resume --rate 20MB",
        ),
    ),
)


def parse_percent(text: str | float) -> float:
    """Read ``5%`` or ``0.1%``."""
    if isinstance(text, float):
        return text
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = 0.0
    if not 0.0001 <= value <= 100 or not text.endswith("%"):
        raise typer.BadParameter(f'"{text}" is not a share: expected a number from 0.0001 to 100 and %, as in 5%')
    return value


_TABLE = typer.Option("--table", metavar="SCHEMA.TABLE", help="Compare only this table; may be repeated.")


def parse_rate(text: str | int) -> int:
    """Read ``20MB``."""
    size = text if isinstance(text, int) else parse_size(text)
    if not size:
        raise typer.BadParameter(f'"{text}" is not a size: expected a number and a unit as in 500kB, 20MB or 1GB')
    return size


@command("verify", PAGE, connects=True)
def verify(
    name: Name,
    tables: Annotated[list[str] | None, _TABLE] = None,
    sample: Annotated[float | None, value("P%", "Compare this share of keys.", parser=parse_percent)] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, max=64, help="Parts read at the same time.")] = 4,
    rate: Annotated[int | None, value("SIZE", "Read this much per second on each server.", parser=parse_rate)] = None,
    resume: Annotated[bool, flag("resume", "Continue a verify that was killed or failed.")] = False,
    rows: Annotated[bool, flag("rows", "Show both versions of a row, not its key alone.")] = False,
    timeout: Timeout = None,
    repair: Annotated[bool, flag("repair", "Change rows that differ to the publisher's state.")] = False,
    right: Annotated[
        Literal["publisher"] | None, typer.Option("--from", help="With --repair: whose rows are right.")
    ] = None,
    dry_run: Annotated[bool, flag("dry-run", "With --repair: compare, and change nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="With --repair: do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare, and repair differences."""
    for option, given in (("--dry-run", dry_run), ("--yes", yes), ("--from", right is not None)):
        if given and not repair:
            raise UsageError(f"{option} needs --repair")
    if repair and resume:
        raise UsageError(
            "--resume and --repair cannot be used together", hint="If a repair was interrupted, run it again."
        )
    if repair and not dry_run and not yes:
        words = ["pgsub", "verify", name, *(word for table in tables or () for word in ("--table", table)), "--repair"]
        words += ["--from", right] if right else []
        introduction = "To see what differs, and then:"
        require_terminal([name], "repairing rows", introduction, [*words, "--dry-run"], [*words, "--yes"])
    from pgsub.cli.output.reporting import ConsoleReporter
    from pgsub.commands.verify import repair as repairs
    from pgsub.commands.verify.result import document
    from pgsub.commands.verify.verify import VerifyOptions
    from pgsub.commands.verify.verify import verify as compare

    options = VerifyOptions(name, current.state_dir, tuple(tables or ()), sample, jobs, timeout, rate, resume)
    if repair:
        ask = agreed if yes else _ask
        sure = right is not None
        done = repairs.repair(
            options, reporter=ConsoleReporter(), confirm=ask, dry_run=dry_run, publisher_is_right=sure
        )
        found, content = done.after, repairs.document(done, rows=rows)
    else:
        found = compare(options, reporter=ConsoleReporter())
        content = document(found, rows=rows)
    if as_json:
        emit_document("verify", content)
    else:
        _print(content, rows=rows)
    _end(found)


def _ask(found: Verification) -> None:
    counts = [(one.name, one.result.differences) for one in found.tables if one.result is not None]
    tables = [f"{name}: {counted(one.unexplained, 'row')}" for name, one in counts if one.unexplained]
    confirm("Repair?", *tables, "They will be changed to the publisher's state; replaced rows are recorded.")


def _end(found: Verification) -> None:
    if found.equal is False:
        raise typer.Exit(ApplyError.exit_code)
    if found.error is not None:
        raise typer.Exit(found.error.exit_code)
    if found.equal is None:
        raise typer.Exit(StateForbids.exit_code)


def _print(found: dict[str, Any], *, rows: bool) -> None:
    tables = [
        {"table": f"{one['schemaname']}.{one['relname']}", **one, "outcome": _outcome(one)} for one in found["tables"]
    ]
    columns = ["table", "outcome", "publisher_rows", "target_rows", "missing", "extra", "different", "explained"]
    emit(render.rows(columns, tables))
    for one in tables:
        if one["lsn"] != found["lsn"]:
            emit(console.line(f"{one['table']} was equal at {one['lsn']}, before verify was interrupted"))
        for part in one["earlier"]:
            said = f"rows with {_between(part)} were equal at {part['lsn']}, before verify was interrupted"
            emit(console.line(f"{one['table']}: {said}"))
        if one["reason"]:
            emit(console.line(f"{one['table']} was not compared: {one['reason']}"))
        if one["written_by"]:
            emit(console.line(f'{one["table"]} is written by subscription "{one["written_by"]}" as well'))
        for difference in one["differences"][:_SHOWN]:
            emit(console.line(f"{one['table']}: {_difference(difference, rows=rows)}"))
        more = one["missing"] + one["extra"] + one["different"] - _SHOWN
        if more > 0:
            emit(console.line(f"{one['table']}: and {counted(more, 'more row')}"))
    for one in found.get("repair", {}).get("tables", ()):
        done = f"{counted(one['inserted'], 'row')} inserted, {one['updated']} updated, {one['deleted']} deleted"
        emit(console.line(f"{one['table']} was repaired: {done}"))
    for one in found.get("repair", {}).get("refused", ()):
        emit(console.line(f"{one['table']} cannot be repaired row by row: {one['reason']}"))
    emit(console.line(f"At {found['lsn']} {_verdict(found)}; apply paused for {1000 * found['pause']:.0f} ms."))


def _verdict(found: dict[str, Any]) -> str:
    tables = found["tables"]
    left = sum(one["outcome"] == "not compared" for one in tables)
    if left == len(tables):
        return "no table was compared"
    of = f"{left} of {counted(len(tables), 'table')} {'was' if left == 1 else 'were'} not compared"
    if found["equal"] is None:
        return f"it is not known whether the tables are equal, because {of}"
    share = "" if found["sample"] is None else f" ({found['sample']:g}% of the keys)"
    explained = sum(one["explained"] for one in tables)
    but = f" but for {counted(explained, 'explained row')}" if explained else ""
    verdict = f"are equal{but}" if found["equal"] else "differ"
    return f"the compared tables{share} {verdict}{f', and {of}' if left else ''}"


def _outcome(table: dict[str, Any]) -> str:
    """Return the outcome to show. A table with explained differences is not called equal."""
    return "explained" if table["outcome"] == "equal" and table["explained"] else str(table["outcome"])


def _between(part: dict[str, Any]) -> str:
    bounds = ((">=", part["low"]), ("<", part["high"]))
    return " and ".join(f"{part['column']} {sign} {value}" for sign, value in bounds if value is not None)


def _difference(one: dict[str, Any], *, rows: bool) -> str:
    explained = f" (explained: {one['explained']})" if one["explained"] else ""
    explained += " (a conflict left out a change of it)" if one["left_out"] else ""
    parts = [one["kind"] if one["key"] is None else f"{one['kind']} {_row(one['key'])}"]
    if rows or one["key"] is None:
        parts += [f"{side} {_row(one[side])}" for side in ("publisher", "target") if one[side] is not None]
    return f"{': '.join(parts[:2])}{''.join(f', {part}' for part in parts[2:])}{explained}"


def _row(values: dict[str, str | None]) -> str:
    names, texts = ", ".join(values), ", ".join("null" if value is None else value for value in values.values())
    return f"({names})=({texts})"
