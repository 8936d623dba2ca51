"""How a command joins the tree: its page, the options that every command has, and its ``--help``.

Help is written here and not by the option parser, so that it looks the same whatever version of the parser is
installed, and the same as in the manual page. Mirrors the ``usage()`` functions of the client programs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand

from pgsub.cli.command_tree import tree
from pgsub.cli.pages import PAGES, Page
from pgsub.cli.settings import SHARED, remember


class Command(TyperCommand):
    """A command whose help is made from its page."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words of the usage line."""
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
                formatter.write(f"  {command}\n      {purpose}\n")
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


def _record(option: tree.Option) -> tuple[str, str]:
    notes = [f"default: {option.default}"] if option.default else []
    notes += [f"environment: {option.variable}"] if option.variable else []
    notes += ["required"] if option.required else []
    return option.synopsis, option.help + (f" [{'; '.join(notes)}]" if notes else "")


def command(
    app: typer.Typer, name: str, page: Page, cls: type[Command] = Command
) -> Callable[[Callable[..., None]], None]:
    """Register a command together with the options that every command has.

    :param page: its texts, for ``--help`` and the manual page.
    """
    PAGES[name] = page

    def decorate(function: Callable[..., None]) -> None:
        own = inspect.signature(function, eval_str=True)

        @functools.wraps(function)
        def wrapper(**values: Any) -> None:
            remember(**{key: values.pop(key) for key in SHARED})
            function(**values)

        signature = own.replace(parameters=[*own.parameters.values(), *SHARED.values()])
        wrapper.__signature__ = signature  # type: ignore[attr-defined]
        app.command(name, short_help=page.summary, cls=cls)(wrapper)

    return decorate
