"""What a soak happens on: two servers, both subscribers, proxies on pgsub's two lines, and its launcher."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import workload_meeting as meeting
from embedded import Server
from fix_faults import Site, Writer
from fix_proxy import Proxy
from fix_servers import Database
from forked import Started
from psycopg import sql
from psycopg.conninfo import make_conninfo
from soak_lag import TABLE, Lag
from workload import ENCODINGS, TYPES, Workload, grow_table, published
from workload_run import Run

from pgsub.common.failpoints import POINTS
from pgsub.demo.servers import Setting

SCHEMA = "w"
#: What a server's sessions and prepared transactions do, where one waits for another.
SESSIONS = """
    SELECT datname, pid, backend_type, application_name, state, wait_event_type, wait_event,
           pg_blocking_pids(pid)::text, clock_timestamp() - xact_start, left(query, 80)
      FROM pg_stat_activity WHERE pid <> pg_backend_pid()
    UNION ALL SELECT database, NULL, 'prepared', gid, NULL, NULL, NULL, NULL, clock_timestamp() - prepared, NULL
    FROM pg_prepared_xacts
"""
#: Seconds within which any lag must vanish.
LIMIT = 600.0
NAME = "pgsub"  #: of the subscription that lasts, and of its slot
_TARGET: dict[str, Setting] = {
    "track_commit_timestamp": True,
    "wal_retrieve_retry_interval": "500ms",
    "max_prepared_transactions": 200,  # of both subscribers
}
_TABLES = f"""
CREATE TABLE load (id bigint PRIMARY KEY, n int, pad text);
CREATE TABLE audit (id bigint, pad text);
CREATE TABLE counter (id bigint PRIMARY KEY, n int, pad text);
CREATE TABLE keyed (id bigint PRIMARY KEY, n int, pad text);
CREATE TABLE audit_prepared (id bigint, pad text);
CREATE TABLE counter_prepared (id bigint PRIMARY KEY, n int, pad text);
CREATE TABLE huge (id bigint PRIMARY KEY, n int, pad text);
CREATE TABLE huge_full (id bigint PRIMARY KEY, n int, pad text);
CREATE TABLE holes (id bigint PRIMARY KEY, n int, pad text);
CREATE TABLE looped (id bigint, pad text);
ALTER TABLE huge ALTER pad SET STORAGE EXTERNAL; ALTER TABLE huge_full ALTER pad SET STORAGE EXTERNAL;
ALTER TABLE huge_full REPLICA IDENTITY FULL; ALTER TABLE looped REPLICA IDENTITY FULL;
{TABLE}
"""
#: Tables that both subscriptions have, apart from those of the random workload.
COMMON = (
    *("load", "audit", "counter", "keyed", "audit_prepared", "counter_prepared", "huge", "huge_full", "looped", "beat"),
)
_KILLS = ("kill", "kill:LAUNCHER", "kill:JVM", "sleep:3")
#: What may happen at a failpoint, by the beginning of its name.
_ACTIONS = {
    "apply.": (*_KILLS, "error", "error:40001"),
    "copy.": (*_KILLS, "error"),
    "sync.": (*_KILLS, "error"),
    "mirror.": ("kill:LAUNCHER", "sleep:3"),
    "state.write": ("sleep:6",),
    "thread.": ("die",),
}
#: Raising there is for tests of the one place: the reply is lost by the proxy here.
_LEFT_OUT = ("apply.commit_reply_lost",)


class Ground:
    """Made by entering it.

    :param folder: private, for the program's state.
    :ivar encodings: of publisher and targets.
    """

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folder, self.chance = folder, chance
        self.origins = chance.choice([100, 12])
        self.encodings = chance.choice([ENCODINGS[0], *ENCODINGS])
        self.publisher = Server(fast=True)
        self.target = Server(fast=True, settings={**_TARGET, "max_active_replication_origins": self.origins})
        self.counts: Counter[str] = Counter()  #: faults that were injected
        self.proxies: list[Proxy] = []
        self.writers: list[Writer] = []
        self._armed: set[str] = set()
        self._deadly: set[str] = set()
        self._struck = False  #: a failpoint that kills was reached since the launcher started

    def __enter__(self) -> Ground:
        try:
            for server in (self.publisher, self.target):
                server.init()
                server.start()
            self._define()
            self._subscribe()
            self._write()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if hasattr(self, "lag"):
            self.lag.stop()
        for writer in self.writers:
            if writer.is_alive():
                writer.stop()
        if hasattr(self, "site"):
            self.site.close()
        for proxy in self.proxies:
            proxy.close()
        for server in (self.target, self.publisher):
            server.destroy()

    def _define(self) -> None:
        first, second = self.encodings
        self.pubdb = Database(self.publisher, "app", first)
        self.subdb, self.native = Database(self.target, "app", second), Database(self.target, "native", second)
        work = Workload(
            tuple(self.chance.sample(range(2**24), 6)), (), two_phase=True, immediate=False, encodings=self.encodings
        )
        self.tables = [grow_table(SCHEMA, number, seed, work) for number, seed in enumerate(work.tables)]
        for database in (self.pubdb, self.subdb, self.native):
            database.execute(f"{TYPES}; CREATE SCHEMA {SCHEMA}; {_TABLES}")
            for table in self.tables:
                database.connection.execute(table.publisher if database is self.pubdb else table.target)
        self.pubdb.execute("ALTER DATABASE app SET logical_decoding_work_mem = '256kB'")
        text = sql.SQL("CREATE PUBLICATION p FOR TABLE {}, {}").format(
            sql.SQL(", ".join(COMMON)), published(self.tables)
        )
        self.pubdb.connection.execute(text)
        # the server's own subscriber stops for good at what happens there, see docs/differences.md
        self.pubdb.execute("CREATE PUBLICATION only_here FOR TABLE holes")
        self.run = Run([], self.pubdb.connection, self.tables, SCHEMA, self.chance)
        self.run.decoded = self._decoded
        self.run.mark = b"INSERT INTO audit VALUES (pg_current_xact_id()::text::bigint, 'random')"
        self.sides = meeting.Sides(self.pubdb, (self.subdb, self.native), self.tables, work)

    def _decoded(self) -> bool:
        """Wait until the server's own subscriber is sent what is there now: false if it takes long.

        What is rolled back before it is decoded may stop it for good, see docs/differences.md.
        """
        [(wanted,)] = self.pubdb.rows("SELECT pg_current_wal_flush_lsn()::text")
        query = (
            "SELECT coalesce(bool_or(sent_lsn >= %s), false) FROM pg_stat_replication WHERE application_name = 'native'"
        )
        with contextlib.suppress(AssertionError):
            self.pubdb.wait(query, wanted, seconds=5.0)
            return True
        return False

    def _subscribe(self) -> None:
        # not parallel: the server's own worker of 18.6 crashed in it, again and again, and its server with it
        self.native.execute(
            f"CREATE SUBSCRIPTION native CONNECTION '{self.pubdb.conninfo}' PUBLICATION p"
            " WITH (copy_data = false, streaming = on, two_phase = true)"
        )
        # sends back whatever pgsub would write without a replication origin
        self.subdb.execute("CREATE PUBLICATION back FOR TABLE looped")
        self.pubdb.execute(
            f"CREATE SUBSCRIPTION back CONNECTION '{self.subdb.conninfo}' PUBLICATION back"
            " WITH (copy_data = false, origin = none)"
        )
        self.proxies = [Proxy(self.pubdb.conninfo), Proxy(self.subdb.conninfo)]
        self.site = Site(self.pubdb, self.subdb, self.folder, NAME)
        self.scratch = self.folder / "scratch"
        self.scratch.mkdir()
        options = ("--no-copy-data", "--two-phase", "--streaming", "parallel", "--publication", "only_here")
        self.create(NAME, "p", *options)
        self.serve()

    def _write(self) -> None:
        for name in ("counter", "counter_prepared", "keyed"):
            self.pubdb.execute(f"INSERT INTO {name} SELECT g, 0, 'first' FROM generate_series(1, 200) g")
        self.lag = Lag(self.pubdb, {"native": self.native, "pgsub": self.subdb})
        self.lag.start()
        self.run.fill()
        self.writers = [
            Writer(self.pubdb, ("audit", "counter", "keyed"), 0.1),
            Writer(self.pubdb, ("audit_prepared", "counter_prepared"), 0.3, prepare=True),
        ]
        for writer in self.writers:
            writer.start()
            writer.resume()

    # the program

    def create(self, name: str, publication: str, *options: str, database: str = "app") -> None:
        """``create`` for the launcher to serve, by way of the proxies.

        :param database: of both servers.
        """
        first, second = (make_conninfo(proxy.conninfo, dbname=database) for proxy in self.proxies)
        ends = ("--connection", first, "--target", second, "--publication", publication)
        self.ok("create", name, *ends, "--no-wait", *options)

    def start(self, *words: str, printed: Path | None = None) -> Started:
        """Start a command.

        :param printed: a file of its own for what it prints on standard output.
        """
        started = self.site.start(*words, printed=printed)
        if hasattr(self, "launcher"):  # who a failpoint is to kill
            self.site.launcher_pid.write_text(str(self.launcher.pid))
        return started

    def command(self, *words: str) -> int:
        """The exit code of a command."""
        return self.start(*words).wait(LIMIT)

    def ok(self, *words: str) -> None:
        """A command that ends well."""
        code = self.command(*words)
        assert code == 0, f"{' '.join(words)}: exit code {code}\n{self.site.said()}"

    def serve(self) -> None:
        """Start a launcher with something to happen at every failpoint once that is armed."""
        points = {
            name: self.chance.choice(actions)
            for name in POINTS
            for start, actions in _ACTIONS.items()
            if name.startswith(start) and name not in _LEFT_OUT
        }
        self.disarm()
        self._deadly = {name for name, action in points.items() if action in ("kill", "kill:LAUNCHER", "die")}
        self._struck = False
        self.site.disarm(*points)
        self._points = list(points)
        self.launcher: Started = self.site.start("run", points=points, TMPDIR=str(self.scratch))

    def arm(self, count: int) -> str:
        """Let what is meant to happen at some failpoints happen when they are reached next; their names."""
        names = self.chance.sample(self._points, count)
        for name in names:
            if name not in self._armed:
                self.site.arm(name)
                self._armed.add(name)
        return ", ".join(names)

    def disarm(self) -> None:
        """Count the failpoints that were reached; nothing happens at the others any more."""
        for name in self._armed:
            try:
                with (self.site.points / name).open("x") as mark:  # whoever makes the file has the point
                    mark.write("not armed")
            except FileExistsError:
                self.counts[f"failpoint {name}"] += 1
                self._struck = self._struck or name in self._deadly
        self._armed.clear()

    def alive(self) -> None:
        """Start the launcher again where a failpoint killed it.

        :raises AssertionError: it ended by itself.
        """
        if (code := self.launcher.poll()) is None:
            return
        self.disarm()
        by_us = code == -signal.SIGKILL and self._struck
        assert by_us, f"the launcher ended by itself with {code}:\n{self.site.said()}"
        self.site.note("the launcher is started again")
        self.serve()

    def worker(self) -> int | None:
        """Process id of the python worker that runs the apply task, if status shows a living one."""
        query = "SELECT max(pid) FROM pg_stat_subscription WHERE worker_type = 'apply'"
        for _ in range(50):
            with contextlib.suppress(sqlite3.Error, OSError):
                pid = self.site.sqlite(query)[0][0]
                if pid and _is_ours(pid, self.site.points):
                    return int(pid)
            time.sleep(0.1)
        return None

    def jvm(self) -> int | None:
        """Process id of the launcher's Java, if it runs."""
        with contextlib.suppress(OSError, ValueError):
            pid = int(self.site.jvm_pid.read_text())
            if Path(f"/proc/{pid}/comm").read_text() == "java\n" and _is_ours(pid, self.site.points):
                return pid
        return None

    def processes(self) -> list[str]:
        """Pid, parent and command line of all that launchers of this soak started, and of their descendants."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if int(entry.name) != os.getpid() and _is_ours(int(entry.name), self.site.points):
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
                    found.append(f"{entry.name} of {parent}: {command[:200]}")
        return found

    # the course of it

    def settle(self) -> dict[str, float]:
        """Wait until all that is committed now is on both targets; seconds that took."""
        try:
            return self.lag.vanish(self.alive, LIMIT)
        except AssertionError as error:
            sessions = "\n".join(str(row) for one in (self.pubdb, self.subdb) for row in one.rows(SESSIONS))
            raise AssertionError(f"{error}\n{sessions}") from error

    @contextlib.contextmanager
    def rest(self) -> Iterator[None]:
        """Nobody writes but the beats, and all that was written has arrived."""
        for writer in self.writers:
            writer.rest()
        self.settle()
        yield
        for writer in self.writers:
            writer.resume()

    def finish(self) -> None:
        """Decide what is prepared."""
        self.run.control = self.pubdb.connection  # another one after a restart
        self.run.finish()


def _is_ours(pid: int, points: Path) -> bool:
    try:
        return f"PGSUB_FAILPOINTS_DIR={points}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
