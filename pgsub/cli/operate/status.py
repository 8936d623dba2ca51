"""``pgsub status``: the status once or repeatedly, a verdict for monitoring, or a view of the state store."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from pgsub.cli.command_tree.command import Command, command, parameters
from pgsub.cli.command_tree.option_values import flag, parse_duration, parse_seconds, value
from pgsub.cli.general_options import current
from pgsub.cli.operate import status_tables
from pgsub.cli.operate.runbook import print_runbook
from pgsub.cli.output import console, render
from pgsub.cli.output.documents import emit, emit_document
from pgsub.cli.pages import Page
from pgsub.common.errors import StateForbids, UsageError

_EVERY = "2"  #: seconds for --watch without a value

PAGE = Page(
    summary="Show subscriptions, their tables and workers",
    description="""
Reads the state store only, contacts no server, and works while others run. On a terminal the result is a table;
elsewhere it is complete and separated by tabs. Scripts should use the documents of --json.

For a single subscription its tables are listed, too, and for tables being copied the bytes, rows and chunks that are
done, the estimated totals, the present rate, and the time left. Tables on hold are listed with the amount of their
kept changes; a subscription with such tables is healthy.

Sequences are listed as the last attempt to synchronize them left them, with the publisher's value, the target's, and
by how much the target is ahead in the direction of the sequence (negative where it is behind). Their srsubstate is r,
or i with the problem where the attempt failed; pg_stat_subscription_stats counts such attempts in
sync_seq_error_count. The view pgsub_sequence has the same rows.

With two_phase the column prepared counts the prepared transactions on the target that await the publisher's decision;
the view pgsub_prepared_pending lists them.

A subscription is blocked when apply was restarted twice or more from one position without progress, or waits for a lock
that a prepared transaction of the subscription itself holds. The status shows since when and why, how much waits behind
that position, when the slot will be lost at the present rate (if max_slot_wal_keep_size is set), and the next command.
--runbook prints the steps for the present state, ready to paste.

A subscription is waiting when its apply worker has given no sign of life for four seconds: its task has no slot, or its
process hangs or is gone, or Spark's Java process has not answered for eight seconds. It is also waiting when its tables
cannot be copied because apply workers occupy all slots, and when its pgsub run has given no sign of life for half a
minute: that process is stopped, or waits for an answer of the target, as it does while somebody locks a table of the
ledger. The status shows what is missing and the next command; task in the documents has the stage (submitted to Spark,
claimed on the target, alive). Signs of life are heartbeats and the worker's session on the target. A worker that hangs
is taken over after a minute, or after PGSUB_WORKER_TIMEOUT seconds; Spark's Java process is replaced then, if pgsub
started it.

The lag is the age of the oldest change that the publisher has and the target has not. If the publisher has said nothing
for ten seconds while its WAL goes on, the lag counts from its last message. The age is measured by two clocks, those of
the publisher and of pgsub run: one here that is behind is noticed by the publisher's messages, one that is ahead adds
to the lag. If the apply worker, with however many sessions, waits in a statement on the target, the status shows since
when and for which lock; so it does for a table whose synchronization waits for a lock, on either server. If a standby
of the publisher's synchronized_standby_slots is away, the publisher sends nothing to a subscription with failover; the
status shows its slot, and the lag counts from then. The log says so after eight seconds, --check after 30. That
sequences cannot follow because a server or a lock is not available is reported after a minute, or after five attempts.

pgsub run asks the publisher of the slot every five seconds, through sessions of its own. If it gets no answer for a
minute while apply goes on (too many connections, another pg_hba.conf), that is an error with the reason; the status
shows as of when the figures of the slot are, and metrics leave them out.

Conflicts are counted in pg_stat_subscription_stats as by the server. confl_update_deleted is always 0, because only the
server itself can see dead rows. confl_update_origin_differs and confl_delete_origin_differs are 0 if the target has
track_commit_timestamp off or its role may not use replication origins.

The exit code of --check is 0 if healthy, 3 if disabled, not served, waiting, in a switchover, without tables or one of
its publications, or if the state folder has no subscription, 4 if the publisher and 5 if the target cannot be reached,
6 if stopped by another error, 7 if the slot is lost, 8 if the lag exceeds --max-lag or has not been known for as long,
or a lock or a standby of the publisher is waited for, 10 if pgsub run cannot record its work, 13 if Spark cannot run
the workers.

