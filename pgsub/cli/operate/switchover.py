"""``pgsub switchover``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from pgsub.cli.command_tree.command import command, parameters
from pgsub.cli.command_tree.option_values import AsJson, Name, Timeout, Yes, flag, value
from pgsub.cli.general_options import current
from pgsub.cli.output import console
from pgsub.cli.output.documents import emit, emit_document
from pgsub.cli.output.prompts import confirm, require_terminal
from pgsub.cli.pages import Page
from pgsub.common.errors import StateForbids, UsageError

if TYPE_CHECKING:
    from pgsub.commands.switchover.outcome import Outcome
    from pgsub.commands.switchover.parties import SwitchoverOptions

PAGE = Page(
    summary="Move the writes to the target, with a way back",
    description="""
Before the switchover clients write to the publisher; afterwards they write to the target, and a subscription NAME_back
replicates what they write there to the former publisher. --back does the same in the other direction, minutes or days
later.

The command takes these steps, and writes each of them into a journal on both servers before it begins:

1. Both servers are checked. Everything that would prevent the switchover is listed, with the statement or command to
run. All tables are compared (pgsub verify), and once more, as they were in the pause, after clients can write again.
--no-verify omits both comparisons. If rows differ, the command ends with 6. If the first comparison finds them, nothing
was changed. If the second one finds them, the writes were moved, and the error says so. Rows that pgsub verify calls
explained count as different, because clients would see what the target has of them; --accept-explained accepts such
rows.

2. The subscription NAME_back is created, disabled, with its slot on the target. It subscribes to the target's
publication NAME_back, or to those of --back-publication.

3. The target is fenced. When apply has nearly caught up, the publisher is fenced, too, and the pause begins. Sessions
of clients are ended.

4. Apply catches up with all that clients wrote. The target's sequences are set to the publisher's values. The slot on
the target is advanced past all of this.

5. The publisher gives the right to write away.

6. The target takes the right to write, and the pause ends. If anything fails before this, or takes longer than
--timeout, everything is restored as it was, and clients write to the publisher again. There is one exception: if the
right was given away and the target does not answer, nothing is restored until the target is back. When a fence is
lifted, sessions that began behind it are ended, because they would stay read-only. --promote-command is run.

7. The subscription is dropped, and NAME_back is enabled. The publisher stays fenced. If it has lost its fence, because
it was restored or a standby that lagged took its place, it is fenced again, and the command ends with 3.

If a connection is lost in the pause, the command opens it again, until the time is over and for half a minute more. If
the command is interrupted or killed, run it again. It continues, or, if the time is over, it restores everything as it
was and ends with 8, or with 3 if an abort had begun. At no time can clients write to both servers. --status shows how
far the switchover is and what can be done next. --abort restores everything as it was, as long as the target has not
taken the right to write.

--fence says how clients are kept from writing. read-only sets default_transaction_read_only for the database and ends
its sessions; a client that turns the setting off for itself is not kept out. connect revokes the privilege CONNECT from
all roles but those of pgsub; superusers are not kept out. --fence-command names a command of your own, for example for
a pooler. The shell runs it with these environment variables: PGSUB_SWITCHOVER is fence or release, and PGSUB_GIVING and
PGSUB_TAKING are connection strings, without secrets, of the server that clients leave and of the server that they move
to. The command must have taken effect when it ends, and must be safe to run more than once. It is killed if pgsub ends
before it. --promote-command is run in the same way, with PGSUB_SWITCHOVER set to promote. Sessions on the target are
ended with every kind of fence, because they may hold cached values of sequences.

While a switchover is under way, refresh (also that of pgsub alter), verify --repair, conflicts replay, and another name
or slot of its subscriptions are refused.

The way back reads from the target with the target's connection string, whose role needs REPLICATION. It writes to the
publisher with the publisher's connection string, whose role must own the database to fence it. --back-connection and
--back-target name other connection strings.

