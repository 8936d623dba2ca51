"""The examples of the manual pages are run between two servers, with these servers' connection strings."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pexpect
import pytest
from fix_program import Cli, until
from fix_served import lose
from fix_servers import Database
from manual_pages import PAGES, between, examples
from terminal import terminal

Tables = tuple[Database, Database]

#: What is run where it has servers of its own.
_ELSEWHERE = {
    "demo": "demo/test_demo.py, the whole show with make thorough",
    "alter sales --connection host=db4": "scenarios/test_upgrades.py, behind pg_upgrade",
}
_MOVES = "switchover"
#: What supposes that something has happened.
_IN_SCENES = (
    _MOVES,
    *("conflicts show", "conflicts replay", "skip-lsn sales --preview", "skip-lsn sales --rows", "origin-advance"),
    *("reconcile", "verify sales --repair", "alter sales --connection", "wait sales --for lsn", "status sales --watch"),
    "run",
)
#: Run behind ``disable``.
_WAITS = ["wait", "sales", "--for", "disabled"]


def _begins(words: list[str], *with_one_of: str) -> bool:
    line = " ".join(words)
    return any(line == one or line.startswith((f"{one} ", f"{one}=")) for one in with_one_of)


def _examples() -> list[list[str]]:
    every = [words for page in PAGES for words in examples(page)]
    return [words for words in every if not _begins(words, *_ELSEWHERE)]


def _here(cli: Cli, words: list[str]) -> list[str]:
    return between(words, cli.connection, cli.target)


@pytest.fixture
def sales(launcher: Cli, tables: Tables) -> Iterator[Cli]:
    """The launcher's program between two servers with what the pages suppose to be there."""
    for database in tables:
        database.execute("CREATE TABLE orders (id int PRIMARY KEY, v text); CREATE TABLE t (id int PRIMARY KEY)")
        database.execute("CREATE TABLE goods_back (id serial PRIMARY KEY)")
    tables[0].execute("CREATE PUBLICATION sales FOR TABLE orders, t; CREATE PUBLICATION returns FOR TABLE goods_back")
    tables[0].execute("INSERT INTO orders SELECT generate_series(1, 100)")
    launcher.connection, launcher.target = (database.conninfo for database in tables)
    yield launcher
    launcher("drop", "sales", "--if-exists", "--yes")


@pytest.mark.long
def test_the_examples_of_the_manual_pages_do_what_they_are_for(sales: Cli, tables: Tables) -> None:
    plain = [words for words in _examples() if words != _WAITS and not _begins(words, *_IN_SCENES)]
    found = [words for words in plain if words[0] not in ("create", "drop")]
    creates = [words for words in plain if words[0] == "create"]
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
            assert sales(*_WAITS, "--timeout", "1m").returncode == 0
            assert sales("enable", "sales").returncode == 0
            disabled += 1
        if "--hold" in words:
            assert sales("alter", "sales", "--release", words[-1]).returncode == 0
            assert sales("wait", "sales", "--for", "caught-up", "--timeout", "1m").returncode == 0
    assert disabled >= 1
    assert sales("wait", "sales", "--for", "caught-up", "--timeout", "1m").returncode == 0
    assert tables[1].value("SELECT count(*) FROM orders") == 100
    assert sales("drop", "sales", "--yes").returncode == 0


