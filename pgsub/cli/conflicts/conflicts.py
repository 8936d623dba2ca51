"""``pgsub conflicts``: the record of conflicts."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pgsub.cli.command_tree.command import Command, command, parameters
from pgsub.cli.command_tree.option_values import AsJson, Name, flag, parse_duration, value
from pgsub.cli.conflicts import prune, replay
from pgsub.cli.general_options import current
from pgsub.cli.output import console, render
from pgsub.cli.output.documents import emit, emit_document
from pgsub.cli.pages import Page
from pgsub.common.errors import UsageError, field, one_line
from pgsub.common.plural import counted

if TYPE_CHECKING:
    from pgsub.catalog.rows import ConflictRow

_LIMIT = 100
#: Options of each action, by parameter.
_TAKEN = {
    "list": ("conflict_type", "table", "since", "limit"),
    "show": ("number",),
    "replay": ("number", "lsn", "table", "dry_run", "yes"),
    "prune": ("replayed", "older_than", "dry_run", "yes"),
}
_WORDS = {"number": "ID", "conflict_type": "--type"}

PAGE = Page(
    summary="Show the conflicts of a subscription, and apply changes that were skipped",
    description="""
list shows conflicts, the newest first. show prints one of them with the publisher's and the target's version of the row
side by side, and marks the columns that differ. Both read the state store only and contact no server.

The action of a conflict says what became of it. stopped: it stops apply. applied: the change was made, or its conflict
is gone. skipped: the change was left out. If pgsub skip-lsn or a rule skipped it, it can be replayed. If its row was
missing, or pgsub origin-advance left it out, only this record remains. kept: a rule left the target's row unchanged.
replayed: the skipped change has been applied. Types are those of the server. A conflict that stops apply is one row,
however often it is retried; attempts counts the retries. identical marks a row of the target that equals the
publisher's row.

replay applies the change that pgsub skip-lsn skipped and kept in pgsub.skipped_change of the target. With --lsn it
applies all such changes of a transaction in their order, with --table only those of one table. They are applied and
marked in one transaction of the target. A missing row is an error here, too: if any conflict occurs, nothing is
changed, and the exit code is 6. Changes of a table that was copied again since then are rejected. The subscription may
run meanwhile. The changes carry its replication origin, so a peer with origin = none does not receive them. A replayed
UPDATE overwrites later values of the columns that were sent. --dry-run shows both versions of every row and the
outcome, changes nothing, and ends with 6 if something would prevent the replay. The journal records each replay.

prune removes changes from pgsub.skipped_change for good: with --replayed those that were replayed, with --older-than
those that were skipped longer ago. If both options are given, only changes to which both apply are removed. The record
of their conflicts stays.

