"""The command tree as plain values, from which manual pages and completions are generated."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from typer.core import TyperArgument, TyperGroup, TyperOption

from pgsub.cli.general_options import SHARED
from pgsub.cli.pages import PAGES, Page

_WORD = re.compile(r"[a-z][a-z_-]*")


@dataclass(frozen=True)
class Option:
    """An option as the user sees it."""

    names: tuple[str, ...]  #: long names first
    help: str
    opposite: str | None = None  #: ``--no-x``
    metavar: str | None = None  #: None if it takes no value
    default: str | None = None
    variable: str | None = None  #: environment variable with its default
    repeatable: bool = False
    required: bool = False
    shared: bool = False  #: whether every command has it

    @property
    def synopsis(self) -> str:
        """``-x, --expanded``, ``--timeout D``, ``--binary / --no-binary``."""
        text = ", ".join(reversed(self.names)) + (f" {self.metavar}" if self.metavar else "")
        return f"{text} / {self.opposite}" if self.opposite else text

    @property
    def words(self) -> tuple[str, ...]:
        """The values that can be listed."""
        if self.names[0] == "--view":
            from pgsub.catalog.store import VIEWS
            from pgsub.commands.status.status import PUBLISHER_VIEWS

            return (*VIEWS, *PUBLISHER_VIEWS)
        if self.names[0] == "--type":
            from pgsub.commands.status.conflicts import TYPES

            return TYPES
        return words(self.metavar)


@dataclass(frozen=True)
class Argument:
    """A positional argument."""

    metavar: str
    help: str
    required: bool
    repeatable: bool

    @property
    def usage(self) -> str:
        """``NAME``, ``[NAME]``, ``[NAME]...``."""
        text = self.metavar if self.required else f"[{self.metavar}]"
        return text + "..." * self.repeatable

    @property
    def is_name(self) -> bool:
        """Whether it may be the name of a subscription."""
        return "NAME" in self.metavar

    @property
    def words(self) -> tuple[str, ...]:
        """The values that can be listed."""
        return words(self.metavar)


@dataclass(frozen=True)
class Command:
    """A command with its page."""

    name: str
    page: Page
    arguments: tuple[Argument, ...]
    options: tuple[Option, ...]

    @property
    def names_subscription(self) -> bool:
        """Whether its first argument is an existing subscription."""
        return self.name != "create" and any(argument.is_name for argument in self.arguments)

    @property
    def places(self) -> bool:
        """Whether some arguments are names of subscriptions, and others have values that can be listed."""
        return self.names_subscription and any(argument.words for argument in self.arguments)


@dataclass(frozen=True)
class Tree:
    """The whole program."""

    options: tuple[Option, ...]
    commands: tuple[Command, ...]


HELP = Option(("--help", "-h"), "Show this message and exit.", shared=True)


def words(metavar: str | None) -> tuple[str, ...]:
    """Return the literal words of a metavar like ``off|on|parallel`` or ``NAME|none``."""
    parts = (metavar or "").split("|")
    return tuple(part for part in parts if _WORD.fullmatch(part)) if len(parts) > 1 else ()


def describe(group: TyperGroup) -> Tree:
    """Return the tree of a program."""
    commands = tuple(
        Command(name, PAGES[name], arguments(found.params), options(found.params))
        for name, found in group.commands.items()
        if not found.hidden
    )
    return Tree(options(group.params), commands)


def arguments(params: Sequence[object]) -> tuple[Argument, ...]:
    """Return the arguments among the parameters of a command."""
    return tuple(
        Argument(param.metavar or param.name.upper(), param.help or "", param.required, param.nargs == -1)
        for param in params
        if isinstance(param, TyperArgument)
    )


def options(params: Sequence[object]) -> tuple[Option, ...]:
    """Return the options among the parameters of a command, and ``--help``."""
    return (*(_option(param) for param in params if isinstance(param, TyperOption) and not param.hidden), HELP)


def _option(param: TyperOption) -> Option:
    takes_value = not (param.is_flag or param.count)
    return Option(
        names=tuple(sorted(param.opts, key=len, reverse=True)),
        opposite=param.secondary_opts[0] if param.secondary_opts else None,
        metavar=(param.metavar or param.name.upper()) if takes_value else None,
        help=param.help or "",
        default=_default(param, takes_value),
        variable=param.envvar if isinstance(param.envvar, str) else None,
        repeatable=param.multiple or param.count,
        required=param.required,
        shared=param.name in SHARED,
    )


def _default(param: TyperOption, takes_value: bool) -> str | None:
    if isinstance(param.show_default, str):
        return param.show_default
    if param.secondary_opts and param.default is not None:
        return param.opts[0] if param.default else param.secondary_opts[0]
    shown = takes_value and param.show_default and param.default not in (None, [])
    return str(param.default) if shown else None