The letters of srsubstate are i = initialize, d = data copy, f = finished copy, s = synchronized, r = ready.
errors_total counts all errors since the counters were reset; last_error is shown only while it lasts.

A pgsub run that cannot write to the state store or to its log goes on with its work. A warning, and not_written in the
documents, say so; the status shown may then be outdated.

--view prints a table or view of the state store: pg_subscription, pg_subscription_rel, pg_replication_origin_status,
pg_stat_subscription, pg_stat_subscription_stats, pg_stat_progress_copy, pgsub_conflict, pgsub_journal and others.
pg_replication_slots, pg_stat_replication_slots and pg_stat_replication are read from the publisher at this moment, as
far as they concern slots of the subscription.

On a terminal --watch is a screen: throughput, a small line of the lag, tables that are being copied, and what to do
next. Elsewhere it prints again and again. It ends with 3 if the state folder has no subscription.
""",
    examples=(
        ("Repeat every five seconds.", "pgsub status sales --watch 5"),
        ("For monitoring.", "pgsub status --check --max-lag 30s"),
    ),
)


class StatusCommand(Command):
    """A command whose ``--watch`` needs no value, which the parser does not support."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Complete the arguments, then parse them."""
        following = [*args, ""][1:]
        completed: list[str] = []
        for word, after in zip(args, following, strict=True):
            bare = word == "--watch" and not after[:1].isdigit()
            completed.append(f"--watch={_EVERY}" if bare else word)
        return super().parse_args(ctx, completed)


class Options:
    """The contents of the output, and its form."""

    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Only this subscription.")] = None
    view: Annotated[str | None, value("VIEW", "Print this table or view of the state store.")] = None
    watch: Annotated[
        float | None, value("[SECONDS]", "Repeat this every 2, or so many, seconds.", parser=parse_seconds)
    ] = None
    as_json: Annotated[bool, flag("json", "JSON documents; one in a line with --watch.")] = False
    check: Annotated[bool, flag("check", "Report health through the exit code.")] = False
    max_lag: Annotated[float | None, value("D", "With --check: the lag that is tolerated.", parser=parse_duration)] = (
        None
    )
    reset_stats: Annotated[bool, flag("reset-stats", "Reset the counters of pg_stat_subscription_stats first.")] = False
    runbook: Annotated[bool, flag("runbook", "Print what to do next, with real names and positions.")] = False
    expanded: Annotated[bool, typer.Option("--expanded", "-x", help="Turn on the expanded table format.")] = False
    columns: Annotated[str | None, value("COLUMN,...", "Only these columns of the table, in this order.")] = None
    sort: Annotated[str | None, value("[-]COLUMN", "Sort the table by a column; with - in front descending.")] = None