class Scenes:
    """The examples that suppose that something has happened; each is run once.

    :ivar left: those that were not run yet.
    """

    def __init__(self, sales: Cli, *, moves: bool = False) -> None:
        self._sales = sales
        found = [words for words in _examples() if _begins(words, *_IN_SCENES)]
        self.left = [words for words in found if _begins(words, _MOVES) is moves]

    def words(self, line: str, replaced: dict[str, str] | None = None) -> list[str]:
        """The example that begins so, which is the first one left, with what is different here."""
        found = next(words for words in self.left if _begins(words, line))
        self.left = [words for words in self.left if words != found]
        return [(replaced or {}).get(word, word) for word in _here(self._sales, found)]

    def run(self, line: str, code: int = 0, replaced: dict[str, str] | None = None) -> str:
        """Run it; what it printed."""
        words = self.words(line, replaced)
        ended = self._sales(*words)
        assert ended.returncode == code, (words, ended.stdout + ended.stderr)
        return ended.stdout

    def answered(self, line: str, again: int | None = None) -> None:
        """Run it on a terminal, and agree to what it asks.

        :param again: the exit code of what changed nothing because it took too long: it is run once more.
        """
        words = self.words(line)
        while (ended := self._agreed(words)).exitstatus == again:
            pass
        assert ended.exitstatus == 0, ended.before

    def _agreed(self, words: list[str]) -> pexpect.spawn:
        with self._typed(words) as child:
            while child.expect([r"\[y/N\]", pexpect.EOF]) == 0:
                child.sendline("y")
        return child

    def on_terminal(self, line: str) -> pexpect.spawn:
        """Start it on a terminal."""
        return self._typed(self.words(line))

    def _typed(self, words: list[str]) -> pexpect.spawn:
        return terminal(["-m", "pgsub", *words], self._sales.environment, folder=self._sales.state.parent)


@pytest.mark.long
def test_the_examples_that_suppose_that_something_has_happened_do_what_they_are_for(
    sales: Cli, tables: Tables, make_cli: Callable[[str, str], Cli]
) -> None:
    pubdb, subdb = tables
    scenes = Scenes(sales)

    def ok(*words: str) -> None:
        ended = sales(*words)
        assert ended.returncode == 0, (words, ended.stdout + ended.stderr)

    def caught_up() -> None:
        ok("wait", "sales", "--for", "caught-up", "--timeout", "1m")

    def rows() -> list[int]:
        return [number for (number,) in subdb.rows("SELECT id FROM orders WHERE id > 100 ORDER BY 1")]

    def stopped() -> None:
        ok("wait", "sales", "--for", "error", "--timeout", "1m")

    ok(*sales.words("sales", publication="sales"))
    subdb.execute("INSERT INTO orders VALUES (101, 'mine')")
    pubdb.execute("INSERT INTO orders VALUES (101, 'theirs'), (102, 'theirs')")
    stopped()
    assert "orders" in scenes.run("skip-lsn sales --preview", code=6)
    scenes.run("skip-lsn sales --rows")
    caught_up()
    assert rows() == [101, 102]
    skips = "SELECT id, finish_lsn FROM pgsub_conflict WHERE action = 'skipped'"
    [(number, position)] = until(lambda: sales.sql(skips))
    assert "insert_exists" in scenes.run("conflicts show", replaced={"7": str(number)})
    subdb.execute("DELETE FROM orders WHERE id = 101")
    assert "would_apply" in scenes.run("conflicts replay sales 7", replaced={"7": str(number)})
    scenes.run("conflicts replay sales --lsn", replaced={"0/14C0378": position})
    assert rows() == [101, 102]

    with scenes.on_terminal("status sales --watch") as child:
        child.expect("sales")
        child.sendintr()
        child.expect(pexpect.EOF)
    assert child.exitstatus == 0
    subdb.execute("INSERT INTO orders VALUES (103)")
    pubdb.execute("INSERT INTO orders VALUES (103)")
    stopped()
    behind = str(pubdb.value("SELECT pg_current_wal_flush_lsn()"))
    assert "orders" in scenes.run("origin-advance sales 0/14C0379 --preview", code=6, replaced={"0/14C0379": behind})
    ok("disable", "sales")
    scenes.run("origin-advance", replaced={"0/14C0379": behind})
    ok("enable", "sales")
    pubdb.execute("INSERT INTO orders VALUES (104)")
    now = str(pubdb.value("SELECT pg_current_wal_flush_lsn()"))
    scenes.run("wait sales --for lsn", replaced={"lsn=16/B374D848": f"lsn={now}"})
    assert rows() == [101, 102, 103, 104]

    subdb.execute("DELETE FROM orders WHERE id = 104")
    scenes.run("verify sales --repair --dry-run", code=6)
    assert rows() == [101, 102, 103]
    scenes.answered("verify sales --repair")
    assert rows() == [101, 102, 103, 104]
    other = f"{sales.connection} application_name=moved"
    scenes.run("alter sales --connection", replaced={sales.connection: other})
    caught_up()

    lose(pubdb, "sales")
    pubdb.execute("INSERT INTO orders VALUES (105)")
    stopped()
    scenes.run("reconcile sales --dry-run")
    assert rows()[-1] == 104
    scenes.answered("reconcile sales")
    caught_up()
    assert rows()[-1] == 105
    lose(pubdb, "sales")
    pubdb.execute("INSERT INTO orders VALUES (106)")
    stopped()
    scenes.run("reconcile sales --yes --no-wait")
    subdb.wait("SELECT count(*) FROM orders WHERE id = 106", value=1)
    caught_up()

    ok("drop", "sales", "--yes")
    job = make_cli(sales.connection, sales.target)
    assert job(*job.words("sales", "--no-copy-data", "--no-wait", publication="sales")).returncode == 0
    pubdb.execute("INSERT INTO orders VALUES (107)")
    assert job(*scenes.words("run sales --until-caught-up")).returncode == 0
    assert rows()[-1] == 107
    elsewhere = make_cli(sales.connection, sales.target)
    serving = elsewhere.start(*scenes.words("run sales --from-target"))
    pubdb.execute("INSERT INTO orders VALUES (108)")
    subdb.wait("SELECT count(*) FROM orders WHERE id = 108", value=1)
    assert elsewhere.stop(serving) == 0
    everything = elsewhere.start(*scenes.words("run"))
    pubdb.execute("INSERT INTO orders VALUES (109)")
    subdb.wait("SELECT count(*) FROM orders WHERE id = 109", value=1)
    assert elsewhere.stop(everything) == 0
    assert elsewhere("drop", "sales", "--yes").returncode == 0
    assert scenes.left == []


