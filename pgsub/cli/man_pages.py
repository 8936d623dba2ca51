"""Manual pages: of commands, from the command tree and the exception classes, and of topics, from texts in ``docs/``.

They have the order of the server's reference pages, and neither a date nor data of the machine, so the same sources
always give the same bytes. Only ``pgsub.cli.docs`` uses this.

The text of a topic begins with ``name section: summary``. ``# NAME`` begins a section, ``: text`` below a line
describes it, and indented lines are kept unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from pgsub import __version__
from pgsub.cli.app import DESCRIPTION, SUMMARY
from pgsub.cli.command_tree.tree import Command, Option, Tree
from pgsub.cli.configuration import SETTINGS
from pgsub.cli.pages import Page
from pgsub.common.errors import exit_code_table

_ENVIRONMENT = (
    ("PGSUB_CONFIG", "The configuration file, see pgsub.toml(5)."),
    ("PGSUB_STATE_DIR", "The state folder, if --state-dir is not given."),
    ("XDG_STATE_HOME", "Where the state folder pgsub is found otherwise; the default is ~/.local/state."),
    ("PGSUB_CONNECTION, PGSUB_TARGET", "Connection strings for pgsub create, if the options are not given."),
    (
        "PGHOST, PGPORT, PGDATABASE, PGUSER and other variables of libpq",
        "Complete the connection string of the target. The publisher is never taken from them.",
    ),
    ("PGPASSFILE, PGSERVICEFILE", "Files of libpq with passwords and services, for both servers."),
    ("JAVA_HOME", "The Java that Spark runs on."),
    ("NO_COLOR, PG_COLOR, CLICOLOR_FORCE", "Whether standard error gets colours, if --color is not given."),
    ("CI", "If set, progress is shown as lines and not as bars."),
    ("PGSUB_RETRY_SECONDS", "Seconds between attempts, instead of the target's wal_retrieve_retry_interval."),
    ("PGSUB_SEQUENCE_SECONDS", "Seconds between checks of sequences whose values do not change; 30 if it is not set."),
    (
        "PGSUB_WORKER_TIMEOUT",
        "Seconds without a sign of life after which a worker, or Spark, is replaced; 60 if not set.",
    ),
    ("PGSUB_SET_BASED", "off makes pgsub run and pgsub create apply every change by a statement of its own."),
    ("PGSUB_CONFLICT_HISTORY", "Conflicts that the state store keeps of each subscription; 10000 if it is not set."),
    ("PGSUB_DEBUG", "If set to 1, the same as --debug."),
)
_FILES = (
    ("~/.config/pgsub/config.toml, /etc/pgsub/config.toml", "Defaults of settings and options, see pgsub.toml(5)."),
    ("state.db", "The state store in the state folder, an SQLite file with the catalogs and statistics views."),
    ("launcher.lock, subscription-*.lock", "Locks in the state folder; each names the process that holds it."),
)
_SIGNALS = (
    (130, "ended by SIGINT; a command that serves a subscription, by a second one"),
    (143, "ended by SIGTERM; a command that serves a subscription, by a second one"),
)
TOPICS = ("conflicts", "states", "pgsub.toml")
_FOLDER = Path(__file__).parents[2] / "docs"
_HEAD = re.compile(r"(\S+) (\d): (.*)")
_PAGE = re.compile(r"(pgsub[\w.-]*)\((\d)\)")


def pages(tree: Tree) -> dict[str, str]:
    """Make the pages of all commands.

    :return: text by file name.
    """
    found = {"pgsub.1": _main(tree)}
    for command in tree.commands:
        found[f"pgsub-{command.name}.1"] = _command(command)
    return found


def _main(tree: Tree) -> str:
    page = Page(SUMMARY, DESCRIPTION, tuple(command.page.examples[0] for command in tree.commands[:3]))
    lines = head("pgsub", "1", SUMMARY, "the command tree")
    lines += [".SH SYNOPSIS", r"\fBpgsub\fR [\fIOPTION\fR]... \fICOMMAND\fR [\fIARGUMENT\fR]..."]
    lines += [".SH DESCRIPTION", *_paragraphs(page), ".SS Commands"]
    for command in tree.commands:
        lines += _item(rf"\fBpgsub\-{escaped(command.name)}\fR(1)", command.page.summary + ".")
    lines += [".SH OPTIONS", "These may stand before the command or behind it.", *_options(tree.options)]
    return _join(lines, page, [f"pgsub-{command.name}" for command in tree.commands])


def _command(command: Command) -> str:
    name = f"pgsub-{command.name}"
    own = [option for option in command.options if not option.shared]
    arguments = [a.usage.replace(a.metavar, rf"\fI{escaped(a.metavar)}\fR") for a in command.arguments]
    synopsis = [rf"\fBpgsub {command.name}\fR", *map(_usage, own), *arguments]
    summary = command.page.summary
    lines = head(name, "1", summary[:1].lower() + summary[1:], "the command tree")
    lines += [".SH SYNOPSIS", ".na", ".nh", " ".join(synopsis), ".hy", ".ad"]
    lines += [".SH DESCRIPTION", *_paragraphs(command.page), ".SH OPTIONS"]
    for argument in command.arguments:
        lines += _item(rf"\fI{escaped(argument.metavar)}\fR", argument.help)
    lines += [*_options(own), ".PP", r"Options that every command has are described in \fBpgsub\fR(1)."]
    return _join(lines, command.page, ["pgsub"])


def head(name: str, section: str, purpose: str, source: str) -> list[str]:
    """Return the first lines of a page."""
    return [
        rf".\" Generated from {source} by: python -m pgsub.cli.docs",
        f'.TH {escaped(name.upper())} {section} "" "pgsub {__version__}" "pgsub manual"',
        ".SH NAME",
        rf"{escaped(name)} \- {escaped(purpose)}",
    ]


def _join(lines: list[str], page: Page, related: Iterable[str]) -> str:
    ends = [*_exit_status(), *_named("ENVIRONMENT", _ENVIRONMENT), *_named("FILES", _FILES), *_examples(page)]
    names = ",\n".join(rf"\fB{escaped(name)}\fR(1)" for name in related)
    return "\n".join([*lines, *ends, ".SH SEE ALSO", names, ""])


def _exit_status() -> list[str]:
    lines = [".SH EXIT STATUS"]
    for code, meaning in (*exit_code_table(), *_SIGNALS):
        lines += _item(rf"\fB{code}\fR", meaning)
    return lines


def _named(section: str, items: Iterable[tuple[str, str]]) -> list[str]:
    return [f".SH {section}", *(line for name, text in items for line in _item(rf"\fB{escaped(name)}\fR", text))]


def _examples(page: Page) -> list[str]:
    lines = [".SH EXAMPLES"]
    for purpose, command in page.examples:
        lines += [".PP", escaped(purpose), ".PP", ".nf", ".RS 4", escaped(command), ".RE", ".fi"]
    return lines


def _paragraphs(page: Page) -> list[str]:
    return [line for paragraph in page.paragraphs() for line in (".PP", escaped(paragraph))]


def _options(options: Iterable[Option]) -> list[str]:
    lines = []
    for option in options:
        notes = f" The default is {option.default}." if option.default else ""
        notes += f" May also be given as {option.variable}." if option.variable else ""
        notes += " Required." if option.required else ""
        lines += _item(_synopsis(option), option.help + notes)
    return lines


def _synopsis(option: Option) -> str:
    names = ", ".join(rf"\fB{escaped(name)}\fR" for name in reversed(option.names))
    names += rf" \fI{escaped(option.metavar)}\fR" if option.metavar else ""
    return names + (rf", \fB{escaped(option.opposite)}\fR" if option.opposite else "")


def _usage(option: Option) -> str:
    name = option.names[0].replace("--", "--[no-]", 1) if option.opposite else option.names[0]
    text = rf"\fB{escaped(name)}\fR" + (rf" \fI{escaped(option.metavar)}\fR" if option.metavar else "")
    text = (text if option.required else f"[{text}]") + "..." * option.repeatable
    return text.replace(" ", r"\ ")  # keeps an option and its value on one line


def _item(term: str, text: str) -> list[str]:
    return [".TP", term, escaped(text)]


def escaped(text: str) -> str:
    """Escape characters that have a meaning for the formatter."""
    shown = text.replace("\\", r"\e").replace("-", r"\-").replace("'", r"\(aq").replace("~", r"\(ti")
    shown = shown.replace("^", r"\(ha").replace("`", r"\(ga").replace('"', r"\(dq")
    return r"\&" + shown if shown.startswith(".") else shown


def topics() -> dict[str, str]:
    """Make the pages of all topics, text by file name."""
    texts = ((_FOLDER / f"{name}.txt").read_text(encoding="utf-8") for name in TOPICS)
    return dict(_topic(text.replace("@SETTINGS@", _settings())) for text in texts)


def _settings() -> str:
    """Return the blocks of all settings."""
    return "\n\n".join(
        f"{one.name}\n: {one.help} Stands in for {one.variable}."
        + (f" The default is {one.default}." if one.default else "")
        for one in SETTINGS
    )


def _topic(text: str) -> tuple[str, str]:
    first, _, rest = text.partition("\n")
    found = _HEAD.fullmatch(first)
    assert found is not None, first
    name, section, summary = found.groups()
    lines = head(name, section, summary, f"docs/{name.removeprefix('pgsub-')}.txt")
    for block in rest.strip("\n").split("\n\n"):
        lines += _block(block)
    page = "\n".join([*lines, ""])
    # Successive unchanged blocks are joined, with an empty line between them.
    return f"{name}.{section}", page.replace(".RE\n.fi\n.PP\n.nf\n.RS 4\n", "\\&\n")


def _block(block: str) -> Iterator[str]:
    first, _, rest = block.partition("\n")
    if block.startswith("# "):
        yield f".SH {escaped(block[2:])}"
    elif block.startswith("    "):
        yield from (".PP", ".nf", ".RS 4")
        # A line that begins with a control character would be a request.
        yield from (rf"\&{escaped(line[4:])}" for line in block.split("\n"))
        yield from (".RE", ".fi")
    elif rest.startswith(": "):
        yield from (".TP", rf"\fB{escaped(first)}\fR", escaped(rest[2:]))
    else:
        yield from (".PP", _PAGE.sub(r"\\fB\1\\fR(\2)", escaped(block).replace(r"\-", "-")).replace("-", r"\-"))
