"""Runs the commands of docs/tasks, in the order of the pages, and compares what they print with what the pages show.

A command of pgsub that shows ``error``, or a preview with ``caution`` or ``risky``, is to fail.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from psycopg.conninfo import conninfo_to_dict

from pgsub.demo.binaries import find_binaries

if TYPE_CHECKING:
    from fix_program import Cli
    from fix_servers import Database

_FOLDER = Path(__file__).parents[1] / "docs" / "tasks"
#: Begins anew between two other servers.
MOVE = _FOLDER / "13-move-database.md"
#: Begins where the second page ends, too.
SLOT = _FOLDER / "15-slot-is-gone.md"
#: Begins with nothing.
TAKE_OVER = _FOLDER / "16-take-over.md"
PAGES = sorted(_FOLDER.glob("[0-9]*-*.md"), key=lambda page: int(page.name.partition("-")[0]))
_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_RULE = re.compile(r"[-+ ]*")


def commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the command lines of a page, each with the lines that it is to show."""
    for block in _BLOCK.findall(page.read_text()):
        yield from parts(block)


def parts(block: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the command lines of one block, each with the lines that it is to show."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        line, *shown = part.rstrip("\n").split("\n")
        yield line, shown


def services(cli: Cli, databases: dict[str, Database]) -> None:
    """Write the user's service file.

    :param databases: by the name of their service.
    """
    params = {name: conninfo_to_dict(database.conninfo) for name, database in databases.items()}
    text = "".join(
        f"[{name}]\n" + "".join(f"{key}={value}\n" for key, value in words.items()) for name, words in params.items()
    )
    Path(cli.environment["HOME"], ".pg_service.conf").write_text(text)


def run(cli: Cli, databases: dict[str, Database], pages: Iterable[Path] = ()) -> None:
    """Run pages.

    :param databases: by the name of their service.
    :param pages: by default all that follow one another.
    """
    services(cli, databases)
    for page in pages or [page for page in PAGES if page not in (MOVE, SLOT, TAKE_OVER)]:
        for line, shown in commands(page):
            program, *words = shlex.split(line)
            if program in ("pg_dump", "pg_restore"):
                shell(cli, line)
                continue
            if program == "psql":
                _sql(f"{page.name}: {line}", databases[words[0].removeprefix("service=")], words[1:], shown)
                continue
            assert program == "pgsub", line
            ended = cli(*words)
            failing = any(shows.startswith(("error ", "caution: ", "risky: ")) for shows in shown)
            assert (ended.returncode != 0) == failing, f"{page.name}: {line}: {ended.stdout}{ended.stderr}"
            compare(f"{page.name}: {line}", shown, ended.stdout + ended.stderr)


def shell(cli: Cli, line: str) -> str:
    """Run a line with programs of the server, of the tests' version, in the user's folder; return what it prints."""
    home = cli.environment["HOME"]
    environment = {"PGSERVICEFILE": f"{home}/.pg_service.conf", "PATH": f"{find_binaries()}:{os.environ['PATH']}"}
    command = ["bash", "-o", "pipefail", "-c", line]
    ended = subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, ""), f"{line}: {ended.stderr}"
    return ended.stdout


def _sql(where: str, database: Database, words: list[str], shown: list[str]) -> None:
    option, statement = words
    database.close()  # a psql of its own
    if option == "-c":
        database.execute(statement)
        assert shown == [], f"{where}: -Atc shows rows without a frame"
        return
    assert option == "-Atc", where
    compare(where, shown, "\n".join("|".join(map(str, row)) for row in database.rows(statement)))


def compare(where: str, shown: list[str], printed: str) -> None:
    """Check that the shown lines come in their order; the form of a terminal's table does not count."""
    left = iter([_plain(line) for line in printed.split("\n")])
    for wanted in filter(None, map(_plain, shown)):
        pattern = re.escape(wanted).replace(re.escape("..."), ".*")
        assert any(re.fullmatch(pattern, line) for line in left), f"{where}: nothing like {wanted!r} in:\n{printed}"


def _plain(line: str) -> str:
    return "" if _RULE.fullmatch(line) else " ".join(re.sub(r"[|\t]", " ", line).split())
