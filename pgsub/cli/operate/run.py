"""``pgsub run``: the launcher in the foreground."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pgsub.cli.command_tree.command import command
from pgsub.cli.command_tree.values import Conf, Master, Timeout, parse_lsn, parse_settings
from pgsub.cli.pages import Page
from pgsub.cli.settings import current

Names = Annotated[
    list[str] | None, typer.Argument(metavar="NAME", help="Subscriptions to serve; all if none is named.")
]
UntilCaughtUp = Annotated[
    bool, typer.Option("--until-caught-up", help="End when apply has reached the publisher's position of now.")
]
UntilLsn = Annotated[
    int | None,
    typer.Option("--until-lsn", metavar="LSN", parser=parse_lsn, help="End when apply has reached this position."),
]
LogFile = Annotated[Path | None, typer.Option("--log-file", metavar="FILE", help="Append the log to a file.")]

PAGE = Page(
    summary="Serve subscriptions: synchronize tables and apply changes",
    description="""
Stays in the foreground and logs to standard error in the server's form. Without a bound it runs until it is
interrupted, also when there is no subscription yet, and notices within a second what other commands create, alter,
enable, disable or drop.

A publisher that is silent for wal_receiver_timeout counts as lost, and a worker that ended with an error starts again
after wal_retrieve_retry_interval. These settings and wal_receiver_status_interval are the target server's, as for a
subscription of its own.

The first SIGINT or SIGTERM lets open transactions finish and ends with 0; a second one ends at once. A log file that
was moved away is opened anew at the next record, with or without SIGHUP; SIGHUP ends only a run whose standard error is
a terminal.
""",
    examples=(
        ("Serve everything in the state folder.", "pgsub run"),
        ("Catch up once, for a job that is started regularly.", "pgsub run sales --until-caught-up --timeout 10m"),
    ),
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(app, "run", PAGE)(run)


def run(
    names: Names = None,
    until_caught_up: UntilCaughtUp = False,
    until_lsn: UntilLsn = None,
    timeout: Timeout = None,
    master: Master = None,
    conf: Conf = None,
    log_file: LogFile = None,
) -> None:
    """Run the launcher."""
    if until_caught_up and until_lsn is not None:
        raise typer.BadParameter("cannot be used together with --until-caught-up", param_hint="--until-lsn")
    from pgsub.common.conninfo import take_environment

    take_environment()
    from pgsub.cli.output.reporting import LogReporter
    from pgsub.commands.serve.run import RunOptions
    from pgsub.commands.serve.run import run as run_launcher

    options = RunOptions(
        names=tuple(names or ()),
        state_dir=current.state_dir,
        until_caught_up=until_caught_up,
        until_lsn=until_lsn,
        timeout=timeout,
        master=master,
        conf=parse_settings(conf),
        log_file=log_file,
    )
    reporter = LogReporter(log_file, current.state_dir)
    try:
        run_launcher(options, reporter=reporter)
    finally:
        reporter.done()
