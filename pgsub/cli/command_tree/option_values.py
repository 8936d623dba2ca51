"""Values of options: durations, LSNs, settings of the form k=v, and connection strings from stdin.

Invalid values are usage errors that name the option. Mirrors ``src/fe_utils/option_utils.c`` and, for durations, the
units of ``guc.c``.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from pgsub.cli.general_options import current
from pgsub.cli.output import console
from pgsub.common.errors import StateForbids, UsageError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Value = TypeVar("Value")
Options = TypeVar("Options", bound="DataclassInstance")

_DURATION = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)(ms|s|m|min|h|d)", re.ASCII)
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(text: str | float) -> float:
    """Read ``500ms``, ``30s``, ``5m``, ``2h``.

    :return: seconds.
    """
    if isinstance(text, float):
        return text
    match = _DURATION.fullmatch(text)
    if match is None:
        raise typer.BadParameter(f'"{text}" is not a duration: expected a number and a unit as in 500ms, 30s, 5m or 2h')
    return float(match[1]) * _SECONDS[match[2]]


#: Maximum number of sessions of one subscription that apply at once.
MOST_WRITERS = 16


def receiver_timeout(text: str | None) -> str | None:
    """Refuse values that the server does not accept as wal_receiver_timeout."""
    from pgsub.common import subscription

    if text is not None:
        subscription.receiver_timeout(text)
    return text


def sessions_that_apply(text: str | int) -> int:
    """Read ``N`` or ``auto``, which is stored as 0.

    :raises typer.BadParameter: it is neither.
    """
    from pgsub.common.subscription import AUTO

    word = str(text).strip().lower()
    if word in ("auto", str(AUTO)) and text != "0":
        return AUTO
    if not word.isdecimal() or not 1 <= int(word) <= MOST_WRITERS:
        raise typer.BadParameter(f"'{text}' is neither 'auto' nor a number from 1 to {MOST_WRITERS}.")
    return int(word)


def unsupported(message: str, detail: str, hint: str) -> Callable[[Value], Value]:
    """Return a callback for an option of which only the default is supported.

    :return: raises :class:`~pgsub.common.errors.StateForbids` for any other value.
    """

    def refuse(value: Value) -> Value:
        if value:
            raise StateForbids(message, detail=detail, hint=hint, sqlstate="0A000")
        return value

    return refuse


def parse_lsn(text: str | int) -> int:
    """Read ``X/X``."""
    if isinstance(text, int):
        return text
    from pgsub.protocol import lsn

    try:
        return lsn.parse_lsn(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def parse_seconds(text: str | float) -> float:
    """Read a number of seconds, or a duration."""
    if isinstance(text, str) and re.fullmatch(r"\d{1,9}(\.\d{1,3})?", text, re.ASCII):
        return max(float(text), 0.1)
    return parse_duration(text)


def parse_settings(items: Iterable[str]) -> dict[str, str]:
    """Read repeated ``key=value`` items.

    :raises UsageError: an item has no key or no ``=``.
    """
    settings = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise UsageError(f'"{item}" is not a setting: expected key=value')
        settings[key.strip()] = value
    return settings


def conninfo(value: str | None, option: str) -> str | None:
    """Return a connection string as given, or one line of stdin for ``-``.

    :param option: name of the option for the error.
    :raises UsageError: stdin has no line.
    """
    if value != "-":
        return value
    line = sys.stdin.readline() if sys.stdin else ""
    if not line.strip():
        raise UsageError(f"no connection string on standard input for {option}")
    return line.strip()


def take_conninfos() -> dict[str, str | None]:
    """Remove the variables with connection strings, so that children do not inherit them.

    :return: their values by option.
    """
    return {name: os.environ.pop(f"PGSUB_{name.upper()}", None) for name in ("connection", "target")}


def _warn_of_passwords(given: Mapping[str, str | None]) -> None:
    """Warn of passwords on the command line.

    :param given: connection strings by option.
    """
    shown = [
        option
        for option, value in given.items()
        if value and console.redacted(value) != value and any(value in word for word in sys.argv)
    ]
    if shown:
        what = "passwords" if len(shown) > 1 else "password"
        console.warning(
            f"the {what} in {' and '.join(shown)} can be read by other users of this machine",
            "Command lines are visible to everybody while they run, and shells keep them.",
            f"Use a passfile or a service, or give {shown[0]} - and the connection string on standard input.",
        )


def collected(options: type[Options], given: Mapping[str, Any]) -> Options:
    """Make a command's options from the command line, with the types of its fields.

    :param options: a dataclass. Values that are not its fields are left out.
    """
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    strings = ("connection", "target")
    _warn_of_passwords({f"--{name}": given.get(name) for name in strings})
    values |= {name: conninfo(given.get(name), f"--{name}") for name in strings}
    values |= {"state_dir": current.state_dir, "environment": current.environment}
    values["conf"] = parse_settings(given["conf"])
    return options(**{name: value for name, value in values.items() if name in options.__dataclass_fields__})


def value(metavar: str, meaning: str, **more: Any) -> Any:
    """Declare an option with a value. Its name is that of the parameter."""
    return typer.Option(metavar=metavar, help=meaning, **more)


def flag(name: str, meaning: str) -> Any:
    """Declare an option that is on if given."""
    return typer.Option(f"--{name}", help=meaning)


def choice(words: str, meaning: str) -> Any:
    """Declare an option whose value is one of some words.

    :param words: the words, separated by ``|``.
    """
    return typer.Option(metavar=words, case_sensitive=False, help=meaning)


def repeatable(metavar: str, meaning: str) -> Any:
    """Declare an option that may be repeated."""
    return typer.Option(metavar=metavar, help=f"{meaning}; may be repeated.")


def switch(name: str, meaning: str) -> Any:
    """Declare a switch whose value is None if not given. It is then on, unless other options turn it off."""
    return typer.Option(f"--{name}/--no-{name}", show_default=f"--{name}", help=meaning)


Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the subscription.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document.")]
#: Forms of the publisher's connection string, for the help.
PUBLISHER = "Publisher: a libpq conninfo, URI or service=NAME; - reads one line from standard input."
Connection = Annotated[
    str | None, typer.Option("--connection", metavar="CONNINFO", envvar="PGSUB_CONNECTION", help=PUBLISHER)
]
Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="CONNINFO",
        envvar="PGSUB_TARGET",
        help="Target database, in the same forms; PGHOST and its like complete it.",
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option("--timeout", metavar="D", parser=parse_duration, help="Give up after this time: 500ms, 30s, 5m, 2h."),
]
Master = Annotated[
    str | None, typer.Option("--master", metavar="URL", help="Spark master; the default is local[N] with enough slots.")
]
Conf = Annotated[list[str], repeatable("KEY=VALUE", "A Spark setting")]
