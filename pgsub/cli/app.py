"""The command tree, made of the commands that the modules of the command line register."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from pgsub import __version__
from pgsub.cli.command_tree.command import COMMANDS
from pgsub.cli.conflicts import conflicts, origin_advance, skip_lsn  # noqa: F401
from pgsub.cli.general_options import SHARED, remember
from pgsub.cli.operate import completion, config, demo, metrics, run, status, switchover, verify, version, wait  # noqa: F401
from pgsub.cli.output.documents import emit
from pgsub.cli.pages import PAGES
from pgsub.cli.subscription import alter, create, drop, reconcile, refresh, toggles  # noqa: F401

SUMMARY = "PostgreSQL logical-replication subscriber outside the server"
DESCRIPTION = """
pgsub creates subscriptions against a PostgreSQL publisher, copies their tables and applies their changes to a target
database, and shows how far they are. Words, options and states are those of CREATE SUBSCRIPTION.

Start with pgsub create --dry-run: it changes nothing and names what is missing. pgsub demo needs no servers of yours.
"""

#: Order of the commands in the help. Each registers itself when its module is imported.
_ORDER = (
    *("create", "run", "refresh", "alter", "status", "wait", "enable", "disable", "disable-on-error", "conflicts"),
    *("skip-lsn", "origin-advance", "verify", "reconcile", "switchover", "drop", "metrics", "config", "demo"),
    *("version", "completion"),
)

app = typer.Typer(
    name="pgsub",
    help=f"{SUMMARY}.\n\n{DESCRIPTION.strip()}",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> None:
    if asked:
        emit(f"pgsub {__version__}")
        raise typer.Exit


_Version = Annotated[
    bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
]


def _root(context: typer.Context, _version: _Version = False, **general: Any) -> None:
    remember(**general)
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)


_own = list(inspect.signature(_root, eval_str=True).parameters.values())
_root.__signature__ = inspect.Signature([_own[0], *SHARED.values(), _own[1]])  # type: ignore[attr-defined]
app.callback()(_root)
for _name in _ORDER:
    _cls, _function = COMMANDS[_name]
    app.command(_name, short_help=PAGES[_name].summary, cls=_cls)(_function)


def program() -> TyperGroup:
    """Return the command tree as a click object."""
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    return group