If a server is gone for good, --gone names it; this is refused while any host of its connection string answers in any
way, unless another database answers there: one of another server, or of one that has dropped the database. If the
target has taken the right to write, --gone publisher completes the switchover without a way back. Otherwise use --abort
--gone publisher, which restores the target as it was. If the publisher comes back, it is still fenced; as long as the
subscription has not been dropped, --abort lets clients write there again. --abort --gone target lets clients write to
the publisher again, even if the target was given the right to write, and also after the switchover has ended. What
clients wrote to the target, and what the way back had not applied, is then lost, and the target must never come back.

--dry-run lists everything that would prevent the switchover, and rehearses it: it measures how long each step of the
pause would take now.

On a terminal the command shows each step as it begins, elsewhere with -v; in the pause itself it writes nothing. With
--back the first line says which server is the publisher, because it is not the same as before.
""",
    examples=(
        ("Rehearse, and see how long the pause would be.", "pgsub switchover sales --dry-run"),
        ("Move the writes; give up if the pause would take longer than ten seconds.",
         "pgsub switchover sales --timeout 10s"),
        ("Move them back.", "pgsub switchover sales --back"),
        ("With a pooler.", "pgsub switchover sales --fence-command ./pause-pool --promote-command ./resume-pool-there"),
    ),
)  # fmt: skip


class Options:
    """The direction, the fence, and the way back."""

    name: Name
    back: Annotated[bool, flag("back", "Move the writes back to where they were.")] = False
    dry_run: Annotated[bool, flag("dry-run", "List what would prevent it, and rehearse.")] = False
    timeout: Timeout = None
    fence: Annotated[
        Literal["read-only", "connect"], typer.Option("--fence", help="How clients are kept from writing.")
    ] = "read-only"
    fence_command: Annotated[str | None, value("C", "Command that keeps clients from writing.")] = None
    promote_command: Annotated[str | None, value("C", "Command that leads clients to the target.")] = None
    back_connection: Annotated[str | None, value("CONNINFO", "How the way back reads the target.")] = None
    back_target: Annotated[str | None, value("CONNINFO", "How the way back writes to the publisher.")] = None
    back_publication: Annotated[list[str] | None, value("PUB", "What the way back subscribes to.")] = None
    no_verify: Annotated[bool, flag("no-verify", "Do not compare the tables.")] = False
    accept_explained: Annotated[bool, flag("accept-explained", "Accept rows that differ for a known reason.")] = False
    status: Annotated[bool, flag("status", "Show how far a switchover is.")] = False
    abort: Annotated[bool, flag("abort", "Restore everything as it was.")] = False
    gone: Annotated[
        Literal["publisher", "target"] | None,
        typer.Option("--gone", help="Finish without a server that is gone for good."),
    ] = None
    yes: Yes = False
    as_json: AsJson = False


@command("switchover", PAGE, parameters(Options), connects=True)
def switchover(
    name: str,
    dry_run: bool,
    status: bool,
    abort: bool,
    yes: bool,
    as_json: bool,
    no_verify: bool,
    back_publication: list[str] | None,
    **given: Any,
) -> None:
    """Move the writes, or show, rehearse or abort that."""
    if sum((dry_run, status, abort)) > 1:
        raise UsageError("only one of --dry-run, --status and --abort can be given")
    if given["gone"] is not None and (dry_run or status):
        raise UsageError("--gone changes what is under way, and goes with neither --dry-run nor --status")
    from pgsub.commands.switchover.parties import SwitchoverOptions

    publications = tuple(back_publication or ())
    options = SwitchoverOptions(name, current.state_dir, back_publications=publications, verify=not no_verify, **given)
    if given["back"]:
        _say_which(options)
    if not (yes or dry_run or status):
        _ask(options, abort=abort)
    found = _run(options, dry_run=dry_run, status=status, abort=abort)
    if as_json:
        emit_document("switchover", found.document())
    else:
        _print(found)
    if dry_run and any(one["severity"] == "error" for one in found.obstacles):
        raise typer.Exit(StateForbids.exit_code)


def _say_which(options: SwitchoverOptions) -> None:
    """Report which server is called the publisher, because ``--back`` exchanges the two."""
    from pgsub.catalog.store import StateStore
    from pgsub.common.connections import conninfo

    with StateStore.open(options.state_dir, create=False) as store:
        sub = store.find(options.names[0])
    if sub is not None:
        servers = (conninfo.endpoint(conninfo.parse(one, "server")) for one in (sub.connection, sub.target))
        console.notice('in this direction the publisher is "{}", and the target "{}"'.format(*servers))


def _run(options: SwitchoverOptions, *, dry_run: bool, status: bool, abort: bool) -> Outcome:
    from pgsub.cli.output.reporting import ConsoleReporter

    # Terminals show each step. Scripts need -v for that.
    reporter = ConsoleReporter(log_from=0 if sys.stderr is not None and sys.stderr.isatty() else 1)
    if status:
        from pgsub.commands.switchover import status as standing

        return standing.status(options)
    if abort:
        from pgsub.commands.switchover import abort as undoing

        return undoing.abort(options, reporter=reporter)
    if dry_run:
        from pgsub.commands.switchover.rehearsal import rehearse

        return rehearse(options, reporter=reporter)
    from pgsub.commands.switchover import switchover as moving

    return moving.switchover(options, reporter=reporter)


def _ask(options: SwitchoverOptions, *, abort: bool) -> None:
    back, gone = options.back, options.gone
    words = ["pgsub", "switchover", options.name, *(["--back"] if back else []), *(["--abort"] if abort else [])]
    words += [] if gone is None else ["--gone", gone]
    require_terminal(
        options.names,
        "a switchover",
        "To see what stands in the way, and then:",
        [*words, "--dry-run"],
        [*words, "--yes"],
    )
    if gone == "target":
        confirm(
            "Is the target gone for good?",
            "If it was given the right to write, clients may have written there: that is lost. If it ever comes back,"
            " clients could write on both servers.",
        )
    elif gone == "publisher":
        confirm("Is the publisher gone for good?", "Nothing will lead back to it.")
    elif abort:
        confirm("Abort?", "Clients write on the publisher again; what was made for the way back is removed.")
    else:
        confirm(
            "Switch over?",
            "Sessions of clients are ended on both servers. Until the target has taken over, nobody can write.",
        )


def _print(found: Outcome) -> None:
    for one in found.obstacles:
        where = {"giving": " (publisher)", "taking": " (target)"}.get(one["server"], "")
        emit(console.line(f"{one['severity']}{where}: {one['message']}"))
        for label, text in (("DETAIL", one["detail"]), ("HINT", one["hint"])):
            if text:
                emit(f"  {label}:  " + console.pasted(console.printable(text)).replace("\n", "\n  "))
    emit(console.line(_verdict(found)))
    for choice in found.choices:
        emit(console.line(f"To {choice.what}:"))
        emit(f"  {console.pasted(console.line(choice.command))}")


def _verdict(found: Outcome) -> str:
    pause = "" if found.pause is None else f"{found.pause:.1f} s"
    ended_alone = found.giving is None and found.taking is not None
    leads_back = "" if ended_alone else f'; subscription "{found.back_name}" leads back'
    said = {
        "done": f"The writes were moved{leads_back}." + (f" Clients could not write for {pause}." if pause else ""),
        "as before": "Everything is as it was before.",
        "none": f'No switchover of subscription "{found.name}" is under way.',
        "rehearsed": f"Nothing was changed. The pause would take about {pause} now."
        if pause
        else "Nothing was changed.",
        "under way": "The switchover is under way."
        + (f" Clients have not been able to write for {pause}." if pause else ""),
    }[found.state]
    return f"{said} {found.said}" if found.said else said