@pytest.mark.long
def test_the_examples_of_a_switchover_move_the_writes_over_and_back(sales: Cli, tables: Tables) -> None:
    pubdb, subdb = tables
    scenes = Scenes(sales, moves=True)
    subdb.execute("CREATE PUBLICATION sales_back FOR TABLE orders, t")
    for name, written in ("pause-pool", "paused"), ("resume-pool-there", "resumed"):
        script = sales.state.parent / name
        script.write_text(f'#!/bin/sh\necho "$PGSUB_SWITCHOVER" >> {sales.state.parent}/{written}\n')
        script.chmod(0o755)

    def write(side: Database, number: int) -> None:
        with side.connect() as session:
            session.execute("INSERT INTO orders VALUES (%s)", (number,))

    def caught_up(name: str) -> None:
        assert sales("wait", name, "--for", "caught-up", "--timeout", "1m").returncode == 0

    assert sales(*sales.words("sales", publication="sales")).returncode == 0
    assert "The pause would take about" in scenes.run("switchover sales --dry-run")
    scenes.answered("switchover sales --timeout", again=8)
    write(subdb, 101)
    caught_up("sales_back")
    scenes.answered("switchover sales --back")
    write(pubdb, 102)
    caught_up("sales")
    scenes.answered("switchover sales --fence-command")
    assert [(sales.state.parent / name).read_text() for name in ("paused", "resumed")] == ["fence\n", "promote\n"]
    write(subdb, 103)
    caught_up("sales_back")
    with pubdb.connect() as session:
        rows = session.execute("SELECT id FROM orders WHERE id > 100 ORDER BY 1").fetchall()
    assert rows == [(101,), (102,), (103,)]
    assert sales("drop", "sales_back", "--yes").returncode == 0
    assert scenes.left == []
