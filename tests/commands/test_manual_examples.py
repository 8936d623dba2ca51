"""The examples of the manual pages are run between two servers, with these servers' connection strings."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from fix_program import ROOT, Cli
from fix_servers import Database

sys.path.insert(0, str(ROOT / "tests" / "cli"))
from test_documented import MANUAL, _of_manual

Tables = tuple[Database, Database]

#: What is run elsewhere: it does not end, needs another server, or what the page supposes to have happened.
_ELSEWHERE = {
    "demo": "demo/test_demo.py",
    "run": "the launcher of this module; from_target in commands/test_from_target.py",
    "switchover": "scenarios of its own",
    "reconcile": "commands/test_reconcile.py",
    "origin-advance": "commands/test_origin_advance.py",
    "status sales --watch": "cli/test_status.py",
    "conflicts show": "commands/test_conflict_scenes.py",
    "conflicts replay": "commands/test_replay.py",
    "skip-lsn sales --preview": "commands/test_skip_preview.py",
    "skip-lsn sales --rows": "commands/test_skip_lsn.py",
    "alter sales --connection": "scenarios of a publisher that was upgraded or promoted",
    "wait sales --for lsn": "a position that this publisher will never have",
    "wait sales --for disabled": "below, after disable",
    "verify sales --repair": "commands/test_repair.py",
}
_SERVERS = ("--connection", "--target")


def _examples() -> Iterator[list[str]]:
    for page in MANUAL:
        for words in _of_manual(page):
            line = " ".join(words)
            if not any(line == one or line.startswith(f"{one} ") or line.startswith(f"{one}=") for one in _ELSEWHERE):
                yield words


def _here(cli: Cli, words: list[str]) -> list[str]:
    place = dict(zip(_SERVERS, (cli.connection, cli.target), strict=True))
    return [place.get(before, word) for before, word in zip(["", *words], words, strict=False)]


@pytest.fixture
def sales(launcher: Cli, tables: Tables) -> Iterator[Cli]:
    """The launcher's program between two servers with what the pages suppose to be there."""
    for database in tables:
        database.execute("CREATE TABLE orders (id int PRIMARY KEY); CREATE TABLE t (id int PRIMARY KEY)")
        database.execute("CREATE TABLE goods_back (id serial PRIMARY KEY)")
    tables[0].execute("CREATE PUBLICATION sales FOR TABLE orders, t; CREATE PUBLICATION returns FOR TABLE goods_back")
    tables[0].execute("INSERT INTO orders SELECT generate_series(1, 100)")
    launcher.connection, launcher.target = (database.conninfo for database in tables)
    yield launcher
    launcher("drop", "sales", "--if-exists", "--yes")


@pytest.mark.long
def test_the_examples_of_the_manual_pages_do_what_they_are_for(sales: Cli, tables: Tables) -> None:
    found = [words for words in _examples() if words[0] not in ("create", "drop")]
    creates = [words for words in _examples() if words[0] == "create"]
    assert len(found) > 25 and len(creates) > 3
    for words in [*creates, creates[0]]:
        assert sales("drop", "sales", "--if-exists", "--yes").returncode == 0
        tables[1].execute("TRUNCATE orders")
        ended = sales(*_here(sales, words))
        assert ended.returncode == 0, (words, ended.stderr)
    disabled = 0
    for words in found:
        ended = sales(*_here(sales, words))
        assert ended.returncode == 0, (words, ended.stdout + ended.stderr)
        if words[0] == "disable":  # the pages of other commands suppose that it is enabled
            assert sales("wait", "sales", "--for", "disabled", "--timeout", "1m").returncode == 0
            assert sales("enable", "sales").returncode == 0
            disabled += 1
        if "--hold" in words:
            assert sales("alter", "sales", "--release", words[-1]).returncode == 0
            assert sales("wait", "sales", "--for", "caught-up", "--timeout", "1m").returncode == 0
    assert disabled >= 1
    assert sales("wait", "sales", "--for", "caught-up", "--timeout", "1m").returncode == 0
    assert tables[1].value("SELECT count(*) FROM orders") == 100
    assert sales("drop", "sales", "--yes").returncode == 0
