"""``pgsub refresh``: asks on a terminal before a table is emptied, wants ``--yes`` elsewhere."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from pgsub.cli.command_tree.command import command
from pgsub.cli.command_tree.values import Conf, Master, Timeout, parse_settings
from pgsub.cli.output import console
from pgsub.cli.pages import Page
from pgsub.cli.settings import current
from pgsub.cli.subscription import plan
from pgsub.cli.subscription.create_options import AsJson, DryRun, Strict, Wait
from pgsub.common.errors import PgsubError, UsageError

if TYPE_CHECKING:
    from pgsub.target.sql.truncate import TruncatedTable

PAGE = Page(
    summary="Let the tables of a subscription follow its publications",
    description="""
Tables that are published and not subscribed yet are added and copied, tables that are published no more are removed
from the subscription with their slots; their rows stay on the target. Tables that are subscribed already are not copied
again. New tables must exist on the target. The other tables go on meanwhile.

With --resync a table is copied again: it is emptied on the target (TRUNCATE) in the same commit that marks it, and
copied from the publisher as it is then. That is refused where a foreign key of another table references it, where a
trigger on TRUNCATE would fire, and where another subscription writes the table too. Tables that reference each other
may be named together. It asks before on a terminal; elsewhere --yes is needed.

The new tables are looked at as create does; with --dry-run nothing is changed and the plan is printed, with --json as
one document. Where pgsub run serves the subscription, it does the work and this command watches.
""",
    examples=(
        ("Take up the tables that were added to the publications.", "pgsub refresh sales"),
        ("Copy one table again.", "pgsub refresh sales --resync public.orders --yes"),
    ),
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(app, "refresh", PAGE)(refresh)


def refresh(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the subscription.")],
    copy_data: Annotated[
        bool, typer.Option("--copy-data/--no-copy-data", help="Copy the rows that new tables hold already.")
    ] = True,
    resync: Annotated[
        list[str] | None,
        typer.Option("--resync", metavar="SCHEMA.TABLE", help="Empty this table and copy it again; may be repeated."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    strict: Strict = False,
    wait: Wait = True,
    timeout: Timeout = None,
    master: Master = None,
    conf: Conf = None,
) -> None:
    """Ask, then refresh."""
    tables = tuple(resync or ())
    if as_json and not dry_run:
        raise UsageError("--json needs --dry-run", hint="pgsub status --json shows what was done.")
    if tables and not yes and not dry_run and (sys.stdin is None or not sys.stdin.isatty()):
        raise _unasked(name, tables)
    from pgsub.common.conninfo import take_environment

    take_environment()
    from pgsub.cli.output.reporting import ConsoleReporter
    from pgsub.commands.refresh.refresh import RefreshOptions
    from pgsub.commands.refresh.refresh import refresh as refresh_subscription

    options = RefreshOptions(
        name=name,
        state_dir=current.state_dir,
        copy_data=copy_data,
        resync=tables,
        dry_run=dry_run,
        strict=strict,
        wait=wait,
        timeout=timeout,
        master=master,
        conf=parse_settings(conf),
    )
    reporter = ConsoleReporter()
    try:
        done = refresh_subscription(options, reporter=reporter, confirm=_agreed if yes else _ask)
    finally:
        reporter.done()
    if dry_run:
        plan.show("refresh", name, done.found, done.document() if as_json else None)


def _unasked(name: str, tables: Sequence[str]) -> UsageError:
    words = ["pgsub", "refresh", name, *(word for table in tables for word in ("--resync", table)), "--yes"]
    return UsageError(
        "emptying a table needs --yes",
        detail="There is no terminal to ask on.",
        hint=f"If you are sure:\n{shlex.join(words)}",
    )


def _agreed(tables: Sequence[TruncatedTable]) -> None:
    """Nothing is asked."""


def _ask(tables: Sequence[TruncatedTable]) -> None:
    for table in tables:
        rows = "an unknown number of rows" if table.rows is None else f"about {table.rows} rows"
        console.say(console.line(f'Table "{table.schema}.{table.name}" on the target has {rows}.'))
    if not typer.confirm("Empty and copy again?", default=False, err=True):
        raise PgsubError("canceled", detail="Nothing was changed.")
