"""The commands of README.md, typed by somebody who reads it from its beginning, with the roles that it creates."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import task_pages
from fix_program import ROOT, Cli, until
from fix_served import lose
from fix_servers import Database, Pair
from installation import copy_sources, run_lines
from pexpect import EOF
from terminal import terminal

from pgsub.demo.binaries import find_binaries

README = ROOT / "README.md"
_TABLES = """
CREATE TABLE orders (id serial PRIMARY KEY, ref text, state text);
CREATE TABLE customers (id int PRIMARY KEY, name text);
CREATE TABLE goods_back (id int PRIMARY KEY);
INSERT INTO orders (ref, state) SELECT 'A-' || n, 'open' FROM generate_series(1, 5) n;
CREATE PUBLICATION returns FOR TABLE goods_back;
"""
#: What the page says of orders and customers is said of what its lines add later, too.
_RETURNS = ("GRANT SELECT ON TABLE goods_back TO repl", "GRANT ALL ON TABLE goods_back TO app")
#: One transaction that conflicts, and two that wait behind it.
_CONFLICT = (
    "INSERT INTO orders VALUES (6, 'A-6', 'open'), (7, 'A-7', 'open'); UPDATE orders SET state = 'paid' WHERE id = 1",
    "INSERT INTO customers VALUES (1, 'one')",
    "INSERT INTO customers VALUES (2, 'two')",
)
#: What is asked, and what is typed then.
_ANSWERS = {r"\[y/N\]: ": "y", "Type the name of the subscription to continue: ": "sales"}
#: Commands that say what is still missing, and end with this code.
_CODES = {"pgsub switchover sales --dry-run": 3}


class Reader:
    """Somebody at a terminal, who answers yes where a command asks.

    :param cli: the program; its environment is that of the terminal.
    """

    def __init__(self, cli: Cli, pair: Pair) -> None:
        self.cli = cli
        self._pair = pair
        self.serving = False

    def here(self, text: str) -> str:
        """The page's words with the addresses of this machine's servers."""
        for name, server in (("db1", self._pair.publisher), ("db2", self._pair.target)):
            text = text.replace(f"host={name} ", f"host=127.0.0.1 port={server.port} ")
        return text

    def types(self, line: str, shown: list[str]) -> None:
        """Run a command, and compare what it prints with what the page shows; the roles must be enough for it."""
        if line == "pgsub run":
            self.cli.launcher(env={"PGSUB_RETRY_SECONDS": "0.5"})
            return
        environment = {**self.cli.environment, "NO_COLOR": "1", "TERM": "dumb"}
        typed = terminal(["-m", *shlex.split(self.here(line))], environment, columns=250)
        said = ""
        while (question := typed.expect([*_ANSWERS, EOF])) < len(_ANSWERS):
            said += typed.before + typed.after
            typed.sendline([*_ANSWERS.values()][question])
        said += typed.before
        typed.close()
        assert typed.exitstatus == _expected(line, shown), f"{line}: {said}"
        assert line in _CODES or not re.search("privilege|permission|GRANT", said), f"{line}: {said}"
        task_pages.compare(line, shown, said.replace("\r", ""))

    def psql(self, side: str, text: str) -> None:
        """Run SQL in the database shop of a server."""
        server = {"publisher": self._pair.publisher, "target": self._pair.target}[side]
        words = [find_binaries() / "psql", server.conninfo("shop"), "-v", "ON_ERROR_STOP=1"]
        ended = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr


def _expected(line: str, shown: list[str]) -> int:
    """A preview that would lose something ends with 6."""
    if any(one.startswith(("caution: ", "risky: ")) for one in shown):
        return 6
    return _CODES.get(line, 0)


def _lines(block: str) -> Iterator[str]:
    """Yield the commands of a block without output."""
    for line in block.replace("\\\n", " ").splitlines():
        if command := task_pages.COMMENT.sub("", line):
            yield command


@pytest.fixture
def reader(make_cli: Callable[[str, str], Cli], own_pair: Callable[..., Pair]) -> tuple[Reader, Database, Database]:
    """Make a reader who has a database shop on one server, and an empty one on another."""
    pair = own_pair()
    source, copy = Database(pair.publisher, "shop"), Database(pair.target, "shop")
    source.execute(_TABLES)
    return Reader(make_cli("", ""), pair), source, copy


@pytest.mark.long
@pytest.mark.own_spark
@pytest.mark.timeout(600)
def test_the_commands_of_the_readme_do_what_it_shows(reader: tuple[Reader, Database, Database], tmp_path: Path) -> None:
    somebody, source, copy = reader
    left = task_pages.blocks(README)

    def block(language: str, begins: str) -> str:
        [found] = [text for one, text in left if one == language and text.startswith(begins)]
        left.remove((language, found))
        return found

    _try_it(block("sh", "make demo"))
    _install(somebody, block("sh", "python3 -m venv .venv"), tmp_path / "checkout")
    somebody.psql("publisher", block("sql", "CREATE ROLE repl") + _RETURNS[0])
    somebody.psql("target", block("sql", "CREATE ROLE app") + _RETURNS[1])
    for line in _lines(block("sh", "pgsub create sales")):
        somebody.types(line, [])
    for line in _lines(block("sh", "pgsub refresh sales")):
        if line == "pgsub reconcile sales":
            lose(source, "sales")
        somebody.types(line, [])
    _conflict(somebody, block("console", "$ pgsub status sales"), source, copy)
    for line in _lines(block("sh", "pgsub alter sales --hold")):
        somebody.types(line, [])
    _on_a_cluster(block("sh", "pgsub run --master"))
    assert left == []  # every block of the page
    somebody.types("pgsub drop sales", [])


def _try_it(block: str) -> None:
    """demo/test_demo.py runs the demo, and who reads this runs the tests."""
    for line in _lines(block):
        words = [*shlex.split(line), "--dry-run"]
        ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr


def _install(somebody: Reader, block: str, folder: Path) -> None:
    """Install the program in a checkout, copy the definitions, and create the publication."""
    copy_sources(folder)
    path = f"{find_binaries()}:{os.environ['PATH']}"
    run_lines(somebody.here(block), folder, PATH=path, PGUSER="postgres")
    assert (folder / ".venv" / "bin" / "pgsub").exists()


def _conflict(somebody: Reader, block: str, source: Database, copy: Database) -> None:
    """The page's conflict, in a subscription of the two tables that it began with."""
    somebody.types("pgsub alter sales --drop-publication returns", [])
    somebody.types("pgsub wait sales --for caught-up --timeout 1m", [])
    copy.execute("INSERT INTO orders VALUES (7, 'A-7', 'local')")
    for transaction in _CONFLICT:
        source.execute(transaction)
    until(lambda: "2 transactions behind it" in somebody.cli("status", "sales").stdout)
    for line, shown in task_pages.parts(block):
        somebody.types(task_pages.COMMENT.sub("", line), shown)
    assert copy.rows("SELECT ref, state FROM orders WHERE id IN (1, 6, 7) ORDER BY id") == [
        ("A-1", "paid"),
        ("A-6", "open"),
        ("A-7", "local"),
    ]
    assert copy.value("SELECT count(*) FROM customers") == 2


def _on_a_cluster(block: str) -> None:
    """spark/test_spark_page.py runs a command with these settings on a cluster."""
    [line] = _lines(block)
    page = (ROOT / "docs" / "spark.md").read_text()
    assert " ".join(line.split()[2:]) in page
