"""``pgsub skip-lsn --conflict``: a conflict rule with a limit. Asks on a terminal, and requires ``--yes`` elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgsub.cli.general_options import current
from pgsub.cli.output.documents import emit_document
from pgsub.cli.output.prompts import agreed, confirm, require_terminal
from pgsub.common.plural import counted

if TYPE_CHECKING:
    from pgsub.common.conflict_rules import Rule


def skip(name: str, conflict: str, table: str, limit: int, *, yes: bool, as_json: bool) -> None:
    """Set a rule.

    :raises UsageError: there is no terminal to ask on.
    """
    if not yes:
        words = ["pgsub", "skip-lsn", name, "--conflict", conflict, "--table", table, "--limit", str(limit), "--yes"]
        require_terminal([name], "skipping changes", "Then:", words)
    from pgsub.cli.output.reporting import ConsoleReporter
    from pgsub.commands.skip.skip_conflicts import skip_conflicts
    from pgsub.common.conflict_rules import SKIP, Rule

    rule, ask = Rule(table, conflict, SKIP, limit), agreed if yes else _ask
    rules = skip_conflicts(current.state_dir, name, rule, reporter=ConsoleReporter(), confirm=ask)
    if as_json:
        shown = [{"conflict": one.conflict, "table": one.table, "limit": one.limit} for one in rules]
        emit_document("skip-lsn", {"preview": False, "subscription": name, "rules": shown})


def _ask(name: str, rule: Rule) -> None:
    changes = counted(rule.limit or 0, "change")
    confirm(
        "Skip them?",
        f"Of {rule.table} the next {changes} with {rule.conflict} will not be applied by subscription {name}, but kept"
        " in pgsub.skipped_change on the target.",
    )
