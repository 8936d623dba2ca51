"""A command returns once the state store shows what it did, with a launcher and without; no mirror takes it back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fix_program import Cli, until
from fix_servers import Database
from thorough import thorough

Tables = tuple[Database, Database]
_TABLES = "SELECT relname FROM pg_subscription_rel ORDER BY 1"
_POINT = "mirror.before_state_db"


@dataclass(frozen=True)
class Step:
    """One command.

    :ivar words: without the program; ``s`` is the subscription.
    :ivar shows: query of the state store, and its rows at the moment in which the command has ended.
    :ivar before: what happens on the publisher before it; ``both`` on either side.
    :ivar after: further words of a ``wait``, or a command that brings the next step about.
    :ivar stale: whether it can end while a mirror stands between its look at the ledger and its write.
    """

    words: str
    shows: tuple[str, list[tuple[Any, ...]]]
    before: str = ""
    both: str = ""
    after: tuple[str, ...] = ()
    stale: bool = False

    def __str__(self) -> str:
        return self.words


def _tables(*names: str) -> tuple[str, list[tuple[Any, ...]]]:
    return _TABLES, [(name,) for name in names]


def _column(name: str, value: Any) -> tuple[str, list[tuple[Any, ...]]]:
    return f"SELECT {name} FROM pg_subscription", [(value,)]


_C = "CREATE TABLE c (id int PRIMARY KEY)"
_FILL = "INSERT INTO c SELECT generate_series(1, 2000); ALTER PUBLICATION p ADD TABLE c"
_HELD = "SELECT relname, releasing FROM pgsub_held_table"
_SYNCED = ("wait s --for synced --timeout 2m",)

STEPS = (
    Step("create s --no-wait", _tables("a", "b"), after=_SYNCED),
    Step("refresh s --no-wait", _tables("a", "b", "c"), both=_C, before=_FILL, after=_SYNCED, stale=True),
    Step("refresh s --no-wait", _tables("a", "b"), before="ALTER PUBLICATION p DROP TABLE c", stale=True),
    Step("alter s --add-publication q --no-wait", _tables("a", "b", "c"), before="CREATE PUBLICATION q FOR TABLE c"),
    Step("alter s --drop-publication q --no-wait", _tables("a", "b")),
    Step("alter s --set-publication q --no-wait --no-copy-data", _tables("c")),
    Step("alter s --set-publication p --no-wait --no-copy-data", _tables("a", "b"), after=_SYNCED),
    Step("alter s --add-publication q --no-refresh", _column("subpublications", '["p", "q"]')),
    Step("alter s --drop-publication q --no-refresh", _column("subpublications", '["p"]'), after=_SYNCED),
    Step("alter s --hold public.a", (_HELD, [("a", 0)]), stale=True),
    Step("alter s --release public.a", (f"{_HELD} WHERE NOT releasing", []), stale=True),
    Step("disable-on-error s on", _column("subdisableonerr", 1), stale=True),
    Step("disable-on-error s off", _column("subdisableonerr", 0), stale=True),
    Step("alter s --streaming off", _column("substream", "f")),
    Step("alter s --rename-to t", _column("subname", "t")),
    Step("alter t --rename-to s", _column("subname", "s"), after=("wait s --for caught-up --timeout 2m",)),
    Step("status s --reset-stats", ("SELECT stats_reset IS NULL FROM pg_stat_subscription_stats", [(0,)]), stale=True),
    Step("disable s", _column("subenabled", 0), stale=True),
    Step("alter s --two-phase", _column("subtwophasestate", "p")),
    Step("alter s --no-two-phase", _column("subtwophasestate", "d")),
    Step("alter s --slot-name none", _column("subslotname", None)),
    Step("alter s --slot-name s", _column("subslotname", "s")),
    Step("enable s", _column("subenabled", 1)),
    Step("drop s --yes", ("SELECT subname FROM pg_subscription", [])),
)


@dataclass
class Stale:
    """Lets the launcher's mirror stand between its look at the ledger and its write of the state store."""

    folder: Path
    go: Path

    @property
    def environment(self) -> dict[str, str]:
        """Of the launcher; nothing happens before :meth:`arm`."""
        (self.folder / _POINT).touch()
        return {"PGSUB_FAILPOINTS": f"{_POINT}=pause:{self.go}", "PGSUB_FAILPOINTS_DIR": str(self.folder)}

    def arm(self) -> None:
        """Wait until the mirror stands there.

        It may still be on its way out of the pause before this one; without its file it would stand there for good.
        """
        until(self._stands)

    def _stands(self) -> bool:
        self.go.unlink(missing_ok=True)
        (self.folder / _POINT).unlink(missing_ok=True)
        with contextlib.suppress(AssertionError):
            until((self.folder / _POINT).exists, 5)
            return True
        self.go.touch()
        return False

    def let_go(self) -> None:
        """Wait until it has written, and has looked again: it stands there once more, and is let go."""
        (self.folder / _POINT).unlink()
        self.go.touch()
        until((self.folder / _POINT).exists)


