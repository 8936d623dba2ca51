"""``pgsub run``: the launcher in the foreground."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from pgsub.cli.command_tree.command import command, parameters
from pgsub.cli.command_tree.values import Conf, Master, Timeout, collected, parse_lsn
from pgsub.cli.operate.metrics import Address, listen, parse_address
from pgsub.cli.pages import Page
from pgsub.cli.settings import current

PAGE = Page(
    summary="Serve subscriptions: synchronize tables and apply changes",
    description="""
Stays in the foreground and logs to standard error in the server's form. Without a bound it runs until it is
interrupted, even while there is no subscription, and notices within a second when subscriptions are created, altered,
enabled, disabled or dropped.

A publisher that is silent for wal_receiver_timeout is considered lost, and a worker that failed restarts after
wal_retrieve_retry_interval. These settings and wal_receiver_status_interval are the target server's.

The first SIGINT or SIGTERM lets open transactions finish and ends with 0; a second one ends at once. SIGHUP stops a run
on a terminal in the same way; elsewhere it is only logged. A log file that was moved is created anew at the next
record.

--metrics-listen serves metrics without authentication, on the loopback address unless a host is named.

With a bound, run ends with 3 if the state folder has no subscription.
""",
    examples=(
        ("Serve everything in the state folder.", "pgsub run"),
        ("Catch up once, for a job that is started regularly.", "pgsub run sales --until-caught-up --timeout 10m"),
    ),
)


class Options:
    """The subscriptions to serve, and until when."""

    names: Annotated[
        list[str], typer.Argument(metavar="NAME", help="Subscriptions to serve; all if none is named.")
    ] = []
    until_caught_up: Annotated[
        bool, typer.Option("--until-caught-up", help="End once apply has reached the publisher's present position.")
    ] = False
    until_lsn: Annotated[
        int | None, typer.Option(metavar="LSN", parser=parse_lsn, help="End once apply has reached this position.")
    ] = None
    timeout: Timeout = None
    master: Master = None
    conf: Conf = []
    metrics_listen: Annotated[
        Address | None,
        typer.Option(
            "--metrics-listen",
            metavar="[HOST:]PORT",
            parser=parse_address,
            help="Serve metrics there.",
        ),
    ] = None
    log_file: Annotated[Path | None, typer.Option(metavar="FILE", help="Append the log to a file.")] = None


@command("run", PAGE, parameters(Options), connects=True)
def run(**given: Any) -> None:
    """Run the launcher."""
    if given["until_caught_up"] and given["until_lsn"] is not None:
        raise typer.BadParameter("cannot be used together with --until-caught-up", param_hint="--until-lsn")
    if given["metrics_listen"] is not None:
        listen(given["metrics_listen"], current.state_dir)
    from pgsub.cli.output.reporting import LogReporter
    from pgsub.commands.serve.run import RunOptions
    from pgsub.commands.serve.run import run as run_launcher

    run_launcher(collected(RunOptions, given), reporter=LogReporter(given["log_file"], current.state_dir))
