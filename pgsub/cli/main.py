"""The program: runs the command tree, and turns exceptions into messages and exit codes.

pgsub ends the process nowhere else, except where its import is interrupted (:mod:`pgsub.__main__`). Mirrors ``main()``
of the client programs in ``src/bin``.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

import typer

from pgsub.cli.general_options import current
from pgsub.cli.output import console, documents
from pgsub.cli.pages import PAGES
from pgsub.common.errors import InternalError, PgsubError, UsageError
from pgsub.common.machine.out_of_resources import out_of_resources

_LIKE = re.compile(r": (--?\S+) \((?:Possible options: |Did you mean )(.*?)\??\)")
_ONE_OF = re.compile(r"'([^']*)' is not one of (.*)")
_NUMBER = re.compile(r"Input should be a valid (?:integer|number).*")
_AT_LEAST = re.compile(r"Input should be greater than or equal to (\S+)")
INTERRUPTED = 130  #: 128 + SIGINT, like in shells


def main() -> NoReturn:
    """Run the ``pgsub`` script."""
    sys.exit(run(sys.argv[1:]))


def run(args: Sequence[str]) -> int:
    """Run one command line.

    :param args: the words after the program's name.
    :return: the exit code.
    """
    if args[:1] == ["__complete"]:
        from pgsub.cli.names import complete

        return complete(args[1:])
    try:
        return _invoke(args)
    except KeyboardInterrupt:
        return INTERRUPTED
    except UsageError as error:
        error.hint = error.hint or _help(" ".join(["pgsub", *[word for word in args if word in PAGES][:1]]))
        return _fail(error, args)
    except PgsubError as error:
        return _fail(error, args)
    except documents.StdoutClosed:
        return PgsubError.exit_code
    except Exception as error:
        return _bug(error, args)


def _invoke(args: Sequence[str]) -> int:
    from pgsub.cli.app import program
    from pgsub.cli.configuration import load

    try:
        tree = program()
        defaults = load(tree.commands).commands
        code = tree(args=list(args), prog_name="pgsub", standalone_mode=False, default_map=defaults)
    except typer.TyperException as error:
        raise _usage(error) from None
    except typer.Abort:
        console.say("")  # the prompt's line has not ended
        raise PgsubError("canceled", detail="Nothing was changed.") from None
    return code if isinstance(code, int) else 0


def _usage(error: typer.TyperException) -> UsageError:
    """Turn an error of the parser into one of pgsub's."""
    text = console.redacted(error.format_message()).rstrip(".").removeprefix("Invalid value: ")
    text = text.replace(": Value error, ", ": ")  # text of a validator that the parser calls
    text = _NUMBER.sub("must be a number", text)
    text = _AT_LEAST.sub(r"must be at least \1", _ONE_OF.sub(_one_of, _LIKE.sub(_like, text)))
    context = getattr(error, "ctx", None)
    hint = _help(context.command_path) if context is not None else None
    return UsageError(text[:1].lower() + text[1:], hint=hint)


def _one_of(match: re.Match[str]) -> str:
    return f'"{match[1]}" is not one of {match[2].replace(chr(39), "")}'


def _like(match: re.Match[str]) -> str:
    """Name the options that resemble a mistyped one. The parser suggests too many."""
    near = difflib.get_close_matches(match[1], match[2].split(", "), cutoff=0.7)
    return f": {match[1]}" + (f" (did you mean {' or '.join(near)}?)" if near else "")


def _help(path: str) -> str:
    return f"Try this for the options and examples:\n{path} --help"


def _fail(error: PgsubError, args: Sequence[str]) -> int:
    console.error(error)
    if "--json" in args:
        try:
            documents.emit_error(error)
        except documents.StdoutClosed:
            pass
        except PgsubError as unwritten:
            console.error(unwritten)
    return error.exit_code


def _bug(error: Exception, args: Sequence[str]) -> int:
    debug = current.debug or os.environ.get("PGSUB_DEBUG", "0") not in ("", "0")
    if debug:
        import traceback

        console.say(console.printable(traceback.format_exc().rstrip()))
    if (lack := out_of_resources(error)) is not None:
        return _fail(lack, args)
    text = console.redacted(str(error)).partition("\n")[0]
    report = InternalError(
        f"unexpected {type(error).__name__}: {text}",
        hint=None if debug else "This is a bug in pgsub. Run the command again with --debug and report what it shows.",
    )
    return _fail(report, args)