@pytest.fixture
def stale(tmp_path: Path) -> Stale:
    """With a folder of its own."""
    folder = tmp_path / "points"
    folder.mkdir()
    return Stale(folder, tmp_path / "go")


@pytest.fixture(params=[pytest.param(False, id="alone"), pytest.param(True, id="launcher")])
def run(request: pytest.FixtureRequest, cli: Cli, stale: Stale) -> Iterator[Callable[[Step], None]]:
    """Runs the command of a step, with or without a launcher, and looks at once."""
    env = {**stale.environment, "PGSUB_RETRY_SECONDS": "0.5"}
    running = cli.launcher(env=env) if request.param else None

    def shown(step: Step, when: str) -> None:
        query, rows = step.shows
        assert cli.sql(query) == rows, f"{step} {when}"

    def do(step: Step) -> None:
        steered = step.stale and running is not None
        if steered:
            stale.arm()
        words = step.words.split()
        ended = cli.create(words[1], *words[2:]) if words[0] == "create" else cli(*words)
        assert ended.returncode == 0, f"{step}: {ended.stderr}"
        shown(step, "when it has ended")
        if steered:
            stale.let_go()
            shown(step, "after what the mirror had seen before")
        for further in step.after if running is not None else ():
            ended = cli(*further.split())
            assert ended.returncode == 0, f"{step}, {further}: {ended.stderr}"

    yield do
    stale.go.touch()
    if running is not None:
        assert running.poll() is None
        assert cli.stop(running) == 0


@pytest.mark.long
def test_every_command_returns_once_the_state_store_shows_what_it_did(run, tables: Tables) -> None:
    for step in STEPS:
        for database in tables if step.both else ():
            database.execute(step.both)
        if step.before:
            tables[0].execute(step.before)
        run(step)
        if step.after == _SYNCED and step.before == _FILL:
            rows = tables[1].value("SELECT count(*) FROM c")
            assert rows in (0, 2000)  # nobody copies, or a wait that has ended has seen all of it


@pytest.mark.long
def test_a_wait_behind_a_refresh_never_misses_a_new_table(served, tables: Tables) -> None:
    cli, name = served
    for number in (0, 1, *thorough(range(2, 5))):
        for database in tables:
            database.execute(f"CREATE TABLE n{number} (id int PRIMARY KEY)")
        tables[0].execute(f"INSERT INTO n{number} SELECT generate_series(1, 5000)")
        tables[0].execute(f"ALTER PUBLICATION p ADD TABLE n{number}")
        assert cli("refresh", name, "--no-wait").returncode == 0
        assert cli("wait", name, "--for", "synced", "--timeout", "2m").returncode == 0
        assert tables[1].value(f"SELECT count(*) FROM n{number}") == 5000
