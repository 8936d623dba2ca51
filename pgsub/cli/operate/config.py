"""``pgsub config``: every setting, its value, and its origin."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated, Any

from pgsub.cli.command_tree.command import command
from pgsub.cli.command_tree.option_values import flag
from pgsub.cli.configuration import SETTINGS, Setting, configuration
from pgsub.cli.general_options import current
from pgsub.cli.output import console, render
from pgsub.cli.output.documents import emit, emit_document
from pgsub.cli.pages import Page
from pgsub.common.errors import UsageError
from pgsub.common.subscription import SECRETS

PAGE = Page(
    summary="Show every setting and where its value comes from",
    description="""
The origin is flag, environment, the path of config.toml, or default, the first of these that names the setting.
Defaults of the options of commands are listed if config.toml has them. Secrets are not shown,
neither those in connection strings nor those in options of Spark.

config.toml is described in pgsub.toml(5).
""",
    examples=(
        ("Show the settings in effect.", "pgsub config"),
        ("For a script.", "pgsub config --json"),
    ),
)


@command("config", PAGE)
def config(as_json: Annotated[bool, flag("json", "A JSON document.")] = False) -> None:
    """Show the settings."""
    found = [*map(_setting, SETTINGS), *_options()]
    path = str(configuration.path) if configuration.path else None
    if as_json:
        emit_document("config", {"file": path, "settings": found})
    else:
        emit(render.rows(["setting", "value", "origin"], found))


def _setting(setting: Setting) -> dict[str, Any]:
    value, origin = os.environ.get(setting.variable) or setting.default, "default"
    if setting.name in configuration.used:
        origin = str(configuration.path)
    elif os.environ.get(setting.variable):
        origin = f"environment {setting.variable}"
    if setting.name == "state_dir":
        value = str(current.state_dir)
        origin = "flag --state-dir" if current.state_dir_option else origin
        origin = "environment XDG_STATE_HOME" if origin == "default" and os.environ.get("XDG_STATE_HOME") else origin
    elif setting.name == "color" and current.color != "auto":
        value, origin = current.color, "flag --color"
    elif setting.name == "debug" and current.debug and origin == "default":
        value, origin = "1", "flag --debug"
    return {"setting": setting.name, "value": None if value is None else _concealed(value), "origin": origin}


def _options() -> Iterator[dict[str, Any]]:
    for name, options in configuration.commands.items():
        for key, value in options.items():
            shown = ", ".join(map(_concealed, map(str, value if isinstance(value, list) else [value])))
            yield {"setting": f"{name}.{key}", "value": shown, "origin": str(configuration.path)}


def _concealed(value: str) -> str:
    """Conceal secrets: those of a connection string as libpq reads it, otherwise text that resembles one."""
    from pgsub.common.connections import conninfo

    name, equals, _ = value.partition("=")
    if equals and name.strip().startswith("spark."):
        return f"{name}=****" if console.redacted(f"{name}=x") != f"{name}=x" else value
    try:
        params = conninfo.parse(value, "")
    except UsageError:
        if "://" in value and "@" in value:
            return "****"
        before, found, _ = console.redacted(value).partition("****")
        return before + found  # libpq cannot read it, so the end of the secret is unknown
    shown = {key: text for key, text in params.items() if key not in SECRETS}
    return conninfo.join({**shown, **dict.fromkeys(params.keys() - shown, "****")}) if shown != params else value
