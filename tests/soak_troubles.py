"""What is done to both servers, to pgsub's processes and lines, and to its disk, in the middle of work."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import psycopg
from embedded import Server
from fix_faults import until
from fix_proxy import Harm, Link
from soak_ground import LIMIT, NAME, Ground

#: What cannot happen while a session of the workload writes: it would be lost itself.
ALONE = ("restart_publisher",)


class Troubles:
    """Each public method is one; it is over when the method returns, but what it broke need not be whole then.

    :param chance: of its own, for troubles run in a thread.
    """

    def __init__(self, ground: Ground, chance: random.Random) -> None:
        self._ground, self._chance = ground, chance
        self._deck: list[Callable[[], None]] = []

    def next(self) -> Callable[[], None]:
        """Any; every kind comes once before any comes again."""
        if not self._deck:
            self._deck = [
                getattr(self, name) for name in sorted(vars(Troubles)) if not name.startswith("_") and name != "next"
            ]
            self._chance.shuffle(self._deck)
        return self._deck.pop()

    # processes

    def kill_worker(self) -> None:
        _signal(self._ground.worker(), signal.SIGKILL)

    def kill_jvm(self) -> None:
        _signal(self._ground.jvm(), signal.SIGKILL)

    def kill_launcher(self) -> None:
        self._ground.launcher.kill()
        self._restart_launcher()

    def terminate_launcher(self) -> None:
        self._ground.disarm()
        self._ground.settle()  # one that has only just begun knows no signal yet
        self._ground.launcher.terminate()
        code = self._restart_launcher()
        assert code == 0, f"the launcher ended with {code}\n{self._ground.site.said()}"

    def _restart_launcher(self) -> int:
        code = self._ground.launcher.wait(LIMIT)
        self._ground.serve()
        return code

    def freeze_worker(self) -> None:
        self._freeze(self._ground.worker())

    def freeze_jvm(self) -> None:
        self._freeze(self._ground.jvm())

    def freeze_launcher(self) -> None:
        self._freeze(self._ground.launcher.pid if self._ground.launcher.poll() is None else None)

    def freeze_walsender(self) -> None:
        query = "SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s"
        self._freeze(self._ask(self._ground.pubdb, query, NAME))

    def freeze_backend(self) -> None:
        self._freeze(self._ask(self._ground.subdb, f"SELECT pid FROM ({_SESSIONS}) s ORDER BY random() LIMIT 1"))

    def _freeze(self, pid: int | None) -> None:
        _signal(pid, signal.SIGSTOP)
        time.sleep(self._chance.choice([0.3, 2.0, 8.0]))
        _signal(pid, signal.SIGCONT)

    def failpoints(self) -> None:
        self._ground.disarm()
        self._ground.site.note(f"armed: {self._ground.arm(6)}")

    # servers

    def restart_target(self) -> None:
        self._restart(self._ground.target)

    def restart_publisher(self) -> None:
        self._restart(self._ground.publisher)

    def _restart(self, server: Server) -> None:
        how = self._chance.choice(["fast", "immediate", "kill -9"])
        self._ground.site.note(f"server on port {server.port}: {how}")
        if how == "kill -9":
            server.kill9()
        else:
            server.stop("fast" if how == "fast" else "immediate")
        time.sleep(self._chance.choice([0.0, 0.5, 3.0]))
        server.start()

    def end_walsenders(self) -> None:
        self._ask(self._ground.pubdb, "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_replication")

    def end_backends(self) -> None:
        self._ask(self._ground.subdb, f"SELECT count(pg_terminate_backend(pid)) FROM ({_SESSIONS}) s")

    def cancel_backends(self) -> None:
        for _ in range(20):
            self._ask(self._ground.subdb, f"SELECT count(pg_cancel_backend(pid)) FROM ({_SESSIONS}) s")
            time.sleep(0.05)

    def reload_settings(self) -> None:
        """Values get another text on both servers, in sessions that are open, too."""
        zone = self._chance.choice(["UTC", "Asia/Tokyo", "America/St_Johns"])
        form = self._chance.choice(["hex", "escape"])
        for server in (self._ground.target, self._ground.publisher):
            server.query(f"ALTER SYSTEM SET timezone = '{zone}'")
            server.query(f"ALTER SYSTEM SET bytea_output = '{form}'")
            server.reload()

    def take_origins(self) -> None:
        """All that are left; those that pgsub's sessions have they lose."""
        subdb = self._ground.subdb
        try:
            with closing(subdb.connect()) as session, contextlib.suppress(psycopg.errors.ConfigurationLimitExceeded):
                for number in range(self._ground.origins + 1):
                    session.execute("SELECT pg_replication_origin_create(%s)", (f"taken {number}",))
                    session.execute("SELECT pg_replication_origin_advance(%s, '0/1')", (f"taken {number}",))
            self.end_backends()
            time.sleep(self._chance.choice([1.0, 4.0]))
        finally:
            drop = (
                "SELECT count(pg_replication_origin_drop(roname)) FROM pg_replication_origin WHERE roname ~ '^taken '"
            )
            self._ask(subdb, drop)

    def lock_beat(self) -> None:
        """Apply waits for somebody's lock, and ``status`` tells of the lag that comes of it."""
        with closing(self._ground.subdb.connect()) as session:
            session.execute("BEGIN; LOCK TABLE beat IN SHARE MODE")
            time.sleep(4.0)
            code = self._ground.command("status", NAME, "--check", "--max-lag", "1s")
            session.execute("ROLLBACK")
        assert code != 0, f"status is content with a table that is locked for 4 s\n{self._ground.site.said()}"

    # lines

    def cut(self) -> None:
        for _ in range(self._chance.choice([1, 5])):
            self._chance.choice(self._ground.proxies).cut()
            time.sleep(self._chance.random())

    def cut_inside_a_message(self) -> None:
        self._chance.choice(self._ground.proxies).allowance = self._chance.randrange(300_000)

    def stall(self) -> None:
        proxy = self._chance.choice(self._ground.proxies)
        proxy.stall()
        time.sleep(self._chance.choice([0.5, 3.0, 8.0]))
        proxy.resume()

    def lose_replies(self) -> None:
        self._harm("lose reply")

    def lose_requests(self) -> None:
        self._harm("swallow")

    def _harm(self, kind: Harm) -> None:
        proxy, chance = self._chance.choice(self._ground.proxies), random.Random(self._chance.random())

        def harm(link: Link, data: bytes) -> Harm:
            return kind if chance.random() < 0.02 else "none"

        before, proxy.harm = proxy.harm, harm
        time.sleep(3.0)
        proxy.harm = before

    # the launcher's own machine

    def lock_store(self) -> None:
        with contextlib.suppress(sqlite3.OperationalError):  # it cannot be had just now
            store = f"file:{self._ground.site.state / 'state.db'}?mode=rw"
            with closing(sqlite3.connect(store, isolation_level=None, uri=True)) as other:
                other.execute("BEGIN IMMEDIATE")
                time.sleep(self._chance.choice([1.0, 6.0]))

    def fill_store(self) -> None:
        """No file of the launcher grows, as on a full disk; its workers and its Java are there already."""
        self._ground.disarm()
        self._ground.settle()
        with _no_room(self._ground.launcher.pid):
            time.sleep(self._chance.choice([1.0, 6.0]))

    def remove_store(self) -> None:
        """The launcher, which is not killed meanwhile, makes it anew."""
        self._ground.disarm()
        self._ground.settle()
        for name in ("state.db", "state.db-wal", "state.db-shm"):
            (self._ground.site.state / name).unlink(missing_ok=True)
        until(self._registered, "no state store was made anew", LIMIT)

    def _registered(self) -> bool:
        with contextlib.suppress(sqlite3.Error):
            return self._ground.site.sqlite("SELECT count(*) FROM pg_subscription WHERE subname = 'pgsub'") == [(1,)]
        return False

    # the operator

    def disable(self) -> None:
        self._ground.alive()
        self._ground.ok("disable", NAME)
        time.sleep(self._chance.choice([0.0, 1.0]))
        self._ground.ok("enable", NAME)

    @staticmethod
    def _ask(database: Any, query: str, *params: Any) -> Any:
        with closing(database.connect()) as session:
            row = session.execute(query.encode(), params or None).fetchone()
        return row[0] if row else None


_SESSIONS = f"SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE '{NAME} %'"


def _signal(pid: int | None, number: int) -> None:
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):  # it ended by itself just now
            os.kill(pid, number)


@contextlib.contextmanager
def _no_room(pid: int) -> Iterator[None]:
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
