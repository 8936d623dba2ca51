"""``config.toml``: defaults of settings and of commands' options. ``pgsub config`` shows the values in effect.

A top-level setting takes the place of an environment variable that is not set, so workers get it as part of the
environment. A table with the name of a command contains defaults of its options. Mirrors the order of ``guc-file.l``
and the clients: command line, environment, file, default.
"""

from __future__ import annotations

import os
import shlex
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pgsub.common.errors import StateForbids
from pgsub.common.machine.path_safety import exchangeable


@dataclass(frozen=True)
class Setting:
    """A setting of the program."""

    name: str  #: name in config.toml
    variable: str  #: environment variable
    help: str
    default: str | None = None


#: In the order in which they are shown.
SETTINGS = (
    Setting("state_dir", "PGSUB_STATE_DIR", "The state folder, if --state-dir is not given.", "~/.local/state/pgsub"),
    Setting("connection", "PGSUB_CONNECTION", "The publisher for pgsub create, if --connection is not given."),
    Setting("target", "PGSUB_TARGET", "The target for pgsub create, if --target is not given."),
    Setting("color", "PG_COLOR", "Colours of standard error, if --color is not given: auto, always or never.", "auto"),
    Setting("debug", "PGSUB_DEBUG", "1 as --debug.", "0"),
    Setting(
        "retry_seconds",
        "PGSUB_RETRY_SECONDS",
        "Seconds between attempts, instead of wal_retrieve_retry_interval.",
        None,
    ),
    Setting(
        "sequence_seconds",
        "PGSUB_SEQUENCE_SECONDS",
        "Seconds between checks of sequences whose values do not change.",
        "30",
    ),
    Setting("set_based", "PGSUB_SET_BASED", "off applies every change by a statement of its own.", "on"),
    Setting("spool_limit", "PGSUB_SPOOL_LIMIT", "Room for transactions in progress, for each worker.", "20GB"),
    Setting("conflict_history", "PGSUB_CONFLICT_HISTORY", "Conflicts that are kept of each subscription.", "10000"),
)


@dataclass
class Configuration:
    """The contents of a configuration file."""

    path: Path | None = None  #: None without a file
    settings: dict[str, str] = field(default_factory=dict)  #: values by name
    commands: dict[str, dict[str, Any]] = field(default_factory=dict)  #: defaults of options, by command and parameter
    used: set[str] = field(default_factory=set)  #: names of settings in effect, which the environment did not override


#: The configuration of this process.
configuration = Configuration()


def find() -> Path | None:
    """Return the file: ``PGSUB_CONFIG``, else the user's, else the machine's; None if there is none."""
    chosen = os.environ.get("PGSUB_CONFIG")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CONFIG_HOME", "")
    own = Path(base) if os.path.isabs(base) else Path("~/.config").expanduser()
    places = own / "pgsub" / "config.toml", Path("/etc/pgsub/config.toml")
    return next((place for place in places if place.is_file()), None)


def load(commands: Mapping[str, Any]) -> Configuration:
    """Read the file. Put its settings into the environment unless they are already set there.

    :param commands: the program's commands by name, whose options the file may name.
    :raises StateForbids: the file cannot be read or trusted, or has an unknown setting or option.
    """
    vars(configuration).update(vars(Configuration(find())))
    if configuration.path is None:
        return configuration
    for name, value in _read(configuration.path).items():
        if isinstance(value, dict):
            configuration.commands[name] = _options(configuration.path, name, value, commands)
        else:
            configuration.settings[name] = _text(value)
    unknown = configuration.settings.keys() - {setting.name for setting in SETTINGS}
    if unknown:
        raise _invalid(configuration.path, f'there is no setting "{min(unknown)}"')
    for setting in SETTINGS:
        if setting.name in configuration.settings and not os.environ.get(setting.variable):
            os.environ[setting.variable] = configuration.settings[setting.name]
            configuration.used.add(setting.name)
    return configuration


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            _check(path, os.fstat(file.fileno()))
            text = file.read().decode("utf-8")
        found = tomllib.loads(text)
        null = next((name for name, value in found.items() if "\0" in _strings(value)), None)
    except OSError as error:
        raise StateForbids(f'could not open configuration file "{path}": {error.strerror}') from None
    except RecursionError:
        raise _invalid(path, "it is nested too deeply") from None
    except ValueError as error:
        # The full text may quote a line with a password.
        raise _invalid(path, str(error).rpartition("(")[2].rstrip(")") or "it is not valid TOML") from None
    if null is not None:
        raise _invalid(path, f'"{null}" contains a null character')
    return found


def _check(path: Path, status: os.stat_result) -> None:
    """Refuse a file that another user wrote or could change: it names servers and Spark options."""
    problem = hint = None
    if status.st_uid not in (0, os.geteuid()):
        problem = f"It belongs to user id {status.st_uid}, this process runs as {os.geteuid()}."
    elif status.st_mode & 0o022 and not stat.S_ISCHR(status.st_mode):  # /dev/null
        problem, hint = "Group or others may write to it.", f"chmod go-w {shlex.quote(str(path))}"
    else:
        problem, hint = exchangeable(path)
    if problem is not None:
        raise StateForbids(f'configuration file "{path}" is not safe', detail=problem, hint=hint)


def _options(path: Path, name: str, given: dict[str, Any], commands: Mapping[str, Any]) -> dict[str, Any]:
    if name not in commands:
        raise _invalid(path, f'there is no command "{name}"')
    known = {option.lstrip("-").replace("-", "_"): one.name for one in commands[name].params for option in one.opts}
    found = {}
    for key, value in given.items():
        parameter = known.get(key.replace("-", "_"))
        if parameter is None:
            raise _invalid(path, f'command "{name}" has no option "{key}"')
        found[parameter] = value if isinstance(value, bool | list) else _text(value)
    return found


def _strings(value: Any) -> str:
    """Join all strings of a value, which must not contain null characters, like the environment."""
    if isinstance(value, dict):
        return " ".join(map(_strings, value.values()))
    return " ".join(map(_strings, value)) if isinstance(value, list) else str(value)


def _text(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _invalid(path: Path, reason: str) -> StateForbids:
    return StateForbids(f'invalid configuration file "{path}": {reason}', hint="See pgsub.toml(5).")
