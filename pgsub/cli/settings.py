"""Options that every command has, and where their values are kept for the time of the process.

They may stand before the command or behind it. The error handler needs them after the parser is gone, hence one
object for the process, as the frontends' ``logging.c`` keeps its level and colours.
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

COLOURS = Literal["auto", "always", "never"]

StateDir = Annotated[
    str | None,
    typer.Option("--state-dir", metavar="FOLDER", help="State folder (PGSUB_STATE_DIR, else $XDG_STATE_HOME/pgsub)."),
]
Color = Annotated[
    COLOURS | None, typer.Option("--color", metavar="auto|always|never", help="Colours on standard error.")
]
Verbose = Annotated[
    int, typer.Option("--verbose", "-v", count=True, show_default=False, help="Say more; twice for debugging messages.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show a traceback with an unexpected error.")]


@dataclass
class Settings:
    """Values of the options that every command has."""

    state_dir_option: str | None = None
    color: str = "auto"
    verbosity: int = 0
    debug: bool = False
    #: libpq's variables by keyword, once a command that connects took them out of the process's environment
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def state_dir(self) -> Path:
        """The state folder of this invocation."""
        from pgsub.catalog.state_folder import state_dir

        return state_dir(self.state_dir_option)

    def take_environment(self) -> None:
        """Take libpq's variables out of the process's environment, before anything connects."""
        from pgsub.common.conninfo import take_environment

        self.environment = take_environment()

    def coloured(self) -> bool:
        """Whether stderr gets colours: the option, else NO_COLOR, PG_COLOR, CLICOLOR_FORCE, else the terminal."""
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
    state_dir: StateDir = None,
    color: Color = None,
    verbose: Verbose = 0,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Take over what was given; what was not given stays."""
    current.state_dir_option = state_dir or current.state_dir_option
    current.color = color or current.color
    current.verbosity += verbose - quiet
    current.debug = current.debug or debug or os.environ.get("PGSUB_DEBUG", "0") not in ("", "0")


#: parameters that every command's function has besides its own
SHARED = inspect.signature(remember, eval_str=True).parameters
