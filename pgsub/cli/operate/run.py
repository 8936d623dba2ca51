"""``pgsub run``: the launcher in the foreground."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from pgsub.cli.command_tree.command import command, parameters
from pgsub.cli.command_tree.option_values import (
    Conf,
    Connection,
    Master,
    Target,
    Timeout,
    collected,
    flag,
    parse_lsn,
    repeatable,
    take_conninfos,
    value,
)
from pgsub.cli.general_options import current
from pgsub.cli.operate.metrics import Address, listen, parse_address
from pgsub.cli.pages import Page

PAGE = Page(
    summary="Serve subscriptions: synchronize tables and apply changes",
    description="""
This process, the launcher, stays in the foreground and logs to standard error in the server's form. Without a bound it
runs until it is interrupted, even while there is no subscription, and notices within a second when subscriptions are
created, altered, enabled, disabled or dropped.

A publisher that is silent for wal_receiver_timeout is considered lost, and a worker that failed restarts after
wal_retrieve_retry_interval. These settings and wal_receiver_status_interval are the target server's.

The first SIGINT or SIGTERM lets open transactions finish, and the command ends with 0; a second one ends it at once. On
a terminal SIGHUP does the same as SIGTERM; elsewhere it is only logged. If the log file was moved, a new one is created
for the next record.

--metrics-listen serves metrics without authentication, on the loopback address unless a host is named.

With a bound, run ends with 3 if the state folder has no subscription, and with a NAME if it does not have that one; a
folder that does not exist is not created. It also ends with 3 if a subscription that is named is disabled, or if all
are. Without a NAME it serves those that are enabled. If they reach the bound, it ends with 3 if an error has disabled
another one (disable_on_error), and otherwise with a warning that names those that are disabled. --until-caught-up also
waits for sequences that follow the publisher and are behind, and ends with an error if one cannot follow. It ends with
3 after it has applied what the publisher sends if a publication is missing there. It does not wait for held tables
(alter --hold); pgsub wait --for caught-up ends with 3 while there are any.

With --from-target the named subscriptions need not be in the state folder: state.db is recreated from the ledger on the
target, and then they are served. Use this to move a launcher to another host, or if state.db is lost. Options are those
that were last written to the ledger; connection strings are those of --connection and --target. Nothing is changed if
the publisher is not the one recorded in the ledger, if another launcher serves the subscription, or if a switchover of
it is under way, which only the state folder where it was begun can end or abort. The former state
folder refuses to serve the subscription from then on. Conflicts, statistics and the journal are not in the ledger. A
subscription that the state folder already has is not changed.
""",
    examples=(
        ("Serve everything in the state folder.", "pgsub run"),
        ("Catch up once, for a job that is started regularly.", "pgsub run sales --until-caught-up --timeout 10m"),
        (
            "Continue with an empty state folder, on this or another host.",
            "pgsub run sales --from-target --connection service=shop --target service=copy",
        ),
    ),
)


class Options:
    """The subscriptions to serve, and the end of the run."""

    names: Annotated[
        list[str], typer.Argument(metavar="NAME", help="Subscriptions to serve; all if none is named.")
    ] = []
    until_caught_up: Annotated[
        bool, flag("until-caught-up", "End once apply has reached the publisher's present position.")
    ] = False
    until_lsn: Annotated[int | None, value("LSN", "End once apply has reached this position.", parser=parse_lsn)] = None
    timeout: Timeout = None
    master: Master = None
    conf: Conf = []
    metrics_listen: Annotated[Address | None, value("[HOST:]PORT", "Serve metrics there.", parser=parse_address)] = None
    log_file: Annotated[Path | None, value("FILE", "Append the log to a file.")] = None
    from_target: Annotated[
        bool, flag("from-target", "Rebuild what is missing from the ledger on the target, then serve it.")
    ] = False
    connection: Connection = None
    target: Target = None
    publication: Annotated[
        list[str], repeatable("PUB", "With --from-target: publication, where the ledger does not have the options")
    ] = []


@command("run", PAGE, parameters(Options), connects=True)
def run(**given: Any) -> None:
    """Run the launcher."""
    variables = take_conninfos()
    if given["until_caught_up"] and given["until_lsn"] is not None:
        raise typer.BadParameter("cannot be used together with --until-caught-up", param_hint="--until-lsn")
    for name in ("connection", "target", "publication"):
        # Variables may be set for other commands.
        if given[name] and given[name] != variables.get(name) and not given["from_target"]:
            raise typer.BadParameter("needs --from-target", param_hint=f"--{name}")
    if given["metrics_listen"] is not None:
        listen(given["metrics_listen"], current.state_dir)
    from pgsub.cli.output.reporting import LogReporter
    from pgsub.commands.serve.run import RunOptions
    from pgsub.commands.serve.run import run as run_launcher

    reporter = LogReporter(given["log_file"], current.state_dir)
    if given["from_target"]:
        from pgsub.commands.subscription.rebuild import RebuildOptions, rebuild

        served = rebuild(collected(RebuildOptions, given), reporter=reporter)
        bounded = given["until_caught_up"] or given["until_lsn"] is not None
        if served and not bounded:
            reporter.notice("the pgsub run that serves this state folder does the work")
            return
    run_launcher(collected(RunOptions, {**given, "connection": None, "target": None}), reporter=reporter)
