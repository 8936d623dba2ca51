"""Messages on stderr: errors, warnings and notices in the format and colors of the server's client programs.

Mirrors ``src/common/logging.c`` and, for the fields of a message, ``pqBuildErrorMessage3`` in ``fe-protocol3.c``.
"""

from __future__ import annotations

import re
import shlex
import sys

from pgsub.cli.general_options import current
from pgsub.cli.pages import PAGES
from pgsub.common.errors import PgsubError, field, one_line
from pgsub.common.subscription import SECRETS
from pgsub.common.text import line as line
from pgsub.common.text import printable as printable

_SGR = {"locus": "01", "error": "01;31", "warning": "01;35", "note": "01;36"}
_COMMAND = re.compile(r"(?:^ *|(?<=: )|(?<=&& ))pgsub ([a-z-]+)\b")
_COMPLETE = re.compile(r"--(?:help|state-dir)\b")
#: Keywords of secrets, also URI-encoded, and those that Spark itself conceals (spark.redaction.regex).
_NAME = "|".join("".join(f"(?:{letter}|%{ord(letter):02x})" for letter in name) for name in SECRETS)
_SPARK = re.compile(r"(?i)secret|password|token|access[.]?key")
_VALUE = r"(?:'(?:[^'\\]|\\.)*'|(?:[^\s\\]|\\.)+)"
_SECRET = re.compile(rf"(?is)((?:{_NAME})['\"]?\s*[=:]\s*){_VALUE}")
_SECRET_OF_OPTION = re.compile(f"(?s){_VALUE}")
#: A name and the text up to its value. It matches once per name, not at each of its letters.
_OPTION = re.compile(r"(?<![\w.-])([\w.-]+)['\"]?\s*[=:]\s*")
#: It always extends to the next space or @, so that no part of a text is read for two matches.
_URI = re.compile(r"(://[^\s:/@]*:)[^\s@]*(@?)")


def pasted(text: str) -> str:
    """Add ``--state-dir``, if this command was given it, to each command to paste in a text.

    Commands are on lines of their own, after a colon at the end of a sentence, or joined with ``&&``.
    """
    folder = current.state_dir_option
    if folder is None or "pgsub " not in text:
        return text
    more = f" --state-dir {shlex.quote(folder)}"
    return "\n".join([_completed(one, more) if "pgsub " in one else one for one in text.split("\n")])


def _completed(line: str, more: str) -> str:
    """Complete the commands of a line in one pass, because servers choose its contents and length."""
    done, parts = 0, []
    start = max((match.end() for match in _COMPLETE.finditer(line)), default=0)
    for run in re.finditer("[^&]+", line):
        end = run.end() - (run.end() < len(line))
        if end < run.end() and not line.startswith(" &&", end):
            continue
        command = _COMMAND.search(line, max(start, run.start()), run.end())
        if command is not None and command[1] in PAGES:
            parts += [line[done:end], more]
            done = end
    return "".join([*parts, line[done:]])


def redacted(text: str) -> str:
    """Remove secrets in connection strings, URIs and Spark options from a text that quotes the command line."""
    concealed = _URI.sub(lambda match: f"{match[1]}****@" if match[2] else match[0], text)
    return _SECRET.sub(lambda match: match[1] + "****", _without_secrets_of_spark(concealed))


def _without_secrets_of_spark(text: str) -> str:
    done, parts = 0, []
    for option in _OPTION.finditer(text):
        _, _, name = option[1].lower().partition("spark.")
        if option.start() >= done and _SPARK.search(name):
            value = _SECRET_OF_OPTION.match(text, option.end())
            if value is not None:
                parts += [text[done : option.end()], "****"]
                done = value.end()
    return "".join([*parts, text[done:]])


def say(text: str) -> None:
    """Write to stderr in one write. A lost stderr is no reason to stop."""
    try:
        if sys.stderr is not None:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()
    except (OSError, ValueError):
        return


def error(problem: PgsubError) -> None:
    """Show the error that ended the command: ``pgsub: error: …``, then DETAIL, CONTEXT and HINT."""
    say("\n".join([_first("error", problem.message), *map(_field, problem.lines())]))


def warning(message: str, detail: str | None = None, hint: str | None = None) -> None:
    """Show a warning: ``pgsub: warning: …``, then DETAIL and HINT."""
    if current.verbosity >= 0:
        fields = [field(name, text) for name, text in (("DETAIL", detail), ("HINT", hint)) if text]
        say("\n".join([_first("warning", message), *map(_field, fields)]))


def notice(message: str, hint: str | None = None) -> None:
    """Show ``NOTICE:  …``, then HINT."""
    if current.verbosity >= 0:
        fields = [f"NOTICE:  {one_line(message)}", *([field("HINT", hint)] if hint else [])]
        say("\n".join(map(_field, fields)))


def _first(kind: str, message: str) -> str:
    return f"{_paint('locus', 'pgsub: ')}{_paint(kind, kind + ': ')}{line(message)}"


def _field(line: str) -> str:
    name, colon, text = line.partition(":")
    return _paint("note", name + colon) + pasted(printable(text))


def _paint(kind: str, text: str) -> str:
    return f"\x1b[{_SGR[kind]}m{text}\x1b[0m" if current.coloured() else text
