"""``pgsub skip-lsn --conflict``: a conflict rule with a limit; asks on a terminal, wants ``--yes`` elsewhere."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

import typer

from pgsub.cli.output import console
from pgsub.cli.output.documents import emit_document
from pgsub.cli.settings import current
from pgsub.common.errors import UsageError
from pgsub.common.plural import counted

if TYPE_CHECKING:
    from pgsub.common.conflict_rules import Rule


def skip(name: str, conflict: str, table: str, limit: int, *, yes: bool, as_json: bool) -> None:
    """Set a rule.

    :raises UsageError: nobody to ask.
    """
    if not yes and (sys.stdin is None or not sys.stdin.isatty()):
        words = ["pgsub", "skip-lsn", name, "--conflict", conflict, "--table", table, "--limit", str(limit), "--yes"]
        raise UsageError(
            "skipping changes needs --yes", detail="There is no terminal to ask on.", hint=f"Then:\n{shlex.join(words)}"
        )
    from pgsub.common.conninfo import take_environment

    take_environment()
    from pgsub.cli.output.reporting import ConsoleReporter
    from pgsub.commands.skip.skip_conflicts import SkipConflictsOptions, skip_conflicts
    from pgsub.common.conflict_rules import SKIP, Rule

    options = SkipConflictsOptions(name, current.state_dir, Rule(table, conflict, SKIP, limit))
    rules = skip_conflicts(options, reporter=ConsoleReporter(), confirm=_agreed if yes else _ask)
    if as_json:
        shown = [{"conflict": one.conflict, "table": one.table, "limit": one.limit} for one in rules]
        emit_document("skip-lsn", {"preview": False, "subscription": name, "rules": shown})


def _agreed(name: str, rule: Rule) -> None:
    """Nothing is asked."""


def _ask(name: str, rule: Rule) -> None:
    from pgsub.commands.skip.skip_lsn import canceled

    console.say(
        f"Of {console.line(rule.table)} the next {counted(rule.limit or 0, 'change')} with {rule.conflict} will not be"
        f" applied by subscription {console.line(name)}, but kept in pgsub.skipped_change on the target."
    )
    if not typer.confirm("Skip them?", default=False, err=True):
        raise canceled()
