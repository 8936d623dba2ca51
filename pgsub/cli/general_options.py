"""The general options, which every command has, and their values in this process.

They may precede or follow the command. The error handler needs them after parsing, so there is one object per process,
like the level and colors in the frontends' ``logging.c``.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import typer


@dataclass
class Settings:
    """Values of the general options."""

    state_dir_option: str | None = None
    color: str = "auto"
    verbosity: int = 0
    debug: bool = False
    #: libpq's variables by keyword, after a connecting command has removed them from the process's environment
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def state_dir(self) -> Path:
        """The state folder of this invocation."""
        from pgsub.catalog.state_folder import state_dir

        return state_dir(self.state_dir_option)

    def take_environment(self) -> None:
        """Remove libpq's variables from the process's environment before anything connects."""
        from pgsub.common.connections.conninfo import take_environment

        self.environment = take_environment()

    def coloured(self) -> bool:
        """Return whether stderr gets colors: the option, else NO_COLOR, PG_COLOR, CLICOLOR_FORCE, else the terminal."""
        if self.color != "auto":
            return self.color == "always"
        if os.environ.get("NO_COLOR"):
            return False
        wish = os.environ.get("PG_COLOR", "auto")
        if wish in ("always", "never"):
            return wish == "always"
        if os.environ.get("CLICOLOR_FORCE", "0") not in ("", "0"):
            return True
        return bool(sys.stderr and sys.stderr.isatty() and os.environ.get("TERM") != "dumb")


current = Settings()


def remember(
    state_dir: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="State folder (PGSUB_STATE_DIR, else $XDG_STATE_HOME/pgsub).")
    ] = None,
    color: Annotated[
        Literal["auto", "always", "never"] | None,
        typer.Option(metavar="auto|always|never", help="Colours on standard error."),
    ] = None,
    verbose: Annotated[
        int,
        typer.Option(
            "--verbose",
            "-v",
            count=True,
            show_default=False,
            help="Print more messages; give it twice for debugging messages.",
        ),
    ] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback with an unexpected error.")] = False,
) -> None:
    """Store the general options. Values that were not given are unchanged."""
    current.state_dir_option = state_dir or current.state_dir_option
    current.color = color or current.color
    current.verbosity += verbose - quiet
    current.debug = current.debug or debug or os.environ.get("PGSUB_DEBUG", "0") not in ("", "0")


#: Parameters of the general options.
SHARED = inspect.signature(remember, eval_str=True).parameters