@dataclass(frozen=True)
class Shown:
    """The contents of the output: the subscription and the format."""

    name: str | None
    view: str | None
    as_json: bool
    expanded: bool
    one_line: bool
    columns: str | None
    sort: str | None

    @property
    def chosen(self) -> bool:
        """Whether columns or an order are chosen."""
        return self.columns is not None or self.sort is not None

    def choice(self, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> render.Content:
        """Return the chosen columns in the chosen order."""
        names = None if self.columns is None else [name.strip() for name in self.columns.split(",")]
        return render.choice(columns, rows, names, self.sort)


@command("status", PAGE, parameters(Options), cls=StatusCommand)
def status(
    watch: float | None, check: bool, max_lag: float | None, reset_stats: bool, runbook: bool, **given: Any
) -> None:
    """Show the status."""
    look = Shown(**given, one_line=watch is not None)
    if watch is not None and (check or reset_stats):
        raise UsageError("--watch cannot be used together with --check or --reset-stats")
    if look.view is not None and check:
        raise UsageError("--view cannot be used together with --check")
    if max_lag is not None and not check:
        raise UsageError("--max-lag needs --check")
    if runbook and (look.view is not None or watch is not None or check):
        raise UsageError("--runbook cannot be used together with --view, --watch or --check")
    if look.chosen and (runbook or (look.as_json and look.view is None)):
        raise UsageError("--columns and --sort cannot be used together with --runbook, or with --json but for a view")
    if reset_stats:
        from pgsub.commands.status.status import reset_stats as reset

        reset(current.state_dir, look.name)
    if runbook:
        print_runbook(look.name, as_json=look.as_json)
    elif watch is not None:
        _watch(watch, look)
    elif check:
        _check(look, max_lag)
    else:
        _show(look)


def _show(look: Shown) -> None:
    from pgsub.commands.status import status as states

    if look.view is None:
        _print(look, states.status(current.state_dir, look.name))
        return
    columns, rows = look.choice(*_view(look.view, look.name))
    if look.as_json:
        emit_document("status", {"view": look.view, "rows": rows}, one_line=look.one_line)
    else:
        emit(render.rows(columns, rows, expanded=look.expanded))


def _view(name: str, subscription: str | None) -> tuple[tuple[str, ...], list[dict[str, Any]]]:
    from pgsub.commands.status import status as states

    if name not in states.PUBLISHER_VIEWS:
        return states.view(current.state_dir, name, subscription)
    from pgsub.commands.status import publisher_views

    current.take_environment()
    return publisher_views.view(current.state_dir, name, subscription)


def _print(look: Shown, found: list[Any], *, checked: bool = False) -> list[str]:
    """Show subscriptions.

    :param checked: whether the caller reports problems afterwards.
    :return: what launchers currently cannot write, which is shown as warnings.
    """
    from pgsub.catalog.locks import troubles

    unwritten = troubles(current.state_dir)
    if look.as_json:
        document = {"subscriptions": [one.document() for one in found], "not_written": unwritten}
        emit_document("status", document, one_line=look.one_line)
        return unwritten
    for text in unwritten:
        console.warning(text, detail="Replication continues; the status shown may be outdated.")
    if not found:
        nothing = _nothing()
        console.notice(nothing.message, hint=nothing.hint)
    emit(status_tables.summary(found, expanded=look.expanded, choice=look.choice if look.chosen else None))
    if sys.stdout is not None and sys.stdout.isatty():
        all_well = status_tables.well(found)
        told = [all_well] if all_well else [] if look.name is not None or checked else status_tables.troubled(found)
        for text in told:
            emit(console.pasted(console.printable(text)))
    if look.name is not None and not look.expanded:
        for part in status_tables.details(found[0]):
            emit("\n" + part)
    return unwritten


def _nothing() -> StateForbids:
    """Return the error for an empty state folder, whose name may be mistyped."""
    return StateForbids(
        f'no subscription exists in state folder "{console.printable(str(current.state_dir))}"',
        hint="Is it the right one?\npgsub --state-dir FOLDER status",
    )


def _check(look: Shown, max_lag: float | None) -> None:
    from pgsub.commands.status import status as states
    from pgsub.commands.status.health_check import check

    found = states.status(current.state_dir, look.name)
    findings = check(found, max_lag, _print(look, found, checked=True))
    for finding in findings:
        console.warning(finding.message, hint=finding.next and f"The next command is:\n{finding.next}")
    if findings:
        raise typer.Exit(findings[0].code)


def _watch(seconds: float, look: Shown) -> None:
    from pgsub.commands.status import status as states

    terminal = sys.stdout is not None and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    plain = look.as_json or look.view is not None or look.chosen or look.expanded
    try:
        if terminal and not plain:
            _watch_screen(seconds, look)
        while True:
            if not states.status(current.state_dir, look.name):  # a mistyped folder must not be shown repeatedly
                raise _nothing()
            if terminal and not look.as_json:
                emit(time.strftime("%Y-%m-%d %H:%M:%S %Z"), clear=True)
            _show(look)
            time.sleep(seconds)
    except KeyboardInterrupt:
        return  # the user's way to stop


def _watch_screen(seconds: float, look: Shown) -> None:
    from pgsub.catalog.locks import troubles
    from pgsub.cli.output.live import Screen
    from pgsub.commands.status import status as states

    with Screen(current.coloured()) as screen:
        while found := states.status(current.state_dir, look.name):
            screen.show(found, troubles(current.state_dir))
            time.sleep(seconds)
    raise _nothing()
