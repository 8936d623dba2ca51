"""Runs the commands of README and docs/tasks, in the order of the pages, and compares what they print with the pages.

A command of pgsub that shows ``error``, a row that differs, or a preview with ``caution`` or ``risky``, is to fail.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fix_program import until
from psycopg.conninfo import conninfo_to_dict

from pgsub.demo.binaries import find_binaries

if TYPE_CHECKING:
    from fix_program import Cli
    from fix_servers import Database
    from forked import Started

_FOLDER = Path(__file__).parents[1] / "docs" / "tasks"
#: Begins with an empty machine: test_task_pages.py has a way of its own to run it.
BEGIN = _FOLDER / "1-begin.md"
#: Begins anew between two other servers.
MOVE = _FOLDER / "13-move-database.md"
#: Begins where the second page ends, too.
SLOT = _FOLDER / "15-slot-is-gone.md"
#: Begins with nothing.
TAKE_OVER = _FOLDER / "16-take-over.md"
#: Begins with nothing, under a launcher whose copies are held up.
BROKE_OFF = _FOLDER / "17-copy-broke-off.md"
PAGES = sorted(_FOLDER.glob("[0-9]*-*.md"), key=lambda page: int(page.name.partition("-")[0]))
#: Those that follow one another, between the same two servers.
IN_ORDER = [page for page in PAGES if page not in (BEGIN, MOVE, SLOT, TAKE_OVER, BROKE_OFF)]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"(?:^|\s+)#.*")
_RULE = re.compile(r"[-+ ]*")
#: What is different each time, and what stands for it.
_VARYING = (
    (re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?(?:\+\d\d(?::\d\d)?)?"), "TIME"),
    (re.compile(r"\b[0-9A-F]{1,8}/[0-9A-F]{1,8}\b"), "LSN"),
    (re.compile(r"\btransaction \d+"), "transaction XID"),
    (re.compile(r"\b\d+ (?:bytes|[kMGT]B)\b"), "SIZE"),
)
_FAILS = re.compile(r"(?:pgsub: )?error:? |caution: |risky: |\S+: (?:missing|extra|different) \(")


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return language and text of each block of a page, in order."""
    return [(found[1], found[2]) for found in _BLOCK.finditer(page.read_text())]


def prose(page: Path) -> str:
    """Return a page without its blocks."""
    return _BLOCK.sub("", page.read_text())


def typed(page: Path) -> Iterator[list[str]]:
    """Yield the words of each command of pgsub in the blocks of a page, without the program's name."""
    for _, block in blocks(page):
        for line in block.replace("\\\n", " ").splitlines():
            if found := re.match(r"(?:\$ )?pgsub (.*)", line):
                yield shlex.split(COMMENT.sub("", found[1]))


def commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the command lines of a page, each with the lines that it is to show."""
    for language, block in blocks(page):
        if language == "console":
            yield from parts(block)


def parts(block: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the command lines of one block, each with the lines that it is to show."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        line, *shown = part.rstrip("\n").split("\n")
        yield line, shown


def services(cli: Cli, databases: Mapping[str, Database]) -> None:
    """Write the user's service file.

    :param databases: by the name of their service.
    """
    params = {name: conninfo_to_dict(database.conninfo) for name, database in databases.items()}
    text = "".join(
        f"[{name}]\n" + "".join(f"{key}={value}\n" for key, value in words.items()) for name, words in params.items()
    )
    Path(cli.environment["HOME"], ".pg_service.conf").write_text(text)


def run(
    cli: Cli,
    databases: Mapping[str, Database],
    pages: Iterable[Path],
    serving: Started | None = None,
    *,
    before: Callable[[str], None] = lambda line: None,
) -> Started | None:
    """Run pages.

    :param databases: by the name of their service.
    :param serving: the launcher; a page that starts another one ends it, and moves to an empty state folder.
    :param before: called with each line before it is run, to wait for what a reader sees with their own eyes.
    :return: the launcher that serves at the end.
    """
    services(cli, databases)
    for database in databases.values():
        database.close()  # a session of its own would be one of an application
    for page in pages:
        for line, shown in commands(page):
            where = f"{page.name}: {line}"
            before(line)
            program, *words = shlex.split(line, comments=True)
            if program != "pgsub":
                compare(where, shown, shell(cli, line, shown))
            elif words[0] == "run":
                assert serving is not None and cli.stop(serving) == 0, where
                serving = _serve(cli, words, where, shown)
            else:
                ended = cli(*words)
                failing = any(map(_FAILS.match, shown))
                assert (ended.returncode != 0) == failing, f"{where}: {ended.stdout}{ended.stderr}"
                compare(where, shown, ended.stdout + ended.stderr)
    return serving


def _serve(cli: Cli, words: list[str], where: str, shown: list[str]) -> Started:
    """Start a launcher in an empty state folder, and wait until it has said what the page shows."""
    shutil.rmtree(cli.state)
    process = cli.start(*words, env={"PGSUB_RETRY_SECONDS": "0.5"})
    log: Path = process.log  # type: ignore[union-attr]

    def said() -> bool:
        with contextlib.suppress(AssertionError):
            compare(where, shown, log.read_text())
            return True
        assert process.poll() is None, log.read_text()
        return False

    until(said)
    return process


def shell(cli: Cli, line: str, shown: list[str]) -> str:
    """Run a line with programs of the server, of the tests' version, in the user's folder; return what it prints.

    :param shown: errors that the page shows are no failure.
    """
    home = cli.environment["HOME"]
    environment = {"PGSERVICEFILE": f"{home}/.pg_service.conf", "PATH": f"{find_binaries()}:{os.environ['PATH']}"}
    command = ["bash", "-o", "pipefail", "-c", line]
    ended = subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True)
    unexpected = [said for said in ended.stderr.splitlines() if "ERROR: " in said and said not in shown]
    assert (ended.returncode, unexpected) == (0, []), f"{line}: {ended.stderr}"
    return ended.stdout + ended.stderr


def compare(where: str, shown: list[str], printed: str) -> None:
    """Check that the shown lines come in their order; the form of a terminal's table does not count.

    An ellipsis stands for any text, or none: what a server has not counted yet is an empty cell.
    """
    left = iter([_plain(line) for line in printed.split("\n")])
    for wanted in filter(None, map(_plain, shown)):
        pattern = re.escape(wanted).replace(re.escape(" ..."), "(?: .*)?").replace(re.escape("..."), ".*")
        assert any(re.fullmatch(pattern, line) for line in left), f"{where}: nothing like {wanted!r} in:\n{printed}"


def _plain(line: str) -> str:
    if _RULE.fullmatch(line):
        return ""
    for varying, name in _VARYING:
        line = varying.sub(name, line)
    return " ".join(re.sub(r"[|\t]", " ", line).split())
