"""Registration of a command in the tree: its page, the general options, and its ``--help``.

Help is written here instead of by the option parser, so that it does not depend on the parser's version, and equals the
manual page. Mirrors the ``usage()`` functions of the client programs.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from textwrap import indent
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import typer
from typer.core import TyperCommand

from pgsub.cli.command_tree import tree
from pgsub.cli.general_options import SHARED, current, remember
from pgsub.cli.pages import PAGES, Page

Function = TypeVar("Function", bound=Callable[..., None])


class Command(TyperCommand):
    """A command whose help is made from its page, and whose error names all missing parameters."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Name all missing ones in the error. The parser would name only the first."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            missing = self._missing(ctx, given) if hasattr(error, "param_type") else []
            if hasattr(error, "param_type") and missing:
                *further, last = [missing[0].get_error_hint(), *map(_kind_and_name, missing[1:])]
                error.param_type = missing[0].param_type_name
                error.param_hint = " and ".join(filter(None, [", ".join(further), last]))
            raise

    def needs(self, param: Any) -> bool:
        """Return whether the command requires a parameter, unless the environment contains it."""
        return bool(param.required)

    def _missing(self, ctx: Any, args: list[str]) -> list[Any]:
        given = self.make_parser(ctx).parse_args(args=args)[0]
        absent = (one for one in self.params if one.value_is_missing(one.consume_value(ctx, given)[0]))
        return [param for param in absent if self.needs(param)]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line."""
        return ["[OPTION]...", *(argument.usage for argument in tree.arguments(self.params))]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write usage, description, examples and options."""
        page = PAGES[str(self.name)]
        self.format_usage(ctx, formatter)
        for paragraph in (page.summary + ".", *page.paragraphs()):
            formatter.write_paragraph()
            formatter.write_text(paragraph)
        with formatter.section("Examples"):
            for purpose, command in page.examples:
                formatter.write(f"{indent(command, '  ')}\n      {purpose}\n")
        self._format_lists(formatter)

    def _format_lists(self, formatter: Any) -> None:
        options = tree.options(self.params)
        lists = {
            "Arguments": [(argument.usage, argument.help) for argument in tree.arguments(self.params)],
            "Options": [_record(option) for option in options if not option.shared],
            "General options": [_record(option) for option in options if option.shared],
        }
        for title, records in lists.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def _kind_and_name(param: Any) -> str:
    return f"{param.param_type_name} {param.get_error_hint()}"


def _record(option: tree.Option) -> tuple[str, str]:
    notes = [f"default: {option.default}"] if option.default else []
    notes += [f"environment: {option.variable}"] if option.variable else []
    notes += ["required"] if option.required else []
    return option.synopsis, option.help + (f" [{'; '.join(notes)}]" if notes else "")


#: For each command, its class and the function that the parser calls.
COMMANDS: dict[str, tuple[type[Command], Callable[..., None]]] = {}


def command(
    name: str, page: Page, *groups: Sequence[inspect.Parameter], cls: type[Command] = Command, connects: bool = False
) -> Callable[[Function], Function]:
    """Make a function a command. The general options are added and passed to :func:`remember`.

    :param page: the texts for ``--help`` and the manual page.
    :param groups: options that the function takes as keywords, see :func:`parameters`; otherwise its own parameters.
    :param connects: whether it connects to the target. Libpq's variables are then removed from the environment: they
        must not affect the publisher's connection, and children must not inherit them.
    """
    PAGES[name] = page

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def wrapper(**values: Any) -> None:
            remember(**{key: values.pop(key) for key in SHARED})
            if connects:
                current.take_environment()
            function(**values)

        own = itertools.chain(*groups) if groups else inspect.signature(function, eval_str=True).parameters.values()
        wrapper.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [one.replace(kind=one.KEYWORD_ONLY) for one in [*own, *SHARED.values()]]
        )
        COMMANDS[name] = cls, wrapper
        return function

    return decorate


def parameters(options: type, *, optional: bool = False) -> list[inspect.Parameter]:
    """Return parameters for a class whose annotated attributes are options.

    :param optional: make the default of each option None, for commands that change only given options.
    """
    found = []
    for name, annotation in get_type_hints(options, include_extras=True).items():
        default = getattr(options, name, inspect.Parameter.empty)
        if optional:
            kind, *extras = get_args(annotation)
            annotation, default = Annotated[(kind | None, *extras)], None
        found.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation))
    return found
