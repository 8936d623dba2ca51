"""``pgsub version``."""

from __future__ import annotations

from pgsub.cli.command_tree.command import command
from pgsub.cli.command_tree.option_values import AsJson
from pgsub.cli.output.documents import emit, emit_document
from pgsub.cli.pages import Page

PAGE = Page(
    summary="Show the versions of pgsub and of its dependencies",
    description="Also shows the schema version of the state store and the supported protocol versions.",
    examples=(("For people.", "pgsub version"), ("For a bug report or a script.", "pgsub version --json")),
)


@command("version", PAGE)
def version(as_json: AsJson = False) -> None:
    """Show the versions."""
    from pgsub.commands.version import version as versions

    found = versions()
    if as_json:
        emit_document("version", found)
        return
    names = {"state_schema": "state schema", "protocol": "protocol versions"}
    for key, value in found.items():
        text = ", ".join(map(str, value)) if isinstance(value, tuple) else value or "not installed"
        emit(f"{names.get(key, key)} {text}")
