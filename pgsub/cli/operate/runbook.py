"""``pgsub status --runbook``: the steps for the present state, ready to paste."""

from __future__ import annotations

from pgsub.cli.general_options import current
from pgsub.cli.output import console
from pgsub.cli.output.documents import emit, emit_document
from pgsub.cli.pages import PAGES
from pgsub.common.errors import UsageError


def print_runbook(subscription: str | None, *, as_json: bool) -> None:
    """Print numbered steps, without commands that this program does not have."""
    from pgsub.commands.status import status as states
    from pgsub.commands.status.next_steps import runbook

    every = states.status(current.state_dir, subscription)
    if len(every) != 1:
        raise UsageError("--runbook needs the name of a subscription")
    [found] = every
    name = found.definition.name
    steps = []
    for step in runbook(found):
        commands = [line for line in step.commands if not line.startswith("pgsub ") or line.split()[1] in PAGES]
        if commands or not step.commands:
            steps.append({"text": step.text, "commands": commands, "statements": list(step.statements)})
    if as_json:
        emit_document("status", {"subscription": name, "runbook": steps})
        return
    for number, one in enumerate(steps, 1):
        text = " ".join(str(one["text"]).split("\n"))  # one line per step, even if servers or names contain line breaks
        lines = [f"{number}. {text}", *(f"       {line}" for line in [*one["commands"], *one["statements"]])]
        emit(console.pasted("\n".join(map(console.printable, lines))))
    if not steps:
        emit(f'Nothing is to be done: subscription "{name}" is {found.state}.')
