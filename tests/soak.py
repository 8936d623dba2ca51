"""A random workload for minutes with pgsub and the server's own subscriber attached, kills and restarts in between.

``make soak ARGS="--minutes 30 --json FILE"``. At the end nothing may be behind, both targets must be equal to each
other and to the publisher, and no launcher may have ended by itself. Between the troubles some bursts are left alone:
how their lag grows and vanishes is printed and written as a time series, so that a lag that swings shows.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import workload_meeting as meeting
from fix_faults import Site
from fix_servers import Database
from psycopg import sql
from soak_lag import QUIET, TABLE, Lag
from workload import TYPES, Workload, grow_table, published
from workload_compare import rows, unlike_publisher
from workload_run import Run

from pgsub.demo.servers import Server, Setting

_SCHEMA = "w"
_LOAD = "CREATE TABLE load (id bigint PRIMARY KEY, n int, pad text)"
#: Seconds within which any lag must vanish.
LIMIT = 120.0
#: Seconds of lag after a burst has been drained and nobody writes: more of it is an oscillation.
_SWING = 1.0
_TARGET: dict[str, Setting] = {"track_commit_timestamp": True, "wal_retrieve_retry_interval": "500ms"}
#: One small transaction of a burst: an insert, an update of one of the last, a delete of an old one.
_SMALL = """
DO $$ BEGIN FOR i IN {first}..{last} LOOP
INSERT INTO load VALUES (i, 0, 'burst'); UPDATE load SET n = n + 1 WHERE id = i - i % 50;
DELETE FROM load WHERE id = i - 50000; COMMIT; END LOOP; END $$
"""
_LARGE = "INSERT INTO load SELECT -g, 0, repeat('x', 100) FROM generate_series(1, {rows}) g"


class Soak:
    """Two servers, three databases, both subscribers, and what is done to them.

    :param folder: private, for the program's state.
    :param burst: small transactions of a burst; its large one has as many rows.
    """

    def __init__(self, folder: Path, seed: int, burst: int) -> None:
        self.chance = random.Random(seed)
        self._burst = burst
        self._numbers = itertools.count(1)
        self._ids = itertools.count(1, burst)
        self.publisher, self.target = Server(fast=True), Server(fast=True, settings=_TARGET)
        self.events: list[tuple[float, str]] = []
        self.bursts: list[dict[str, Any]] = []
        self.troubles: Counter[str] = Counter()
        self._deck: list[Callable[[], None]] = []
        self._folder, self._seed = folder, seed

    def __enter__(self) -> Soak:
        try:
            for server in (self.publisher, self.target):
                server.init()
                server.start()
            self._define()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if hasattr(self, "lag"):
            self.lag.stop()
        if hasattr(self, "site"):
            self.site.close()
        for server in (self.target, self.publisher):
            server.destroy()

    def _define(self) -> None:
        self.pubdb = Database(self.publisher, "app")
        self.subdb, self.native = Database(self.target, "app"), Database(self.target, "native")
        work = Workload(tuple(self.chance.sample(range(2**24), 6)), (), two_phase=True, immediate=False)
        self.tables = [grow_table(_SCHEMA, number, seed, work) for number, seed in enumerate(work.tables)]
        for database in (self.pubdb, self.subdb, self.native):
            database.execute(f"{TYPES}; CREATE SCHEMA {_SCHEMA}; {_LOAD}; {TABLE}")
            for table in self.tables:
                database.connection.execute(table.publisher if database is self.pubdb else table.target)
        self.pubdb.execute("ALTER DATABASE app SET logical_decoding_work_mem = '256kB'")
        text = sql.SQL("CREATE PUBLICATION p FOR TABLE load, beat, {}").format(published(self.tables))
        self.pubdb.connection.execute(text)
        self._run = Run([], self.pubdb.connection, self.tables, _SCHEMA, self.chance)
        self._sides = meeting.Sides(self.pubdb, (self.subdb, self.native), self.tables)
        self._subscribe()
        self.lag = Lag(self.pubdb, {"native": self.native, "pgsub": self.subdb})
        self.lag.start()
        self._run.fill()

    def _subscribe(self) -> None:
        # not parallel: the server's own worker of 18.6 crashed in it, again and again, and its server with it
        self.native.execute(
            f"CREATE SUBSCRIPTION native CONNECTION '{self.pubdb.conninfo}' PUBLICATION p"
            " WITH (copy_data = false, streaming = on, two_phase = true)"
        )
        self.site = Site(self.pubdb, self.subdb, self._folder, "pgsub")
        options = ("--no-wait", "--no-copy-data", "--two-phase", "--streaming", "parallel")
        self.site.end(self.site.create(*options))
        self._launcher = self.site.start("run")

    # the course of it

    def work(self, minutes: float) -> None:
        """Bursts, troubles and pauses for so long, at least one trouble and one burst.

        Every kind of trouble comes once before any comes again.
        """
        deadline = time.monotonic() + minutes * 60
        rounds = itertools.cycle([self._troubled, self._measured, self._troubled, self._meeting, self._troubled])
        self._settle()
        for number, one in enumerate(rounds):
            if number >= 2 and time.monotonic() > deadline:
                break
            one()
            time.sleep(self.chance.choice([0.0, 0.2, 1.0]))
        self._finish()
        self._settle()
        self.lag.stop()
        for target in (self.subdb, self.native):  # what the last beats wrote while it stopped
            target.wait("SELECT coalesce(max(n), 0) FROM beat", value=self._last_beat(), seconds=LIMIT)

    def _last_beat(self) -> int:
        return int(self.pubdb.value("SELECT coalesce(max(n), 0) FROM beat"))

    def _finish(self) -> None:
        """Decide what is prepared."""
        self._run.control = self.pubdb.connection  # another one after a restart
        self._run.finish()

    def _settle(self) -> dict[str, float]:
        return self.lag.vanish(self._alive, LIMIT)

    def _alive(self) -> None:
        assert self._launcher.poll() is None, f"the launcher ended by itself:\n{self.site.said()}"

    def _measured(self) -> None:
        """A burst that nobody disturbs, from no lag until there is none again, and a quiet time after it."""
        self._settle()
        begun = self.lag.now()
        self._write_burst()
        ended = self.lag.now()
        drained = self._settle()
        time.sleep(QUIET)
        found = self.lag.behaviour(begun, drained, ended)
        self.bursts.append({"began": round(begun, 3), "ended": round(ended, 3), **found})
        self._say(f"burst of {ended - begun:.1f} s: {found}")

    def _write_burst(self) -> None:
        first = next(self._ids)
        with self.pubdb.connect() as session:
            session.execute("SET synchronous_commit = off")
            session.execute(_SMALL.format(first=first, last=first + self._burst - 1).encode())
            session.execute(_LARGE.format(rows=self._burst).encode())
            session.execute("UPDATE load SET n = n + 1 WHERE id < 0")
            session.execute("DELETE FROM load WHERE id < 0")

    def _meeting(self) -> None:
        """A change of the schema while nothing is under way."""
        self._finish()
        self._settle()
        action = self.chance.choice([one for one in meeting.ACTIONS if one is not meeting.stray])
        self._say(action(self._sides, self.chance))

    def _troubled(self) -> None:
        """Random transactions, and meanwhile a burst or none, and one trouble at any moment."""
        trouble = self._next_trouble()
        self.troubles[trouble.__name__.strip("_")] += 1
        self._say(f"trouble: {trouble.__name__.strip('_').replace('_', ' ')}")
        with self._beside(self._write_burst if self.chance.random() < 0.5 else None):
            with self._beside(None if trouble == self._restart_publisher else trouble):
                self._phase(self.chance.randrange(50, 200))
        if trouble == self._restart_publisher:
            trouble()

    @contextlib.contextmanager
    def _beside(self, what: Callable[[], None] | None) -> Iterator[None]:
        """Run something in another thread meanwhile, after a random moment; its error is ours."""
        errors: list[BaseException] = []
        pause = self.chance.random()

        def body() -> None:
            time.sleep(pause)
            try:
                if what is not None:
                    what()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=body)
        thread.start()
        try:
            yield
        finally:
            thread.join()
        if errors:
            raise errors[0]

    def _phase(self, transactions: int) -> None:
        with contextlib.ExitStack() as stack:
            sessions = [stack.enter_context(contextlib.closing(self.pubdb.connect())) for _ in range(3)]
            for session in sessions:
                session.execute("SET lock_timeout = '10ms'")
            self._run.sessions, self._run.control = sessions, self.pubdb.connection
            seeds = [self.chance.randrange(2**24) for _ in range(transactions)]
            self._run.phase(seeds, lambda: time.sleep(self.chance.choice([0.0, 0.05, 0.2])))

    # troubles

    def _next_trouble(self) -> Callable[[], None]:
        if not self._deck:
            self._deck = [self._kill_worker, self._crash_target, self._kill_jvm, self._restart_publisher]
            self._deck += [self._kill_launcher, self._end_walsenders]
            self.chance.shuffle(self._deck)
        return self._deck.pop()

    def _kill_worker(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it ended by itself just now
            os.kill(self.site.worker_pid(), signal.SIGKILL)

    def _kill_jvm(self) -> None:
        with contextlib.suppress(OSError):  # it has not begun yet, or has ended
            pid = int(self.site.jvm_pid.read_text())
            if Path(f"/proc/{pid}/comm").read_text() == "java\n":
                os.kill(pid, signal.SIGKILL)

    def _kill_launcher(self) -> None:
        self._launcher.kill()
        self._launcher.wait()
        self._launcher = self.site.start("run")

    def _crash_target(self) -> None:
        self._restart(self.target, self.chance.choice(["fast", "immediate", "immediate"]))

    def _restart_publisher(self) -> None:
        self._restart(self.publisher, self.chance.choice(["fast", "immediate", "immediate"]))

    def _restart(self, server: Server, mode: Any) -> None:
        server.stop(mode)
        time.sleep(self.chance.choice([0.0, 0.5]))
        server.start()

    def _end_walsenders(self) -> None:
        with self.pubdb.connect() as session:
            session.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_replication")

    # what it comes to

    @property
    def statements(self) -> Counter[str]:
        """How often each kind of random statement did something."""
        return self._run.done

    def differences(self) -> list[str]:
        """What is not equal at the end; empty if all is well."""
        found = [f"{t.name.as_string()} on both targets" for t in self.tables if self._unlike(t)]
        for target in (self.subdb, self.native):
            found += unlike_publisher(self.pubdb, target, self.tables)
            for name in ("load", "beat"):
                query = f"SELECT count(*), sum(hashtextextended(t::text, 0)) FROM {name} t"
                if target.rows(query) != self.pubdb.rows(query):
                    found.append(f"{name} on {target.name}")
        return found

    def _unlike(self, table: Any) -> bool:
        return rows(self.subdb, table) != rows(self.native, table)

    def swings(self) -> list[str]:
        """Bursts after whose end pgsub's lag came back."""
        return [f"burst at {one['began']:.1f} s" for one in self.bursts if one["pgsub"]["afterwards"] > _SWING]

    def document(self) -> dict[str, Any]:
        """All of it: seconds since the start."""
        return {
            "schema_version": 1,
            "seed": self._seed,
            "troubles": dict(self.troubles),
            "statements": dict(self.statements),
            "bursts": self.bursts,
            "events": self.events,
            "lag": [[at, lags["native"], lags["pgsub"]] for at, lags in self.lag.series],
        }

    def _say(self, text: str) -> None:
        self.events.append((round(self.lag.now(), 3), text))
        print(f"{self.lag.now():8.1f} s  {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Run it.

    :return: exit status: 1 if something is lost, behind, or swings.
    """
    parser = argparse.ArgumentParser(prog="soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=None, help="of an earlier run")
    parser.add_argument("--burst", type=int, default=20_000, metavar="N", help="transactions of a burst")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write lag over time, bursts and troubles")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the servers end with us
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(2**32)
    print(f"seed {seed}", file=sys.stderr)
    folder = Path(tempfile.mkdtemp(prefix="pgsub-soak-"))
    try:
        with Soak(folder, seed, arguments.burst) as soak:
            try:
                soak.work(arguments.minutes)
                wrong = [*soak.differences(), *soak.swings()]
            except (AssertionError, psycopg.Error) as error:
                traceback.print_exc()
                wrong = [str(error), soak.site.said()]
            if arguments.json:
                arguments.json.write_text(json.dumps(soak.document(), indent=1) + "\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("\n".join(f"FAILED: {text}" for text in wrong) or "both targets are equal to the publisher, no lag is left")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