replay and prune ask on a terminal and need --yes elsewhere; --dry-run changes nothing. PGSUB_CONFLICT_HISTORY limits
the record, but conflicts that still stop apply are never dropped. The record outlives the subscription.
pgsub-conflicts(7) explains each type with an example.
""",
    examples=(
        ("See what was not applied today.", "pgsub conflicts list sales --type update_missing --since 24h"),
        ("Compare both versions of a row.", "pgsub conflicts show sales 7"),
        ("See what applying a skipped change would do.", "pgsub conflicts replay sales 7 --dry-run"),
        ("Apply all skipped changes of a transaction.", "pgsub conflicts replay sales --lsn 0/14C0378 --yes"),
        ("Remove replayed changes after a month.", "pgsub conflicts prune sales --replayed --older-than 30d --yes"),
    ),
)


class ConflictsCommand(Command):
    """A command that suggests an action if only a subscription is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse like other commands. Suggest an action for an unknown one."""
        try:
            return super().parse_args(ctx, args)
        except typer.TyperException:
            action = ctx.params.get("action")
            if action is None or action in _TAKEN:
                raise
            raise _unknown(action, None) from None


def _unknown(action: str, name: str | None) -> UsageError:
    words = ["list", name or action]
    if name is not None and name.isdecimal():
        words = ["show", action, name]
    return UsageError(
        f'"{action}" is not an action of pgsub conflicts: expected list, show, replay, or prune',
        hint=f"Perhaps you meant:\n{shlex.join(['pgsub', 'conflicts', *words])}",
    )


class Options:
    """Options of all actions. One that was not given is None or False."""

    action: Annotated[str, typer.Argument(metavar="list|show|replay|prune", help="What to do.")]
    name: Name
    number: Annotated[int | None, typer.Argument(metavar="ID", help="Number of the conflict, from list.")] = None
    conflict_type: Annotated[
        str | None, typer.Option("--type", metavar="TYPE", help="With list: only conflicts of this type.")
    ] = None
    table: Annotated[str | None, value("SCHEMA.TABLE", "With list, or --lsn: only on this table.")] = None
    since: Annotated[float | None, value("D", "With list: detected within this time.", parser=parse_duration)] = None
    limit: Annotated[
        int | None, value("N", "With list: no more than the newest N.", min=1, show_default=str(_LIMIT))
    ] = None
    lsn: Annotated[str | None, value("LSN", "With replay: all skipped changes of this transaction.")] = None
    replayed: Annotated[bool, flag("replayed", "With prune: only changes that were replayed.")] = False
    older_than: Annotated[
        float | None, value("D", "With prune: only changes skipped longer ago.", parser=parse_duration)
    ] = None
    dry_run: Annotated[bool, flag("dry-run", "With replay or prune: show what it would do, and change nothing.")] = (
        False
    )
    yes: Annotated[bool, typer.Option("--yes", "-y", help="With replay or prune: do not ask.")] = False
    as_json: AsJson = False


@command("conflicts", PAGE, parameters(Options), cls=ConflictsCommand)
def conflicts(action: str, name: str, as_json: bool, **given: Any) -> None:
    """Show conflicts, or apply or remove skipped changes."""
    if action not in _TAKEN:
        raise _unknown(action, name)
    for option, chosen in given.items():
        if chosen is not None and chosen is not False and option not in _TAKEN[action]:
            hint = None
            if (action, option) == ("list", "number"):
                hint = f"Perhaps you meant:\npgsub conflicts show {shlex.quote(name)} {chosen}"
            shown = _WORDS.get(option, f"--{option.replace('_', '-')}")
            raise UsageError(f"pgsub conflicts {action} takes no {shown}", hint=hint)
    run: dict[str, Callable[..., None]]
    run = {"list": _list, "show": _show, "replay": replay.replay, "prune": prune.prune}
    run[action](name, as_json=as_json, **{option: given[option] for option in _TAKEN[action]})


def _list(name: str, *, as_json: bool, limit: int | None, **choice: Any) -> None:
    from pgsub.commands.status.conflicts import conflicts, document

    found = conflicts(current.state_dir, name, limit=limit or _LIMIT, **choice)
    if as_json:
        rows = [document(row) for row in found.rows]
        content = {"subscription": found.name, "conflicts": rows, "more": found.more, "dropped": found.dropped}
        emit_document("conflicts", content)
        return
    columns = ["id", "last_at", "conflict_type", "relation", "key", "action", "attempts", "identical", "finish_lsn"]
    emit(render.rows(columns, [_line(document(row)) for row in found.rows]))
    if found.more:
        shown = "conflict is" if len(found.rows) == 1 else f"{len(found.rows)} conflicts are"
        console.notice(f"only the newest {shown} shown", hint="Show more with --limit.")
    if found.dropped:
        removed = f"{counted(found.dropped, 'older conflict', ('was', 'were'))} removed from the record"
        console.notice(f"{removed}, which PGSUB_CONFLICT_HISTORY limits")


def _line(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, "relation": f"{row['schemaname']}.{row['relname']}"}


def _show(name: str, *, number: int | None, as_json: bool) -> None:
    from pgsub.commands.status.conflicts import conflict, document
    from pgsub.common.quoting import word

    if number is None:
        raise UsageError(
            "pgsub conflicts show needs an ID", hint=f"See which exist.\npgsub conflicts list {shlex.quote(name)}"
        )
    row, kept = conflict(current.state_dir, name, number)
    if as_json:
        emit_document("conflicts", {"subscription": name, "conflict": document(row)})
        return
    shown = _line(document(row))
    columns = ["id", "conflict_type", "relation", "key", "action", "attempts", "identical", "remote_xid", "finish_lsn"]
    columns += ["remote_commit_ts", "at", "last_at", *(["replayed_at"] if row.replayed_at else [])]
    emit(render.rows(columns, [shown], expanded=True))
    for local in row.local_conflicts or [{}]:
        emit("")
        _versions(row, local)
    emit("\n" + "\n".join(_log_lines(row)))
    if kept:
        emit(console.pasted(f"HINT:  To apply the change after all:\npgsub conflicts replay {word(name)} {row.id}"))


def _versions(row: ConflictRow, local: dict[str, Any]) -> None:
    """Print both versions of a row side by side."""
    from pgsub.commands.status.conflicts import compare

    if local:
        emit(_where(local))
    lines = [
        {
            "column": one.column,
            "remote": _value(one.remote),
            "local": _value(one.local),
            "differs": "*" if one.differs else "",
        }
        for one in compare(row, local)
    ]
    emit(render.rows(["column", "remote", "local", "differs"], lines))


def _where(local: dict[str, Any]) -> str:
    text = f'unique index "{local["index"]}"'
    if local["key"]:
        text += f", key {local['key']}"
    if local["row"] is None:
        return console.line(text + ": the row no longer exists, or the transaction itself had written it")
    if local["commit_ts"]:
        by = {None: "locally", "": "by an origin that no longer exists"}.get(
            local["origin"], f'by origin "{local["origin"]}"'
        )
        text += f": written {by} in transaction {local['xid']} at {local['commit_ts']}"
    else:
        text += f": written in transaction {local['xid']}"
    return console.line(text + (", identical" if local["identical"] else ""))


def _value(value: object) -> str:
    from pgsub.commands.status.conflicts import ABSENT

    return "" if value is ABSENT else "null" if value is None else str(value)


def _log_lines(row: ConflictRow) -> list[str]:
    """Return the log message with its fields."""
    fields = [field(name, text) for name, text in (("DETAIL", row.detail), ("CONTEXT", row.context)) if text]
    return [console.printable(text) for text in (one_line(row.message or ""), *fields)]
