"""JSON on stdout: one document a call, described by the files in ``pgsub/cli/schema``.

Inside a ``schema_version`` fields are only ever added.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from pgsub.cli.output.console import pasted
from pgsub.common.errors import PgsubError
from pgsub.common.text import CONTROLS, printable

SCHEMA_VERSION = 1
_TO_PASTE = frozenset({"hint", "next", "commands"})  #: what holds commands, in every document


class StdoutClosed(Exception):
    """The end of a program whose stdout nobody reads any more."""


_CLEAR = "\x1b[H\x1b[2J"


def emit(text: str, *, clear: bool = False) -> None:
    """Write a result to stdout; nothing that others chose in it controls a terminal.

    :param clear: it is the first of a screen that is drawn anew.
    :raises StdoutClosed: if its reader has gone.
    :raises PgsubError: if it cannot be written, as on a full disk.
    """
    if sys.stdout is None:
        return
    try:
        sys.stdout.write(f"{_CLEAR if clear else ''}{printable(text)}\n")
        sys.stdout.flush()
    except OSError as error:
        # what is still buffered has nowhere to go: the interpreter must not try again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise StdoutClosed from None
        raise PgsubError(f"could not write to standard output: {error.strerror}") from None


def emit_document(command: str, content: dict[str, Any], *, one_line: bool = False) -> None:
    """Write the document of a command.

    :param one_line: for a sequence of documents, one in a line.
    """
    document = {"schema_version": SCHEMA_VERSION, "command": command, **_pasted(content)}
    emit(_text(document, indent=None if one_line else 2))


def _pasted(value: Any, *, to_paste: bool = False) -> Any:
    """Apply :func:`~pgsub.cli.output.console.pasted` to the commands of a document."""
    if isinstance(value, dict):
        return {key: _pasted(one, to_paste=key in _TO_PASTE) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_pasted(one, to_paste=to_paste) for one in value]
    return pasted(value) if to_paste and isinstance(value, str) else value


def emit_error(error: PgsubError) -> None:
    """Write the document of a failure."""
    fields = {name: getattr(error, name) for name in ("sqlstate", "message", "detail", "hint", "context")}
    content = {"code": error.exit_code, "class": type(error).__name__, **fields}
    emit(_text({"schema_version": SCHEMA_VERSION, "error": _pasted(content)}, indent=2))


def _text(document: dict[str, Any], *, indent: int | None) -> str:
    """Format a document; characters that control terminals are escaped, not only those of ASCII."""
    text = json.dumps(document, ensure_ascii=False, indent=indent)
    return CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
