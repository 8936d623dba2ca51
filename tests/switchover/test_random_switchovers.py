"""Switchovers there and back under clients that write, while what takes part in them is killed at random.

The command, the launcher, both servers, the lines between them and pgsub's whole host are, at a step or at any moment;
then somebody runs the command again, or aborts. It is audited by what clients were told.

``PGSUB_SWITCHOVERS=200`` makes so many from a seed that is printed, as ``make soak`` does; ``PGSUB_SWITCHOVERS_SEED=N``
is that of a run before.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import patience
import pytest
from fix_program import Cli, until
from fix_proxy import Harm, Link, Proxy, unharmed
from fix_switchover import moving
from switching_clients import COUNTS, Counting

from pgsub.commands.switchover.transfer.steps import APPROACH
from pgsub.common import failpoints

pytestmark = pytest.mark.long

if TYPE_CHECKING:
    from fix_servers import Pair

COUNT = int(os.environ.get("PGSUB_SWITCHOVERS") or 0)
SEED = int(os.environ.get("PGSUB_SWITCHOVERS_SEED") or random.SystemRandom().randrange(2**32))
_POINTS = [name for name in failpoints.POINTS if name.startswith("switchover.") and not name.endswith("back_dropped")]
_RELEASING = ("releasing", "declined", "dropped")
_STEPS = [name for name in _POINTS if not name.endswith(_RELEASING)]
_CLIENTS = 3
#: Switchovers between two looks at all rows, for which clients stop.
_AUDIT = 10
#: A command waits so long for apply to come near, before there is a pause; one that was cut off asks again.
_PATIENCE = patience.SECONDS + APPROACH


class Ground:
    """Two servers, each with a line that pgsub uses, and a launcher."""

    def __init__(
        self, cli: Cli, pair: Pair, proxy: Callable[[str], Proxy], folder: Path, chance: random.Random
    ) -> None:
        self.cli, self.chance, self._folder = cli, chance, folder
        self.servers = (pair.publisher, pair.target)
        databases = (pair.pubdb, pair.subdb)
        self.lines = (proxy(pair.pubdb.conninfo), proxy(pair.subdb.conninfo))
        for database in databases:
            database.execute(COUNTS)
            database.execute("CREATE ROLE app LOGIN; GRANT pg_read_all_data, pg_write_all_data TO app")
        pair.pubdb.execute(f"INSERT INTO counts SELECT n, 0 FROM generate_series(0, {_CLIENTS - 1}) n")
        self.serve()
        ways = (self.lines[0].conninfo, self.lines[1].conninfo)
        self.mover = moving(cli, databases, ways, more=["counts"])
        conninfos = [server.conninfo("app", user="app") for server in self.servers]
        self.clients = Counting((conninfos[0], conninfos[1]), count=_CLIENTS, pause=0.03)
        self.said: list[str] = []
        self.kinds: Counter[str] = Counter()
        self._number = 0

    def serve(self) -> None:
        """Start a launcher."""
        self.launcher = self.cli.launcher(env={"PGSUB_RETRY_SECONDS": "0.5"})

    def note(self, text: str) -> None:
        """Keep and print."""
        self.said.append(text)
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)

    def command(self, *options: str, at: str | None, trouble: str | None) -> int:
        """Run ``switchover`` and harm something, at a step or at any moment.

        :return: the exit code.
        """
        self._number += 1
        go, marks = self._folder / f"go{self._number}", self._folder / f"marks{self._number}"
        marks.mkdir()
        env = {"PGSUB_FAILPOINTS": f"{at}=pause:{go}", "PGSUB_FAILPOINTS_DIR": str(marks)} if at else None
        words = ["switchover", "moved", *(["--back"] if self.mover.side else []), "--yes", *options]
        began = time.monotonic()
        started = self.cli.start(*words, env=env)
        if trouble is not None:
            if at is None:
                time.sleep(self.chance.random() * 4)
            else:
                until(lambda: (marks / at).exists() or started.poll() is not None, _PATIENCE)
            self.kinds[trouble] += 1
            Troubles(self, started).begin(trouble)
        go.touch()
        code = started.wait(_PATIENCE)
        for line in self.lines:
            line.harm = unharmed
        text = started.log.read_text()  # type: ignore[union-attr]
        where = f"{trouble} at {at}" if trouble else "undisturbed"
        self.note(f"  {' '.join(words[1:])}: {where}: {code} in {time.monotonic() - began:.1f} s\n{_indented(text)}")
        assert "Traceback" not in text and code != 12, text
        if self.launcher.poll() is not None:
            self.serve()
        return code

    def state(self) -> str:
        """What ``--status`` says."""
        return str(self.mover("--status")["state"])


def _indented(text: str) -> str:
    return "".join(f"      {line}\n" for line in text.splitlines()).rstrip()


class Troubles:
    """Each public method but ``begin`` is one; both servers and lines are whole again when it returns."""

    def __init__(self, ground: Ground, started: object) -> None:
        self._ground, self._chance, self._started = ground, ground.chance, started

    @staticmethod
    def names() -> list[str]:
        """All of them."""
        return sorted(name for name in vars(Troubles) if not name.startswith("_") and name not in ("begin", "names"))

    def begin(self, name: str) -> None:
        """Begin one."""
        getattr(self, name)()

    def kill_command(self) -> None:
        self._started.kill()  # type: ignore[attr-defined]

    def terminate_command(self) -> None:
        self._started.terminate()  # type: ignore[attr-defined]

    def interrupt_command(self) -> None:
        self._started.send_signal(signal.SIGINT)  # type: ignore[attr-defined]

    def kill_launcher(self) -> None:
        self._ground.launcher.kill()
        self._ground.launcher.wait(_PATIENCE)
        self._ground.serve()

    def kill_host(self) -> None:
        self.kill_command()
        self.kill_launcher()

    def kill_giving(self) -> None:
        self._kill(self._ground.mover.side)

    def kill_taking(self) -> None:
        self._kill(1 - self._ground.mover.side)

    def kill_both(self) -> None:
        self._kill(0, 1)

    def kill_all(self) -> None:
        self.kill_command()
        self._ground.launcher.kill()
        self._kill(0, 1)

    def _kill(self, *sides: int) -> None:
        servers = [self._ground.servers[side] for side in sides]
        for server in servers:
            server.kill9()
        time.sleep(self._chance.choice([0.0, 0.3, 2.0]))
        for server in servers:
            server.start()

    def cut(self) -> None:
        for _ in range(self._chance.choice([1, 5])):
            self._chance.choice(self._ground.lines).cut()
            time.sleep(self._chance.random() / 2)

    def stall(self) -> None:
        line = self._chance.choice(self._ground.lines)
        line.stall()
        time.sleep(self._chance.choice([0.5, 3.0]))
        line.resume()

    def lose_replies(self) -> None:
        self._harm("lose reply")

    def lose_requests(self) -> None:
        self._harm("swallow")

    def _harm(self, kind: Harm) -> None:
        """Not while the command stands still: it comes with what it does next."""
        line, chance = self._chance.choice(self._ground.lines), random.Random(self._chance.random())
        until_ = time.monotonic() + 3.0

        def harm(link: Link, data: bytes) -> Harm:
            return kind if time.monotonic() < until_ and chance.random() < 0.05 else "none"

        line.harm = harm

    def end_sessions(self) -> None:
        side = self._chance.choice([0, 1])
        query = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE usename = 'postgres'"
        with contextlib.suppress(Exception):
            self._ground.mover.rows(side, f"{query} AND pid <> pg_backend_pid() AND backend_type = 'client backend'")

    def run_beside(self) -> None:
        back = ["--back"] if self._ground.mover.side else []
        option = self._chance.choice(["--abort", "--no-verify"])
        ended = self._ground.cli("switchover", "moved", *back, "--yes", option)
        assert "Traceback" not in ended.stderr, ended.stderr


class Course:
    """Many switchovers; all of them grow from one seed."""

    def __init__(self, ground: Ground) -> None:
        self._ground, self._chance = ground, ground.chance
        self._deck: list[str] = []

    def next(self) -> str:
        """Any trouble; every kind comes once before any comes again."""
        if not self._deck:
            self._deck = Troubles.names()
            self._chance.shuffle(self._deck)
        return self._deck.pop()

    def move(self) -> None:
        """One switchover until the writes have moved, however often it is aborted before."""
        ground, chance = self._ground, self._chance
        mover, clients = ground.mover, ground.clients
        since, to = time.monotonic(), 1 - mover.side
        for _ in range(chance.choice([0, 1, 1, 2, 3])):
            if self._ended(self._disturbed()):
                break
            if chance.random() < 0.3 and self._abort():
                now = time.monotonic()
                until(lambda now=now: clients.wrote_on(mover.side, now) or clients.faults)
                assert not clients.wrote_on(to, since), "clients wrote on a target that was left as it was"
        else:
            self._undisturbed()
        mover.side = to
        now = time.monotonic()
        until(lambda: clients.wrote_on(to, now) or clients.faults)
        assert clients.both_wrote(since, to) == []
        assert not clients.faults and not clients.wrong(), (clients.faults, clients.wrong())
        if chance.random() < 0.5:
            mover.caught_up()

    def _undisturbed(self) -> None:
        """Let it finish; what a run before this one was undoing is undone first (3)."""
        codes: list[int] = []
        while not codes or codes == [3]:
            codes.append(self._ground.command("--no-verify", "--timeout", "2m", at=None, trouble=None))
        assert codes[-1] == 0 or self._ground.state() == "done", codes

    def _disturbed(self) -> int:
        chance = self._chance
        options = ["--timeout", chance.choice(["2s", "10s", "1m"])]
        options += chance.choice([[], ["--no-verify"], ["--no-verify"]])
        options += chance.choice([[], ["--fence", "connect"]])
        at = chance.choice([None, chance.choice(_STEPS)])
        return self._ground.command(*options, at=at, trouble=self.next())

    def _ended(self, code: int) -> bool:
        return code == 0 or self._ground.state() == "done"

    def _abort(self) -> bool:
        """Abort, with a trouble now and then; return whether all is as before."""
        if self._chance.random() < 0.5:
            at = f"switchover.{self._chance.choice(_RELEASING)}"
            self._ground.command("--abort", at=at, trouble=self.next())
        code = self._ground.command("--abort", at=None, trouble=None)
        state = self._ground.state()
        # 3: the target has taken the right
        assert (code, state) in ((0, "none"), (3, "under way"), (3, "done")), (code, state)
        return code == 0

    def audit(self) -> None:
        """Look at all rows of both sides, while nobody writes."""
        mover, clients = self._ground.mover, self._ground.clients
        query = "SELECT client, n, (SELECT count(*) FROM writes w WHERE w.client = c.client) FROM counts c ORDER BY 1"
        with clients.standing():
            mover.audit(clients)
            here, there = mover.rows(0, query), mover.rows(1, query)
            assert here == there
            # a transaction that nobody was told of may have been committed, but counts and writes are one
            assert all(n == rows and n >= clients.counted.get(client, [0])[-1] for client, n, rows in here), here


@contextlib.contextmanager
def _told(ground: Ground) -> Iterator[None]:
    """Print what was done, where that fails."""
    try:
        yield
    except BaseException:
        print("\n".join(ground.said[-40:]), file=sys.stderr)
        raise


@pytest.mark.skipif(not COUNT, reason="part of make soak")
@pytest.mark.timeout(300 + 300 * COUNT)
def test_writes_move_there_and_back_whatever_is_killed(
    make_cli: Callable[[str, str], Cli],
    own_pair: Callable[..., Pair],
    proxy: Callable[[str], Proxy],
    tmp_path: Path,
) -> None:
    print(f"PGSUB_SWITCHOVERS={COUNT} PGSUB_SWITCHOVERS_SEED={SEED}", file=sys.stderr, flush=True)
    ground = Ground(make_cli("", ""), own_pair(), proxy, tmp_path, random.Random(SEED))
    course = Course(ground)
    with _told(ground), ground.clients:
        for number in range(1, COUNT + 1):
            ground.note(f"switchover {number} of {COUNT}, to {1 - ground.mover.side}")
            course.move()
            if number % _AUDIT == 0 or number == COUNT:
                course.audit()
                ground.note(
                    f"audit: {len(ground.clients.acknowledged)} writes, {len(ground.clients.drawn)} values drawn"
                )
    assert ground.cli.stop(ground.launcher) == 0
    ground.note(f"{COUNT} switchovers, troubles: {dict(ground.kinds)}")
