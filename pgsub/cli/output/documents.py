"""JSON on stdout: one document per call, described by the files in ``pgsub/cli/schema``.

Within a ``schema_version``, fields are only added.
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
_TO_PASTE = frozenset({"hint", "next", "commands"})  #: keys of values that contain commands, in every document


class StdoutClosed(Exception):
    """The end of a program whose stdout has no reader any more."""


_CLEAR = "\x1b[H\x1b[2J"


def emit(text: str, *, clear: bool = False) -> None:
    """Write a result to stdout. Text from others in it cannot control the terminal.

    :param clear: clear the screen first.
    :raises StdoutClosed: its reader has gone.
    :raises PgsubError: the result cannot be written, for example on a full disk.
    """
    if sys.stdout is None:
        return
    try:
        sys.stdout.write(f"{_CLEAR if clear else ''}{printable(text)}\n")
        sys.stdout.flush()
    except OSError as error:
        # The interpreter must not try to write the buffered rest at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise StdoutClosed from None
        raise PgsubError(f"could not write to standard output: {error.strerror}") from None


def emit_document(command: str, content: dict[str, Any], *, one_line: bool = False) -> None:
    """Write the document of a command.

    :param one_line: write it in one line, for a sequence of documents.
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
    """Format a document. Characters that control terminals are escaped, including those outside of ASCII."""
    text = json.dumps(document, ensure_ascii=False, indent=indent)
    return CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
